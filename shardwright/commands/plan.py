"""`shardwright plan`: capture a model and find how to split it over a cluster."""

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from shardwright.api import capture, of_graph
from shardwright.commands.model_file import load_model
from shardwright.commands.output import JsonOption, print_json, print_view, require_folder
from shardwright.commands.progress import DelayedProgress
from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import ClusterError, ShardwrightError, nearest
from shardwright.core.model.graph import Graph
from shardwright.core.plan.decision import LossScope
from shardwright.core.search import make_plan
from shardwright.core.search.request import Request
from shardwright.core.search.study import study as make_study

_SEARCHED = "searched where not given"
_LOSS_SCOPES: dict[str, LossScope] = {"replica": "replica", "global": "global"}


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
    batch: Annotated[int, typer.Option(help="Samples per step, over all replicas.", show_default=False)],
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
    pp: Annotated[
        int | None,
        typer.Option(help=f"Pipeline degree, {_SEARCHED}.", show_default=False, rich_help_panel="Decision"),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(help=f"Tensor degree, {_SEARCHED}.", show_default=False, rich_help_panel="Decision"),
    ] = None,
    dp: Annotated[
        int | None,
        typer.Option(help=f"Data degree, {_SEARCHED}.", show_default=False, rich_help_panel="Decision"),
    ] = None,
    microbatch: Annotated[
        int | None,
        typer.Option(
            help=f"Samples that a replica runs at a time, {_SEARCHED}.",
            show_default=False,
            rich_help_panel="Decision",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help=f"The pipeline schedule; auto generates one. {_SEARCHED.capitalize()}.",
            show_default=False,
            rich_help_panel="Decision",
        ),
    ] = None,
    virtual_stages: Annotated[
        int | None,
        typer.Option(help=f"Stages per pipeline rank, {_SEARCHED}.", show_default=False, rich_help_panel="Decision"),
    ] = None,
    placement_order: Annotated[
        str | None,
        typer.Option(
            help=f"How the axes lie on the ranks, such as PDT (tensor groups are neighbours), {_SEARCHED}.",
            show_default=False,
            rich_help_panel="Decision",
        ),
    ] = None,
    recompute: Annotated[
        str, typer.Option(help="none, selective, full or auto (searched).", rich_help_panel="Decision")
    ] = "auto",
    shard: Annotated[
        int | None,
        typer.Option(
            help=f"0 nothing, 1 optimizer states, 2 gradients, 3 parameters over the data axis, {_SEARCHED}.",
            show_default=False,
            rich_help_panel="Decision",
        ),
    ] = None,
    shard_group: Annotated[
        int | None,
        typer.Option(
            help="Ranks that share a shard; default: the whole data axis where --shard is given, else searched.",
            show_default=False,
            rich_help_panel="Decision",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp32, bf16 or fp16; default: the device's best.", show_default=False, rich_help_panel="Decision"
        ),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="Whose states are counted.", rich_help_panel="Decision")] = "adamw",
    gradient_precision: Annotated[
        str | None,
        typer.Option(
            help="In which gradients add up over microbatches; default: as the parameters.",
            show_default=False,
            rich_help_panel="Decision",
        ),
    ] = None,
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel",
            help="Whether what the tensor axis leaves whole is divided along the sequence; default: searched.",
            show_default=False,
            rich_help_panel="Decision",
        ),
    ] = None,
    stage_starts: Annotated[
        str | None,
        typer.Option(
            help=f"The first unit of every stage, as 0,5,9; with --pp. {_SEARCHED.capitalize()}.",
            show_default=False,
            rich_help_panel="Decision",
        ),
    ] = None,
    loss_scope: Annotated[
        str | None,
        typer.Option(
            help="replica or global: what depends on the batch as a whole; default: replica, and the runtime asks.",
            show_default=False,
            rich_help_panel="Decision",
        ),
    ] = None,
    partitioner: Annotated[
        str,
        typer.Option(
            help="What cuts the model into stages: exact, pareto, tree (SageMaker's) or blocks (RaNNC's).",
            rich_help_panel="Decision",
        ),
    ] = "exact",
    framework: Annotated[
        list[str] | None,
        typer.Option(
            help="Whose runtime must carry the plan out, torch or jax; may be given twice. Default: both.",
            show_default=False,
            rich_help_panel="Decision",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="How many devices to use, all, or auto (searched); default: all, but auto where they differ.",
            show_default=False,
            rich_help_panel="Decision",
        ),
    ] = None,
    offload: Annotated[
        bool | None,
        typer.Option(
            "--offload/--no-offload",
            help="Whether activations may go to the host's memory; default: where the runtimes carry it out.",
            show_default=False,
            rich_help_panel="Decision",
        ),
    ] = None,
    study: Annotated[
        bool,
        typer.Option(
            "--study", help="Also what binds, what changes would bring, and time against memory against price."
        ),
    ] = False,
    tokens: Annotated[
        float | None,
        typer.Option(help="With --study: days and cost of training on so many tokens.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to save the plan file.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Capture a model and find how to split it over a cluster. What is given is pinned, the rest is searched."""
    require_folder(output)
    if loss_scope is not None and loss_scope not in _LOSS_SCOPES:
        raise ShardwrightError(f"--loss-scope {loss_scope!r}: {nearest(loss_scope, _LOSS_SCOPES)}")
    request = Request(
        batch=batch,
        pp=pp,
        tp=tp,
        dp=dp,
        microbatch=microbatch,
        virtual_stages=virtual_stages,
        schedule=schedule,
        recompute=recompute,
        shard=shard,
        shard_group=shard_group,
        precision=precision,
        optimizer=optimizer,
        loss_scope=None if loss_scope is None else _LOSS_SCOPES[loss_scope],
        placement_order=placement_order,
        partitioner=partitioner,
        offload=offload,
        gradient_precision=gradient_precision,
        sequence_parallel=sequence_parallel,
        stage_starts=None if stage_starts is None else _numbers("--stage-starts", stage_starts),
        devices=int(devices) if devices is not None and devices.isdecimal() else devices,
    )
    whole = load_cluster(cluster, nodes, devices_per_node, intra_node, inter_node)
    if tokens is not None and not study:
        raise ShardwrightError(f"--tokens {tokens:g} without --study: add --study, which says what training takes")
    with DelayedProgress() as bar:
        graph = _captured(model, bar)
        request = of_graph(request, graph, framework)
        bar.stage("searching")
        studied = make_study(graph, whole, request, tokens) if study else None
        plan = studied.plan if studied is not None else make_plan(graph, whole, request, bar.update)
    from shardwright.core.plan.file import to_document

    if output is not None:
        plan.save(output)
    from shardwright.report.study import study_document, study_view

    if json:
        document = to_document(plan)
        print_json(document if studied is None else {"plan": document, "study": study_document(studied)})
        return
    from shardwright.report.tables import plan_view

    saved = f"saved to {output}" if output is not None else "not saved: give -o plan.json to keep it"
    print_view(plan_view(plan), *([] if studied is None else [study_view(studied)]), saved)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ShardwrightError(f"{option} {text!r}: expected whole numbers with commas between them, as 0,5,9")
    return tuple(map(int, parts))


def _captured(model: str, bar: DelayedProgress) -> Graph:
    bar.stage(f"loading {model}")
    given = load_model(model)
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
