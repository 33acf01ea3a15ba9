"""Cases of the fuzzer: real files, schedules and arguments, spoilt. Each case follows from a seed alone.

A case is a function that either raises ShardwrightError, or returns a fault: why what was accepted is not legal, empty
when it is. Anything else that it raises is a fault too; so the runner says.
"""

import copy
import dataclasses
import json
import os
import random
import string
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import chdir
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import fuzz_training
from fuzz_oracle import plan_fault, schedule_fault

import shardwright as sw
from shardwright.core.plan.breakdown import break_down
from shardwright.core.plan.file import to_document, to_text
from shardwright.core.plan.memory_over_time import memory_over_time
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule import Action, Kind, Schedule, StageCosts, schedule_names
from shardwright.core.schedule.files import from_csv, to_csv
from shardwright.core.schedule.passes import insert_sharding, insert_transfers
from tests.core.toy import decoder

STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 1 << 31, 1 << 62, 1 << 64, 10**30, 10**400, -(10**18), 0.5, 1.0, -0.0, 1e-320,
    1e300, float("nan"), float("inf"), "", "x", "1f1b", "auto", "tp", "\x1b[31m", "\u202e", "\ud800", "🙂" * 9,
    "0" * 5000, "../../etc/passwd", [], [[]], [0], ["x"], {}, {"split": 0}, {"tp": {"split": 0}},
    {"a": {"b": {"c": []}}}, [None] * 40,
)  # fmt: skip
"""Values to put where others belong."""


@cache
def graph() -> Any:
    return decoder(layers=3, hidden=64, heads=4, vocabulary=256, sequence=16)


@cache
def plans() -> tuple[str, ...]:
    """Plan files of many kinds."""
    eight, four = sw.Cluster("a100-80gb", devices_per_node=8), sw.Cluster("t4", nodes=2, devices_per_node=2)
    twin = decoder(layers=3, hidden=64, heads=4, vocabulary=256, sequence=16, transposed=True, name="Twin")
    usual: dict[str, Any] = {"batch": 16, "shard": 0, "recompute": "none", "schedule": "1f1b", "placement_order": "PDT"}
    made = [
        sw.plan(graph(), cluster, **(usual | pins))
        for cluster, pins in (
            (eight, {"pp": 2, "dp": 2, "tp": 2, "microbatch": 2, "shard": 1}),
            (eight, {"pp": 1, "dp": 1, "tp": 8, "microbatch": 4, "recompute": "full"}),
            (four, {"pp": 2, "dp": 2, "tp": 1, "microbatch": 1, "schedule": "auto"}),
            (four, {"pp": 2, "dp": 2, "tp": 1, "microbatch": 1, "schedule": "zbv", "virtual_stages": 2}),
            (eight, {"pp": 1, "dp": 8, "tp": 1, "microbatch": 2, "shard": 3, "shard_group": 4, "optimizer": "sgd"}),
        )
    ]
    other = dataclasses.replace(twin, capabilities=dataclasses.replace(twin.capabilities, framework="other"))
    return tuple(to_text(plan) for plan in (*made, made[0].rebind(other)))


@cache
def tables() -> tuple[str, ...]:
    """Files of clusters and of hardware."""
    folder = Path(__file__).parents[1] / "shardwright/core/cluster/hardware/profiles"
    profiles = [(folder / f"{name}.toml").read_text() for name in ("a100-80gb", "cpu", "tpu-v4")]
    plain = 'format = 1\ndevice = "h100"\nnodes = 2\ndevices_per_node = 8\n'
    groups = (
        'format = 1\ninter_node = "ethernet-100g"\ninter_region = "ethernet-10g"\n[[groups]]\ndevice = "v100"\n'
        'nodes = 1\ndevices_per_node = 4\nregion = "a"\n[[groups]]\ndevice = "t4"\nnodes = 3\n'
        'devices_per_node = 1\nregion = "b"\n'
    )
    return (plain, groups, *profiles)


@cache
def csvs() -> tuple[str, ...]:
    made = []
    for name in schedule_names():
        for virtual in (1, 2):
            try:
                schedule = Schedule.build(name, ranks=3, microbatches=6, virtual_stages=virtual)
            except sw.ShardwrightError:
                continue
            made += [schedule, insert_transfers(schedule), insert_sharding(schedule)]
    return tuple(map(to_csv, made))


def scratch(suffix: str) -> Path:
    """A file of this process."""
    return Path(tempfile.gettempdir()) / f"shardwright-fuzz-{os.getpid()}{suffix}"


# Mutations --------------------------------------------------------------------------------------------------------


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    found, left = [], [document]
    while left:
        value = left.pop()
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        found += [(value, key) for key in keys]
        left += [value[key] for key in keys]
    return found


def spoil_value(rng: random.Random, value: Any, all_places: list[tuple[Any, Any]]) -> Any:
    """Another value for a place."""
    if isinstance(value, bool) or rng.random() < 0.3:
        return copy.deepcopy(rng.choice(STRANGE))
    if isinstance(value, int | float):
        return rng.choice(
            [value + 1, value - 1, value * 2, -value, value * 10**6, value // 2, str(value), float(value)]
        )
    if isinstance(value, str):
        return rng.choice([value + "x", value[:-1], value[::-1], value.upper(), value * 50, value + "\x00", ""])
    if isinstance(value, list) and value:
        other = list(value)
        other = rng.choice(
            [other[:-1], other + other[-1:], other[::-1], other * 2, rng.sample(other, len(other)), [other]]
        )
        return other
    container, key = rng.choice(all_places)
    return copy.deepcopy(container[key])


def spoil_document(rng: random.Random, document: Any) -> Any:
    """A document with one to four places spoilt."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        everywhere = places(document)
        if not everywhere:
            return document
        # Decisions are few among many names and costs: they are spoilt as often as all others.
        inner = places(document["decision"]) if isinstance(document.get("decision"), dict) else []
        container, key = rng.choice(inner if inner and rng.random() < 0.5 else everywhere)
        action = rng.random()
        if action < 0.15 and len(container) > 0:
            del container[key]
        elif action < 0.25 and isinstance(container, dict):
            container[rng.choice(["typo", "", "pp", "\x1b", "0/w0", "@1/w0", str(key) + "s"])] = spoil_value(
                rng, container[key], everywhere
            )
        else:
            container[key] = spoil_value(rng, container[key], everywhere)
    return document


def spoil_text(rng: random.Random, text: str) -> str:
    """Text with pieces cut out, put in, doubled or turned around."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(text) + 1)
        to = min(len(text), at + rng.choice((1, 2, 10, 1000)))
        new = rng.choice(
            ["", text[at:to] * 2, text[at:to][::-1], rng.choice(string.printable), "[" * 3000, "{" * 3000, '"', ",",
             "\n", "\x00", "9" * 400, "\ufeff", "é", "\\u001b", "-", ".", "=", "1e999", "0F0,", "(0F0;0B0),", "a." * 60]
        )  # fmt: skip
        text = text[:at] + new + text[to:]
    return text


# Kinds of cases ---------------------------------------------------------------------------------------------------


def used(plan: Any) -> str:
    """An accepted plan is used by everything that reads plans."""
    if plan.stages * plan.microbatches > 20_000:
        return ""  # of which playing it through takes seconds, by the oracle longer
    fault = plan_fault(to_document(plan), plan.build_schedule())
    if fault:
        return fault
    if Plan.from_text(to_text(plan)) != plan:
        return "saved and read, it is another plan"
    sw.simulate(plan)
    sw.explain(plan)
    break_down(plan)
    memory_over_time(plan)
    sw.compare(plan, plan)
    repr(plan)
    from rich.console import Console

    from shardwright.report.tables import plan_view

    with open("/dev/null", "w", encoding="utf-8") as nowhere:
        Console(file=nowhere, markup=False).print(plan_view(plan))
    return ""


def plan_file(rng: random.Random) -> str:
    document = spoil_document(rng, json.loads(rng.choice(plans())))
    return used(Plan.from_text(json.dumps(document), "plan.json"))


def plan_text(rng: random.Random) -> str:
    return used(Plan.from_text(spoil_text(rng, rng.choice(plans())), "plan.json"))


def toml_file(rng: random.Random) -> str:
    """A cluster file or a hardware profile, line by line or letter by letter."""
    text = rng.choice(tables())
    if rng.random() < 0.6:
        lines = text.splitlines()
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(lines))
            key, equals, value = lines[at].partition("=")
            strange = [
                "0",
                "-1",
                "1e999",
                "nan",
                "true",
                '"x"',
                "[]",
                "{}",
                "1e30",
                "10",
                '"\\u001b[2J"',
                "99999999999999",
            ]
            change = rng.random()
            if change < 0.2:
                del lines[at]
                lines = lines or [""]
            elif change < 0.4:
                lines.insert(at, lines[at])
            elif equals:
                old = rng.choice([value, value * 2, value.replace("e", "e1")])
                lines[at] = f"{key}= {rng.choice([*strange, old])}"
        text = "\n".join(lines)
    else:
        text = spoil_text(rng, text)
    path = scratch(".toml")
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        cluster = sw.Cluster(path) if "peak_flops_per_s" in text else sw.Cluster.load(path)
    finally:
        path.unlink()
    size = cluster.world_size
    devices = {cluster.device(rank) for rank in {0, size - 1, size // 2}}
    sane = all(d.usable_memory_bytes > 0 and 0 < d.memory_bandwidth_bytes_per_s < 1e18 for d in devices)
    if not sane or not 1 <= size <= 1 << 20:
        return f"{size} devices, {devices}"
    if size > 1 and not cluster.link_between(0, size - 1).effective_bandwidth_bytes_per_s > 0:
        return "a link that carries nothing"
    cluster.to_document()
    if size <= 16 and rng.random() < 0.1:
        return used(sw.plan(graph(), cluster, batch=16, pp=1, tp=1, microbatch=1, shard=0))
    return ""


def schedule_file(rng: random.Random) -> str:
    text = rng.choice(csvs())
    if rng.random() < 0.6:
        rows = [line.split(",") for line in text.splitlines()]
        for _ in range(rng.choice((1, 1, 2, 3))):
            row = rng.choice(rows)
            at, other = rng.randrange(len(row) + 1), rng.randrange(max(1, len(row)))
            change = rng.random()
            if change < 0.35 and row:
                row[at - 1], row[other] = row[other], row[at - 1]
            elif change < 0.6 and row:
                del row[other]
            elif change < 0.8 and row:
                row.insert(at, row[other])
            elif row:
                row[other] = rng.choice(
                    ["0F0", "(0F1;0B0)", "1B9", "0I0", "0W0", "0SEND_F0", "0UNSHARD", "", "x", "5B0"]
                )
        text = "\n".join(",".join(row) for row in rows)
    else:
        text = spoil_text(rng, text)
    schedule = from_csv(text)
    sw.simulate(schedule)
    return schedule_fault(schedule)


def schedule_value(rng: random.Random) -> str:
    """`Schedule.build`, `Schedule(...)`, `Action` and `StageCosts` by hand, of strange and of large values."""

    def some(usual: Any) -> Any:
        return usual if rng.random() < 0.75 else copy.deepcopy(rng.choice(STRANGE))

    large = rng.choice((2, 3, 4, 8, 17, 300, 5000, 10**5, 10**9))
    sizes = {
        "ranks": some(rng.choice((1, 2, 3, 4, large))),
        "microbatches": some(rng.choice((1, 2, 3, 6, 8, large))),
        "virtual_stages": some(rng.choice((1, 1, 2, 3))),
    }
    if rng.random() < 0.3:
        sizes |= {"memory_limit_bytes": some(rng.choice((0, 1, 5, [3, 3], 10**12))), "active_microbatches": some(None)}
    if rng.random() < 0.4 and type(sizes["ranks"]) is int and 0 < sizes["ranks"] < 50:
        virtual = sizes["virtual_stages"]
        stages = sizes["ranks"] * (virtual if type(virtual) is int and virtual in (1, 2, 3) else 1)
        values = [tuple(some(rng.choice((0.0, 1.0, 2.5, 1e11))) for _ in range(stages)) for _ in range(3)]
        sizes["costs"] = StageCosts(*values, (some(0.5),) * (stages - 1), (some(1),) * stages, some(0.5))
    if rng.random() < 0.7:
        # The searched one takes seconds by design: of small sizes alone.
        small = all(type(v) is not int or v <= 8 for v in sizes.values())
        name = some(rng.choice((*schedule_names(), *(["auto"] if small else []))))
        schedule = Schedule.build(name, **sizes)
    else:
        kinds = [*Kind, *Kind, "F", None]
        table = some(
            tuple(
                tuple(Action(some(s), rng.choice(kinds), some(m), some(())) for s in range(2) for m in range(2))
                for _ in range(2)
            )
        )
        schedule = Schedule("custom", (), some(2), some(2), some(2), some((0, 1)), table, some(None))
    if schedule.stages * schedule.microbatches <= 20_000:
        timeline = sw.simulate(schedule, sizes.get("costs"))
        if not 0 <= timeline.makespan_s < float("inf"):
            return f"takes {timeline.makespan_s} s"
        if schedule.stages * schedule.microbatches <= 300:
            return schedule_fault(schedule)
    return ""


def arguments(rng: random.Random) -> str:
    """Arguments of `plan`, `Cluster`, layouts and meshes."""

    def some(usual: Any) -> Any:
        return usual if rng.random() < 0.8 else copy.deepcopy(rng.choice(STRANGE))

    which = rng.random()
    if which < 0.2:
        sw.Mesh.of(pp=some(2), dp=some(2), tp=some(rng.choice((1, 4))))
        layout = sw.Layout(((some("tp"), some(sw.Split(some(1), some(())))),))
        layout.check(some((8, 8)), sw.Mesh.of(tp=4))
        return ""
    cluster = sw.Cluster(
        some(rng.choice(("a100-80gb", "cpu", "t4"))),
        nodes=some(rng.choice((1, 1, 2))),
        devices_per_node=some(rng.choice((1, 2, 4))),
        intra_node=some(None),
        inter_node=some(rng.choice((None, "ethernet-100g"))),
    )
    if which < 0.35:
        return ""
    if cluster.world_size > 64:
        return ""
    pins = {
        "pp": rng.choice((1, 2)), "tp": rng.choice((1, 2)), "dp": rng.choice((1, 2)),
        "microbatch": rng.choice((1, 2, 3)), "virtual_stages": rng.choice((1, 2)),
        "schedule": rng.choice(schedule_names()), "recompute": "full",
        "shard": rng.choice((0, 1, 2, 3)), "shard_group": rng.choice((1, 2, 3)), "precision": "fp32",
        "optimizer": rng.choice(("sgd", "adamw")), "loss_scope": "global",
        "stage_starts": rng.choice(((0, 1), (0, 2), (0,))),
        "sequence_parallel": rng.choice((True, False)), "gradient_precision": "fp32", "layouts": [(".*", sw.Layout())],
        "placement_order": "TPD", "partitioner": rng.choice(("exact", "pareto", "tree", "blocks")),
        "frameworks": ["torch"],
        "devices": rng.choice((1, 2, "auto", "all")), "offload": rng.choice((None, False)),
    }  # fmt: skip
    chosen = {name: some(pins[name]) for name in rng.sample(sorted(pins), rng.choice((1, 2, 3, 6)))}
    batch = some(rng.choice((1, 4, 8, 12, 10**6, 10**9)))
    return used(sw.plan(some(graph()), cluster, batch=batch, **({"pp": 1, "tp": 1, "microbatch": 4} | chosen)))


def command(rng: random.Random) -> str:
    """The command line, on spoilt files and spoilt options."""
    from typer.testing import CliRunner

    from shardwright.cli import app

    path = scratch(".json")
    text = rng.choice(plans())
    spoilt = rng.random()
    if spoilt < 0.4:
        text = json.dumps(spoil_document(rng, json.loads(text)))
    elif spoilt < 0.6:
        text = spoil_text(rng, text)
    path.write_text(text, encoding="utf-8", errors="replace")
    numbers = ["0", "-1", "2", "4", "1e9", "x", "", "nan", "99999999999", "1,2", "\x1b[2J", "1" * 400]
    options = ["--json", "--memory", "--all", "--exit-code", "--svg", "--csv", "--trace", "--help", "--typo", "--study"]
    asked = rng.choice(
        [
            ["show", path],
            ["explain", path, *rng.choice(([], ["h.0.fc"], ["\x1b"], ["x" * 3000]))],
            ["simulate", path],
            ["compare", path, path],
            ["schedule", rng.choice((*schedule_names(), "x", "\x1b")), "--ranks", rng.choice(numbers), "--microbatches",
             rng.choice(numbers)],
            ["schedule", "1f1b", rng.choice(("--f", "--b", "--w", "--transfer", "--activation-bytes", "--memory-limit",
             "--virtual-stages", "--active-microbatches")), rng.choice(numbers)],
            ["plan", "none.py:f", "--cluster", rng.choice(("cpu", "x", "none.toml", str(path))), "--batch",
             rng.choice(numbers)],
            ["plan", "none.py:f", "--cluster", "cpu", "--batch", "8", rng.choice(("--pp", "--devices", "--stage-starts",
             "--loss-scope", "--placement-order", "--tokens", "--shard", "--framework")), rng.choice(numbers)],
            ["partition", "none.py:f", "--cluster", "cpu", "--stages", rng.choice(numbers)],
        ]
    )  # fmt: skip
    asked += rng.sample(options, rng.choice((0, 0, 1, 2)))
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # some options name a file to write
        result = CliRunner().invoke(app, [str(word) for word in asked])
    path.unlink()
    said = result.output + result.stderr
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code not in (0, 1, 2):
        return f"exit code {result.exit_code}: {asked}"
    if result.exit_code and not said.strip():
        return f"nothing was said: {asked}"
    if "plan" not in asked[:1] and "Usage" not in said and any(c in said for c in "\x1b\x07\x9b"):
        return f"an escape code: {asked}"
    return ""


KINDS: dict[str, Callable[[random.Random], str]] = {
    "plan files": plan_file,
    "plan text": plan_text,
    "cluster and hardware files": toml_file,
    "schedule files": schedule_file,
    "schedules": schedule_value,
    "arguments": arguments,
    "commands": command,
    "settings": partial(fuzz_training.settings, strange=STRANGE),
    "JAX arguments": partial(fuzz_training.jax_arguments, strange=STRANGE),
}


def run(kind: str, seed: int, number: int) -> tuple[str, str]:
    """One case: ("refused" or "accepted" or "fault", what was said). Raises what is no ShardwrightError."""
    rng = random.Random(f"{seed}/{kind}/{number}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fault = KINDS[kind](rng)
        except sw.ShardwrightError as error:
            return "refused", str(error)
    return ("fault", fault) if fault else ("accepted", "")
