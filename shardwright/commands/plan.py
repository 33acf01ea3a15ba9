"""`shardwright plan`: capture a model and find how to split it over a cluster."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwright.api import capture, resolve
from shardwright.api import plan as find_plan
from shardwright.commands.model_file import LossOption, load_model
from shardwright.commands.options import takes_options
from shardwright.commands.output import JsonOption, print_json, print_view, require_folder
from shardwright.commands.progress import DelayedProgress
from shardwright.commands.sagemaker import pins_of
from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import ClusterError, PlanError
from shardwright.core.model.graph import Graph
from shardwright.core.search.options import Options
from shardwright.core.search.study import study as make_study


@takes_options
def plan_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="A function that returns (model, sample) or (model, sample, loss), in either framework.",
            show_default=False,
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(
            help="Hardware by name (a100-80gb, h100, tpu-v5e, cpu …), or a cluster file (TOML).", show_default=False
        ),
    ],
    nodes: Annotated[int | None, typer.Option(help="How many nodes; 1 where not given.", show_default=False)] = None,
    devices_per_node: Annotated[
        int | None, typer.Option(help="Devices in each; 1 where not given.", show_default=False)
    ] = None,
    intra_node: Annotated[
        str | None, typer.Option(help="The link inside a node; default: the hardware's.", show_default=False)
    ] = None,
    inter_node: Annotated[
        str | None, typer.Option(help="The link between nodes; default: the hardware's.", show_default=False)
    ] = None,
    loss: LossOption = None,
    from_smp: Annotated[
        Path | None,
        typer.Option(
            help="A configuration of SageMaker's model-parallel library (JSON): its keys are pins.", show_default=False
        ),
    ] = None,
    study: Annotated[
        bool,
        typer.Option(
            "--study", help="Also what binds, what changes would bring, and time against memory against price."
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to save the plan file.", show_default=False)
    ] = None,
    json: JsonOption = False,
    *,
    options: Options,
) -> None:
    """Capture a model and find how to split it over a cluster. What is given is pinned, the rest is searched."""
    require_folder(output)
    whole = load_cluster(cluster, nodes, devices_per_node, intra_node, inter_node)
    if from_smp is not None:
        options = _with_pins(options, pins_of(from_smp, options.batch, whole.world_size), from_smp)
    with DelayedProgress() as bar:
        graph = _captured(model, loss, bar)
        bar.stage("searching")
        plan = find_plan(graph, whole, **options.given, progress=bar.update)
        if output is not None:
            plan.save(output)
        bar.stage("studying")
        studied = make_study(plan, graph, whole, resolve(options, graph)) if study else None
    from shardwright.core.plan.file import to_document
    from shardwright.report.study import study_document, study_view

    if json:
        document = to_document(plan)
        print_json(document if studied is None else {"plan": document, "study": study_document(studied)})
        return
    from shardwright.report.tables import plan_view

    saved = f"saved to {output}" if output is not None else "not saved: give -o plan.json to keep it"
    print_view(plan_view(plan), *([] if studied is None else [study_view(studied)]), saved)


def _with_pins(options: Options, pins: dict[str, Any], source: Path) -> Options:
    """The options with pins beside them. Raises PlanError for one that was given otherwise."""
    plain = Options(batch=options.batch)
    for name, pin in pins.items():
        own = getattr(options, name)
        if own not in (getattr(plain, name), pin):
            raise PlanError(f"{name}={own!r} is given, and {source} pins {pin!r}: leave one of them out")
    return replace(options, **pins)


def _captured(model: str, loss: str | None, bar: DelayedProgress) -> Graph:
    bar.stage(f"loading {model}")
    given = load_model(model, loss)
    bar.stage("capturing")
    return capture(given.model, given.sample, given.loss)


def load_cluster(
    name: str,
    nodes: int | None = None,
    devices_per_node: int | None = None,
    intra_node: str | None = None,
    inter_node: str | None = None,
) -> Cluster:
    """The cluster that the options name: a cluster file, or hardware (by name or profile file) in so many nodes.

    Raises ClusterError for an unknown name (with the nearest), or for a cluster file beside options that it answers.
    """
    path = Path(name)
    if path.suffix == ".toml" and not _is_profile(path):
        options = {
            "--nodes": nodes,
            "--devices-per-node": devices_per_node,
            "--intra-node": intra_node,
            "--inter-node": inter_node,
        }
        twice = [option for option, value in options.items() if value is not None]
        if twice:
            raise ClusterError(f"{name} is a cluster file and says this itself: leave out {', '.join(twice)}")
        return Cluster.load(path)
    return Cluster(
        name,
        nodes=1 if nodes is None else nodes,
        devices_per_node=1 if devices_per_node is None else devices_per_node,
        intra_node=intra_node,
        inter_node=inter_node,
    )


def _is_profile(path: Path) -> bool:
    """Whether a TOML file describes one device rather than a cluster of them. A bad file is left to its reader."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return False
    return "peak_flops_per_s" in document
