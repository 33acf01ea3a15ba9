"""Capture of a PyTorch model: its forward pass and loss, run on fake tensors at batch 2 and at batch 3.

A size that differs between the two runs is that of a batch dim; everything else must be the same, op for op. Where an
op needs values (`.item()`, `nonzero`), both runs are repeated on real tensors, on a copy of the model.
"""

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from shardwright.backends.capabilities import TORCH_EXECUTION, TORCH_MEMORY
from shardwright.backends.torch.capture import tensor_parallel_marks as marks
from shardwright.backends.torch.capture.autograd_calls import AutogradQuestions
from shardwright.backends.torch.capture.batch_dims import Leaf, Sample
from shardwright.backends.torch.capture.fp8_products import plain_products
from shardwright.backends.torch.capture.known_values import known_values
from shardwright.backends.torch.capture.op_schemas import dtype_name
from shardwright.backends.torch.capture.own_checkpoints import marked_paths, plain_checkpoints
from shardwright.backends.torch.capture.precision import step_dtype
from shardwright.backends.torch.capture.recorder import Recorder
from shardwright.backends.torch.capture.stand_in import (
    fake_like,
    no_remembered_results,
    real_like,
    swapped_in,
    tensors_of,
)
from shardwright.backends.torch.capture.two_batch_sizes import Alignment
from shardwright.backends.torch.capture.unflatten import unflatten_products, without_unused
from shardwright.backends.torch.capture.value_reads import REAL_LIMIT_BYTES
from shardwright.backends.torch.compat import (
    COMPILER,
    FAKE_TENSOR_LOGGER,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    below_autograd,
    mkldnn_enabled,
    pytree,
    set_mkldnn_enabled,
)
from shardwright.core.capabilities import Capabilities
from shardwright.core.errors import CaptureError, PlanWarning
from shardwright.core.model.graph import Graph, Parameter, TensorRole

SIZES = (2, 3)
"""The batch sizes of the two runs. Batch 1 would specialise: size-1 dims broadcast."""


def capture(
    model: nn.Module,
    sample: Any,
    loss: Callable[..., Any] | None = None,
    *,
    batch_dims: Any = None,
    require_loss: bool = True,
    capabilities: Capabilities,
) -> Graph:
    """The graph of ``model``'s forward pass on ``sample`` and of its loss. The model is read, never changed.

    The model may be on any device, the meta device included; no memory is allocated for it. ``sample`` is a tensor, a
    tuple (positional arguments) or a dict (keyword arguments), or a `Sample` of them; ``batch_dims`` says where the
    batch is when it is not dim 0. ``loss`` maps the model's output to a scalar; without it the output's own ``loss`` is
    used, or the output itself where that is a scalar. With ``require_loss=False`` a model without a loss gives a graph
    whose outputs are all tensors that the model returns.

    Raises CaptureError: no loss; a model that fails, that needs values which do not exist, or whose ops depend on the
    batch size; samples whose tensors disagree about the batch.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"expected a torch.nn.Module, given {type(model).__name__}")
    lazy = [name for name, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        raise CaptureError(f"parameter {lazy[0]!r} has no shape yet: run the model once, so that lazy modules are made")
    batched = sample if isinstance(sample, Sample) else Sample(sample, batch_dims)
    session = _Session(model, batched, loss, require_loss)
    try:
        return session.graph(*session.run_fake(torch.bfloat16), capabilities)
    except (CaptureError, _NeedsValuesError):  # a model that has no such step, or another one then
        session.compute = None
    try:
        runs = session.run_fake()
    except _NeedsValuesError as needs:
        runs = session.run_real(needs)
    except CaptureError as failed:
        if not isinstance(failed.__cause__, RuntimeError | NotImplementedError) or not session.has_values():
            raise
        runs = session.run_real(_NeedsValuesError(str(failed)))  # an op that has no fake counterpart
    return session.graph(*runs, capabilities)


class _NeedsValuesError(Exception):
    """An op asked a fake tensor for its values."""


class _Run:
    """The result of one run: its record and the numbers of the values that it returned."""

    def __init__(self, recorder: Recorder, outputs: tuple[int, ...]) -> None:
        self.recorder = recorder
        self.outputs = outputs


class _Session:
    """One capture: the state that its two runs share."""

    make_recorder: type[Recorder] = Recorder

    def __init__(self, model: nn.Module, sample: Sample, loss: Callable[..., Any] | None, require_loss: bool) -> None:
        self.model = model
        self.sample = sample
        self.loss = loss
        self.require_loss = require_loss
        self.tensors = tensors_of(model)
        self.buffers = {id(buffer) for buffer in model.buffers()}
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.recomputed = marked_paths(model)
        if "" in self.recomputed:
            raise CaptureError(
                f"the whole {type(model).__name__} is marked by set_activation_checkpointing: mark its blocks"
            )
        self.templates: dict[Any, Any] = {}
        self.chance = False
        """The outcome of branches that random numbers alone decide."""
        self.with_values = False
        """Whether the runs were on real tensors, whose values may have decided which ops were run."""
        self.compute: torch.dtype | None = None
        """The dtype in which the second run computes; None: that of the model."""

    def run_fake(self, compute: torch.dtype | None = None) -> tuple[_Run, _Run]:
        """Both runs on fake tensors; the second as a step that computes in ``compute``."""
        self.compute = compute
        mode = FakeTensorMode(allow_non_fake_inputs=True)

        def run(size: int) -> _Run:
            inside = compute if size == SIZES[1] else None
            with mode:
                stand_ins = {key: fake_like(tensor, inside) for key, (_, tensor) in self.tensors.items()}
            return self._run(size, mode, stand_ins, lambda leaf, size: self._fake_leaf(leaf, size, inside))

        return self._both(run)

    def run_real(self, needs: _NeedsValuesError) -> tuple[_Run, _Run]:
        """Both runs on a copy with values, on the CPU."""
        if not self.has_values():
            raise CaptureError(
                f"{needs}: its result depends on values, and the model or the sample has none (meta or fake tensors). "
                "Build a small version of the model with real values and capture that, or keep the op out of forward"
            ) from needs
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._held())
        if size_bytes > REAL_LIMIT_BYTES:
            raise CaptureError(
                f"{needs}: its result depends on values, so the model would have to run for real, and its "
                f"{size_bytes / 2**30:.1f} GiB are above the {REAL_LIMIT_BYTES / 2**30:.0f} GiB that are copied for "
                "that. Capture a model with fewer layers, or keep the op out of forward"
            ) from needs
        self.with_values = True

        def run(size: int) -> _Run:
            stand_ins = {key: real_like(tensor) for key, (_, tensor) in self.tensors.items()}
            return self._run(size, nullcontext(), stand_ins, self._real_leaf)

        return self._both(run)

    def _both(self, run: Callable[[int], _Run]) -> tuple[_Run, _Run]:
        """The runs at both sizes. Branches that random numbers alone decide, as those of layers that are dropped, all
        go the way on which more modules are called: a plan has a place for each."""
        self.chance = False
        small = run(SIZES[0])
        if small.recorder.met_chance:
            self.chance = True
            try:
                other = run(SIZES[0])
            except CaptureError:  # a model of which everything is dropped may fail
                other = small
            if len(other.recorder.calls) > len(small.recorder.calls):
                small = other
            else:
                self.chance = False
        return small, run(SIZES[1])

    def _held(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in self.tensors.values()] + [leaf.tensor for leaf in self.sample.leaves]

    def has_values(self) -> bool:
        """Whether the model and the sample have values, so that the model could run for real."""
        return not any(
            tensor.is_meta or isinstance(tensor, FakeTensor) or hasattr(type(tensor), "has_no_values")
            for tensor in self._held()
        )

    def _fake_leaf(self, leaf: Leaf, size: int, compute: torch.dtype | None = None) -> torch.Tensor:
        shape = list(leaf.tensor.shape)
        if leaf.batch_dim is not None:
            shape[leaf.batch_dim] = size * leaf.rows
        made = torch.empty(shape, dtype=step_dtype(leaf.tensor.dtype, compute), device="cpu")
        return made.requires_grad_(leaf.tensor.requires_grad)

    def _real_leaf(self, leaf: Leaf, size: int) -> torch.Tensor:
        made = leaf.tensor.detach().to("cpu", copy=True)
        if leaf.batch_dim is not None:
            chosen = torch.arange(size * leaf.rows) % (self.sample.batch * leaf.rows)
            made = made.index_select(leaf.batch_dim, chosen)
        return made.requires_grad_(leaf.tensor.requires_grad)

    def _run(
        self, size: int, mode: Any, stand_ins: Mapping[int, torch.Tensor], make: Callable[[Leaf, int], torch.Tensor]
    ) -> _Run:
        recorder = self.make_recorder(self.templates, self.chance)
        recorder.recomputed = self.recomputed
        with swapped_in(self.model, stand_ins), mode, plain_torch(), no_remembered_results(self.model):
            args, kwargs, made = self.sample.arguments(lambda leaf: make(leaf, size), size)
            self._name_all(recorder, stand_ins, made)
            try:
                # Below autograd, composite ops reach the recorder whole, and no graph is kept for a backward pass.
                with (
                    noted_calls(recorder, self.paths),
                    plain_checkpoints(recorder.checkpoint),
                    recorder,
                    AutogradQuestions(recorder, with_values=self.with_values),
                    nullcontext() if self.with_values else known_values(),
                    below_autograd(),
                ):
                    output = self.model(*args, **kwargs)
                    result = self._result(output)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                where = recorder.failed_path or "the model itself"
                raise _NeedsValuesError(f"{recorder.failed_op or error} in {where!r}") from error
            except CaptureError:
                raise
            except Exception as error:
                where = recorder.failed_path if recorder.failed_path is not None else recorder.path
                what = f"{recorder.failed_op} in " if recorder.failed_op else ""
                hint = (
                    f". Models are captured at batch {SIZES[0]} and {SIZES[1]}: where an input's batch is not dim 0, "
                    f"say so with batch_dims="
                    if isinstance(error, (RuntimeError, IndexError, ValueError))
                    else ": the model itself raises it, as it would with this sample outside of capture"
                )
                raise CaptureError(
                    f"{type(self.model).__name__} failed at batch {size}, at {what}{where or 'the model itself'!r}: "
                    f"{type(error).__name__}: {str(error).rstrip('.')}{hint}"
                ) from error
            return _Run(recorder, tuple(recorder.read(t) for t in result))

    def _name_all(
        self, recorder: Recorder, stand_ins: Mapping[int, torch.Tensor], made: Sequence[torch.Tensor]
    ) -> None:
        """Number the inputs first, then the tensors that the model holds, in the same order in every run."""
        for leaf, tensor in zip(self.sample.leaves, made, strict=True):
            recorder.name(tensor, "input", leaf.name)
        for key, (name, tensor) in self.tensors.items():
            role: TensorRole = (
                "parameter" if isinstance(tensor, nn.Parameter) else "buffer" if key in self.buffers else "constant"
            )
            recorder.name(stand_ins[key], role, name)

    def _result(self, output: Any) -> list[torch.Tensor]:
        """The loss, or everything that the model returned."""
        if self.loss is not None:
            value = self.loss(output)
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                raise CaptureError(
                    f"loss= returned {_described(value)}: expected a tensor with one entry, the mean over the batch"
                )
            return [value]
        value = own_loss(output)
        if value is not None:
            return [value]
        if self.require_loss:
            raise CaptureError(
                f"{type(self.model).__name__} returned {_described(output)}, and no loss: pass labels in the sample "
                "(Hugging Face models then return one), or loss=, a function from the model's output to a scalar"
            )
        return [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]

    # -- the graph -----------------------------------------------------------------------------------------------

    def graph(self, small: _Run, large: _Run, capabilities: Capabilities) -> Graph:
        """The two runs as one graph. Raises CaptureError where they differ."""
        a = small.recorder
        self._say_left_checkpoints(a)
        returned = small.outputs, large.outputs
        aligned = Alignment(a, large.recorder, returned, SIZES, self.with_values, self.compute is not None)
        inputs = len(self.sample.leaves)  # inputs, then what the model holds, keep their numbers: see `_name_all`
        parameters = self._parameters(inputs)
        pins = marks.pins(self.model, parameters)

        def made(with_casts: bool, known: Graph | None = None) -> Graph:
            ops, values = aligned.ops(with_casts=with_casts), aligned.tensors(with_casts=with_casts)
            outputs = aligned.outputs(with_casts=with_casts)
            ops, tensors, outputs = without_unused(*unflatten_products(ops, values, outputs), outputs)
            return Graph(
                capabilities,
                type(self.model).__name__,
                tuple(tensors),
                tuple(ops),
                tuple(a.calls),
                parameters,
                tuple(range(inputs)),
                outputs,
                self.sample.batch,
                pins,
                memory_traits=TORCH_MEMORY,
                execution=TORCH_EXECUTION,
                in_16_bits=known,
            )

        return made(False, made(True) if aligned.has_casts else None)

    def _say_left_checkpoints(self, recorder: Recorder) -> None:
        """Warn of checkpoints of the model's own that a plan does without."""
        if found := dict.fromkeys(recorder.checkpointed_functions):
            places = ", ".join(path or type(self.model).__name__ for path in found)
            warnings.warn(
                f"{places}: what is checkpointed here is no single call of a module, or is checkpointed by a policy "
                f"(context_fn). A plan recomputes units, each by itself and from its own input: what lies beside them "
                f"is kept, and counted so",
                PlanWarning,
                stacklevel=6,
            )

    def _parameters(self, first: int) -> tuple[Parameter, ...]:
        """The model's parameters, whose values were numbered right after the inputs."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        number = {key: first + i for i, key in enumerate(self.tensors)}
        return tuple(
            Parameter(name, number[id(p)], tuple(n for n in names[id(p)] if n != name), p.requires_grad)
            for name, p in self.model.named_parameters()
        )


@contextmanager
def noted_calls(recorder: Recorder, paths: Mapping[int, str]) -> Iterator[None]:
    """A context with global module hooks that keep the recorder's call stack, for this thread; ``paths`` are by ids of
    modules."""
    thread = threading.get_ident()

    def before(module: nn.Module, args: Any) -> None:
        path = paths.get(id(module))
        if path is not None and threading.get_ident() == thread:
            recorder.enter(path)

    def after(module: nn.Module, args: Any, *kwargs_and_output: Any) -> None:
        if id(module) in paths and threading.get_ident() == thread:
            # Where a forward failed, torch hands no keyword arguments to the hooks of all modules.
            named = kwargs_and_output[0].values() if len(kwargs_and_output) > 1 else ()
            recorder.leave((*args, *named), failed=sys.exc_info()[1] is not None)

    handles = [
        register_module_forward_pre_hook(before),
        register_module_forward_hook(after, with_kwargs=True, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def plain_torch() -> Iterator[None]:
    """A context with torch's process-wide settings as the record needs them; they are put back afterwards."""
    mkldnn = mkldnn_enabled()
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    level = logger.level
    device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    eager = torch.compiler.set_stance("force_eager") if COMPILER in sys.modules else nullcontext()
    set_mkldnn_enabled(False)  # oneDNN hides recurrent layers in one op, and is not what a GPU runs
    torch.clear_autocast_cache()  # casts of the run before would be missing from this one
    logger.setLevel(logging.CRITICAL)  # what it logs is raised too
    try:
        with device, torch.enable_grad(), eager, plain_products():
            yield
    finally:
        set_mkldnn_enabled(mkldnn)
        torch.clear_autocast_cache()
        logger.setLevel(level)


def own_loss(output: Any) -> torch.Tensor | None:
    """The loss that a model returns: ``.loss``, ``["loss"]``, a tuple's first element or all there is, if a scalar."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    if found is None:
        found = output
    is_scalar = isinstance(found, torch.Tensor) and found.numel() == 1 and found.is_floating_point()
    return found if is_scalar else None


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {dtype_name(value.dtype)} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
