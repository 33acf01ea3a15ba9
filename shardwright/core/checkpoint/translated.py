"""A training state under the names and in the layouts of the other framework, read in place through a map of names.

States of optimizers follow their parameters. They are named as torch's optimizers name them, whatever framework they
come from: ``optimizer0/exp_avg/NAME``, ``optimizer0/exp_avg_sq/NAME``, ``optimizer0/momentum_buffer/NAME``, and the
count of updates ``optimizer0/step/NAME``. JAX checkpoints tell which of their leaves are which (`ROLES`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from shardwright.core.checkpoint.axis_boxes import Dims
from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.name_map import Framework, NameMap, Relation
from shardwright.core.checkpoint.options import OptionGroup, of_optax, of_torch, renamed
from shardwright.core.checkpoint.rearranged import Rearranged, solve_sizes
from shardwright.core.checkpoint.saved_tensors import Entry, SavedState, SavedTensor
from shardwright.core.checkpoint.tensor_file import ITEM_BYTES, Bytes
from shardwright.core.errors import CheckpointError, few, nearest

MODEL, OTHER, OPTIMIZER, USER = "model", "other", "optimizer0", "user"
"""The parts of a checkpoint that both frameworks have. Only JAX has ``other``: batch statistics and the like."""
ROLES, COUNTS = "roles", "counts"
"""Keys of the values of a checkpoint: what the leaves of an optax state are, by the name before the parameter's; and,
of a state that was translated, the counts of updates and of steps of a schedule, by role."""
STEP, SCHEDULE = "step", "schedule"
"""The roles of counts: of updates, from which Adam corrects its bias; and of a schedule of the learning rate."""
OPTION, OPTIONS = "option", "options"
"""The role of options that an optax state holds; and the key, among the values of a state that was translated, of the
options of its optimizer (`core.checkpoint.options`)."""
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""The roles of states that are as large as their parameters, in torch's words."""
_SCALARS = {"F32": np.float32, "F64": np.float64, "I32": np.int32, "I64": np.int64, "U32": np.uint32}


class Translated:
    """A saved state of one framework as one of the other."""

    def __init__(
        self,
        source: SavedState,
        names: NameMap,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        first_names: Mapping[str, str] | None = None,
    ) -> None:
        """``shapes``: those of the tensors that are wanted, by label, where they are known: they tell the sizes of axes
        that the source's shapes do not. ``first_names``: where a tensor has several names, the one that counts.

        Raises CheckpointError where the map has no relation for a tensor of the source, or two become one, or the size
        of an axis is not known or not the one that a shape has.
        """
        self._source, self._names, self._shapes, self._first_names = source, names, shapes or {}, first_names or {}
        self.framework: Framework = _other(source.framework)
        self._content = source.content(lambda name: _Later(name))
        self._targets: dict[str, Rearranged] = {}
        self._counts: dict[str, int | None] = {}
        self._translate()
        self._states = self._optimizer_states()

    @property
    def step(self) -> int:
        return self._source.step

    def __str__(self) -> str:
        return f"{self._source}, by {self._names.source},"

    # The weights ---------------------------------------------------------------------------------------------------

    def _translate(self) -> None:
        source, theirs = self._source, _other(self.framework)
        ties: Mapping[str, str] = self._content.get("ties", {})
        aliases: dict[str, list[str]] = {}
        for alias, first in ties.items():
            aliases.setdefault(first, []).append(alias)
        found: dict[tuple[int, tuple[tuple[str, str], ...]], list[tuple[dict[str, str], str]]] = {}
        unmapped = []
        for label in self._weights():
            name = label.removeprefix(f"{MODEL}/")
            related = [one for one in (name, *aliases.get(name, ())) if self._names.relation(one, theirs) is not None]
            if not related:
                if not self._names.is_only(name, theirs):
                    unmapped.append(name)
                continue
            fits = self._names.relation(related[0], theirs)
            assert fits is not None
            relation, values = fits
            _, target = relation.sides(self.framework)
            shared = tuple((axis, value) for axis, value in values.items() if axis in target.name_axes)
            found.setdefault((self._names.relations.index(relation), shared), []).append((values, label))
        if unmapped:
            sides = [relation.torch if theirs == "torch" else relation.jax for relation in self._names.relations]
            hint = nearest(unmapped[0], [side.name for side in sides])[:200]
            raise CheckpointError(
                f"{self._names.source} has no relation for {few(unmapped)} of {source} ({hint}); name what the other "
                f"model has not under {theirs}_only"
            )
        for (number, shared), sources in found.items():
            self._relate(self._names.relations[number], dict(shared), sources)

    def _weights(self) -> list[str]:
        """The labels of the source's weights."""
        parts = (MODEL,) if self._source.framework == "torch" else (MODEL, OTHER)
        return [f"{part}/{name}" for part in parts for name in self._source.names(part)]

    def _relate(self, relation: Relation, shared: dict[str, str], sources: list[tuple[dict[str, str], str]]) -> None:
        side, target = relation.sides(self.framework)
        shapes = {self._source.tensor(label).shape for _, label in sources}
        dtypes = {self._source.tensor(label).dtype for _, label in sources}
        if len(shapes) > 1 or len(dtypes) > 1:
            raise CheckpointError(
                f"{relation}: tensors that become one have different shapes or dtypes: {sources[0][1]} and others have "
                f"{sorted(shapes)} in {sorted(dtypes)}"
            )
        shape = shapes.pop()
        plain: Dims = tuple((f"dim{number}",) for number in range(len(shape)))
        dims = plain if side.dims is None else side.dims
        target_dims = plain if target.dims is None else target.dims
        stacked = tuple(axis for axis in side.name_axes if axis in target.dim_axes)
        split = tuple(axis for axis in target.name_axes if axis not in side.name_axes)
        by_index = {
            tuple(self._names.index(axis, values[axis]) for axis in stacked): label for values, label in sources
        }
        if len(by_index) != len(sources):
            raise CheckpointError(f"{relation}: {sources[0][1]} and {sources[1][1]} would be one tensor")
        axes = {axis: len(held) for axis, held in self._names.values.items()} | dict(self._names.sizes)
        for number, axis in enumerate(stacked):
            axes[axis] = len({index[number] for index in by_index})
        if set(by_index) != set(product(*(range(axes[axis]) for axis in stacked))):
            raise CheckpointError(
                f"{relation}: {_first_of(sources)} and others are not one for each index of {', '.join(stacked)}"
            )
        first = target.filled(shared | {axis: self._names.value(axis, 0) for axis in split})
        equations = [(dims, shape, sources[0][1]), (target_dims, self._shapes.get(_label(first)), first)]
        solve_sizes(axes, equations, str(relation))
        needed = {axis for group in (*dims, *target_dims) for axis in group}
        axes = {axis: axes[axis] for axis in needed}
        for index in product(*(range(axes[axis]) for axis in split)):
            values = {axis: self._names.value(axis, place) for axis, place in zip(split, index, strict=True)}
            name = target.filled(shared | values)
            back = self._names.relation(name, self.framework)
            if back is None or back[0] is not relation:
                raise CheckpointError(
                    f"{relation}: {sources[0][1]} becomes {name!r}, which {self._names.source} relates by "
                    f"{back[0] if back else 'nothing'}: put the more special relation first"
                )
            label = _label(self._first_names.get(name, name))
            fixed = {axis: (place, 1) for axis, place in zip(split, index, strict=True)}
            if label in self._targets:
                raise CheckpointError(f"{relation}: {sources[0][1]} would be {label}, which another tensor is already")
            self._targets[label] = Rearranged(target_dims, dims, axes, fixed, stacked, by_index)

    # The optimizer ---------------------------------------------------------------------------------------------------

    def _optimizer_states(self) -> dict[str, tuple[str, Rearranged]]:
        """What moments are read from, by label: the prefix of the source's labels, and the weight that they follow."""
        prefixes = self._prefixes()
        found = {}
        for target_label, target in self._targets.items():
            if not target_label.startswith(f"{MODEL}/"):
                continue
            for role in MOMENTS:
                for prefix in prefixes.get(role, ()):
                    has = [self._source.has(_state(prefix, label)) for label in target.sources.values()]
                    if not any(has):
                        continue
                    if not all(has):
                        raise CheckpointError(f"{self._source} has {role} of a part of what becomes {target_label}")
                    label = f"{OPTIMIZER}/{role}/{target_label.removeprefix(f'{MODEL}/')}"
                    if label in found:
                        raise CheckpointError(f"{self._source} has {role} of {target_label} twice")
                    found[label] = (prefix, target)
        return found

    def _prefixes(self) -> dict[str, list[str]]:
        """What comes before the names of parameters in the source's labels, by role."""
        if self._source.framework == "torch":
            return {role: [f"{OPTIMIZER}/{role}"] for role in (*MOMENTS, STEP)}
        found: dict[str, list[str]] = {}
        for prefix, role in self._roles().items():
            found.setdefault(role, []).append(f"{OPTIMIZER}/{prefix}")
        return found

    def _roles(self) -> Mapping[str, str]:
        """What the leaves of an optax state are, by the name before the parameter's."""
        own = {role: role for role in MOMENTS}  # of a state that was translated before
        return own if COUNTS in self._content else self._content[ROLES]

    @cached_property
    def options(self) -> list[OptionGroup]:
        """The options of the optimizer, as far as the source tells them, by this state's names of parameters."""
        weights = {name: target for name, target in self._targets.items() if name.startswith(f"{MODEL}/")}
        sources = {
            name.removeprefix(f"{MODEL}/"): [label.removeprefix(f"{MODEL}/") for label in target.sources.values()]
            for name, target in weights.items()
        }
        return renamed(self._source_options(), sources)

    def _source_options(self) -> list[OptionGroup]:
        if OPTIONS in self._content:
            return [OptionGroup.of_values(values) for values in self._content[OPTIONS]]
        if self._source.framework == "torch":
            optimizers = self._content["optimizers"]
            return of_torch(optimizers[0], self._number) if optimizers else []
        scalars = (OPTION, SCHEDULE)
        names = [name for name in self._source.names(OPTIMIZER) if self._roles().get(name) in scalars]
        follows: dict[str, list[str]] = {"": [label.removeprefix(f"{MODEL}/") for label in self._weights()]}
        moments = [prefix for prefix, role in self._roles().items() if role in MOMENTS]
        for name in self._source.names(OPTIMIZER):
            for prefix in moments:
                if name.startswith(f"{prefix}/"):
                    follows.setdefault(prefix, []).append(name.removeprefix(f"{prefix}/"))
        return of_optax(names, follows, lambda name: self._number(_Later(f"{OPTIMIZER}/{name}")))

    def _number(self, value: Any) -> float | None:
        """A number, which may lie in a tensor; None for another value."""
        if not isinstance(value, _Later):
            return float(value) if isinstance(value, int | float) else None
        told = self._source.tensor(value.name)
        return self._scalar(value.name) if told.dtype in _SCALARS and not told.shape else None

    def require_states(self) -> None:
        """Raise CheckpointError where the optimizer has states that the other framework's has no word for."""
        known = {_state(prefix, label) for prefix, target in self._states.values() for label in target.sources.values()}
        for prefixes in self._prefixes().values():
            known |= set(prefixes)
        steps = self._prefixes().get(STEP, ())
        for name in self._source.names(OPTIMIZER):
            label = f"{OPTIMIZER}/{name}"
            if label not in known and not any(label.startswith(f"{prefix}/") for prefix in steps):
                raise CheckpointError(
                    f"{self._source}: the optimizer's {name} has no counterpart in {self.framework}: Adam, AdamW and "
                    f"SGD with momentum cross over; load_optimizer=False loads the weights alone"
                )
        if self._source.names("optimizer1"):
            raise CheckpointError(f"{self._source} has several optimizers: one of them alone goes to {self.framework}")

    def count(self, role: str = STEP) -> int | None:
        """The number of updates, or of steps of the schedule; None where the source has none. Raises CheckpointError
        where parameters were updated unlike numbers of times, which one count cannot say."""
        if role not in self._counts:
            self._counts[role] = self._counted(role)
        return self._counts[role]

    def _counted(self, role: str) -> int | None:
        if COUNTS in self._content:
            count: int | None = self._content[COUNTS][role]
            return count
        found: dict[int, str] = {}
        if role == SCHEDULE and self._source.framework == "torch":
            optimizers = self._content["optimizers"]
            return int(optimizers[0]["steps"]) if optimizers else None
        for prefix in self._prefixes().get(role, ()):
            labels = [prefix] if self._source.has(prefix) else [
                f"{OPTIMIZER}/{name}" for name in self._source.names(OPTIMIZER)
                if f"{OPTIMIZER}/{name}".startswith(f"{prefix}/")
            ]  # fmt: skip
            for label in labels:
                found.setdefault(int(self._scalar(label)), label)
        if len(found) > 1:
            (one, first), (other, second), *_ = found.items()
            raise CheckpointError(
                f"{self._source} has parameters that were updated {one} and {other} times ({first}, {second}): one "
                f"count of updates cannot say so"
            )
        return next(iter(found), None)

    def _scalar(self, label: str) -> float:
        record = self._source.tensor(label)
        if record.shape or record.dtype not in _SCALARS:
            raise CheckpointError(f"{label} in {self._source} is {record.dtype} of shape {record.shape}: no count")
        data = self._assembled(label, Box((), ()))
        return float(np.ascontiguousarray(data).view(_SCALARS[record.dtype])[0])

    # What a saved state is read by -----------------------------------------------------------------------------------

    def names(self, part: str) -> list[str]:
        """The names of a part's tensors."""
        if part in (MODEL, OTHER):
            return [label.removeprefix(f"{part}/") for label in self._targets if label.startswith(f"{part}/")]
        if part == OPTIMIZER:
            moments = [label.removeprefix(f"{part}/") for label in self._states]
            return [*moments, *(name.removeprefix(f"{part}/") for name in self._steps)]
        return self._source.names(part) if part == USER else []

    @cached_property
    def _steps(self) -> dict[str, None]:
        """The labels of the counts of updates, one for each parameter that has moments, as torch has them."""
        if self.framework == "jax" or self.count() is None:
            return {}
        return dict.fromkeys(f"{OPTIMIZER}/{STEP}/{_parameter(label)}" for label in self._states)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._targets or name in self._states or name in self._steps or self._is_users(name)

    def _is_users(self, name: str) -> bool:
        return name.startswith(f"{USER}/") and self._source.has(name)

    def tensor(self, name: str) -> SavedTensor:
        """What is known of a tensor. Raises CheckpointError where there is none of that name."""
        if name in self._targets:
            first = next(iter(self._targets[name].sources.values()))
            return Entry(self._source.tensor(first).dtype, self._targets[name].shape)
        if name in self._states:
            prefix, target = self._states[name]
            first = _state(prefix, next(iter(target.sources.values())))
            return Entry(self._source.tensor(first).dtype, target.shape)
        if self._is_users(name):
            return self._source.tensor(name)
        if name in self._steps:
            return Entry("F32", ())
        raise CheckpointError(f"{self} has no tensor {name!r}: {nearest(name, [*self._targets, *self._states])[:200]}")

    def boxes(self, name: str, box: Box) -> Iterator[tuple[Box, Bytes]]:
        """The pieces of a box of a tensor, as `SavedState` has them."""
        if name in self._targets:
            yield from self._targets[name].boxes(box, self._assembled)
        elif name in self._states:
            prefix, target = self._states[name]
            yield from target.boxes(box, lambda label, part: self._assembled(_state(prefix, label), part))
        elif self._is_users(name):
            yield from self._source.boxes(name, box)
        else:
            self.tensor(name)
            yield box, np.array([self.count()], dtype=np.float32).view(np.uint8)

    def _assembled(self, label: str, box: Box) -> Bytes:
        """A box of a source's tensor in one array."""
        record = self._source.tensor(label)
        pieces = list(self._source.boxes(label, box))
        if len(pieces) == 1 and pieces[0][0] == box:
            return pieces[0][1]
        out = np.empty((*box.shape, ITEM_BYTES[record.dtype]), dtype=np.uint8)
        for shared, data in pieces:
            out[shared.inside(box)] = data
        return out

    def content(self, tensors: Callable[[str], Any]) -> Any:
        """The values that are no tensors: what the user added, and the number of steps. The rest is of the framework
        that wrote it."""
        told = self._source.content(tensors)
        counts = {STEP: self.count(STEP), SCHEDULE: self.count(SCHEDULE)}
        samples = told.get("samples", 0)
        options = [group.values() for group in self.options]
        shared = {"user": told["user"], "steps": told["steps"], COUNTS: counts, OPTIONS: options, "samples": samples}
        if self.framework == "jax":
            return shared | {"keys": None}
        return shared | {"optimizers": None, "ties": {}, "seed": None, "steps_begun": told["steps"]}


@dataclass(frozen=True, slots=True)
class _Later:
    """A tensor among values that are only looked at for their form."""

    name: str


def _other(framework: str) -> Framework:
    return "jax" if framework == "torch" else "torch"


def _label(name: str) -> str:
    """The label of a weight: names of other parts than the parameters' say theirs."""
    return name if name.startswith(f"{OTHER}/") else f"{MODEL}/{name}"


def _state(prefix: str, weight: str) -> str:
    return f"{prefix}/{weight.removeprefix(f'{MODEL}/')}"


def _parameter(label: str) -> str:
    return label.split("/", 2)[2]


def _first_of(sources: Sequence[tuple[Mapping[str, str], str]]) -> str:
    """The first of some tensors that become one."""
    return min(label for _, label in sources)
