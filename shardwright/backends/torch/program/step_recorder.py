"""Recording of the step body: it runs once on stand-ins, and what it does becomes a `Program`.

Functions are recorded as the user calls them (`__torch_function__`), above autograd, so that replaying them builds the
same autograd graph. Module calls that the plan gives to a stage are recorded whole. A dispatch mode below watches what
happens inside them: which parameters are used, where random numbers are drawn.

The stand-ins are fake tensors. A model that needs values runs on real ones: the batch as it is, parameters at random.
Inside a unit it may do what it likes with them, since units are replayed whole; between units it may read what follows
from the batch alone, which becomes a guard of the program (`value_guards`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.capture.fake_state import (
    VALUE_DEPENDENT,
    fake_state,
    real_state,
)
from shardwright.backends.torch.capture.host_draws import generator_state, host_state, patched_functions
from shardwright.backends.torch.capture.loss_scaler import real_scales
from shardwright.backends.torch.capture.stand_in import no_remembered_results
from shardwright.backends.torch.capture.value_reads import READING, masks_of, require_room_for_values
from shardwright.backends.torch.compat import FakeTensorMode, pytree
from shardwright.backends.torch.program.draft_steps import Draft, Frame
from shardwright.backends.torch.program.hooks import Functions, Ops, patched_modules
from shardwright.backends.torch.program.program import (
    BufferRef,
    ConstantRef,
    Guard,
    Leaf,
    Literal,
    Loss,
    NumberRef,
    ObjectRef,
    ParameterRef,
    Program,
    SetAttribute,
    Template,
    Tree,
    ValueRef,
    is_plain,
    make_template,
    tensors_in,
)
from shardwright.backends.torch.program.python_clocks import Clocks
from shardwright.backends.torch.program.python_numbers import Number, Tape
from shardwright.backends.torch.program.python_places import Holder
from shardwright.backends.torch.program.python_reads import Reads, undo
from shardwright.backends.torch.program.python_values import Effect, PythonValues
from shardwright.backends.torch.program.randomness import Moment, draws
from shardwright.backends.torch.program.recorded_draws import RecordedDraws
from shardwright.backends.torch.program.refusals import (
    draws_by_itself,
    draws_on_the_host,
    keeps_a_tensor,
    reads_a_value,
    reads_what_it_computed,
    refuse_function,
    said,
    sets_an_attribute,
    shares_a_value,
    takes_a_gradient,
    where,
    wraps_units,
)
from shardwright.backends.torch.program.value_guards import what_was_read
from shardwright.backends.torch.program.value_ledger import Ledger, memory_of
from shardwright.core.errors import CaptureError, UnrecordableError


class StepRecorder:
    """Records one run of a step body.

    Args:
        model: the whole model; parameters may be on any device, the meta device too. It is left as it was.
        stage_of_call: the stage of every module call that is to be kept whole: (path, occurrence) → stage.
        device: where the stand-ins are, or pretend to be.
        real: whether they have values.
        moment: by which random numbers are drawn where they decide what the model does.
        units_run_again: whether units are replayed by calling their modules, which read Python values anew.
        places: of Python values that change from step to step, so that the program is given them anew.
        readings: of clocks; see `Clocks`.
    """

    def __init__(
        self,
        model: nn.Module,
        stage_of_call: Mapping[tuple[str, int], int],
        device: torch.device,
        *,
        real: bool = False,
        moment: Moment | None = None,
        units_run_again: bool = True,
        places: Sequence[tuple[Holder, Any]] = (),
        readings: Sequence[Any] | None = None,
    ) -> None:
        self.model = model
        self.stage_of_call = stage_of_call
        self.device = device
        self.real = real
        self.moment = moment or Moment()
        self.units_run_again = units_run_again
        self.reads = Reads(model, self._runs_again)
        self.tape = Tape(places, self._is_heard, with_tensors=units_run_again)
        self.clocks = self.reads.clocks = Clocks(self.tape, readings)
        self.ledger = Ledger()
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.frames: list[Frame] = []
        self.unit_depth = 0
        self.current: Draft | None = None
        self.losses: list[Loss] = []
        self.guards: list[Guard] = []
        self.templates: dict[tuple[int, int], Template] = {}
        self.children: dict[str, dict[str, None]] = {}
        self.seen_calls: set[tuple[str, int]] = set()
        self.failed_path: str | None = None
        """The innermost module call that an error left first; None when none was under way."""
        self.effects: list[Effect] = []
        self._units_called = 0
        self._objects: dict[int, int] = {}
        self._keep: list[Any] = []
        self._host_state = host_state()
        self._draws = RecordedDraws(self, self.moment, [])

    def _runs_again(self) -> bool:
        """Whether what runs now will run again at every replay."""
        return self.units_run_again and self.current is not None

    def _is_heard(self) -> bool:
        """Whether what is decided now is part of the recording."""
        return not (self._runs_again() or self.reads.is_collecting)

    # What the user's code meets ------------------------------------------------------------------------------------

    def record(self, body: Callable[[list[torch.Tensor]], Any], inputs: list[torch.Tensor]) -> Program:
        """Run ``body(stand_ins)`` on stand-ins for ``inputs``, which are those of one microbatch.

        Raises CaptureError when what the body does depends on the values of tensors, or cannot be replayed;
        UnrecordableError, a CaptureError, when it is the model that needs values.
        """
        mode = nullcontext() if self.real else FakeTensorMode(allow_non_fake_inputs=True)
        state = real_state if self.real else fake_state
        with (
            mode,
            state(self.model, self.device) as (parameters, buffers),
            no_remembered_results(self.model),
            self.tape.in_place(),
            real_scales(),
        ):
            for name, parameter in parameters.items():
                self.ledger.know(parameter, ParameterRef(name))
            for name, buffer in buffers.items():
                self.ledger.know(buffer, BufferRef(name))
            self._draws.inputs = inputs
            stand_ins: list[torch.Tensor] = []
            for position, tensor in enumerate(inputs):
                stand_ins.append(self._stand_in(tensor))
                self.ledger.new_value(stand_ins[-1], None, position)
            drawing = patched_functions(self.model, self._draws.host_function, self.function_call)
            reading = self.reads.watching(getattr(body, "python_roots", ()))
            with reading, self.clocks.followed(), patched_modules(self), drawing, Functions(self), Ops(self):
                try:
                    result = body(stand_ins)
                except VALUE_DEPENDENT as error:
                    raise reads_a_value(self.model, self.failed_path, error) from error
                self._note_host_draws()
            self.reads.close()
            self._note_python_writes()
            return self._finish(result)

    def _note_python_writes(self) -> None:
        """What the run wrote to Python values becomes what the step does to them, and is undone here.

        Raises CaptureError for a tensor that was left where it may be read again; UnrecordableError, a CaptureError,
        where the model did that.
        """
        writes = self.reads.writes()
        undo(writes)
        for write in writes:
            if write.by_unit:
                if not self.reads.is_of_module(write.holder) and not tensors_in(write.new):
                    raise shares_a_value(self.model, write.place)
            elif tensors_in(write.new):
                if self.reads.may_be_read(write):
                    raise keeps_a_tensor(self.model, write.place, by_model=self.reads.is_of_module(write.holder))
            else:
                value = write.new.expression if isinstance(write.new, Number) else write.new
                self.effects.append(Effect(write.holder, write.key, value))
                if isinstance(value, str):
                    self.tape.keep_texts()

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.real:
            made = tensor.detach().to(self.device, copy=True)
        else:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        return made.requires_grad_(tensor.requires_grad)

    def backward(self, loss: Any, weight: Any = None, reduction: str | None = None) -> None:
        """``model.backward`` inside the body."""
        if not isinstance(loss, torch.Tensor) or not isinstance(self.ledger.ref(loss), ValueRef):
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
            leaf = self._leaf(weight, None)
        elif isinstance(weight, Number):
            leaf = self._leaf(weight, None)
        elif weight is not None:
            leaf = Literal(float(weight))
        self.losses.append(Loss(self.ledger.use_value(loss), leaf, reduction))

    # Module calls --------------------------------------------------------------------------------------------------

    def module_call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = self.paths.get(id(module))
        if path is None:
            return original(module, *args, **kwargs)
        self._note_host_draws()
        occurrence = self.counts[path]
        self.counts[path] += 1
        if self.frames:
            self.children.setdefault(self.frames[-1].path, {})[path] = None
        self.frames.append(Frame(path, occurrence))
        try:
            stage = self.stage_of_call.get((path, occurrence))
            self._units_called += stage is not None
            if self.unit_depth:
                stage = None
            if stage is None:
                result = original(module, *args, **kwargs)
            else:
                result = self._unit(original, module, path, occurrence, stage, args, kwargs)
            self._note_host_draws()
            return result
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
        if (
            not self.units_run_again
        ):  # what the module does with a number is seen below torch's functions, as a constant
            args, kwargs = self.tape.plain((args, kwargs), fix=True)
        draft = self.make_draft(path, occurrence, None, (args, kwargs), stage)
        draft.counts = dict(self.counts)
        draft.counts[path] -= 1
        objects = {
            leaf.index: item
            for leaf, item in zip(draft.arguments.leaves, pytree.tree_leaves((args, kwargs)), strict=True)
            if isinstance(leaf, ObjectRef)
        }
        args, kwargs = self.tape.plain((args, kwargs))
        given = tensors_in((args, kwargs))
        versions = [tensor._version for tensor in given]
        self.unit_depth += 1
        outer, self.current = self.current, draft
        try:
            with self.reads.unit() if self.units_run_again else nullcontext():
                result = original(module, *args, **kwargs)
                if self.units_run_again:
                    result = self._outputs_of_their_own(result)
            self._note_host_draws()
        finally:
            self.unit_depth -= 1
            self.current = outer
        for parameter in module.parameters():
            ref = self.ledger.ref(parameter)
            if isinstance(ref, ParameterRef):
                draft.parameters.add(ref.name)
        self.ledger.note_writes(draft, given, versions)
        draft.outputs = self.outputs_of(draft, result)
        draft.object_outputs = [(index, tuple(self.outputs_of(draft, item))) for index, item in objects.items()]
        return result

    def _outputs_of_their_own(self, result: Any) -> Any:
        """A unit's result with another tensor in place of each that it only hands on, as dropout of nothing does: when
        it runs again it may not."""

        def own(tensor: torch.Tensor) -> torch.Tensor:
            passed = isinstance(self.ledger.ref(tensor), ValueRef) and tensor.is_floating_point()
            return tensor.view_as(tensor) if passed else tensor

        return pytree.tree_map_only(torch.Tensor, own, result)

    def assignment(self, module: nn.Module, name: str, value: Any) -> None:
        """An attribute of a module is about to be set. Between units, on a module that replay runs as part of one, that
        is a step. Raises CaptureError where it cannot be: the value is no tensor of the step and no plain value, the
        module's unit lies on several stages, or the step's own body sets it."""
        path = self.paths.get(id(module))
        if self.unit_depth or path is None:
            return
        stages = {stage for (unit, _), stage in self.stage_of_call.items() if _lies_in(path, unit)}
        old, constant = getattr(module, name, None), _is_constant(value)
        if not stages or (old is value and not constant) or (not self.frames and constant and old == value):
            return
        known = isinstance(value, torch.Tensor) and isinstance(self.ledger.ref(value), ValueRef)
        if len(stages) > 1 or not self.frames or not (known or constant):
            raise sets_an_attribute(self.model, self.frames[-1].path if self.frames else None, path, name)
        self.reads.set_on_replay(module, name)
        draft = self.make_draft(None, 0, SetAttribute(module, path, name), ((value,), {}), None)
        (draft.stage,) = stages

    def autograd_function(self, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a custom ``torch.autograd.Function``: one step, with the backward that it defines.

        Raises UnrecordableError where it calls a unit.
        """
        if self.unit_depth:
            return apply(*args, **kwargs)
        frame, called = (self.frames[-1].path if self.frames else None), self._units_called
        try:
            return self.function_call(apply, args, kwargs)
        finally:
            if self._units_called != called:
                raise wraps_units(self.model, frame, apply)

    # Functions -----------------------------------------------------------------------------------------------------

    def function_call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.unit_depth:
            args, kwargs = self.tape.plain((args, kwargs), fix=not self.units_run_again)
            return function(*args, **kwargs)
        refuse_function(function, args)
        if any(isinstance(one, torch.Generator) for one in (*args, *kwargs.values())):
            raise draws_by_itself(self.model, self.frames[-1].path if self.frames else None)
        if function in (torch.autograd.grad, torch.autograd.backward) and len(set(self.stage_of_call.values())) > 1:
            raise takes_a_gradient(self.model, function)
        begins_gradients = function in _BEGINNING_GRADIENTS and bool((*args, True)[1]) and not args[0].requires_grad
        if begins_gradients:
            function, args, kwargs = torch.Tensor.requires_grad_, args[:1], {}
        function, args, kwargs = self._draws.on_arrays(function, args, kwargs)
        recorded = args, kwargs
        args, kwargs = self.tape.plain(recorded)
        given = tensors_in((args, kwargs))
        if getattr(function, "__name__", "") in READING and any(self.ledger.is_drawn(tensor) for tensor in given):
            draft = self.make_draft(None, 0, function, recorded, None, kept=False)
            if self._draws.decides(draft):
                return self._draws.decide(draft)
        versions = [tensor._version for tensor in given]
        probe = Draft(-1, None, 0, function, _EMPTY, set())
        outer, self.current = self.current, probe
        self.unit_depth += 1
        try:
            result = function(*args, **kwargs)
        finally:
            self.unit_depth -= 1
            self.current = outer
        made = tensors_in(result)
        if not made and not probe.scalars and getattr(function, "__name__", "") in READING:
            probe.reads_value = True
        if begins_gradients:
            versions[0] -= 1  # from here on it is another value, through which gradients flow
        changed = any(tensor._version != version for tensor, version in zip(given, versions, strict=True))
        for read, tensors in ((torch.Tensor.item, probe.scalars), (_count, probe.masks)):
            for tensor in tensors:
                asked = self.make_draft(None, 0, read, ((tensor,), {}), None, kept=False)
                self._guard(asked, read(tensor))
        if made and not any(tensor.dim() for tensor in made):
            probe.reads_value = False  # as `ctc_loss` reads lengths: what it gives is one number whatever they are
        if not (changed or made or (probe.reads_value and given)):
            return result
        if probe.random:  # how much is drawn may depend on it
            recorded = self.tape.plain(recorded, fix=True)
        draft = self.make_draft(None, 0, function, recorded, None, kept=changed or bool(made))
        draft.parameters |= probe.parameters
        draft.buffers |= probe.buffers
        draft.random = probe.random
        if draft.random and (changed or made):
            self._draws.note_order(draft)
        if probe.reads_value and given:
            self._guard(draft, result)
        if not changed and not made:
            return result
        self.ledger.note_writes(draft, given, versions)
        draft.outputs = self.outputs_of(draft, result)
        known = [ref for tensor in given if (ref := self.ledger.ref(tensor)) is not None]
        if known and all(isinstance(ref, ParameterRef) for ref in known):
            memory = {memory_of(tensor) for tensor in given}
            draft.views_parameter = all(memory_of(tensor) in memory for tensor in made)
        return result

    def _guard(self, draft: Draft, result: Any) -> None:
        """A value was read between units: note it where the batch alone decides it.

        Raises UnrecordableError where it does not; CaptureError where it is the step's own body that reads.
        """
        path = self.frames[-1].path if self.frames else None
        if path is None or not self.ledger.depends_on_batch_alone(draft):
            raise reads_what_it_computed(self.model, path, draft.function)
        assert draft.function is not None
        found = what_was_read(result)
        self.guards.append(Guard(draft.function, draft.arguments, frozenset(draft.reads), found))

    # What the dispatch mode sees -----------------------------------------------------------------------------------

    def observe(self, function: Any, args: Any, kwargs: Any) -> None:
        draft = self.current
        if draft is None:
            return
        for item in pytree.tree_leaves((args, kwargs)):
            if isinstance(item, torch.Tensor):
                ref = self.ledger.ref(item)
                if isinstance(ref, ParameterRef):
                    draft.parameters.add(ref.name)
                elif isinstance(ref, BufferRef):
                    draft.buffers.add(ref.name)
                elif isinstance(ref, ValueRef) and draft.path is not None:
                    draft.reads.add(self.ledger.use_value(item))
        if draws(function, args, kwargs):
            self.note_draw(draft)
        reads = torch.Tag.data_dependent_output in function.tags or torch.Tag.dynamic_output_shape in function.tags
        if reads or function is _PACKING:
            masks = masks_of(function, args)
            if function is _ITEM and self.ledger.ref(args[0]) is not None:
                draft.scalars.append(args[0])
            elif masks is not None and all(self.ledger.ref(mask) is not None for mask in masks):
                draft.masks += masks
            else:
                draft.reads_value = True

    def note_draw(self, draft: Draft) -> None:
        frame = self.frames[-1] if self.frames else Frame("", 0, 0)
        draft.random[(frame.path, frame.occurrence, frame.segment)] = None

    def _note_host_draws(self) -> None:
        """Draws from Python's or NumPy's generator since the last look: a unit's are its own, as are torch's.

        Raises CaptureError for those between units: the result is a constant to the recording.
        """
        state, generators = host_state(), self.reads.generators
        drawn = False
        for number, (generator, known) in enumerate(generators):
            now = generator_state(generator)
            drawn = drawn or now != known
            generators[number] = generator, now
        if state == self._host_state and not drawn:
            return
        self._host_state = state
        if self.current is None:
            raise draws_on_the_host(self.model, self.frames[-1].path if self.frames else None)
        self.note_draw(self.current)
        self.current.draws_on_host = True

    # Values --------------------------------------------------------------------------------------------------------

    def _leaf(self, item: Any, stage: int | None) -> Leaf:
        expression = self.tape.expression_of(item)
        if expression is not None:
            return NumberRef(self.tape.use(expression), expression)
        if isinstance(item, torch.Tensor):
            return self.ledger.use(item)
        if is_plain(item):
            return Literal(item)
        self._draws.require_known(item)
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
        expression = self.tape.expression_of(tensor)
        if expression is not None:  # inside an object, which keeps it
            self.tape.conditions.append((expression, tensor))
        if self.ledger.ref(tensor) is None:
            return None if self.ledger.is_made(tensor) else ConstantRef(tensor)
        return self.ledger.use(tensor)

    def make_draft(
        self, path: str | None, occurrence: int, function: Callable[..., Any] | None, arguments: Any,
        stage: int | None, kept: bool = True,
    ) -> Draft:  # fmt: skip
        items, spec = pytree.tree_flatten(arguments)
        leaves = tuple(self._leaf(item, stage) for item in items)
        draft = Draft(len(self.ledger.drafts), path, occurrence, function, Tree(leaves, spec), set())
        held: list[Leaf | None] = [*leaves]
        for leaf, item in zip(leaves, items, strict=True):
            if path is None and isinstance(leaf, ObjectRef):  # such as a slice; units read of objects what they need
                held += [self._name_or_none(tensor) for tensor in tensors_in(item)]
        draft.reads |= {leaf.value for leaf in held if isinstance(leaf, ValueRef)}
        draft.parameters |= {leaf.name for leaf in held if isinstance(leaf, ParameterRef)}
        draft.buffers |= {leaf.name for leaf in held if isinstance(leaf, BufferRef)}
        draft.grad_enabled = torch.is_grad_enabled()
        kind = self.device.type
        draft.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if kept:
            self.ledger.drafts.append(draft)
        return draft

    def outputs_of(self, draft: Draft, result: Any) -> list[int | None]:
        found: list[int | None] = []
        for tensor in tensors_in(result):
            known = self.ledger.ref(tensor) is not None or not self.ledger.is_made(tensor)
            found.append(None if known else self.ledger.new_value(tensor, draft.index))
        return found

    # The end -------------------------------------------------------------------------------------------------------

    def _finish(self, result: Any) -> Program:
        items, spec = pytree.tree_flatten(result)
        leaves: list[Leaf] = []
        for item in items:
            if isinstance(item, torch.Tensor):
                leaves.append(self._leaf(item, None))
            elif tensors_in(item):
                raise CaptureError(
                    f"the step returns a {type(item).__name__}, which holds tensors: return tensors, or lists, tuples "
                    f"and dicts of them"
                )
            else:
                leaves.append(self._leaf(item, None) if isinstance(item, Number) else Literal(item))
        drafts = self.ledger.drafts
        random_paths = {context[0] for draft in drafts for context in draft.random}
        late = {c[0] for draft in drafts for c in draft.random if c[2] > 0}
        return Program(
            tuple(self.ledger.values),
            tuple(draft.finished(random_paths) for draft in drafts),
            tuple(self.losses),
            Tree(tuple(leaves), spec),
            self.templates,
            tuple(self.guards),
            {path: tuple(self.children.get(path, ())) for path in late},
            {path: self.counts[path] for path in random_paths},
            tuple(dict.fromkeys(d.path for d in drafts if d.path is not None and d.random and d.reads_value)),
            any(draft.draws_on_host for draft in drafts),
            PythonValues(
                self.reads.guards(self._constants(leaves), lambda tensor: id(tensor) in self.tape.tensors),
                tuple(self.effects),
                tuple(self.tape.used),
                tuple(self.tape.conditions),
                self.clocks.readings,
                tuple(self.clocks.sources),
            ),
        )

    def _constants(self, result: Iterable[Leaf]) -> set[int]:
        """The ids of the tensors from outside the step that the program uses."""
        leaves = [leaf for draft in self.ledger.drafts for leaf in draft.arguments.leaves]
        leaves += [ref for template in self.templates.values() for _, ref in template.markers if ref is not None]
        leaves += [loss.weight for loss in self.losses if loss.weight is not None]
        return {id(leaf.tensor) for leaf in (*leaves, *result) if isinstance(leaf, ConstantRef)}


def record(
    model: nn.Module,
    stage_of_call: Mapping[tuple[str, int], int],
    device: torch.device,
    body: Callable[[list[torch.Tensor]], Any],
    inputs: list[torch.Tensor],
    begin: Callable[[StepRecorder], None],
    moment: Moment | None = None,
    *,
    units_run_again: bool = True,
    places: Sequence[tuple[Holder, Any]] = (),
    readings: Sequence[Any] | None = None,
) -> tuple[Program, StepRecorder]:
    """Record a step: on fake tensors, and where the model needs values on real ones.

    ``begin`` is called with the recorder before each run of the body. Raises as `StepRecorder.record`.
    """
    recorder = StepRecorder(
        model, stage_of_call, device, moment=moment, units_run_again=units_run_again, places=places, readings=readings
    )
    begin(recorder)
    try:
        return recorder.record(body, inputs), recorder
    except (UnrecordableError, RuntimeError, NotImplementedError) as failed:
        # Values are needed, or an op has no fake counterpart; an error of the model's own comes again.
        require_room_for_values(model, failed)
        recorder = StepRecorder(
            model, stage_of_call, device, real=True, moment=moment, units_run_again=units_run_again, places=places,
            readings=readings,
        )  # fmt: skip
        begin(recorder)
        return recorder.record(body, inputs), recorder


def _is_constant(value: Any) -> bool:
    return is_plain(value) and not isinstance(value, nn.Module)


def _lies_in(path: str, unit: str) -> bool:
    return not unit or path == unit or path.startswith(unit + ".")


def _count(mask: torch.Tensor) -> int:
    return int(mask.count_nonzero())


_BEGINNING_GRADIENTS = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_PACKING = torch.ops.aten._pack_padded_sequence.default
"""Its result has as many rows as its lengths say, which its tags do not."""
_ITEM = torch.ops.aten._local_scalar_dense.default
_EMPTY = Tree((), pytree.tree_flatten(())[1])
