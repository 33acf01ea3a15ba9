"""Recording of the step body: it runs once on stand-ins, and everything it does becomes a `Program`.

Functions are recorded as the user calls them (`__torch_function__`), above autograd, so that replaying them builds the
same autograd graph. Module calls that the plan gives to a stage are recorded whole. A dispatch mode below sees the ops
inside them: the parameters that are used, and the places where random numbers are drawn.

The stand-ins are fake tensors. A model that needs values runs on real ones: the batch as it is, parameters at random.
Inside a unit it may do what it likes with them, since units are replayed whole; between units it may read values that
follow from the batch alone, which become guards of the program (`value_guards`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.capture.fake_state import (
    VALUE_DEPENDENT,
    fake_state,
    real_state,
)
from shardwright.backends.torch.capture.held_tensors import tensors_in
from shardwright.backends.torch.capture.host_draws import generator_state, host_state, patched_functions
from shardwright.backends.torch.capture.known_values import known_values
from shardwright.backends.torch.capture.loss_scaler import real_scales
from shardwright.backends.torch.capture.own_checkpoints import plain_checkpoints
from shardwright.backends.torch.capture.product_flops import ProductFlops
from shardwright.backends.torch.capture.remembered_results import memory_of
from shardwright.backends.torch.capture.stand_in import no_remembered_results
from shardwright.backends.torch.capture.value_reads import READING, masks_of, require_room_for_values
from shardwright.backends.torch.compat import FakeTensorMode, pytree
from shardwright.backends.torch.program.draft_steps import CallStack, Draft
from shardwright.backends.torch.program.hooks import Functions, Ops, patched_modules
from shardwright.backends.torch.program.module_calls import ModuleCalls
from shardwright.backends.torch.program.program import (
    BufferRef,
    ConstantRef,
    Guard,
    Leaf,
    Literal,
    Loss,
    ParameterRef,
    Program,
    Tree,
    ValueRef,
)
from shardwright.backends.torch.program.python_clocks import Clocks
from shardwright.backends.torch.program.python_numbers import Number, Tape
from shardwright.backends.torch.program.python_places import Holder
from shardwright.backends.torch.program.python_reads import Reads, undo
from shardwright.backends.torch.program.python_values import Effect, PythonValues
from shardwright.backends.torch.program.randomness import Moment, draws
from shardwright.backends.torch.program.read_later import ReadLater, ValueNeededError
from shardwright.backends.torch.program.recorded_draws import RecordedDraws
from shardwright.backends.torch.program.refusals import (
    draws_by_itself,
    draws_on_the_host,
    keeps_a_tensor,
    reads_a_value,
    reads_what_it_computed,
    refuse_function,
    require_one_element,
    said,
    shares_a_value,
    takes_a_gradient,
    writes_a_buffer,
)
from shardwright.backends.torch.program.step_drafts import StepDrafts
from shardwright.backends.torch.program.value_guards import what_was_read
from shardwright.backends.torch.program.value_ledger import Ledger
from shardwright.core.errors import CaptureError, UnrecordableError


class StepRecorder:
    """A recorder of one run of a step body.

    Args:
        model: the whole model; parameters may be on any device, the meta device too. It is left as it was.
        stage_of_call: the stage of every module call that is to be kept whole: (path, occurrence) → stage.
        device: where the stand-ins are, or pretend to be.
        real: whether they have values.
        moment: the moment by which random numbers are drawn where they decide what the model does.
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
        self.may_read_values = False
        """Whether what the body reads by ``.item()`` and returns may be read when the step has run."""
        self.tape = Tape(places, self._is_heard, with_tensors=units_run_again)
        self.clocks = self.reads.reached.clocks = Clocks(self.tape, readings)
        self.ledger = Ledger()
        self.stack = CallStack()
        self.losses: list[Loss] = []
        self.guards: list[Guard] = []
        self.effects: list[Effect] = []
        self.flops = ProductFlops()
        self._host_state = host_state()
        self._draws = RecordedDraws(self, self.moment, [])
        self.drafts = StepDrafts(self.ledger, self.tape, device, self._draws.require_known)
        self.modules = ModuleCalls(
            model, stage_of_call, self.stack, self.drafts, self.reads, units_run_again=units_run_again,
            function_call=self.function_call, note_host_draws=self._note_host_draws,
        )  # fmt: skip

    def _runs_again(self) -> bool:
        """Whether the code that runs now will run again at every replay."""
        return self.units_run_again and self.stack.current is not None

    def _is_heard(self) -> bool:
        """Whether a decision made now is part of the recording."""
        return not (self._runs_again() or self.reads.is_collecting)

    # What the user's code meets ------------------------------------------------------------------------------------

    def record(self, body: Callable[[list[torch.Tensor]], Any], inputs: list[torch.Tensor]) -> Program:
        """Run ``body(stand_ins)`` on stand-ins for ``inputs``, which are those of one microbatch.

        Raises CaptureError when the course of the body depends on the values of tensors, or cannot be replayed;
        UnrecordableError, a CaptureError, when it is the model that needs values.
        """
        self.may_read_values = may_read_values(body)
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
            known = nullcontext() if self.real else known_values(self._runs_again)
            clocks = self.clocks.followed()
            plain = plain_checkpoints()  # what is computed again is the plan's to say
            with reading, clocks, patched_modules(self.modules), drawing, plain, Functions(self), Ops(self), known:
                try:
                    result = body(stand_ins)
                except (*VALUE_DEPENDENT, ValueNeededError) as error:
                    raise reads_a_value(self.model, self.modules.failed_path, error) from error
                self._note_host_draws()
            self.reads.close()
            self._require_buffers(buffers)
            self._note_python_writes()
            return self._finish(result)

    def _require_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Raise CaptureError for a buffer in whose place the body has put another tensor, unless it is in a unit whose
        module does that again at every replay."""
        units = {path for path, _ in self.stage_of_call} if self.units_run_again else set()
        now = dict(self.model.named_buffers(remove_duplicate=False))
        for name in (name for name, buffer in buffers.items() if now.get(name) is not buffer):
            path = name.rpartition(".")[0]
            if not any(path == unit or not unit or path.startswith(f"{unit}.") for unit in units):
                raise writes_a_buffer(self.model, path, name)

    def _note_python_writes(self) -> None:
        """Turn the writes of the run to Python values into effects of the step, and undo them here.

        Raises CaptureError for a tensor that was left where it may be read again; UnrecordableError, a CaptureError,
        where the model did that.
        """
        writes = self.reads.writes()
        undo(writes)
        for write in writes:
            if write.by_unit:
                if not self.reads.reached.is_of_module(write.holder) and not tensors_in(write.new):
                    raise shares_a_value(self.model, write.place)
            elif tensors_in(write.new):
                if self.reads.may_be_read(write):
                    by_model = self.reads.reached.is_of_module(write.holder)
                    raise keeps_a_tensor(self.model, write.place, by_model=by_model)
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
        """Note a loss that the body gives to ``model.backward``."""
        if not isinstance(loss, torch.Tensor) or not isinstance(self.ledger.ref(loss), ValueRef):
            raise CaptureError(f"model.backward takes the loss, a tensor that this step computed: given {said(loss)}")
        require_one_element(loss)
        if not loss.requires_grad:
            raise CaptureError("model.backward was given a loss that depends on no trainable parameter")
        leaf: Leaf | None = None
        if isinstance(weight, torch.Tensor) and weight.numel() != 1:
            raise CaptureError(f"the weight of a loss has one element: given shape {tuple(weight.shape)}")
        if isinstance(weight, (torch.Tensor, Number)):
            leaf = self.drafts.leaf(weight, None)
        elif weight is not None:
            leaf = Literal(float(weight))
        self.losses.append(Loss(self.ledger.use_value(loss), leaf, reduction))

    # Functions -----------------------------------------------------------------------------------------------------

    def function_call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.stack.unit_depth:
            args, kwargs = self.tape.plain((args, kwargs), fix=not self.units_run_again)
            return function(*args, **kwargs)
        if function is torch.Tensor.item and self.may_read_values and self.stack.path is None:
            return ReadLater(args[0])
        refuse_function(function, args)
        if any(isinstance(one, torch.Generator) for one in (*args, *kwargs.values())):
            raise draws_by_itself(self.model, self.stack.path)
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
            draft = self.drafts.make(None, 0, function, recorded, None, kept=False)
            if self._draws.decides(draft):
                return self._draws.decide(draft)
        versions = [tensor._version for tensor in given]
        probe = Draft(-1, None, 0, function, _EMPTY, set())
        with self.stack.inside(probe):
            result = function(*args, **kwargs)
        made = tensors_in(result)
        if not made and not probe.scalars and getattr(function, "__name__", "") in READING:
            probe.reads_value = True
        if begins_gradients:
            versions[0] -= 1  # from here on it is another value, through which gradients flow
        changed = any(tensor._version != version for tensor, version in zip(given, versions, strict=True))
        if changed and (lost := self.ledger.lost_write(given, versions, made)) is not None:
            raise writes_a_buffer(self.model, self.stack.path, lost)
        for read, tensors in ((torch.Tensor.item, probe.scalars), (_count, probe.masks)):
            for tensor in tensors:
                asked = self.drafts.make(None, 0, read, ((tensor,), {}), None, kept=False)
                self._guard(asked, read(tensor))
        if made and not any(tensor.dim() for tensor in made):
            probe.reads_value = False  # as `ctc_loss` reads lengths: what it gives is one number whatever they are
        if not (changed or made or (probe.reads_value and given)):
            return result
        if probe.random:  # how much is drawn may depend on it
            recorded = self.tape.plain(recorded, fix=True)
        draft = self.drafts.make(None, 0, function, recorded, None, kept=changed or bool(made))
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
        draft.outputs = self.drafts.outputs_of(draft, result)
        known = [ref for tensor in given if (ref := self.ledger.ref(tensor)) is not None]
        if known and all(isinstance(ref, ParameterRef) for ref in known):
            memory = {memory_of(tensor) for tensor in given}
            draft.views_parameter = all(memory_of(tensor) in memory for tensor in made)
        return result

    def _guard(self, draft: Draft, result: Any) -> None:
        """Note a value that was read between units, where the batch alone decides it.

        Raises UnrecordableError where it does not; CaptureError where it is the step's own body that reads.
        """
        path = self.stack.path
        if path is None or not self.ledger.depends_on_batch_alone(draft):
            raise reads_what_it_computed(self.model, path, draft.function)
        assert draft.function is not None
        found = what_was_read(result)
        self.guards.append(Guard(draft.function, draft.arguments, frozenset(draft.reads), found))

    # What the dispatch mode sees -----------------------------------------------------------------------------------

    def observe(self, function: Any, args: Any, kwargs: Any) -> None:
        draft = self.stack.current
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
            self.stack.note_draw(draft)
        reads = torch.Tag.data_dependent_output in function.tags or torch.Tag.dynamic_output_shape in function.tags
        if reads or function is _PACKING:
            masks = masks_of(function, args)
            if function is _ITEM and self.ledger.ref(args[0]) is not None:
                draft.scalars.append(args[0])
            elif masks is not None and all(self.ledger.ref(mask) is not None for mask in masks):
                draft.masks += masks
            else:
                draft.reads_value = True

    def _note_host_draws(self) -> None:
        """Note draws from Python's or NumPy's generator since the last look: a unit's are its own, as are torch's.

        Raises CaptureError for draws between units: the result is a constant to the recording.
        """
        state, generators = host_state(), self.reads.reached.generators
        drawn = False
        for number, (generator, known) in enumerate(generators):
            now = generator_state(generator)
            drawn = drawn or now != known
            generators[number] = generator, now
        if state == self._host_state and not drawn:
            return
        self._host_state = state
        if self.stack.current is None:
            raise draws_on_the_host(self.model, self.stack.path)
        self.stack.note_draw(self.stack.current)
        self.stack.current.draws_on_host = True

    # The end -------------------------------------------------------------------------------------------------------

    def _finish(self, result: Any) -> Program:
        items, spec = pytree.tree_flatten(result)
        leaves: list[Leaf] = []
        for item in items:
            if isinstance(item, torch.Tensor | ReadLater):
                leaves.append(self.drafts.leaf(item.tensor if isinstance(item, ReadLater) else item, None))
            elif tensors_in(item):
                raise CaptureError(
                    f"the step returns a {type(item).__name__}, which holds tensors: return tensors, or lists, tuples "
                    f"and dicts of them"
                )
            else:
                leaves.append(self.drafts.leaf(item, None) if isinstance(item, Number) else Literal(item))
        drafts = self.ledger.drafts
        random_paths = {context[0] for draft in drafts for context in draft.random}
        late = {c[0] for draft in drafts for c in draft.random if c[2] > 0}
        return Program(
            tuple(self.ledger.values),
            tuple(draft.finished(random_paths) for draft in drafts),
            tuple(self.losses),
            Tree(tuple(leaves), spec),
            self.drafts.templates,
            tuple(self.guards),
            {path: tuple(self.modules.children.get(path, ())) for path in late},
            {path: self.modules.counts[path] for path in random_paths},
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
            None if self.flops.unknown else self.flops.by_precision,
            self.flops.unknown,
            frozenset(position for position, item in enumerate(items) if isinstance(item, ReadLater)),
        )

    def _constants(self, result: Iterable[Leaf]) -> set[int]:
        """The ids of the tensors from outside the step that the program uses."""
        leaves = [leaf for draft in self.ledger.drafts for leaf in draft.arguments.leaves]
        leaves += [ref for template in self.drafts.templates.values() for _, ref in template.markers if ref is not None]
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

    ``begin`` is called with the recorder before each run of the body. Raises as `StepRecorder.record`, and
    UnrecordableError too where a body that may read values (`may_read_values`) does more with them than to return them.
    """
    with _by_messages_where_values_are_needed(body):
        recorder = StepRecorder(
            model,
            stage_of_call,
            device,
            moment=moment,
            units_run_again=units_run_again,
            places=places,
            readings=readings,
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


def may_read_values(body: Callable[..., Any]) -> bool:
    """Whether a step body may read values of tensors, so that it runs by messages where it does more than to return
    them."""
    return getattr(body, "may_read_values", False)


@contextmanager
def _by_messages_where_values_are_needed(body: Callable[..., Any]) -> Iterator[None]:
    """A context in which a body is recorded. Where one that may read values does more with them than to return them it
    raises UnrecordableError."""
    made = ReadLater.made
    try:
        yield
    except UnrecordableError:
        raise
    except Exception as failed:
        if not may_read_values(body) or not (isinstance(failed, CaptureError) or ReadLater.made > made):
            raise
        # What takes no placeholder for a number may fail by any error; by messages it is given the number.
        raise UnrecordableError(f"{failed}") from failed


def _count(mask: torch.Tensor) -> int:
    return int(mask.count_nonzero())


_BEGINNING_GRADIENTS = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_PACKING = torch.ops.aten._pack_padded_sequence.default
"""An op whose result has as many rows as its lengths say; its tags do not tell that."""
_ITEM = torch.ops.aten._local_scalar_dense.default
_EMPTY = Tree((), pytree.tree_flatten(())[1])
