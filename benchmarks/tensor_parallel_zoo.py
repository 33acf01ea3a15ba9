"""Hugging Face classes of every kind on a tensor axis against the plain model: the result, the share of parameters that
lies in pieces, and why the rest is whole.

    python benchmarks/tensor_parallel_zoo.py                       # 44 classes, 2 ranks: some minutes on two cores
    python benchmarks/tensor_parallel_zoo.py --ranks 4 --classes T5ForConditionalGeneration CLIPModel

Tiny models from configurations as they are, random weights, train mode, dropout on, two microbatches of two samples:
the loss within 1e-5, every gradient within 1e-4 of its norm plus 1e-6 of the norm of all. One group of processes takes
the classes one by one, and is started again after a failure.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import claims
import class_by_class

from tests.models.pieces import CLASSES, tensor_step

SHOWN = 3
"""Reasons in the table; the file that --json names has all."""


def line(result: dict[str, Any]) -> str:
    reasons = [" ".join(reason.split())[:160] for reason in result["reasons"]]
    more = f"; and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
    equal, split = "yes" if result["equal"] else "NO", result.get("split", 0.0)
    return f"| {result['class']} | {equal} | {result['mode']} | {split:.1%} | {'; '.join(reasons[:SHOWN])}{more} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--classes", nargs="+", default=list(CLASSES))
    parser.add_argument("--json", type=Path, help="where all results go, a line of JSON for each class")
    arguments = parser.parse_args()
    print("| class | equal | run | parameters in pieces | why the rest is whole |\n|---|---|---|---|---|", flush=True)
    results = class_by_class.run(tensor_step, arguments.ranks, arguments.classes, arguments.json, line)
    results = [{"split": 0.0} | result for result in results]
    equal = sum(result["equal"] for result in results)
    shares = sorted(result["split"] for result in results)
    print(f"\n{equal} of {len(arguments.classes)} equal; median share of parameters in pieces "
          f"{shares[len(shares) // 2]:.1%}")  # fmt: skip
    judged = claims.tensor_parallel_zoo(results, arguments.classes, tuple(arguments.classes) == CLASSES)
    print("\n" + judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
