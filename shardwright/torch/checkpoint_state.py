"""The state of training on one rank, as a checkpoint has it: gathered to be saved, and taken from a saved one."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwright.backends.torch.machine.agreement import Claim
from shardwright.backends.torch.machine.digests import digest_of
from shardwright.backends.torch.state.extra_state import extra_keys, held_extra, set_extra
from shardwright.backends.torch.state.generators import generator_states, set_generator_states
from shardwright.backends.torch.state.parts import Parts
from shardwright.backends.torch.state.saved_parts import (
    MODEL,
    SavedParts,
    SavedWeights,
    fill,
    read_whole,
    whole_piece,
)
from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.content import encoded
from shardwright.core.checkpoint.folder import Piece
from shardwright.core.checkpoint.name_map import NameMap, Side, families
from shardwright.core.checkpoint.options import OptionGroup
from shardwright.core.checkpoint.reader import Reader, require_names
from shardwright.core.checkpoint.saved_tensors import SavedState
from shardwright.core.checkpoint.tensor_file import digest_of as bytes_digest
from shardwright.core.checkpoint.translated import COUNTS, OPTIMIZER, OPTIONS, SCHEDULE, STEP, Translated
from shardwright.core.errors import CheckpointError, PlanWarning, ShardwrightError
from shardwright.torch import session as sessions
from shardwright.torch.crossed_options import take_options
from shardwright.torch.model import DistributedModel
from shardwright.torch.optimizer import DistributedOptimizer
from shardwright.torch.run_agreement import optimizers_claim

HALVES = (torch.bfloat16, torch.float16)
USER, RANDOM, EXTRA = "user", "random", "extra"
"""The parts of a checkpoint with tensors of the user's, with the states of random generators, and with tensors in the
extra state of modules."""
Optimizers = DistributedOptimizer | Sequence[DistributedOptimizer] | None


class CheckpointState:
    """The state of training of one model on this rank."""

    def __init__(self, session: "sessions.Session", model: DistributedModel | None, optimizer: Optimizers) -> None:
        """Raises ShardwrightError where there is no model, there are several and none is given, or something else is
        given."""
        if model is not None and not isinstance(model, DistributedModel):
            raise CheckpointError(f"model= is a {type(model).__name__}: expected the sw.DistributedModel of this run")
        if not session.models:
            raise ShardwrightError("wrap the model first: sw.DistributedModel(model); then save or load checkpoints")
        fix = "say which, model=..., and give each a folder of its own"
        run = session.only("a checkpoint is of one model", fix) if model is None else session.of(model)
        self.session, self.run, self.runtime = session, run, run.runtime
        self.split_model, self.ownership = self.runtime.split_model, self.runtime.ownership
        if optimizer is None:
            self.optimizers = [one for one in run.optimizers_alive() if isinstance(one, DistributedOptimizer)]
        else:
            given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
            for one in given:
                if not isinstance(one, DistributedOptimizer):
                    raise CheckpointError(
                        f"optimizer= is a {type(one).__name__}: wrap it, sw.DistributedOptimizer(optimizer)"
                    )
                if one.model_run is not run:
                    raise CheckpointError(
                        f"optimizer= has the parameters of {one.model_run.label}, and the checkpoint is of "
                        f"{run.label}: each model is saved and loaded with its own optimizers"
                    )
            self.optimizers = given
        self.steps = self.split_model.steps_run

    def _saved(self) -> SavedParts:
        alike = self.split_model.are_replicas_alike
        return SavedParts(self.ownership, self.split_model.parts, self.session.bound, are_alike=alike)

    # Saving ------------------------------------------------------------------------------------------------------

    def gathered(self, user_content: Any) -> tuple[dict[str, Any], dict[str, list[Piece]], list[Claim]]:
        """The values that are no tensors; the pieces that this rank writes, by part; and the claims of what must be the
        same on all ranks."""
        if self.split_model.awaits_masters:
            raise CheckpointError(
                "the float32 weights of a checkpoint wait for the first step, until which parameters are in 16 bits: "
                "run a step, then save"
            )
        self.split_model.make_values()
        saved = self._saved()
        pieces: dict[str, list[Piece]] = {MODEL: list(saved.model_pieces())}
        told = []
        for number, optimizer in enumerate(self.optimizers):
            groups = optimizer.named_groups()
            optimizer.cut_states()
            optimizer.require_states()
            names = [name for held in groups for name in held]
            pieces[f"optimizer{number}"] = list(saved.state_pieces(optimizer.optimizer, names))
            told.append(optimizer.told())
        user: list[Piece] = []

        def tensor(value: Any, place: str) -> str | None:
            if not isinstance(value, torch.Tensor | np.ndarray):
                return None
            try:
                found = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
            except TypeError as failed:
                raise CheckpointError(f"{place} is an array of {value.dtype}, which no tensor is of") from failed
            user.append(whole_piece(f"{len(user)}", found, place))
            return f"{USER}/{len(user) - 1}"

        content = {
            "optimizers": [encoded(one, tensor, f"optimizer {number}") for number, one in enumerate(told)],
            "user": encoded(user_content, tensor, "user_content"),
            "ties": {k: v for k, v in self.ownership.first_name.items() if k != v},
            "seed": self.run.seed, "steps": self.steps, "steps_begun": self.session.steps_begun,
            "samples": self.run.samples_before + self.run.samples_trained,
        }  # fmt: skip
        pieces[USER] = user
        states = generator_states()
        pieces[RANDOM] = [whole_piece(f"{kind}.{self.session.bound.rank}", state) for kind, state in states.items()]
        claims = [*_content_claims(content, user), optimizers_claim(self.run)]
        return content, pieces, claims

    def own_content(self, pieces: dict[str, list[Piece]]) -> dict[str, dict[str, Any]]:
        """The values that are no tensors and that this rank alone has: the extra states of the modules that run here,
        of the first replica. Their tensors join ``pieces``."""
        bound = self.session.bound
        is_first = not any(bound.coordinate(axis) for axis in bound.mesh.names if axis != "pp")
        if not is_first or (self.ownership.placement is None and bound.rank):
            return {}
        held: list[Piece] = []

        def tensor(value: Any, place: str) -> str | None:
            if not isinstance(value, torch.Tensor):
                return None
            name = f"{bound.coordinate('pp')}.{len(held)}"
            held.append(whole_piece(name, value, place))
            return f"{EXTRA}/{name}"

        found = {key: encoded(value, tensor, key) for key, value in held_extra(self.ownership).items()}
        pieces[EXTRA] = held
        return {EXTRA: found}

    # Loading -----------------------------------------------------------------------------------------------------

    def _own_names(self) -> list[str]:
        """The first names of what a checkpoint of this model holds."""
        kept = set(self.ownership.model.state_dict(keep_vars=True))
        buffers = [name for name in self.ownership.buffer_names if name in kept]
        return [*sorted(self.ownership.parameter_names), *sorted(buffers)]

    def translated(
        self, found: Reader, names: NameMap | Mapping[str, str] | str | Path | None, *, load_optimizer: bool
    ) -> tuple[SavedState, tuple[Side, ...]]:
        """A checkpoint of JAX as one of this model, and the names that it does not have. Raises CheckpointError where
        no map of names was given, or it does not fit."""
        if names is None:
            raise CheckpointError(
                f"{found} was written by a {found.framework} run, whose weights have other names and layouts: give "
                f"names=, a map of them or the name of a family: {', '.join(families())}"
            )
        chosen = NameMap.of_any(names)
        parts = self.split_model.parts
        shapes = {
            f"{MODEL}/{name}": tuple(parts.whole_shape(first, self.ownership.tensor(first).shape))
            for name, first in self.ownership.first_name.items()
        }
        reader = Translated(found, chosen, shapes, self.ownership.first_name)
        if load_optimizer:
            reader.require_states()
        return reader, chosen.torch_only

    def require_fits(
        self, reader: SavedState, content: Any, torch_only: Sequence[Side], *, strict: bool, load_optimizer: bool
    ) -> None:
        """Raise CheckpointError where the checkpoint is of another model or of other optimizers; nothing is loaded
        then. ``torch_only``: names that a checkpoint of JAX does not have."""
        weights = SavedWeights(reader, content["ties"])
        firsts = {self.ownership.first_name.get(name, name) for name in weights}
        own = [name for name in self._own_names() if not any(side.match(name) is not None for side in torch_only)]
        if strict:
            require_names(own, sorted(firsts), "the model")
        shapes = {name: self.split_model.parts.whole_shape(name, self.ownership.tensor(name).shape) for name in own}
        for name in own:
            if name in weights and reader.tensor(weights.label(name)).shape != tuple(shapes[name]):
                raise CheckpointError(
                    f"{reader} has {name} of shape {reader.tensor(weights.label(name)).shape}, and the model of "
                    f"{tuple(shapes[name])}: it is of another model"
                )
        saved = content["optimizers"]
        if saved is None:  # a JAX run has one
            saved = [None]
        if load_optimizer and len(saved) != len(self.optimizers):
            raise CheckpointError(
                f"{reader} has {len(saved)} optimizers, and this run has {len(self.optimizers)}: wrap as many before, "
                f"or give load_optimizer=False"
            )
        if strict and (extra := content.get(EXTRA)) is not None:
            require_names(extra_keys(self.ownership.model), sorted(extra), "the extra state of the model's modules")
        lacking = sorted(self.split_model.lacking_values() - firsts)
        if lacking:
            raise CheckpointError(f"{lacking[0]} has no values yet, and {reader} has none for it: give weights= too")
        for one, optimizer in zip(saved, self.optimizers, strict=False) if load_optimizer else ():
            if one is None:
                optimizer.require_across(reader, OPTIMIZER)
            else:
                optimizer.require_like(one, str(reader))

    def load(self, reader: SavedState, content: Any, *, load_optimizer: bool) -> None:
        """Load this rank's part. Raises CheckpointError where a file is damaged."""
        weights = SavedWeights(reader, content["ties"])
        awaited = self.split_model.take_values(weights)
        saved = self._saved()
        for name in saved.of:
            if name in weights and name not in awaited:
                saved.read(reader, weights.label(name), name, self.ownership.tensor(name))
        self._read_masters(reader, {name: weights.label(name) for name in saved.of if name in weights})
        set_extra(self.ownership, content.get(EXTRA) or {})
        kept = set(self.ownership.model.state_dict(keep_vars=True))
        for name in self.ownership.buffer_names:
            tensor = self.ownership.tensor(name)
            if name in kept and name in weights and self.ownership.holds(name) and not tensor.is_meta:
                fill(reader, weights.label(name), Box.whole(tuple(tensor.shape)), tensor)
        for number, optimizer in enumerate(self.optimizers if load_optimizer else ()):
            told = content["optimizers"] and content["optimizers"][number]
            counts = content.get(COUNTS) or {}
            updates = counts.get(STEP) if counts.get(STEP) is not None else counts.get(SCHEDULE)
            optimizer.resume(told, reader, f"optimizer{number}", updates)
            if not told and OPTIONS in content:
                groups = [OptionGroup.of_values(values) for values in content[OPTIONS]]
                note = take_options(optimizer.optimizer, optimizer.named_groups(), groups, counts.get(SCHEDULE))
                self._say_options(reader, note)
        if content["seed"] is not None:
            self.run.set_seed(content["seed"])
            if len(self.session.models) == 1:
                self.session.seed = content["seed"]
        self.split_model.steps_run, self.session.steps_begun = content["steps"], content["steps_begun"]
        self.run.samples_before = content["samples"] - self.run.samples_trained
        suffix = f".{self.session.bound.rank}"
        mine = [name for name in reader.names(RANDOM) if name.endswith(suffix)]
        set_generator_states({name.removesuffix(suffix): read_whole(reader, f"{RANDOM}/{name}") for name in mine})

    def load_scales(self, content: Any) -> None:
        """Load the scales of losses alone, of as many optimizers as the checkpoint has."""
        for optimizer, told in zip(self.optimizers, content["optimizers"] or (), strict=False):
            optimizer.resume_scale(told)

    def _say_options(self, reader: SavedState, note: str | None) -> None:
        """Say what of the options of an optimizer does not cross frameworks."""
        if note is not None and self.session.bound.rank == 0:
            warnings.warn(f"{reader}: {note}", PlanWarning, stacklevel=4)

    def _read_masters(self, reader: SavedState, labels: Mapping[str, str]) -> None:
        """Read parameters once more where the first step will keep them in float32, and they are in 16 bits until
        then: all but those that are given other values in between."""
        split_model = self.split_model
        wider = {
            name: label for name, label in labels.items()
            if self.ownership.tensor(name).dtype in HALVES and reader.tensor(label).dtype == "F32"
        }  # fmt: skip
        if split_model.parts.compute is None or split_model.parts.flat is not None or not wider:
            return

        def read(parts: Parts) -> None:
            split_model.after_sharding.remove(read)
            split_model.awaits_masters = False
            saved = SavedParts(self.ownership, parts, self.session.bound)
            for name, label in wider.items():
                tensor = self.ownership.tensor(name)
                if name in saved.of and tensor.dtype is torch.float32 and tensor.numel():
                    found = torch.empty_like(tensor)
                    saved.read(reader, label, name, found)
                    if torch.equal(*(one.detach().to(split_model.parts.compute) for one in (found, tensor))):
                        tensor.detach().copy_(found)

        split_model.after_sharding.append(read)
        split_model.awaits_masters = True


def _content_claims(content: Mapping[str, Any], tensors: Sequence[Piece]) -> list[Claim]:
    parts = {
        "user_content": json.dumps(content["user"], sort_keys=True),
        "tensors of user_content": " ".join(bytes_digest(piece.bytes().tobytes()) for piece in tensors),
        "optimizers": json.dumps(content["optimizers"], sort_keys=True),
    }
    fix = "Every rank gives the same; what differs by rank belongs to a list with an entry for each."
    return [
        Claim(f"the {key} of the checkpoint", digest_of(text), lambda text=text: text[:300], fix)  # type: ignore[misc]
        for key, text in parts.items()
    ]


def copied(piece: Piece) -> Piece:
    """The piece with its entries copied now."""
    data = np.array(piece.bytes())
    return replace(piece, bytes=lambda: data)
