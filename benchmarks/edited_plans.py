"""Random edits of plan files: each is refused by name, or counted anew to what `plan()` says with its decision pinned.

    python benchmarks/edited_plans.py [--edits 1000] [--seed 1] [--write benchmarks/results/edited_plans.md]

GPT-2, T5, NCF and a residual network in PyTorch and, written apart from these, in Flax: of each eight plans, on one
device, on one node, on two and on unlike nodes, half of them with the names of the twin too. Edits are of the file (a
value, a degree, a cut, a layout, a figure, a key, the devices, anything anywhere, valid or not) or of the plan by name
(`sw.rescore(plan, microbatch=4)`). The oracle is `sw.plan` of the captured graph with public options
(`tests/plan_edit_judge.py`):

- what is rescored has the edit, has everything that was neither edited nor follows from the edit as it was, and equals
  what `plan()` makes of it: decision, time and memory, costs, work, names, programs, devices and training;
- what is refused is refused by name, and `plan()` does not make it either;
- a file whose decision, figures, devices or options were edited says that its figures are old.

Every fourth edit also goes through `show`, `explain`, `simulate`, `compare` and `rescore --set` of the command line:
each refuses the file as one message, or says that its figures are old where they are.
"""

import argparse
import os
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims

import shardwright as sw
from shardwright.core.cluster.hardware import load_link, load_profile
from shardwright.core.cluster.node_group import NodeGroup
from tests.plan_edit_judge import Original, Outcome, judge, judge_commands
from tests.plan_edits import random_edit
from tests.twins.models import Graphs, gpt2, ncf, resnet, t5

COMMANDS_OF = 4
"""Of so many edits one also goes through the command line."""
MODELS: dict[str, Callable[[], Graphs]] = {
    "NCF": lambda: ncf(512, 256, 16, 3),
    "residual network": lambda: resnet(8, 32),
    "GPT-2": lambda: gpt2(3, 32, 2, 16),
    "T5": lambda: t5(2, 32, 2, 16),
}
NODE = sw.Cluster("a100-80gb", devices_per_node=8)
NODES = sw.Cluster("h100", nodes=2, devices_per_node=4)
ONE = sw.Cluster("a100-80gb")
UNLIKE = sw.Cluster.of_groups(
    [NodeGroup(load_profile(name).device, 1, 4, load_link("nvlink3")) for name in ("a100-80gb", "h100")], "ib-hdr200"
)
PLAIN: dict[str, Any] = {"schedule": "1f1b", "virtual_stages": 1}
PLANS: tuple[tuple[sw.Cluster, dict[str, Any]], ...] = (
    (NODE, {"batch": 32, "pp": 2, "dp": 2, "tp": 2, "microbatch": 4, **PLAIN}),
    (NODE, {"batch": 64, "pp": 1, "dp": 4, "tp": 2, "microbatch": 4, "shard": 3, "recompute": "none"}),
    (NODES, {"batch": 64, "pp": 2, "dp": 4, "tp": 1, "microbatch": 2, "recompute": "full", "shard": 3, **PLAIN}),
    (NODE, {"batch": 32, "pp": 2, "dp": 4, "tp": 1, "microbatch": 2, "schedule": "auto", "virtual_stages": 1}),
    (ONE, {"batch": 8, "microbatch": 2}),
    (NODE, {"batch": 32, "microbatch": 2, "pp": 1, "recompute": "full", "kept_units": [1]}),
    (UNLIKE, {"batch": 32, "pp": 2, "dp": 4, "tp": 1, "microbatch": 2, "devices": "all", **PLAIN}),
    (UNLIKE, {"batch": 32, "pp": 2, "dp": 2, "tp": 2, "microbatch": 2, "devices": "all", **PLAIN}),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--edits", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    rng = random.Random(asked.seed)
    counts: dict[tuple[str, str], Counter[str]] = {}
    wrong: list[str] = []
    shown: dict[str, str] = {}
    each = -(-asked.edits // (2 * len(MODELS)))
    left = asked.edits
    folder = Path(tempfile.mkdtemp())
    for name, make in MODELS.items():
        graphs = make()
        for graph, twin in zip(graphs, reversed(graphs), strict=True):
            originals = [
                Original.of(graph, cluster, twin=twin if number % 2 == 0 else None, **pins)
                for number, (cluster, pins) in enumerate(PLANS)
            ]
            count = counts.setdefault((name, graph.framework), Counter())
            for number in range(min(each, left)):
                original = rng.choice(originals)
                edit = random_edit(rng, original)
                outcome = judge(original, edit)
                if outcome.kind != "wrong" and number % COMMANDS_OF == 0:
                    count["commands"] += 1
                    if said := judge_commands(original, edit, folder):
                        outcome = Outcome("wrong", edit.text, said)
                count[outcome.kind] += 1
                if outcome.kind == "wrong":
                    wrong.append(
                        f"{name}, {graph.framework}, {original.plan.summary()}: {outcome.edit}: {outcome.said}"
                    )
                    print(wrong[-1], flush=True)
                elif outcome.kind == "refused" and len(outcome.said) < 200:
                    shown[outcome.edit.partition("=")[0].partition("[")[0]] = f"`{outcome.edit}`: {outcome.said}"
            left -= sum(count.values()) - count["commands"]
            print(f"{name} in {graph.framework}: {dict(count)}", flush=True)
    judged = claims.edited_plans(counts)
    text = _page(counts, wrong, list(shown.values()), asked.seed)
    print(text, judged.verdict(), sep="\n")
    if asked.write:
        asked.write.write_text(text, encoding="utf-8")
    return judged.exit_code


def _page(counts: dict[tuple[str, str], Counter[str]], wrong: list[str], shown: list[str], seed: int) -> str:
    total = sum(counts.values(), Counter())
    edits = sum(total[kind] for kind in ("refused", "rescored", "wrong"))
    lines = [
        "# Random edits of plan files",
        "",
        f"`python benchmarks/edited_plans.py --edits {edits} --seed {seed}`: {edits} edits, of which "
        f"{total['refused']} were refused by name (and `plan()` does not make them either), {total['rescored']} "
        f"counted anew to exactly what `plan()` says with the decision pinned (decision, time and memory, costs, work, "
        f"names, programs, devices), and {total['wrong']} were wrong. {total['commands']} also went through `show`, "
        f"`explain`, `simulate`, `compare` and `rescore --set`, which refused the same and called old figures old.",
        "",
        "| model | framework | refused | counted anew | wrong | through the commands |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {framework} | {count['refused']} | {count['rescored']} | {count['wrong']} "
            f"| {count['commands']} |"
            for (name, framework), count in counts.items()
        ),
        "",
        *(["Wrong:", "", *(f"- {one}" for one in wrong), ""] if wrong else []),
        "Some refusals:",
        "",
        *(f"- {one}" for one in shown[:12]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
