"""From the names of Hugging Face's state dicts to those of SageMaker's modules, and back, bit for bit."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from shardwright.core.errors import ShardwrightError, few

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Translation:
    """How the names of a family of models are translated.

    Attributes:
        family: its name, for messages.
        layers: pairs of what stands before the number of a layer, in Hugging Face's names and in SageMaker's.
        layer: names of a layer's modules, Hugging Face's and SageMaker's: several where Hugging Face's is fused.
        whole: names of the other modules.
        transposed: those of Hugging Face's modules whose weight lies the other way around.
        buffers: the ends of names of buffers that older versions of Transformers saved: masks, which modules make.
        passes_others: whether names of other modules stay as they are.
    """

    family: str
    layers: tuple[tuple[str, str], ...]
    layer: Mapping[str, tuple[str, ...]]
    whole: Mapping[str, str] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    buffers: tuple[str, ...] = ()
    passes_others: bool = False

    def to_smdistributed(self, state: Mapping[str, torch.Tensor]) -> State:
        """A state dict with SageMaker's names. One that has them is returned as it is.

        Raises ShardwrightError for a name that models of this family do not have.
        """
        if self.has_smdistributed_names(state):
            return dict(state)
        return {new: value for name, tensor in state.items() for new, value in self._from_hugging_face(name, tensor)}

    def to_hugging_face(self, state: Mapping[str, torch.Tensor]) -> State:
        """A state dict with Hugging Face's names. One that has them is returned as it is: models that are made of
        Hugging Face's classes keep their names here.

        Raises ShardwrightError for a name that models of this family do not have, and where a part of a fused weight is
        missing.
        """
        if not self.has_smdistributed_names(state):
            for name, tensor in state.items():
                list(self._from_hugging_face(name, tensor))  # an unknown name is an error
            return dict(state)
        left = dict(state)
        found: State = {}
        for name in state:
            if name in left:
                new, value = self._from_smdistributed(name, left)
                found[new] = value
        return found

    def _from_hugging_face(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if name.endswith(self.buffers):
            return
        path, kind = _parted(name)
        for theirs, own in self.layers:
            if not path.startswith(theirs):
                continue
            number, _, inner = path.removeprefix(theirs).partition(".")
            names = self.layer.get(inner)
            if names is None:
                raise self._unknown(name)
            is_transposed = inner in self.transposed and kind == ".weight"
            parts = tensor.chunk(len(names), -1 if is_transposed else 0)
            for one, part in zip(names, parts, strict=True):
                yield f"{own}{number}.{one}{kind}", (part.t() if is_transposed else part).contiguous()
            return
        if path not in self.whole and not self.passes_others:
            raise self._unknown(name)
        yield f"{self.whole.get(path, path)}{kind}", tensor

    def _from_smdistributed(self, name: str, left: State) -> tuple[str, torch.Tensor]:
        """What one of SageMaker's becomes, with those beside it that are in the same fused weight. They are taken from
        what is left."""
        path, kind = _parted(name)
        for theirs, own in self.layers:
            if not path.startswith(own):
                continue
            number, _, inner = path.removeprefix(own).partition(".")
            fused = next(((one, names) for one, names in self.layer.items() if inner in names), None)
            if fused is None:
                raise self._unknown(name)
            wanted = [f"{own}{number}.{one}{kind}" for one in fused[1]]
            missing = [one for one in wanted if one not in left]
            if missing:
                raise ShardwrightError(f"{self.family}: the state dict has {name}, and lacks {few(missing)} beside it")
            is_transposed = fused[0] in self.transposed and kind == ".weight"
            parts = [left.pop(one) for one in wanted]
            parts = [part.t() for part in parts] if is_transposed else parts
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1 if is_transposed else 0)
            return f"{theirs}{number}.{fused[0]}{kind}", joined.contiguous()
        whole = {own: theirs for theirs, own in self.whole.items()}
        if path not in whole and not self.passes_others:
            raise self._unknown(name)
        return f"{whole.get(path, path)}{kind}", left.pop(name)

    def has_smdistributed_names(self, state: Mapping[str, torch.Tensor]) -> bool:
        """Whether a state dict has the names of SageMaker's modules."""
        return any(name.startswith(own) for name in state for _, own in self.layers)

    def _unknown(self, name: str) -> ShardwrightError:
        known = [*self.whole, *(f"{theirs}0.{inner}" for theirs, _ in self.layers[:1] for inner in self.layer)]
        return ShardwrightError(f"{name} is no name of {self.family}'s state dict: known: {', '.join(known)}")


def _parted(name: str) -> tuple[str, str]:
    """The path of a module, and the name of its tensor with the dot before it."""
    path, dot, kind = name.rpartition(".")
    return path, f"{dot}{kind}"


Translate = Callable[..., State]


def to_hugging_face(translation: Translation) -> Translate:
    """The function that translates to Hugging Face's names, as scripts call it."""

    def translate(state_dict: Mapping[str, torch.Tensor], max_seq_len: int | None = None) -> State:
        """A state dict of the Hugging Face model. ``max_seq_len``, the size of the causal masks that older versions of
        Transformers saved, has no effect: models make their masks."""
        return translation.to_hugging_face(state_dict)

    return translate


def to_smdistributed(translation: Translation) -> Translate:
    """The function that translates to SageMaker's names, as scripts call it."""

    def translate(state_dict: Mapping[str, torch.Tensor], max_seq_len: int | None = None) -> State:
        """A state dict of the distributed form. ``max_seq_len`` has no effect."""
        return translation.to_smdistributed(state_dict)

    return translate
