"""Recording of the step body: it runs once on fake tensors, and what it does becomes a `Program`.

Functions are recorded as the user calls them (`__torch_function__`), above autograd, so that replaying them builds the
same autograd graph. Module calls that the plan gives to a stage are recorded whole. A dispatch mode below watches what
happens inside them: which parameters are used, where random numbers are drawn.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.backends.torch.fake_state import GROUPED_PRODUCT, VALUE_DEPENDENT, fake_state, grouped_product
from shardwright.backends.torch.program import (
    BufferRef,
    ConstantRef,
    Context,
    Leaf,
    Literal,
    Loss,
    ObjectRef,
    ParameterRef,
    Program,
    Step,
    Template,
    Tree,
    Value,
    ValueRef,
    is_plain,
    make_template,
    tensors_in,
)
from shardwright.backends.torch.randomness import draws
from shardwright.backends.torch.refusals import reads_a_value, refuse_function, said, where
from shardwright.core.errors import CaptureError


@dataclass(slots=True)
class _Frame:
    """A module call under way."""

    path: str
    occurrence: int
    segment: int = 0


@dataclass(slots=True)
class _Draft:
    """A step under construction."""

    index: int
    path: str | None
    occurrence: int
    function: Callable[..., Any] | None
    arguments: Tree
    reads: set[int]
    written: set[int] = field(default_factory=set)
    memories: set[int] = field(default_factory=set)
    outputs: list[int | None] = field(default_factory=list)
    object_outputs: list[tuple[int, tuple[int | None, ...]]] = field(default_factory=list)
    renewals: list[tuple[int, int]] = field(default_factory=list)
    parameters: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)
    grad_enabled: bool = True
    autocast: torch.dtype | None = None
    random: dict[Context, None] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    views_parameter: bool = False


class StepRecorder:
    """Records one run of a step body.

    Args:
        model: the whole model; parameters may be on any device, the meta device too. It is left as it was.
        stage_of_call: the stage of every module call that is to be kept whole: (path, occurrence) → stage.
        device: where the fake tensors pretend to be.
    """

    def __init__(self, model: nn.Module, stage_of_call: Mapping[tuple[str, int], int], device: torch.device) -> None:
        self.model = model
        self.stage_of_call = stage_of_call
        self.device = device
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.frames: list[_Frame] = []
        self.unit_depth = 0
        self.current: _Draft | None = None
        self.drafts: list[_Draft] = []
        self.values: list[Value] = []
        self.losses: list[Loss] = []
        self.templates: dict[tuple[int, int], Template] = {}
        self.children: dict[str, dict[str, None]] = {}
        self.seen_calls: set[tuple[str, int]] = set()
        self.failed_path: str | None = None
        """The innermost module call that an error left first; None when none was under way."""
        self._known: dict[int, Leaf] = {}
        self._keep: list[Any] = []
        self._objects: dict[int, int] = {}
        self._mutations: defaultdict[int, list[int]] = defaultdict(list)
        self._renewed: dict[tuple[int, int], int] = {}

    # What the user's code meets ------------------------------------------------------------------------------------

    def record(self, body: Callable[[list[torch.Tensor]], Any], inputs: list[torch.Tensor]) -> Program:
        """Run ``body(stand_ins)`` on fakes of ``inputs``, which have the shapes of one microbatch.

        Raises CaptureError when what the body does depends on the values of tensors, or cannot be replayed;
        UnrecordableError, a CaptureError, when it is the model that needs values.
        """
        with self.fake_mode, fake_state(self.model, self.device) as (parameters, buffers):
            for name, parameter in parameters.items():
                self._know(parameter, ParameterRef(name))
            for name, buffer in buffers.items():
                self._know(buffer, BufferRef(name))
            fakes: list[torch.Tensor] = []
            for position, tensor in enumerate(inputs):
                fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
                if tensor.requires_grad:
                    fake.requires_grad_()
                self._new_value(fake, None, position)
                fakes.append(fake)
            with _patched_calls(self), _Functions(self), _Watcher(self):
                try:
                    result = body(fakes)
                except VALUE_DEPENDENT as error:
                    raise reads_a_value(self.model, self.failed_path, error) from error
            return self._finish(result)

    def backward(self, loss: Any, weight: Any) -> None:
        """``model.backward`` inside the body."""
        if not isinstance(loss, torch.Tensor) or not isinstance(self._known.get(id(loss)), ValueRef):
            raise CaptureError(f"model.backward takes the loss, a tensor that this step computed: given {said(loss)}")
        if loss.numel() != 1:
            raise CaptureError(
                f"model.backward takes a loss of one element: given shape {tuple(loss.shape)}; reduce it by mean or sum"
            )
        if not loss.requires_grad:
            raise CaptureError("model.backward was given a loss that depends on no trainable parameter")
        leaf: Leaf | None = None
        if isinstance(weight, torch.Tensor):
            if weight.numel() != 1:
                raise CaptureError(f"the weight of a loss has one element: given shape {tuple(weight.shape)}")
            leaf = self._use(weight)
        elif weight is not None:
            leaf = Literal(float(weight))
        self.losses.append(Loss(self._use_value(loss), leaf))

    # Module calls --------------------------------------------------------------------------------------------------

    def module_call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = self.paths.get(id(module))
        if path is None:
            return original(module, *args, **kwargs)
        occurrence = self.counts[path]
        self.counts[path] += 1
        if self.frames:
            self.children.setdefault(self.frames[-1].path, {})[path] = None
        self.frames.append(_Frame(path, occurrence))
        try:
            stage = self.stage_of_call.get((path, occurrence)) if self.unit_depth == 0 else None
            if stage is None:
                return original(module, *args, **kwargs)
            return self._unit(original, module, path, occurrence, stage, args, kwargs)
        except VALUE_DEPENDENT:
            if self.failed_path is None:
                self.failed_path = path
            raise
        finally:
            self.frames.pop()
            if self.frames:
                self.frames[-1].segment += 1

    def _unit(
        self, original: Callable[..., Any], module: nn.Module, path: str, occurrence: int, stage: int, args: Any,
        kwargs: Any,
    ) -> Any:  # fmt: skip
        self.seen_calls.add((path, occurrence))
        draft = self._draft(path, occurrence, None, (args, kwargs), stage)
        draft.counts = dict(self.counts)
        draft.counts[path] -= 1
        objects = {
            leaf.index: item
            for leaf, item in zip(draft.arguments.leaves, pytree.tree_leaves((args, kwargs)), strict=True)
            if isinstance(leaf, ObjectRef)
        }
        given = tensors_in((args, kwargs))
        versions = [tensor._version for tensor in given]
        self.unit_depth += 1
        outer, self.current = self.current, draft
        try:
            result = original(module, *args, **kwargs)
        finally:
            self.unit_depth -= 1
            self.current = outer
        for parameter in module.parameters():
            ref = self._known.get(id(parameter))
            if isinstance(ref, ParameterRef):
                draft.parameters.add(ref.name)
        self._note_writes(draft, given, versions)
        draft.outputs = self._outputs(draft, result)
        draft.object_outputs = [(index, tuple(self._outputs(draft, item))) for index, item in objects.items()]
        return result

    # Functions -----------------------------------------------------------------------------------------------------

    def function_call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.unit_depth:
            return function(*args, **kwargs)
        refuse_function(function, args)
        given = tensors_in((args, kwargs))
        versions = [tensor._version for tensor in given]
        probe = _Draft(-1, None, 0, function, _EMPTY, set())
        outer, self.current = self.current, probe
        try:
            result = function(*args, **kwargs)
        finally:
            self.current = outer
        changed = any(tensor._version != version for tensor, version in zip(given, versions, strict=True))
        if not changed and not tensors_in(result):
            return result
        draft = self._draft(None, 0, function, (args, kwargs), None)
        draft.parameters |= probe.parameters
        draft.buffers |= probe.buffers
        draft.random = probe.random
        self._note_writes(draft, given, versions)
        draft.outputs = self._outputs(draft, result)
        known = [self._known[id(tensor)] for tensor in given if id(tensor) in self._known]
        if known and all(isinstance(ref, ParameterRef) for ref in known):
            memory = {_memory(tensor) for tensor in given}
            draft.views_parameter = all(_memory(tensor) in memory for tensor in tensors_in(result))
        return result

    # What the dispatch mode sees -----------------------------------------------------------------------------------

    def observe(self, function: Any, args: Any, kwargs: Any) -> None:
        draft = self.current
        if draft is None:
            return
        for item in pytree.tree_leaves((args, kwargs)):
            if isinstance(item, torch.Tensor):
                ref = self._known.get(id(item))
                if isinstance(ref, ParameterRef):
                    draft.parameters.add(ref.name)
                elif isinstance(ref, BufferRef):
                    draft.buffers.add(ref.name)
                elif isinstance(ref, ValueRef) and draft.path is not None:
                    draft.reads.add(self._use_value(item))
        if draws(function, args, kwargs):
            frame = self.frames[-1] if self.frames else _Frame("", 0, 0)
            draft.random[(frame.path, frame.occurrence, frame.segment)] = None

    # Values --------------------------------------------------------------------------------------------------------

    def _know(self, tensor: torch.Tensor, ref: Leaf) -> None:
        self._known[id(tensor)] = ref
        self._keep.append(tensor)

    def _new_value(self, tensor: torch.Tensor, step: int | None, position: int | None = None) -> int:
        index = len(self.values)
        memory = _memory(tensor)
        self.values.append(Value(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, step, position, memory))
        self._know(tensor, ValueRef(index))
        return index

    def _use_value(self, tensor: torch.Tensor) -> int:
        """The value that a known tensor holds now, after the writes to its memory so far."""
        ref = self._known[id(tensor)]
        if not isinstance(ref, ValueRef):
            raise CaptureError(f"{said(tensor)} is not a value of the step")
        return self._version(ref.value, len(self._mutations[self.values[ref.value].memory]))

    def _version(self, value: int, writes: int) -> int:
        """The value ``value`` after the first ``writes`` writes to its memory."""
        made = self.values[value].step
        for number in reversed(range(writes)):
            writer = self._mutations[self.values[value].memory][number]
            if made is not None and writer <= made:
                break
            key = (value, writer)
            if key not in self._renewed:
                old = self._version(value, number)
                base = self.values[value]
                self._renewed[key] = len(self.values)
                requires_grad = self._renewed_grad(writer, base)
                self.values.append(Value(base.shape, base.dtype, requires_grad, writer, None, base.memory))
                draft = self.drafts[writer]
                draft.reads.add(old)
                draft.renewals.append((self._renewed[key], old))
            return self._renewed[key]
        return value

    def _renewed_grad(self, writer: int, base: Value) -> bool:
        return base.requires_grad or any(self.values[v].requires_grad for v in self.drafts[writer].reads)

    def _use(self, tensor: torch.Tensor) -> Leaf:
        ref = self._known.get(id(tensor))
        if isinstance(ref, ValueRef):
            return ValueRef(self._use_value(tensor))
        if ref is not None:
            return ref
        if isinstance(tensor, FakeTensor):
            raise CaptureError(
                f"a tensor of shape {tuple(tensor.shape)} reached {where()} in a way that cannot be recorded (it was "
                f"made by no torch function that this step called): compute it inside a module, or pass it in the batch"
            )
        if tensor.requires_grad:
            raise CaptureError(
                f"a tensor of shape {tuple(tensor.shape)} that requires gradients is used at {where()}, and is no "
                f"parameter of the model: register it in the model, so that its gradient is reduced"
            )
        self._keep.append(tensor)
        return ConstantRef(tensor)

    def _leaf(self, item: Any, stage: int | None) -> Leaf:
        if isinstance(item, torch.Tensor):
            return self._use(item)
        if is_plain(item):
            return Literal(item)
        if id(item) not in self._objects:
            self._objects[id(item)] = len(self._objects)
            self._keep.append(item)
        index = self._objects[id(item)]
        key = (index, -1 if stage is None else stage)
        if key not in self.templates:
            try:
                self.templates[key] = make_template(item, self._name_or_none)
            except CaptureError:
                raise
            except Exception as error:
                raise CaptureError(
                    f"an object of type {type(item).__name__} is passed to a unit at {where()}, and cannot be copied "
                    f"for each stage and microbatch: {error}"
                ) from error
        return ObjectRef(index)

    def _name_or_none(self, tensor: torch.Tensor) -> Any:
        ref = self._known.get(id(tensor))
        if ref is None:
            return None if isinstance(tensor, FakeTensor) else ConstantRef(tensor)
        return self._use(tensor)

    def _draft(
        self, path: str | None, occurrence: int, function: Callable[..., Any] | None, arguments: Any, stage: int | None
    ) -> _Draft:
        items, spec = pytree.tree_flatten(arguments)
        leaves = tuple(self._leaf(item, stage) for item in items)
        draft = _Draft(
            len(self.drafts), path, occurrence, function, Tree(leaves, spec),
            {leaf.value for leaf in leaves if isinstance(leaf, ValueRef)},
        )  # fmt: skip
        draft.parameters |= {leaf.name for leaf in leaves if isinstance(leaf, ParameterRef)}
        draft.buffers |= {leaf.name for leaf in leaves if isinstance(leaf, BufferRef)}
        draft.grad_enabled = torch.is_grad_enabled()
        kind = self.device.type
        draft.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.drafts.append(draft)
        return draft

    def _note_writes(self, draft: _Draft, given: list[torch.Tensor], versions: list[int]) -> None:
        memories = set()
        for tensor, version in zip(given, versions, strict=True):
            if tensor._version == version:
                continue
            ref = self._known.get(id(tensor))
            if isinstance(ref, ParameterRef):
                raise CaptureError(
                    f"parameter {ref.name} is changed in place inside the step ({where()}): do it outside"
                )
            if isinstance(ref, ValueRef):
                # Read as it was before this write: the step itself is the next writer.
                draft.reads.add(self._use_value(tensor))
                draft.written.add(self._use_value(tensor))
                memories.add(self.values[ref.value].memory)
        draft.memories |= memories
        for memory in memories:
            self._mutations[memory].append(draft.index)

    def _outputs(self, draft: _Draft, result: Any) -> list[int | None]:
        found: list[int | None] = []
        for tensor in tensors_in(result):
            if id(tensor) in self._known or not isinstance(tensor, FakeTensor):
                found.append(None)
                continue
            found.append(self._new_value(tensor, draft.index))
        return found

    # The end -------------------------------------------------------------------------------------------------------

    def _finish(self, result: Any) -> Program:
        items, spec = pytree.tree_flatten(result)
        leaves: list[Leaf] = []
        for item in items:
            if isinstance(item, torch.Tensor):
                leaves.append(self._use(item))
            elif tensors_in(item):
                raise CaptureError(
                    f"the step returns a {type(item).__name__}, which holds tensors: return tensors, or lists, tuples "
                    f"and dicts of them"
                )
            else:
                leaves.append(Literal(item))
        random_paths = {context[0] for draft in self.drafts for context in draft.random}
        late = {c[0] for draft in self.drafts for c in draft.random if c[2] > 0}
        steps = tuple(
            Step(
                d.index, d.path, d.occurrence, d.function, d.arguments, frozenset(d.reads), tuple(d.outputs),
                tuple(d.object_outputs), tuple(d.renewals), frozenset(d.written), frozenset(d.memories),
                frozenset(d.parameters), frozenset(d.buffers), d.grad_enabled, d.autocast, tuple(d.random),
                tuple((path, n) for path, n in d.counts.items() if path in random_paths), d.views_parameter,
            )
            for d in self.drafts
        )  # fmt: skip
        return Program(
            tuple(self.values),
            steps,
            tuple(self.losses),
            Tree(tuple(leaves), spec),
            self.templates,
            {path: tuple(self.children.get(path, ())) for path in late},
            {path: self.counts[path] for path in random_paths},
        )


_EMPTY = Tree((), pytree.tree_flatten(())[1])


class _Functions(TorchFunctionMode):
    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.function_call(func, args, kwargs or {})


class _Watcher(TorchDispatchMode):
    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.recorder.observe(func, args, kwargs or {})
        if func is GROUPED_PRODUCT and args[0].device.type == "cpu":
            return grouped_product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def _patched_calls(recorder: StepRecorder) -> Iterator[None]:
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.module_call(original, module, args, kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def _memory(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)
