"""`shardwright profile`: measure the machine that this runs on, and write a hardware profile."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from shardwright.backends.registry import load
from shardwright.commands.model_file import LossOption, load_model
from shardwright.commands.output import JsonOption, print_json, print_view, require_folder
from shardwright.commands.progress import DelayedProgress
from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import ShardwrightError
from shardwright.measure import measure_units


def profile_command(
    output: Annotated[Path, typer.Argument(metavar="PROFILE.toml", help="Where to write it.", show_default=False)],
    framework: Annotated[str, typer.Option(help="Measure as this framework runs.")] = "torch",
    name: Annotated[str, typer.Option(help="What the profile is called.")] = "measured",
    budget: Annotated[float, typer.Option(help="About how many seconds to measure.", min=1.0)] = 20.0,
    model: Annotated[
        str | None, typer.Option(metavar="FILE.py:FUNCTION", help="Measure the units of this model too.")
    ] = None,
    loss: LossOption = None,
    microbatch: Annotated[
        list[int] | None, typer.Option(help="Sizes at which to run the model's units; may be repeated. [default: 1, 4]")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure products, memory, launches and collectives here; the profile serves `Cluster(PROFILE.toml)`.

    With --model, plans of that model take its units' measured times: whole, and shared by every number of ranks that
    divides those that measure.

    Under torchrun (or mpirun, srun) every rank measures, the collectives are those of the whole group, and rank 0
    writes.
    """
    if output.suffix != ".toml":
        raise ShardwrightError(f"{output}: a profile is a TOML file; name it {output.with_suffix('.toml')}")
    if loss is not None and model is None:
        raise ShardwrightError(f"--loss {loss} without --model: add --model, whose units are measured with this loss")
    require_folder(output)
    backend = load(framework)
    with DelayedProgress() as bar:

        def show(what: str, done: int, total: int) -> None:
            bar.stage(what)
            bar.update(done, total)

        measured = backend.profile(name=name, budget_s=budget, progress=show)
        if model is not None:
            given = load_model(model, loss)
            sizes = tuple(microbatch or (1, 4))
            units = measure_units(
                given.model,
                given.sample,
                given.loss,
                microbatches=sizes,
                cluster=Cluster(measured.profile(), devices_per_node=measured.ranks),
                tensor_degrees=[d for d in range(1, measured.ranks + 1) if measured.ranks % d == 0],
                progress=show,
            )
            measured = replace(measured, units=units)
    if measured.rank:
        return
    measured.save(output)
    document = measured.document()
    if json:
        print_json({"saved": str(output), "profile": document})
        return
    peak = max(p.flops_per_s for p in measured.products)
    print_view(
        f"{measured.measured_on}: {len(measured.products)} products up to {peak / 1e9:,.0f} GFLOP/s, memory "
        f"{measured.memory_bandwidth_bytes_per_s / 1e9:,.1f} GB/s, {measured.kernel_launch_s * 1e6:,.1f} µs for each "
        f"small op, {measured.ranks} {'ranks' if measured.ranks > 1 else 'rank'}",
        f"saved to {output}",
    )
