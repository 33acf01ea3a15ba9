"""`shardwright partition`: every partitioner on one model, in one table."""

from dataclasses import asdict
from typing import Annotated

import typer

from shardwright.api import capture
from shardwright.commands.model_file import LossOption, load_model
from shardwright.commands.output import JsonOption, print_json, print_view
from shardwright.commands.plan import load_cluster


def partition_command(
    model: Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION", help="As for plan.", show_default=False)],
    cluster: Annotated[str, typer.Option(help="Hardware by name, or a cluster file.", show_default=False)],
    stages: Annotated[int, typer.Option(help="How many stages.", show_default=False)],
    nodes: Annotated[int | None, typer.Option(help="How many nodes.", show_default=False)] = None,
    devices_per_node: Annotated[int | None, typer.Option(help="Devices in each.", show_default=False)] = None,
    tp: Annotated[int, typer.Option(help="Tensor degree.")] = 1,
    microbatch: Annotated[int, typer.Option(help="Samples at a time.")] = 1,
    shard: Annotated[int, typer.Option(help="What is sharded over the data axis.")] = 0,
    loss: LossOption = None,
    json: JsonOption = False,
) -> None:
    """Cut a model by every partitioner: exact, with Pareto states, SageMaker's tree, RaNNC's blocks."""
    from shardwright.core.search.partitioner_comparison import contest

    given = load_model(model, loss)
    graph = capture(given.model, given.sample, given.loss)
    devices = load_cluster(cluster, nodes, devices_per_node)
    found = contest(graph, devices, stages, microbatch=microbatch, shard=shard, tp=tp)
    if json:
        rows = [{"partitioner": name} | ({} if j is None else asdict(j)) for name, j in found.judged]
        print_json({"model": graph.model_name, "stages": found.stages, "units": found.units, "partitioners": rows})
        return
    from shardwright.core.values.amounts import bytes_text, seconds_text
    from shardwright.report.tables import new_table

    table = new_table(
        f"{graph.model_name}: {found.units} units in {stages} stages",
        "partitioner", ">largest / mean", ">forward + backward", ">bytes cut", ">peak memory", ">solved in", "starts",
    )  # fmt: skip
    for name, judged in found.judged:
        if judged is None:
            table.add_row(name, "", "", "", "", "", "no cut fits")
            continue
        table.add_row(
            name,
            f"{judged.imbalance:.3f}",
            seconds_text(judged.objective_s),
            bytes_text(judged.sent_bytes),
            bytes_text(judged.peak_bytes),
            seconds_text(judged.solve_s),
            " ".join(map(str, judged.starts)),
        )
    print_view(table)
