"""The decorator ``@sw.step``: a function that runs once for every microbatch, wherever its parts are."""

import copy
import functools
import inspect
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch

from shardwright.backends.torch.capture.held_tensors import tensors_in
from shardwright.backends.torch.compat import pytree
from shardwright.backends.torch.machine.agreement import Claim
from shardwright.backends.torch.machine.digests import code_of, digest_of
from shardwright.backends.torch.pipeline.step_results import Returned, Shares
from shardwright.backends.torch.runtime import Runtime
from shardwright.backends.torch.training.call import StepCall
from shardwright.core.errors import ShardwrightError
from shardwright.core.values.step_line import Argument
from shardwright.torch import session as sessions
from shardwright.torch.batch import Batch
from shardwright.torch.model import DistributedModel
from shardwright.torch.output import StepOutput
from shardwright.torch.peers import of_all_peers, of_this_rank
from shardwright.torch.run_agreement import batch_claims, mode_claim, session_claims
from shardwright.torch.scaler import Scalers, noting_scalers

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
    """Make a training or evaluation step of a function of (model, batch …).

    The tensors among its arguments are split into microbatches along axis 0. A batch that does not divide makes
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
        ShardwrightError: when called: arguments of different sizes do not divide into the microbatches.
        CaptureError: when first called: the body cannot be recorded.
    """
    if function is None:
        return lambda given: _Step(given, frozenset(non_split_inputs), dict(input_split_axes or {}))
    return _Step(function, frozenset(non_split_inputs), dict(input_split_axes or {}))


@dataclass(slots=True)
class _Given:
    """The arguments of one call."""

    bound: inspect.BoundArguments
    leaves: list[Any]
    spec: Any
    form: str
    names: list[str]
    """The argument that each leaf belongs to."""
    batch: Batch
    sized: list[Argument]
    """The tensors of the batch, whole."""


class _Step:
    def __init__(self, function: StepFunction, whole: frozenset[str], axes: dict[str, int]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.whole, self.axes = whole, axes
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._code = f"{digest_of(code_of(function), sorted(whole), sorted(axes.items())) & 0xFFFFFFFF:08x}"
        self._said: set[int] = set()
        self._scalers: Scalers = weakref.WeakSet()
        """The scalers that the body has scaled its loss by."""
        self._numbers: dict[str, dict[tuple[str, int], float]] = {}
        """The numbers among the arguments, by the form of the arguments and (name, position): a recording is given them
        anew."""
        self._names: dict[str, list[str]] = {}
        """The argument that each leaf belongs to, by the form of the arguments."""
        self._labels: dict[str, list[str]] = {}
        """The place of each leaf in words, by the form of the arguments: ``batch['labels']``."""
        self._signature = inspect.signature(function)
        named = set(self._signature.parameters)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self._signature.parameters.values())
        for name in (*whole, *axes):
            if name not in named and not takes_any:
                raise ShardwrightError(f"the step function has no argument {name!r}: it has {', '.join(sorted(named))}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = sessions.current()
        with session.watchdog.step():
            return self._agreed(args, kwargs, session)

    def _agreed(self, args: Any, kwargs: Any, session: sessions.Session) -> Any:
        """Run the step, once all ranks have come to it with the same claims."""
        runtime = session.runtime
        if runtime is None:
            raise ShardwrightError("wrap the model first: sw.DistributedModel(model)")
        given: _Given | None = None
        claims: list[Claim] = []
        failure: Exception | None = None
        try:
            given = self._given(args, kwargs, session)
            if session.bound.mesh.size > 1:
                claims = self._claims(given, session, runtime)
        except Exception as error:
            failure = error  # which the other ranks are told
        session.steps_begun += 1
        samples = (1,) if given is None else given.batch.samples
        shares = runtime.begin(f"the step {self._name}", samples, claims, failure)
        assert given is not None
        return self._run(given, session, runtime, shares)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any], session: sessions.Session) -> "_Given":
        """The arguments, taken apart, without anything from other ranks."""
        bound = self._signature.bind(*args, **kwargs)
        arguments = {name: plain(value) for name, value in bound.arguments.items()}
        leaves, spec = pytree.tree_flatten(arguments, is_leaf=_is_model)
        form = str(spec)
        if form not in self._names:
            paths = pytree.tree_flatten_with_path(arguments, is_leaf=_is_model)[0]
            self._names[form] = [str(path[0].key) for path, _ in paths]  # type: ignore[attr-defined]
            self._labels[form] = [
                f"{name}{pytree.keystr(path[1:])}" for name, (path, _) in zip(self._names[form], paths, strict=True)
            ]
        names = self._names[form]
        own = session.bound.size("tp") > 1 and not session.config.prescaled_batch
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
        batch = Batch.of(sized, session.microbatches)
        labels = [self._labels[form][p] for p, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [_argument(name, *given) for name, given in zip(labels, sized.values(), strict=True)]
        return _Given(bound, leaves, spec, form, names, batch, tensors)

    def _claims(self, given: "_Given", session: sessions.Session, runtime: Runtime) -> list[Claim]:
        """The claims of this call that must be the same on all ranks."""
        in_full = session.compares_in_full
        fix = "Every rank runs the same script."
        held = ", whose gradients are not summed" if runtime.gradients.holds_back else ""
        function = Claim.of("the code of the step", f"{self._name} ({self._code}){held}", fix)
        form = Claim.of(
            "the form of the arguments", given.form, "Pass the same arguments on every rank of a replica.", "replica"
        )
        batch = batch_claims(self._labels[given.form], given.leaves, session, in_full=in_full)
        split_model = runtime.split_model
        of_model = [*split_model.flags.claims(), *(split_model.claims_in_full() if in_full else ())]
        return [function, mode_claim(), *batch, form, *of_model, *session_claims(session)]

    def _run(self, call: "_Given", session: sessions.Session, runtime: Runtime, shares: Shares) -> Any:
        leaves, names, batch = call.leaves, call.names, call.batch
        device = session.bound.device
        positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        own = session.bound.size("tp") > 1 and not session.config.prescaled_batch
        if own:
            for p in positions:
                axis = self._axis(leaves[p], names[p])
                if axis is not None:
                    leaves[p] = of_all_peers(leaves[p].to(device), axis, session.bound, session.watchdog)
        literals = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        numbers = self._numbers.setdefault(call.form, {})
        numbers.update({(names[p], p): leaf for p, leaf in enumerate(leaves) if type(leaf) in (int, float)})
        self._say_of_size(session, batch)
        inputs = [
            batch.slices(leaves[p].to(device, non_blocking=True), self._axis(leaves[p], names[p])) for p in positions
        ]
        microbatches = [[pieces[m] for pieces in inputs] for m in range(len(batch.samples))]

        def body(stand_ins: list[torch.Tensor]) -> Any:
            given = list(literals)
            for (_, position), number in numbers.items():
                given[position] = number
            for position, tensor in zip(positions, stand_ins, strict=True):
                given[position] = tensor
            again = copy.copy(call.bound)
            again.arguments = {
                name: _restored(call.bound.arguments[name], value)
                for name, value in pytree.tree_unflatten(given, call.spec).items()
            }
            return self.function(*again.args, **again.kwargs)

        objects = [(item, names[p]) for p, item in enumerate(literals) if item is not None and not _is_model(item)]
        body.python_roots = (  # type: ignore[attr-defined]
            (self.function, "the step function"), (numbers, "the arguments"), *objects
        )  # fmt: skip
        axes = [self._axis(leaves[p], names[p]) for p in positions]
        body.axes = tuple(axes)  # type: ignore[attr-defined]
        key = self._key(runtime, call.form, literals, microbatches[0])
        if session.log is not None:
            session.log.begin()
        with noting_scalers(self._scalers):
            prepared = runtime.prepare(StepCall(key, body, microbatches, shares, axes))
            if session.is_first_step:
                session.is_first_step = False
                failure = session.run_post_partition_hooks()
                session.agreement.meet("the hooks behind the split", failure=failure)
            tree, returned, trained = prepared.run()
        if trained is not None:
            session.scalers, session.batch_losses = self._scalers, trained.losses
            session.samples_trained += sum(shares.flat)
        if session.log is not None and trained is not None:
            session.log.worked(trained, sum(batch.samples), call.sized)
        if own and batch.whole_axis:
            returned = {
                position: replace(found, outputs=of_this_rank(found.outputs, batch.samples, session.bound))
                for position, found in returned.items()
            }
        outputs = [_output(returned.get(position), leaf) for position, leaf in enumerate(tree.leaves)]
        return pytree.tree_unflatten(outputs, tree.spec)

    def _axis(self, tensor: torch.Tensor, name: str) -> int | None:
        """The axis along which an argument is split into microbatches; None: every microbatch gets it whole."""
        if name in self.whole or tensor.dim() == 0:
            return None
        axis = self.axes.get(name, 0)
        if not -tensor.dim() <= axis < tensor.dim():
            raise ShardwrightError(f"input_split_axes has axis {axis} for {name!r}, of shape {tuple(tensor.shape)}")
        return axis

    def _say_of_size(self, session: sessions.Session, batch: Batch) -> None:
        """Warn, once for each size, of a training batch whose size is not the planned one."""
        total = sum(batch.samples)
        if total in self._said or not torch.is_grad_enabled():
            return
        self._said.add(total)
        planned = None if session.plan is None else session.plan.decision.microbatch * session.plan.microbatches
        if planned is not None and total != planned and batch.whole_axis:
            warnings.warn(
                f"a step was given {total} samples, and the plan has {planned} on each replica: it runs microbatches "
                f"of {_counted(batch.samples)} samples, each weighted by its size, and time and memory are not those "
                f"that were predicted",
                stacklevel=3,
            )

    def _key(self, runtime: Runtime, form: str, literals: list[Any], inputs: list[torch.Tensor]) -> Hashable:
        def hashable(item: Any) -> Hashable:
            if _is_model(item):
                return "the model"
            try:
                hash(item)
            except TypeError:
                return id(item)
            return (type(item), None if type(item) in (int, float) else item)

        modes = tuple([module.training for module in runtime.ownership.modules.values()])
        kind = runtime.bound.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        shapes = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in inputs)
        # The function itself: an id could become another one's.
        return (self, form, tuple(map(hashable, literals)), shapes, modes, torch.is_grad_enabled(), autocast)


def _argument(name: str, tensor: torch.Tensor, axis: int | None) -> Argument:
    is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    return Argument(name, tuple(tensor.shape), is_integer, axis)


def _is_model(item: Any) -> bool:
    return isinstance(item, DistributedModel)


def _output(found: Returned | None, leaf: Any) -> Any:
    """A leaf of a result, a tensor as StepOutput."""
    if found is None:
        return getattr(leaf, "value", None)
    return StepOutput(found.outputs, found.everywhere, found.weights, found.first)


def _counted(samples: Sequence[int]) -> str:
    """The sizes of microbatches in words: ``3 x 2, 1 x 1``."""
    return ", ".join(f"{samples.count(size)} x {size}" for size in sorted(set(samples), reverse=True))


def plain(value: Any) -> Any:
    """An argument whose tensors can be found: mappings such as tokenizers return become dicts. Raises ShardwrightError
    for another object that holds tensors."""
    if isinstance(value, UserDict):
        return dict(value.data)
    is_leaf = not isinstance(value, (torch.Tensor, torch.nn.Module)) and pytree.tree_structure(value).is_leaf()
    if is_leaf and tensors_in(value):
        raise ShardwrightError(
            f"a {type(value).__name__} among the arguments of the step holds tensors: pass tensors, or lists, tuples "
            f"and dicts of them"
        )
    return value


def _restored(original: Any, value: Any) -> Any:
    if isinstance(original, UserDict):
        made = copy.copy(original)
        made.data = value
        return made
    return value
