"""Random edits of plan files: each is refused by name, or counted anew to what `plan()` says with its decision pinned.

    python benchmarks/edited_plans.py [--edits 1000] [--seed 1] [--write benchmarks/results/edited_plans.md]

GPT-2, T5, NCF and a residual network in PyTorch and, written apart from these, in Flax: of each four plans on two
clusters. Edits are of the file (a value, a degree, a cut, a layout, a figure, anything anywhere, valid or not) or of
the plan by name (`sw.rescore(plan, microbatch=4)`). The oracle is `sw.plan` of the captured graph with public options:
decision, predicted time and memory, costs, work and programs must be equal (`tests/plan_edits.py`).
"""

import argparse
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims

import shardwright as sw
from tests.plan_edits import Original, judge, random_edit
from tests.twins.models import Graphs, gpt2, ncf, resnet, t5

MODELS: dict[str, Callable[[], Graphs]] = {
    "NCF": lambda: ncf(512, 256, 16, 3),
    "residual network": lambda: resnet(8, 32),
    "GPT-2": lambda: gpt2(3, 32, 2, 16),
    "T5": lambda: t5(1, 32, 2, 16),
}
NODE = sw.Cluster("a100-80gb", devices_per_node=8)
NODES = sw.Cluster("h100", nodes=2, devices_per_node=4)
PLAIN: dict[str, Any] = {"schedule": "1f1b", "virtual_stages": 1}
PLANS: tuple[tuple[sw.Cluster, dict[str, Any]], ...] = (
    (NODE, {"batch": 32, "pp": 2, "dp": 2, "tp": 2, "microbatch": 4, **PLAIN}),
    (NODE, {"batch": 64, "pp": 1, "dp": 4, "tp": 2, "microbatch": 4, "shard": 3, "recompute": "none"}),
    (NODES, {"batch": 64, "pp": 2, "dp": 4, "tp": 1, "microbatch": 2, "recompute": "full", "shard": 3, **PLAIN}),
    (NODE, {"batch": 32, "pp": 2, "dp": 4, "tp": 1, "microbatch": 2, "schedule": "auto", "virtual_stages": 1}),
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
    for name, make in MODELS.items():
        for graph in make():
            originals = [Original.of(graph, cluster, **pins) for cluster, pins in PLANS]
            count = counts.setdefault((name, graph.framework), Counter())
            for _ in range(min(each, left)):
                original = rng.choice(originals)
                outcome = judge(original, random_edit(rng, original))
                count[outcome.kind] += 1
                if outcome.kind == "wrong":
                    wrong.append(
                        f"{name}, {graph.framework}, {original.plan.summary()}: {outcome.edit}: {outcome.said}"
                    )
                    print(wrong[-1], flush=True)
                elif outcome.kind == "refused" and len(outcome.said) < 200:
                    shown[outcome.edit.partition("=")[0].partition("[")[0]] = f"`{outcome.edit}`: {outcome.said}"
            left -= sum(count.values())
            print(f"{name} in {graph.framework}: {dict(count)}", flush=True)
    judged = claims.edited_plans(counts)
    text = _page(counts, wrong, list(shown.values()), asked.seed)
    print(text, judged.verdict(), sep="\n")
    if asked.write:
        asked.write.write_text(text, encoding="utf-8")
    return judged.exit_code


def _page(counts: dict[tuple[str, str], Counter[str]], wrong: list[str], shown: list[str], seed: int) -> str:
    total = sum(counts.values(), Counter())
    lines = [
        "# Random edits of plan files",
        "",
        f"`python benchmarks/edited_plans.py --edits {total.total()} --seed {seed}`: {total.total()} edits, of which "
        f"{total['refused']} were refused by name, {total['rescored']} counted anew to exactly what `plan()` says with "
        f"the decision pinned (decision, predicted time and memory, costs, work, programs), and {total['wrong']} were "
        f"wrong.",
        "",
        "| model | framework | refused | counted anew | wrong |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {framework} | {count['refused']} | {count['rescored']} | {count['wrong']} |"
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
