"""Hugging Face classes of every kind with sharded state under a pipeline, against the plain model.

    python benchmarks/sharded_zoo.py                       # 64 classes, 4 ranks: a quarter of an hour on two cores
    python benchmarks/sharded_zoo.py --classes T5ForConditionalGeneration CLIPModel

Two stages of two replicas, parameters, gradients and states sharded over these (ZeRO-3). Tiny models from
configurations as they are, random weights, train mode, dropout on, a microbatch of two samples on each replica: the
loss within 1e-5, every gradient within 1e-4 of its norm plus 1e-6 of the norm of all. One group of processes takes the
classes one by one, and is started again after a failure.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import claims
import class_by_class

from tests.models.shards import REPLICAS, SHARDED, STAGES, sharded_step


def line(result: dict[str, Any]) -> str:
    reasons = "; ".join(" ".join(reason.split())[:160] for reason in result["reasons"][:3])
    return f"| {result['class']} | {'yes' if result['equal'] else 'NO'} | {result['mode']} | {reasons} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--classes", nargs="+", default=list(SHARDED))
    parser.add_argument("--json", type=Path, help="where all results go, a line of JSON for each class")
    given = parser.parse_args()
    print("| class | equal | run | what differs |\n|---|---|---|---|", flush=True)
    results = class_by_class.run(sharded_step, STAGES * REPLICAS, given.classes, given.json, line)
    print(f"\n{sum(result['equal'] for result in results)} of {len(given.classes)} equal")
    judged = claims.sharded_zoo(results, given.classes, tuple(given.classes) == SHARDED)
    print("\n" + judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
