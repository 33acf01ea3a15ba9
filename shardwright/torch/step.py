"""The decorator ``@sw.step``: a function that runs once for every microbatch, wherever its parts are."""

import contextlib
import copy
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, overload

import torch

from shardwright.backends.torch.compat import pytree
from shardwright.backends.torch.machine.agreement import Claim
from shardwright.backends.torch.machine.digests import code_of, digest_of
from shardwright.backends.torch.pipeline.step_results import Shares
from shardwright.backends.torch.program.program import Literal, Tree
from shardwright.backends.torch.program.python_places import Holder
from shardwright.backends.torch.runtime import Runtime
from shardwright.backends.torch.training.call import StepCall
from shardwright.core.errors import MissingCapabilityError, ShardwrightError
from shardwright.torch import session as sessions
from shardwright.torch.batch import Batch
from shardwright.torch.input_gradients import InputGradients, require_can_have_gradient, wants_gradient
from shardwright.torch.joint_stand_ins import MISSING
from shardwright.torch.joint_step import JointStep
from shardwright.torch.model_run import ModelRun
from shardwright.torch.own_results import OwnResults
from shardwright.torch.peers import have_own_batches, of_all_peers, of_each_peer, together
from shardwright.torch.run_agreement import batch_claims, mode_claim, model_claim, session_claims
from shardwright.torch.scaler import Scalers, noting_scalers
from shardwright.torch.sliced import Sliced, can_be_sliced, with_tensors
from shardwright.torch.step_arguments import Given, as_key, is_model, models_in, plain, restored, sized_argument
from shardwright.torch.step_outputs import as_listed, as_output
from shardwright.torch.weights_copy import with_models

StepFunction = Callable[..., Any]


@overload
def step(function: StepFunction) -> StepFunction: ...
@overload
def step(
    *, non_split_inputs: Iterable[str] = (), input_split_axes: Mapping[str, int] | None = None
) -> Callable[[StepFunction], StepFunction]: ...
def step(
    function: StepFunction | None = None,
    *,
    non_split_inputs: Iterable[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
) -> Any:
    """Make a training or evaluation step of a function of (model, batch …). It runs the DistributedModel among its
    arguments, on that model's plan; where the run has only one, it need not be an argument. Of several among them one
    is given the loss. Others that are called without gradients, as a teacher is, run first, in evaluation steps of
    their own. Where what one returns goes into another, as from a generator into its discriminator, gradients flow
    through all of them: their forward passes run first, then each runs once more with its backward pass, from the last
    to the first.

    A tensor among the arguments that requires a gradient gets it, as from a backward pass of torch.

    The tensors among its arguments are split into microbatches along axis 0. An object with a method
    ``smp_slice(num_mb, mb, axis)`` is asked for what each microbatch has of it, which may differ in the contents and
    sizes of tensors alone. A batch that does not divide makes
    microbatches that differ by one sample, and one of fewer samples than microbatches makes fewer of them: each counts
    by its samples, unless ``model.backward`` is given a weight. The body runs once for each signature, on
    stand-ins with the shapes of one microbatch; reading a tensor's value in it is an error. Each tensor that it returns
    becomes a `StepOutput`, the same on every rank.

    Args:
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: for arguments whose batch is not on axis 0, the axis.

    Raises:
        DisagreementError: when called, on every rank: ranks were given different batches, differ in the model's modes,
            the seed or another thing that must be the same, or are in different calls; or another rank failed.
        ShardwrightError: when called: arguments of different sizes do not divide into the microbatches; there are
            several models, and the arguments hold none of them, or two that are given a loss.
        CaptureError: when first called: the body cannot be recorded.
    """
    if function is None:
        return lambda given: Step(given, frozenset(non_split_inputs), dict(input_split_axes or {}))
    return Step(function, frozenset(non_split_inputs), dict(input_split_axes or {}))


class Step:
    """A step of a user's function.

    Args:
        whole: names of arguments that every microbatch gets whole.
        axes: for arguments whose batch is not on axis 0, the axis.
        lists_plain: what it returns beside tensors comes as a list with one entry for each microbatch, as SageMaker's
            steps return it. Otherwise a number that depends on values becomes a StepOutput, and what is the same for
            all microbatches stays as it is.
    """

    def __init__(
        self, function: StepFunction, whole: frozenset[str], axes: dict[str, int], *, lists_plain: bool = False
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.whole, self.axes, self._lists_plain = whole, axes, lists_plain
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._code = f"{digest_of(code_of(function), sorted(whole), sorted(axes.items())) & 0xFFFFFFFF:08x}"
        self._joined = False
        """Whether it is made by a training step of several models, of which it is a part without gradients too."""
        self.holds_writes = False
        """Whether what its body writes to Python values is kept back, until `release_writes`."""
        self._held_writes: list[tuple[Holder, Any, Any]] = []
        self._is_passed_on = False
        """Whether what it returns goes into another part of such a step."""
        self._said: set[tuple[int, int]] = set()
        self._scalers: weakref.WeakKeyDictionary[ModelRun, Scalers] = weakref.WeakKeyDictionary()
        """The scalers that the body has scaled its loss by, by model."""
        self._numbers: dict[str, dict[tuple[str, int], float]] = {}
        """The numbers among the arguments, by the form of the arguments and (name, position): a recording is given them
        anew."""
        self._names: dict[str, list[str]] = {}
        """The argument that each leaf belongs to, by the form of the arguments."""
        self._labels: dict[str, list[str]] = {}
        """The place of each leaf in words, by the form of the arguments: ``batch['labels']``."""
        self._signature = inspect.signature(function)
        self._joint = JointStep(function, self._like)
        named = set(self._signature.parameters)
        self._more = next((p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
        """The name of ``**more``, if the function has it."""
        takes_any = self._more is not None
        for name in (*whole, *axes):
            if name not in named and not takes_any:
                raise ShardwrightError(f"the step function has no argument {name!r}: it has {', '.join(sorted(named))}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = sessions.current()
        with with_models(args, kwargs, session) as given, _without_inference_mode():
            return self._called(*given, session)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any], session: sessions.Session) -> Any:
        if len(session.models) > 1:
            try:
                models = models_in(args, kwargs, session)
            except ShardwrightError:  # which is raised below, and told to the other ranks
                models = []
            if len(models) > 1:
                return self._joint(models, args, kwargs)
        with session.watchdog.step():
            return self._agreed(args, kwargs, session)

    def _like(self, function: StepFunction, *, is_main: bool) -> "Step":
        """A step of a function of the same arguments; ``is_main``: whether it returns what this one does."""
        made = Step(function, self.whole, self.axes, lists_plain=self._lists_plain and is_main)
        made._code, made._joined, made._is_passed_on = self._code, torch.is_grad_enabled(), not is_main
        return made

    def release_writes(self) -> None:
        """Write what was kept back (`holds_writes`)."""
        held, self._held_writes = self._held_writes, []
        _put(held)

    def _agreed(self, args: Any, kwargs: Any, session: sessions.Session) -> Any:
        """Run the step, once all ranks have come to it with the same claims."""
        if not session.models:
            raise ShardwrightError("wrap the model first: sw.DistributedModel(model)")
        run: ModelRun | None = None
        given: Given | None = None
        claims: list[Claim] = []
        failure: Exception | None = None
        try:
            run = self._run_of(args, kwargs, session)
            given = self._given(args, kwargs, session, run)
            if session.bound.mesh.size > 1:
                claims = self._claims(given, session, run)
        except Exception as error:
            failure = error  # which the other ranks are told
        session.steps_begun += 1
        call = f"the step {self._name}"
        if run is None:
            session.agreement.meet(call, failure=failure)
        assert run is not None
        samples = (1,) if given is None else given.batch.samples
        shares = run.runtime.begin(call, samples, claims, failure)
        assert given is not None
        return self._carry_out(given, session, shares)

    def _run_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], session: sessions.Session) -> ModelRun:
        """The model that a call is for. Raises ShardwrightError where that cannot be told."""
        found = models_in(args, kwargs, session)
        if found:
            return session.of(found[0])
        return session.only(f"the step {self._name} is given no model", "pass the one that it runs as an argument")

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any], session: sessions.Session, run: ModelRun) -> Given:
        """The arguments, taken apart, without anything from other ranks."""
        bound = self._signature.bind(*args, **kwargs)
        arguments = {name: plain(value) for name, value in bound.arguments.items()}
        leaves, spec = pytree.tree_flatten(arguments, is_leaf=is_model)
        leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.is_inference() else leaf for leaf in leaves]
        form = str(spec)
        if form not in self._names:
            paths = pytree.tree_flatten_with_path(arguments, is_leaf=is_model)[0]
            # Arguments of ``**more`` have names of their own, which `non_split_inputs` and `input_split_axes` mean too.
            self._names[form] = [
                str(path[1 if path[0].key == self._more and len(path) > 1 else 0].key)  # type: ignore[attr-defined]
                for path, _ in paths
            ]
            self._labels[form] = [f"{path[0].key}{pytree.keystr(path[1:])}" for path, _ in paths]  # type: ignore[attr-defined]
        names = self._names[form]
        apart = have_own_batches(session)
        own = self._runs_jointly(session)
        sized: dict[str, tuple[torch.Tensor, int | None]] = {}
        for position, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            if isinstance(leaf, torch.Tensor):
                axis = self._axis(leaf, name)
                whole = leaf
                if own and axis is not None:  # the samples of all peers, whose batches have this shape too
                    shape = list(leaf.shape)
                    shape[axis] *= session.bound.size("tp")
                    whole = leaf.new_empty(shape, device="meta")
                sized[f"{name} (number {position})"] = (whole, axis)
        for position, leaf in enumerate(leaves):
            if wants_gradient(leaf):
                label = self._labels[form][position]
                require_can_have_gradient(leaf, self._axis(leaf, names[position]), label, session.bound)
        batch = Batch.of(sized, run.microbatches)
        sliced: dict[int, Sliced] = {}
        for p, leaf in enumerate(leaves):
            if can_be_sliced(leaf):
                if apart:
                    raise MissingCapabilityError(
                        f"{self._labels[form][p]} has smp_slice, and ranks of the tensor axis have batches of their "
                        f"own: pass its tensors, or set prescaled_batch=True and give these ranks the same batch"
                    )
                axis = self.axes.get(names[p], 0)
                sliced[p] = Sliced.of(leaf, self._labels[form][p], len(batch.samples), axis)
                batch = batch.with_samples(sliced[p].samples, self._labels[form][p])
        labels = [self._labels[form][p] for p, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [sized_argument(name, *given) for name, given in zip(labels, sized.values(), strict=True)]
        return Given(run, bound, leaves, spec, form, names, batch, tensors, sliced)

    def _claims(self, given: Given, session: sessions.Session, run: ModelRun) -> list[Claim]:
        """The claims of this call that must be the same on all ranks."""
        runtime = run.runtime
        which = [model_claim(run)] if len(session.models) > 1 else []
        in_full = session.compares_in_full
        fix = "Every rank runs the same script."
        held = ", whose gradients are not summed" if runtime.gradients.holds_back else ""
        function = Claim.of("the code of the step", f"{self._name} ({self._code}){held}", fix)
        labels, leaves = list(self._labels[given.form]), list(given.leaves)
        whole = [
            position for position, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and self._axis(leaf, given.names[position]) is None
        ]  # fmt: skip
        wanting = [label for label, leaf in zip(labels, leaves, strict=True) if wants_gradient(leaf)]
        said = f"{given.form}, with gradients of {', '.join(wanting)}" if wanting else given.form
        said += ", with a copy of the weights" if run.has_copied_weights else ""
        form = Claim.of(
            "the form of the arguments", said, "Pass the same arguments on every rank of a replica.", "replica"
        )
        for position, parts in given.sliced.items():
            cut = [tensor for of_one in parts.tensors for tensor in of_one]
            labels += [f"{labels[position]}, tensor {number} of its parts" for number in range(len(cut))]
            leaves += cut
        batch = batch_claims(labels, leaves, whole, session, in_full=in_full)
        split_model = runtime.split_model
        of_model = [*split_model.flags.claims(), *(split_model.claims_in_full() if in_full else ())]
        return [*which, function, mode_claim(), *batch, form, *of_model, *session_claims(session, run)]

    def _carry_out(self, call: Given, session: sessions.Session, shares: Shares) -> Any:
        """Run the step. Where ranks of the tensor axis have batches of their own, a training step is over the samples
        of all of them, and so are all steps that one of several models makes; without gradients it runs once for each
        of them, and a rank gets what came of its own."""
        batch, bound = call.batch, session.bound
        if self._runs_jointly(session) or not have_own_batches(session):
            tree, returned, others = self._run_once(call, session, shares)
        else:
            every = {
                p: of_each_peer(leaf.detach().to(bound.device), bound, session.watchdog)
                for p, leaf in enumerate(call.leaves)
                if isinstance(leaf, torch.Tensor) and self._axis(leaf, call.names[p]) is not None
            }
            turns = []
            for peer in range(bound.size("tp")):
                leaves = [every[p][peer] if p in every else leaf for p, leaf in enumerate(call.leaves)]
                is_own = peer == bound.coordinate("tp")
                turns.append(self._run_once(replace(call, leaves=leaves), session, shares, is_own=is_own))
            tree, returned, others = turns[bound.coordinate("tp")]
            returned = {
                position: together([turn[1][position] for turn in turns], bound.coordinate("tp"))
                for position in returned
            }
        outputs: list[Any] = []
        for position, leaf in enumerate(tree.leaves):
            found = returned.get(position)
            of_each = (leaf, *(other.leaves[position] for other in others))
            values = [getattr(one, "value", None) for one in of_each]
            if len(values) == 1:
                values *= len(batch.samples)
            outputs.append(as_listed(found, values) if self._lists_plain else as_output(found, values, position))
        return pytree.tree_unflatten(outputs, tree.spec)

    def _run_once(
        self, call: Given, session: sessions.Session, shares: Shares, *, is_own: bool = True
    ) -> tuple[Any, Any, Any]:
        """The result of the body as a tree, its tensors by position, and the trees of further microbatches. What the
        body writes to Python values stays where ``is_own``, and the step is no part of another one."""
        run, runtime = call.run, call.run.runtime
        leaves, names, batch = call.leaves, call.names, call.batch
        device = session.bound.device
        positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        own = self._runs_jointly(session)
        wanting = InputGradients(session.bound, session.watchdog, own=own)
        given_by_user = list(leaves)
        if own:
            for p in positions:
                axis = self._axis(leaves[p], names[p])
                if axis is not None:
                    leaves[p] = of_all_peers(leaves[p].detach().to(device), axis, session.bound, session.watchdog)
        literals = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        numbers = self._numbers.setdefault(call.form, {})
        numbers.update({(names[p], p): leaf for p, leaf in enumerate(leaves) if type(leaf) in (int, float)})
        self._say_of_size(run, batch)
        inputs = []
        for p in positions:
            axis = self._axis(leaves[p], names[p])
            pieces = batch.slices(leaves[p].to(device, non_blocking=True), axis)
            inputs.append(wanting.leaves(given_by_user[p], pieces, axis))
        inputs += [
            [tensor.to(device, non_blocking=True) for tensor in held]
            for parts in call.sliced.values() for held in zip(*parts.tensors, strict=True)
        ]  # fmt: skip
        microbatches = [[pieces[m] for pieces in inputs] for m in range(len(batch.samples))]

        def body(stand_ins: list[torch.Tensor]) -> Any:
            given = list(literals)
            for (_, position), number in numbers.items():
                given[position] = number
            given_tensors = iter(stand_ins)
            for position in positions:
                given[position] = next(given_tensors)
            for position, parts in call.sliced.items():
                given[position] = with_tensors(parts.parts[0], list(islice(given_tensors, len(parts.axes))))
            again = copy.copy(call.bound)
            again.arguments = {
                name: restored(call.bound.arguments[name], value)
                for name, value in pytree.tree_unflatten(given, call.spec).items()
            }
            return self.function(*again.args, **again.kwargs)

        objects = [
            (item, names[p]) for p, item in enumerate(literals)
            if item is not None and not is_model(item) and p not in call.sliced
        ]  # fmt: skip
        body.python_roots = (  # type: ignore[attr-defined]
            (self.function, "the step function"), (numbers, "the arguments"), *objects
        )  # fmt: skip
        axes = [self._axis(leaves[p], names[p]) for p in positions]
        axes += [axis for parts in call.sliced.values() for axis in parts.axes]
        body.may_read_values = self._lists_plain  # type: ignore[attr-defined]
        body.axes = tuple(axes)  # type: ignore[attr-defined]
        forms = [parts.form if (parts := call.sliced.get(p)) else item for p, item in enumerate(literals)]
        key = self._key(runtime, call.form, forms, microbatches[0])
        if run.log is not None:
            run.log.begin()
        scalers = self._scalers.setdefault(run, weakref.WeakSet())
        with noting_scalers(scalers):
            written: list[tuple[Holder, Any, Any]] | None = None
            if self._is_passed_on or self.holds_writes or not is_own:
                written = []
            made = StepCall(key, body, microbatches, shares, axes, written)
            prepared = runtime.prepare(made)
            results = self._own_results(runtime, made, batch) if own else None
            if run.is_first_step:
                run.is_first_step = False
                failure = run.run_post_partition_hooks()
                session.agreement.meet(run.of_model("the hooks behind the split"), failure=failure)
            tree, returned, trained, others = prepared.run()
        if written is not None:
            left = [(holder, key, holder.value(key)) for holder, key, _ in written]
            _put(reversed(written))
            self._held_writes = left if self.holds_writes and is_own else self._held_writes
        if trained is not None:
            wanting.give(trained.divisor)
            run.scalers, run.batch_losses = scalers, trained.losses
            run.samples_trained += sum(shares.flat)
        if run.log is not None and trained is not None:
            run.log.worked(trained, sum(batch.samples), call.sized)
        if results is not None:
            returned, missing, totals = results.taken(returned, session.bound)
            if missing:
                tree, others = _without(tree, missing), [_without(other, missing) for other in others]
            if totals and (run.number, -1) not in self._said:
                self._said.add((run.number, -1))
                results.say_of_totals(totals)
        return tree, returned, others

    def _own_results(self, runtime: Runtime, call: StepCall, batch: Batch) -> OwnResults:
        """What this rank gets of the results of a step over the samples of all ranks of the tensor axis. Raises
        MissingCapabilityError where that cannot be told."""
        samples = batch.samples if batch.whole_axis else None
        found = OwnResults(self._name, runtime.reading(call), samples, self._is_passed_on)
        found.require()
        return found

    def _runs_jointly(self, session: sessions.Session) -> bool:
        """Whether the step is over the samples of all ranks of the tensor axis, which have batches of their own."""
        return have_own_batches(session) and (torch.is_grad_enabled() or self._joined)

    def _axis(self, tensor: torch.Tensor, name: str) -> int | None:
        """The axis along which an argument is split into microbatches; None: every microbatch gets it whole."""
        if name in self.whole or tensor.dim() == 0:
            return None
        axis = self.axes.get(name, 0)
        if not -tensor.dim() <= axis < tensor.dim():
            raise ShardwrightError(f"input_split_axes has axis {axis} for {name!r}, of shape {tuple(tensor.shape)}")
        return axis

    def _say_of_size(self, run: ModelRun, batch: Batch) -> None:
        """Warn, once for each size, of a training batch whose size is not the planned one."""
        total = sum(batch.samples)
        if (run.number, total) in self._said or not torch.is_grad_enabled():
            return
        self._said.add((run.number, total))
        planned = None if run.plan is None else run.plan.decision.microbatch * run.plan.microbatches
        if planned is not None and total != planned and batch.whole_axis:
            warnings.warn(
                f"a step was given {total} samples, and the plan has {planned} on each replica: it runs microbatches "
                f"of {_counted(batch.samples)} samples, each weighted by its size, and time and memory are not those "
                f"that were predicted",
                stacklevel=3,
            )

    def _key(self, runtime: Runtime, form: str, literals: list[Any], inputs: list[torch.Tensor]) -> Hashable:
        modes = tuple([module.training for module in runtime.ownership.modules.values()])
        kind = runtime.bound.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        shapes = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in inputs)
        # The function itself: an id could become another one's.
        return (self, form, tuple(map(as_key, literals)), shapes, modes, torch.is_grad_enabled(), autocast)


@contextlib.contextmanager
def _without_inference_mode() -> Iterator[None]:
    """A context in which inference mode is gradients off alone: a step follows tensors by their versions, which those
    of inference mode have not."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _put(values: Iterable[tuple[Holder, Any, Any]]) -> None:
    for holder, key, value in values:
        holder.put(key, value)


def _without(tree: Tree, missing: frozenset[int]) -> Tree:
    """A result with the mark of what is missing in these places."""
    leaves = [Literal(MISSING) if position in missing else leaf for position, leaf in enumerate(tree.leaves)]
    return Tree(tuple(leaves), tree.spec)


def _counted(samples: Sequence[int]) -> str:
    """The sizes of microbatches in words: ``3 x 2, 1 x 1``."""
    return ", ".join(f"{samples.count(size)} x {size}" for size in sorted(set(samples), reverse=True))
