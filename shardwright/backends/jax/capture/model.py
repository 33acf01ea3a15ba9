"""A JAX model as a `core.model.graph.Graph`, by tracing it on shapes at two batch sizes."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from flax import linen, nnx

from shardwright.backends.capabilities import JAX, JAX_EXECUTION, JAX_MEMORY
from shardwright.backends.jax.capture.loss_results import Weighted
from shardwright.backends.jax.capture.module_inputs import ModuleCalls
from shardwright.backends.jax.capture.ops import translate
from shardwright.backends.jax.capture.own_checkpoints import noted, of_whole_units, with_plain
from shardwright.backends.jax.capture.partitioning import LogicalAxes, linen_axes, nnx_axes
from shardwright.backends.jax.capture.precision import computed_in
from shardwright.backends.jax.capture.samples import at_batch, batch_size, positional, resolve_batch_dims
from shardwright.backends.jax.capture.steps import Program, flatten, same_structure
from shardwright.backends.jax.capture.trace import Recorder, boxed_functions, linen_calls, nnx_calls
from shardwright.backends.jax.capture.tree import (
    abstract,
    abstract_parameters,
    aliases_of,
    dotted,
    flat_names,
    is_function,
    parameter_names,
)
from shardwright.core.errors import CaptureError, ShardwrightError
from shardwright.core.model.graph import Call, Graph, Op, Parameter, Tensor, TensorRole

Traces = tuple[tuple[Any, Program], tuple[Any, Program]]
"""The closed jaxpr and its flat program, at batch 2 and at batch 3."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model made ready for tracing: its arrays as one pytree, the names and kinds of their leaves, and the function
    that runs the model on them."""

    name: str
    arrays: Any
    names: tuple[str, ...]
    """The name of every leaf of ``arrays``."""
    trainable: tuple[bool | None, ...]
    """A flag for every leaf of ``arrays``; None for buffers."""
    aliases: dict[str, tuple[str, ...]]
    run: Callable[[Any, Any, Recorder], Any]
    """A function ``run(arrays, sample, recorder)`` that gives the loss, or what the model returns."""
    logical_axes: LogicalAxes = ()
    run_with: Callable[[Any, Any, Recorder, ModuleCalls], Any] | None = None
    """The same as ``run``, with the inputs of modules as the last argument gives them."""

    def traced_in(self, compute: Any, inputs: Any, pick: Callable[[Any], Any]) -> tuple[Any, Program]:
        """The `trace` of a step that computes in the dtype ``compute``, as a training step casts what it is given."""
        cast = partial(computed_in, compute)
        leaves, structure = jax.tree.flatten(self.arrays)
        narrow = [leaf if flag is None else cast(leaf) for leaf, flag in zip(leaves, self.trainable, strict=True)]
        calls, run = ModuleCalls(compute), self.run_with
        assert run is not None
        arrays = jax.tree.unflatten(structure, narrow)
        source = replace(self, arrays=arrays, run=lambda values, sample, recorder: run(values, sample, recorder, calls))
        found = trace(source, inputs, pick)
        return found if calls.count else trace(source, jax.tree.map(cast, inputs), pick)


@dataclass(frozen=True, slots=True)
class Captured:
    """The graph of a model, the traces that it was read from, and the names of the model's arrays."""

    graph: Graph
    traces: Traces
    names: tuple[str, ...]
    traces_in: Callable[[Any], Traces]
    """A function of a dtype that gives the traces of steps that compute in it."""
    is_module: bool = False
    """Whether the model is an NNX module."""


def capture(
    model: Any,
    sample: Any,
    loss: Callable[..., Any] | None = None,
    *,
    batch_dims: Any = None,
    require_loss: bool = True,
) -> Captured:
    """Read a JAX model, without running it and without memory for its weights.

    model: an ``nnx.Module``; a pair ``(linen_module, variables)``; or a function of ``(params, batch)``. Weights may
        be arrays or ``jax.ShapeDtypeStruct`` (an ``nnx.eval_shape`` of the constructor, an ``eval_shape`` of ``init``).
    sample: what the model is called with, as arrays or shapes: a dict goes in by keyword, a tuple or list by position,
        anything else as the one argument. For a function: the pair ``(params, batch)``, handed over as they are.
    loss: a function of the model's output; or, when it takes two arguments, ``loss(model, sample)``, which calls the
        model itself (``model`` is the NNX module, or for Linen a function with the variables bound). Without it, the
        model's own: a scalar output, the first of ``(loss, aux)``, `weighted`, or ``.loss`` / ``["loss"]``.
    batch_dims: the dim that counts samples: None for the first of every array, a number, or a tree like ``sample``'s
        with a number (or None: no such dim) per array.
    require_loss: False captures a model without a loss: the graph's outputs are then what it returns.

    Raises CaptureError when the model is of no known kind, when no loss is found, and when the traces at batch 2 and
    batch 3 do not hold the same ops.
    """
    source, batch = _source(model, sample, loss)
    batch = jax.tree.map(abstract, batch)
    dims = resolve_batch_dims(batch, batch_dims)
    pick = _loss_of if require_loss else _outputs_of
    graph, traces = read(source, batch, dims, lambda output: pick(output, source.name))

    def traces_in(compute: Any) -> Traces:
        one, other = (
            source.traced_in(compute, at_batch(batch, dims, size), lambda output: pick(output, source.name))
            for size in (2, 3)
        )
        return _as_planned(graph, (one, other))

    return Captured(graph, _as_planned(graph, traces), source.names, traces_in, isinstance(model, nnx.Module))


def _as_planned(graph: Graph, traces: Traces) -> Traces:
    """The traces without the checkpoints around units that a plan recomputes, as these are plain calls then."""
    (one, first), (other, second) = traces
    paths = of_whole_units(graph, [step.checkpoint for step in first.steps])
    return (with_plain(one, paths), first), (with_plain(other, paths), second)


def read(source: Source, batch: Any, dims: tuple[int | None, ...], pick: Callable[[Any], Any]) -> tuple[Graph, Traces]:
    """The graph of the results of a source that ``pick`` takes, and the traces, whose programs' steps are the graph's
    ops, in order.

    batch: shapes, with ``dims`` those that count samples. Raises CaptureError when the traces at batch 2 and batch 3 do
    not hold the same ops.
    """
    inputs = [at_batch(batch, dims, size) for size in (2, 3)]
    one, other = (_traced_at(source, given, pick, size) for given, size in zip(inputs, (2, 3), strict=True))
    same_structure(one[1], other[1], lambda what: _differs(source.name, what))
    return _graph(source, one[1], other[1], inputs[0], batch_size(batch, dims)), (one, other)


def _traced_at(source: Source, inputs: Any, pick: Callable[[Any], Any], samples: int) -> tuple[Any, Program]:
    try:
        return trace(source, inputs, pick)
    except ShardwrightError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{source.name} fails at batch {samples}: {type(error).__name__}: {error}. Shardwright captures at batch 2 "
            "and 3, whatever the sample has: make the function run at any batch size, or name the batch dim of each "
            "input with batch_dims="
        ) from error


def trace(
    source: Source,
    inputs: Any,
    pick: Callable[[Any], Any],
    results: int | None = None,
    *,
    whole_batch_norms: bool = False,
) -> tuple[Any, Program]:
    """The closed jaxpr of the results of a source that ``pick`` takes, and the flat program of its first
    ``results``."""
    recorder = Recorder(whole_batch_norms=whole_batch_norms)

    def run(arrays: Any, inputs: Any) -> Any:
        return pick(source.run(arrays, inputs, recorder))

    with boxed_functions():
        closed = jax.make_jaxpr(run)(source.arrays, inputs)
    return closed, flatten(closed, recorder.calls, len(source.names), results)


def _differs(name: str, what: str) -> CaptureError:
    return CaptureError(
        f"{name} does not run the same ops at every batch size: {what}. Shardwright captures at batch 2 and 3; make "
        "control flow independent of the batch size, or name the batch dim of each input with batch_dims="
    )


# --- kinds of model


def _source(model: Any, sample: Any, loss: Callable[..., Any] | None) -> tuple[Source, Any]:
    if isinstance(model, nnx.Module):
        return _nnx_source(model, loss), sample
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], linen.Module):
        return _linen_source(model[0], model[1], loss), sample
    if isinstance(model, linen.Module):
        raise CaptureError(
            f"a Linen module is captured with its variables: give ({type(model).__name__}(…), variables), "
            "where variables may be jax.eval_shape(module.init, …)"
        )
    if callable(model) and not is_function(model):
        raise CaptureError(
            f"a {type(model).__name__} is a pytree of parameters: capture the loss function of it and a batch, "
            "sw.capture(loss_fn, (model, batch))"
        )
    if callable(model):
        if not (isinstance(sample, tuple) and len(sample) == 2):
            raise CaptureError("a function of (params, batch) is captured with the sample (params, batch): give a pair")
        return _function_source(model, sample[0], loss), sample[1]
    raise CaptureError(
        f"a {type(model).__name__} is no JAX model: give an nnx.Module, (linen module, variables), or a function of "
        "(params, batch)"
    )


def _nnx_source(model: nnx.Module, loss: Callable[..., Any] | None) -> Source:
    graphdef, state = nnx.split(model)
    flat = nnx.to_flat_state(state)
    names = tuple(dotted(path) for path, _ in flat)
    trainable = tuple(True if isinstance(variable, nnx.Param) else None for _, variable in flat)
    # A module may hold arrays beside its variables, as tables of positions.
    arrays = tuple(abstract(v.get_raw_value() if isinstance(v, nnx.Variable) else v) for _, v in flat)
    paths = [path for path, _ in flat]
    # Without their values: plans remember what was captured, and the model's arrays would stay with it.
    variables = [
        variable.replace(array) if isinstance(variable, nnx.Variable) else None
        for (_, variable), array in zip(flat, arrays, strict=True)
    ]

    def run(values: Any, sample: Any, recorder: Recorder, calls: ModuleCalls | None = None) -> Any:
        filled = [
            value if variable is None else variable.replace(value)
            for variable, value in zip(variables, values, strict=True)
        ]
        private = nnx.merge(graphdef, nnx.from_flat_state(zip(paths, filled, strict=True)))
        with nnx_calls(private, recorder), _given(calls, private):
            return _with_loss(private, sample, loss)

    axes = nnx_axes((path, variable) for path, variable in flat if isinstance(variable, nnx.Param))
    return Source(type(model).__name__, arrays, names, trainable, aliases_of(model), run, axes, run)


def _linen_source(module: linen.Module, variables: Any, loss: Callable[..., Any] | None) -> Source:
    if not hasattr(variables, "keys") or "params" not in variables:
        raise CaptureError(f"{type(module).__name__} needs its variables, a dict with the collection 'params'")
    arrays = jax.tree.map(abstract, variables)
    full = flat_names(arrays)
    names = tuple(name.removeprefix("params.") for name in full)
    trainable = tuple(True if name.startswith("params.") else None for name in full)

    def run(values: Any, sample: Any, recorder: Recorder, calls: ModuleCalls | None = None) -> Any:
        def apply(*args: Any, **kwargs: Any) -> Any:
            return module.apply(values, *args, **kwargs)

        with linen_calls(recorder), _given(calls, None):
            return _with_loss(apply, sample, loss)

    axes = linen_axes(variables["params"], tuple(n for n, t in zip(names, trainable, strict=True) if t))
    return Source(type(module).__name__, arrays, names, trainable, {}, run, axes, run)


def _function_source(function: Callable[..., Any], params: Any, loss: Callable[..., Any] | None) -> Source:
    arrays = abstract_parameters(params)
    leaves = jax.tree.leaves(arrays)
    trainable = tuple(True if jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact) else None for leaf in leaves)

    def run(values: Any, sample: Any, recorder: Recorder, calls: ModuleCalls | None = None) -> Any:
        with linen_calls(recorder), _given(calls, None):  # a training step runs the function so too
            output = function(values, sample)
        return loss(output) if loss is not None else output

    name = getattr(function, "__name__", type(function).__name__)
    return Source(name, arrays, parameter_names(arrays), trainable, {}, run, run_with=run)


def _given(calls: ModuleCalls | None, model: nnx.Module | None) -> AbstractContextManager[None]:
    """A context in which modules are given their inputs by ``calls``, if any."""
    return nullcontext() if calls is None else calls.around(model)


def _with_loss(call: Callable[..., Any], sample: Any, loss: Callable[..., Any] | None) -> Any:
    if loss is not None and positional(loss) == 2:
        return loss(call, sample)
    if isinstance(sample, dict):
        output = call(**sample)
    elif isinstance(sample, tuple | list):
        output = call(*sample)
    else:
        output = call(sample)
    return loss(output) if loss is not None else output


def _loss_of(output: Any, name: str) -> Any:
    if isinstance(output, tuple) and 2 <= len(output) <= 3 and _is_scalar(_value(output[0])):
        output = output[0]  # (loss, aux), (loss, state) or (loss, aux, state), as of train_step
    output = _value(output)
    if hasattr(output, "keys") and "loss" in output:
        output = output["loss"]
    elif getattr(output, "loss", None) is not None:
        output = output.loss
    if _is_scalar(output):
        return output
    shapes = ", ".join(str(leaf.shape) for leaf in jax.tree.leaves(output) if hasattr(leaf, "shape"))
    raise CaptureError(
        f"{name} returns no loss but arrays of shapes {shapes or 'none'}: give capture a loss=, a function of "
        "the output (or of model and sample) that returns one number"
    )


def _value(output: Any) -> Any:
    return output.value if isinstance(output, Weighted) else output


def _outputs_of(output: Any, name: str) -> Any:
    return jax.tree.leaves(output)


def _is_scalar(value: Any) -> bool:
    return getattr(value, "shape", None) == () and jax.numpy.issubdtype(value.dtype, jax.numpy.floating)


# --- the graph


def _graph(source: Source, first: Program, second: Program, inputs: Any, sample_batch: int) -> Graph:
    """The graph of two programs with the same steps; values keep their order but those no op uses are left out."""
    used = {value for step in first.steps for value in (*step.inputs, *step.outputs) if value is not None}
    weights = first.arguments[: len(source.names)]
    input_values = first.arguments[len(source.names) :]
    used.update(first.arguments)
    results = tuple(value for value in first.outputs if value is not None)
    used.update(results)
    order = sorted(used)
    index = {value: number for number, value in enumerate(order)}
    roles: dict[int, tuple[TensorRole, str]] = dict.fromkeys(first.constants, ("constant", ""))
    for value, name, trainable in zip(weights, source.names, source.trainable, strict=True):
        roles[value] = ("buffer" if trainable is None else "parameter", name)
    for value, name in zip(input_values, flat_names(inputs), strict=True):
        roles[value] = ("input", name)
    tensors = tuple(
        Tensor.from_two(first.shapes[v], second.shapes[v], first.dtypes[v], *roles.get(v, ("activation", "")))
        for v in order
    )
    ops = []
    for step in second.steps:  # labels from the shapes at batch 3, which coincide with fewer other sizes
        kind, operands, labelled = translate(step, second)
        ops.append(
            Op(
                kind,
                step.name.removeprefix("call:"),
                tuple(index[value] for value in operands),
                tuple(index[value] for value in step.outputs),
                labelled.labels,
                labelled.special,
                labelled.offsets,
                step.call,
            )
        )
    calls = tuple(Call(call.path, call.parent, call.occurrence) for call in first.calls)
    parameters = tuple(
        Parameter(name, index[value], source.aliases.get(name, ()), trainable)
        for value, name, trainable in zip(weights, source.names, source.trainable, strict=True)
        if trainable is not None
    )
    graph = Graph(
        JAX,
        source.name,
        tensors,
        tuple(ops),
        calls,
        parameters,
        tuple(index[value] for value in input_values),
        tuple(index[value] for value in results),
        sample_batch,
        logical_axes=tuple((name, dims) for name, dims in source.logical_axes if name in {p.name for p in parameters}),
        memory_traits=JAX_MEMORY,
        execution=JAX_EXECUTION,
    )
    return noted(graph, [step.checkpoint for step in first.steps], [step.is_saved for step in first.steps])
