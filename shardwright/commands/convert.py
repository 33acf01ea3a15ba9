"""`shardwright convert`: a checkpoint in another format, or under the names of the other framework."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shardwright.commands.output import JsonOption, print_json, print_view
from shardwright.core.checkpoint import folder as folders
from shardwright.core.checkpoint.copied import write_copy
from shardwright.core.checkpoint.name_map import NameMap, families
from shardwright.core.checkpoint.options import ARGUMENTS, OptionGroup, said, said_alone
from shardwright.core.checkpoint.reader import Reader
from shardwright.core.checkpoint.safetensors_folder import (
    INDEX,
    ONE_FILE,
    SUFFIX,
    SafetensorsModel,
    write_safetensors_folder,
)
from shardwright.core.checkpoint.saved_tensors import SavedState
from shardwright.core.checkpoint.translated import Translated
from shardwright.core.errors import CheckpointError, nearest

Target = Literal["torch", "jax", "safetensors", "dcp", "orbax"]
TARGETS: dict[Target, str] = {
    "torch": "a checkpoint that sw.resume_from_checkpoint reads in PyTorch",
    "jax": "a checkpoint that train.resume_from_checkpoint reads in JAX",
    "safetensors": "the weights in a folder that Hugging Face's from_pretrained reads",
    "dcp": "a folder of torch.distributed.checkpoint",
    "orbax": "an Orbax folder, with names of JAX",
}
_DCP_METADATA, _ORBAX_MARKS = ".metadata", ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")
_OF_TORCH_SAVE = (".pt", ".pth", ".bin")


@dataclass(frozen=True, slots=True)
class _Opened:
    state: SavedState
    kind: str
    plan: Any = None


def convert_command(
    source: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint, a folder of checkpoints (the newest counts), a folder or file of safetensors, a folder "
            "of torch.distributed.checkpoint or of Orbax, or a file of torch.save with a state dict.",
            show_default=False,
        ),
    ],
    target: Annotated[
        Path, typer.Argument(help="The folder to write; of a checkpoint its last part is the tag.", show_default=False)
    ],
    to: Annotated[
        str, typer.Option("--to", help="; ".join(f"{name}: {what}" for name, what in TARGETS.items()) + ".")
    ] = "torch",
    names: Annotated[
        str | None,
        typer.Option(
            help=f"Between frameworks, how names and layouts become the other's: a TOML file, or one of "
            f"{', '.join(families())}.",
            show_default=False,
        ),
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Which checkpoint of a folder.", show_default=False)] = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Leave the optimizer out.")] = False,
    json: JsonOption = False,
) -> None:
    """Write a checkpoint in another format, or under the names of the other framework: weights, the states of Adam,
    AdamW and SGD, counts of steps and what the user added. No model is made."""
    if to not in TARGETS:
        raise CheckpointError(f"--to {to!r}: {nearest(to, TARGETS)}")
    opened = _open(source, tag)
    state = opened.state
    wanted = "jax" if to in ("jax", "orbax") else "torch"
    if state.framework != wanted:
        state = _translated(state, names, wanted, weights_only=weights_only)
    elif names is not None:
        raise CheckpointError(f"--names: {state} has the names of {wanted} already: leave it out")
    if weights_only:
        state = _WeightsAlone(state)
    options = state.options if isinstance(state, Translated) and to in ("torch", "jax") else []
    written = _write(state, target, to, opened)
    if json:
        told = {"source": opened.kind, "framework": state.framework, "step": state.step, "written": written}
        print_json(told | {"options": [group.values() for group in options]})
        return
    print_view(
        f"{opened.kind} {source}, step {state.step}",
        *(f"  {line}" for line in _lines(written)),
        *(f"  {line}" for line in _lines_of_options(options, wanted)),
        f"as {TARGETS[to]}: {target}",
    )


def _open(source: Path, tag: str | None) -> _Opened:
    """What lies there, as a saved state. Raises CheckpointError where nothing that can be read does."""
    path = folders.folder_of(source)
    if not path.exists():
        raise CheckpointError(f"{source}: there is no such file or folder")
    if path.is_dir() and (tag is not None or (path / folders.MARKER).is_file() or folders.complete(path)):
        is_one = (path / folders.MARKER).is_file() and tag is None
        reader = Reader.open(path.parent, path.name) if is_one else Reader.open(path, tag)
        return _Opened(reader, f"{reader.framework} checkpoint", reader.index.plan)
    if tag is not None:
        raise CheckpointError(f"--tag: {source} is no folder of checkpoints")
    if path.name.endswith(SUFFIX):
        return _Opened(SafetensorsModel.of_file(path), "safetensors file")
    if path.is_dir() and (model := SafetensorsModel.of_folder(path)) is not None:
        return _Opened(model, "safetensors folder")
    if (path / _DCP_METADATA).is_file():
        from shardwright.backends.torch.state.dcp_folder import open_dcp

        return _Opened(open_dcp(path), "DCP folder")
    if any((path / mark).exists() for mark in _ORBAX_MARKS):
        from shardwright.backends.jax.training.orbax_folder import OrbaxFolder

        return _Opened(OrbaxFolder(path), "Orbax folder")
    if path.suffix in _OF_TORCH_SAVE or (path.is_dir() and any(path.glob("pytorch_model*.bin"))):
        from shardwright.backends.torch.state.weight_files import opened

        return _Opened(opened(path).state, "torch.save file")
    raise CheckpointError(
        f"{source}: expected a checkpoint ({folders.MARKER} in it or in its folders), safetensors ({INDEX}, {ONE_FILE} "
        f"or a file {SUFFIX}), a DCP folder ({_DCP_METADATA}), an Orbax folder, or a file of "
        f"torch.save ({', '.join(_OF_TORCH_SAVE)})"
    )


def _translated(state: SavedState, names: str | None, wanted: str, *, weights_only: bool) -> Translated:
    if names is None:
        raise CheckpointError(
            f"{state} has the names of {state.framework}, and {wanted}'s are asked for: give --names, a TOML file or "
            f"one of {', '.join(families())}"
        )
    found = Translated(state, NameMap.of_any(names))
    if not weights_only:
        found.require_states()
    return found


def _write(state: SavedState, target: Path, to: Target, opened: _Opened) -> dict[str, int]:
    path = folders.folder_of(target)
    if to in ("torch", "jax"):
        folders.require_tag(path.name)
        is_same = isinstance(opened.state, Reader) and opened.state.framework == state.framework
        return write_copy(state, path.parent, path.name, opened.plan if is_same else None)
    if to == "safetensors":
        write_safetensors_folder(state, path)
        return {"model": len(state.names("model"))}
    parts = ("model", "other", *(f"optimizer{n}" for n in range(10)))
    said = {part: len(state.names(part)) for part in parts if state.names(part)}
    if to == "orbax":
        from shardwright.backends.jax.training.orbax_folder import write_orbax

        write_orbax(state, path)
        return said
    from shardwright.backends.torch.state.dcp_writer import write_dcp

    if isinstance(state, Translated):
        raise CheckpointError(
            f"{opened.state} does not tell all options of a torch optimizer, which DCP holds: give --weights-only, or "
            f"--to torch and resume from that"
        )
    write_dcp(state, path)
    return said


class _WeightsAlone:
    """A saved state without its optimizers."""

    def __init__(self, state: SavedState) -> None:
        self._state, self.framework, self.step = state, state.framework, state.step

    def __str__(self) -> str:
        return str(self._state)

    def names(self, part: str) -> list[str]:
        return [] if part.startswith("optimizer") else self._state.names(part)

    def has(self, name: str) -> bool:
        return not name.startswith("optimizer") and self._state.has(name)

    def tensor(self, name: str) -> Any:
        return self._state.tensor(name)

    def boxes(self, name: str, box: Any) -> Any:
        return self._state.boxes(name, box)

    def content(self, tensors: Any) -> Any:
        return self._state.content(tensors) | {"optimizers": []}


def _lines_of_options(options: list[OptionGroup], wanted: str) -> list[str]:
    """The options of the optimizer that go along, in the words of the framework that is to read them, and those that it
    has not."""
    words = ARGUMENTS if wanted == "jax" else {word: word for word in ARGUMENTS}
    taken = said(options, list(words), words)
    return [*([f"options of the optimizer: {taken}"] if taken else []), *said_alone(options)]


def _lines(written: dict[str, int]) -> list[str]:
    words = {
        "model": "weights and buffers",
        "other": "other state",
        "user": "tensors of the user's",
        "random": "states of random generators",
        "extra": "tensors in extra states of modules",
        "scaling": "loss scale",
    }
    return [f"{count} {words.get(part, f'states of {part}')}" for part, count in written.items()]
