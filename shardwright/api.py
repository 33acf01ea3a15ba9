"""The entry points that are the same for both frameworks."""

import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import signature
from typing import Any, ParamSpec, Protocol, get_type_hints

from shardwright.backends.registry import framework_of, load, runtimes_of
from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import PlanError, PlanWarning, nearest
from shardwright.core.model.graph import Graph
from shardwright.core.plan.plan import Plan, stale_note
from shardwright.core.rules.pins import pins_of
from shardwright.core.schedule import Schedule, StageCosts
from shardwright.core.schedule.simulate import simulate_schedule
from shardwright.core.schedule.timeline import Timeline
from shardwright.core.search import make_plan
from shardwright.core.search.named_units import as_the_model_asks, by_module, of_maxtext
from shardwright.core.search.options import Options
from shardwright.core.search.request import Request, request_for
from shardwright.core.tables.graph_reading import unknown_memory_of, unpriced_of
from shardwright.core.values.collection import without_full_collections
from shardwright.core.values.fields import Field, fields_of


def capture(model: Any, sample: Any, loss: Callable[..., Any] | None = None, *, batch_dims: Any = None) -> Graph:
    """Read a model as it is, without running it on real data.

    Args:
        model: an `nn.Module`, an `nnx.Module`, a pair (Linen module, variables), or a JAX function of (params, batch).
        sample: one batch: a tensor, or a tuple, list or dict of them (for a JAX function: the pair (params, batch)).
            Shapes and dtypes matter, values do not.
        loss: called on the model's output. Default: the output's ``.loss``, or a scalar output.
        batch_dims: for inputs whose dim 0 is not the batch: the same structure as ``sample``, with a dim or None.

    Raises:
        CaptureError: the model is of no framework with a backend, or it cannot be read; names the op and the module.
        MissingFrameworkError: the model's framework is there, but not all that its backend needs.
    """
    with without_full_collections():
        return load(framework_of(model)).capture(model, sample, loss, batch_dims=batch_dims)


Asked = ParamSpec("Asked")


class _Planner(Protocol[Asked]):
    def __call__(self, graph: Graph, cluster: Cluster, *args: Asked.args, **asked: Asked.kwargs) -> Plan: ...


def _planner(options: Callable[Asked, Options]) -> _Planner[Asked]:
    """The function `plan`, with the options as its arguments."""

    def plan(graph: Graph, cluster: Cluster, *args: Asked.args, **asked: Asked.kwargs) -> Plan:
        require_plannable(graph, cluster)
        if args:
            raise TypeError(f"plan() takes a graph and a cluster, and options by name; given {len(args)} more by place")
        unknown = [name for name in asked if name not in known]
        if unknown:
            raise TypeError(f"plan() has no option {unknown[0]!r}: {nearest(unknown[0], known)}")
        if "batch" not in asked:
            raise TypeError("plan() needs batch=, the samples per step over all replicas")
        with without_full_collections():
            return make_plan(graph, cluster, resolve(options(*args, **_spelled_out(asked, graph)), graph))

    known = {field.name: field for field in fields(Options)}
    own = list(signature(plan).parameters.values())[:2]
    plain = get_type_hints(Options)
    shown = [each.replace(annotation=plain[name]) for name, each in signature(Options).parameters.items()]
    plan.__signature__ = signature(plan).replace(parameters=[*own, *shown])  # type: ignore[attr-defined]  # for `help`
    plan.__doc__ = _PLAN.format(options="\n".join(_described(field) for field in fields_of(Options) if field.option))
    plan.__qualname__ = plan.__name__
    return plan


_PLAN = """Find how to split a captured model over a cluster. What is given is pinned, the rest is searched.

    Args:
        graph: from `capture`.
        cluster: the devices, as many of them used as ``devices`` says.
{options}
        progress: called with (candidates scored, candidates in all).

    Raises:
        LayoutError: pins that contradict each other (both are named), that match nothing, or on an axis that the
            mesh lacks.
        PlanError: degrees or batch that do not divide (with the nearest that do), or no plan that fits the memory (by
            how much, and the nearest plan that fits).
    """


def _described(field: Field) -> str:
    """The text of an option in the documentation, with what None does."""
    assert field.option is not None
    without = f"; None: {field.option.without}" if field.option.without else ""
    text = f"{field.name}: {field.option.means}{without}."
    return textwrap.fill(text, 120, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)


def _spelled_out(asked: Mapping[str, Any], graph: Graph) -> dict[str, Any]:
    """What was asked for, with recompute by module as units, and MaxText's names as ours. Raises PlanError where units
    are named twice, or a name has no counterpart."""
    recompute = asked.get("recompute")
    if isinstance(recompute, str):
        return {**asked, "recompute": of_maxtext(recompute)}
    if not isinstance(recompute, Mapping):
        return dict(asked)
    for name in ("kept_units", "offloaded_units", "other_units", "other_recompute", "offload"):
        if asked.get(name):
            raise PlanError(f"recompute by module and {name}={asked[name]!r} both name units: leave out one of them")
    return {**asked, **by_module(graph, recompute)}


plan = _planner(Options)


def require_plannable(graph: object, cluster: object) -> None:
    """Raise PlanError for a graph that was not captured, or a cluster that is none."""
    if not isinstance(graph, Graph):
        raise PlanError(f"plan takes a captured graph, not a {type(graph).__name__}: call shardwright.capture first")
    if not isinstance(cluster, Cluster):
        raise PlanError(f"plan takes a Cluster, not {cluster!r}: write Cluster({cluster!r})")


def resolve(options: Options, graph: Graph) -> Request:
    """The request of options for one model: the runtimes that must carry the plan out, and the layouts that are pinned,
    by the model's own marks too. Raises PlanError for a framework without a runtime, or with one that lacks a mode of
    recompute that is pinned, LayoutError as `plan`."""
    if (unpriced := unpriced_of(graph)) is not None:
        warnings.warn(f"{graph.model_name}: {unpriced}", stacklevel=3)
    if (unknown := unknown_memory_of(graph)) is not None:
        warnings.warn(f"{graph.model_name}: {unknown}", stacklevel=3)
    runtimes = runtimes_of(graph.capabilities, options.frameworks)
    options = as_the_model_asks(graph, options, lambda text: warnings.warn(text, PlanWarning, stacklevel=5))
    for runtime in () if options.searches_recompute else runtimes:
        lack = runtime.lack_of_pins(options.recompute, options.other_recompute)
        if lack is None:
            continue
        if options.frameworks is not None:
            raise PlanError(f"{lack}; take one of these, or leave {runtime.framework!r} out of frameworks")
        if options.like is None:
            warnings.warn(f"{lack}: the plan can be read and compared, and not run there", PlanWarning, stacklevel=4)
    return request_for(options, pins_of(graph, options.layouts), runtimes)


def simulate(plan_or_schedule: Plan | Schedule, costs: StageCosts | None = None) -> Timeline:
    """The timeline of a pipeline: when every action would run.

    A plan is simulated with its own costs unless others are given. The costs of an edited plan are those of the one
    before: without others, that one is simulated, with a warning (`rescore` counts them anew). Raises ScheduleError
    when the costs are of another number of stages.
    """
    if isinstance(plan_or_schedule, Plan) and costs is None and (note := stale_note(plan_or_schedule)) is not None:
        warnings.warn(f"the plan is simulated as it was before it was edited: {note}", PlanWarning, stacklevel=2)
        plan_or_schedule = plan_or_schedule.as_counted
    if isinstance(plan_or_schedule, Plan):
        return simulate_schedule(plan_or_schedule.build_schedule(), costs or plan_or_schedule.pass_costs())
    if isinstance(plan_or_schedule, Schedule):
        return simulate_schedule(plan_or_schedule, costs)
    raise PlanError(f"simulate takes a Plan or a Schedule, not a {type(plan_or_schedule).__name__}")
