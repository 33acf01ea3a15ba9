"""Scripts for Hugging Face's Trainer, Accelerate and Lightning, over splits on 2 and 4 CPU ranks.

    python benchmarks/training_loops.py [--loop trainer] [--model gpt2] [--split "pp 2 × dp 2"] [--out results.md]

The scripts in `benchmarks/loops` are for one process. The changes below are made to them, and counted by the lines that
`diff` removes and adds. Each runs 20 updates over two batches each, with evaluation and clipped gradients, on one
process and over each split; what is logged (losses, norms of gradients, validation) must be the one process's within
1e-5. Then it goes on from the checkpoint that one process wrote at the tenth update: again what one process does from
there. And one process goes on from the last split's, as it does from its own.
"""

import argparse
import difflib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOOPS = Path(__file__).resolve().parent / "loops"
BATCH = 8
NEAR = 1e-5


@dataclass(frozen=True)
class Split:
    name: str
    ranks: int
    replicas: int
    """The ranks that take different batches, without those of the tensor axis."""
    keys: dict[str, Any]


SPLITS = (
    Split("pp 2", 2, 1, {"pipeline_parallel_degree": 2, "microbatches": 4}),
    Split("tp 2", 2, 1, {"tensor_parallel_degree": 2, "microbatches": 2}),
    Split("sharded 2", 2, 2, {"sharded_data_parallel_degree": 2, "microbatches": 2}),
    Split("pp 2 × dp 2", 4, 2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    Split("pp 2 × tp 2", 4, 1, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "microbatches": 2}),
    Split("sharded 4", 4, 4, {"sharded_data_parallel_degree": 4, "microbatches": 2}),
)
CHANGES = {
    "trainer": (),  # SageMaker's names and configuration are given by the command that starts it
    "accelerate": (
        ("from accelerate import Accelerator",
         "import shardwright.torch as sw\nfrom shardwright.compat.accelerate import Accelerator"),
        ("accelerator = Accelerator(gradient", "accelerator = Accelerator({keys}, gradient"),
        ("def train_step(", "@sw.step\ndef train_step("),
        ("def predict(", "@sw.step\ndef predict("),
    ),
    "lightning": (
        ("import loop_models\n", "import loop_models\nfrom shardwright.compat.lightning import SplitStrategy\n"),
        ("devices=1,", "devices={ranks}, strategy=SplitStrategy({keys}),"),
    ),
}  # fmt: skip


def configuration(loop: str, split: Split) -> dict[str, Any]:
    """The keys of a split: what SageMaker's launcher gives `Trainer`, or what the loop's own class takes."""
    keys = {**split.keys, **({"ddp": True} if split.replicas > 1 else {})}
    if loop == "trainer":
        return {"partitions": keys.pop("pipeline_parallel_degree", 1), **keys, "prescaled_batch": True}
    return keys


def changed(loop: str, split: Split) -> tuple[str, int]:
    """The script over a split, and the lines that `diff` removes and adds."""
    plain = (LOOPS / f"{loop}_loop.py").read_text(encoding="utf-8")
    text = plain
    for old, new in CHANGES[loop]:
        if text.count(old) != 1:
            raise SystemExit(f"{loop}: {old!r} is there {text.count(old)} times")
        text = text.replace(
            old, new.replace("{keys}", repr(configuration(loop, split))).replace("{ranks}", str(split.ranks))
        )
    lines = [*difflib.unified_diff(plain.splitlines(), text.splitlines(), n=0, lineterm="")][2:]
    return text, sum(line[0] in "+-" for line in lines)


def run(script: Path, command: list[str], arguments: list[str], folder: Path, **environment: str) -> dict[str, Any]:
    """What a run logs. Raises RuntimeError where it fails."""
    folders = [str(ROOT), str(ROOT / "tests" / "torch" / "workers"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *command, str(script), *arguments], capture_output=True, text=True, timeout=900, check=False,
        env=os.environ | environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)},
    )  # fmt: skip
    if done.returncode != 0:
        said = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line and "Child" not in line]
        raise RuntimeError(said[0] if said else (done.stdout + done.stderr)[-300:])
    found: dict[str, Any] = json.loads(folder.with_suffix(".json").read_text(encoding="utf-8"))
    return found


def over(loop: str, split: Split, kind: str, folder: Path, *resume: str) -> dict[str, Any]:
    """What the changed script logs over a split."""
    script = folder.with_suffix(".py")
    script.write_text(changed(loop, split)[0], encoding="utf-8")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(split.ranks)]
    environment = {"REPLICAS": str(split.replicas)}
    if loop == "trainer":
        environment["SM_HP_MP_PARAMETERS"] = json.dumps(configuration(loop, split))
        environment["SM_FRAMEWORK_PARAMS"] = '{"sagemaker_mpi_enabled": true}'
        command += ["-m", "shardwright.compat"]
    return run(script, command, [kind, str(folder), str(BATCH // split.replicas), *resume], folder, **environment)


def alone(loop: str, kind: str, folder: Path, *resume: str) -> dict[str, Any]:
    return run(LOOPS / f"{loop}_loop.py", [], [kind, str(folder), str(BATCH), *resume], folder)


def distance(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest relative distance of a figure. Raises ValueError where their numbers differ."""
    pairs = [pair for key in wanted for pair in zip(found[key], wanted[key], strict=True)]
    return max(abs(one - other) / abs(other) if math.isfinite(one) else math.inf for one, other in pairs)


def rows(loop: str, kind: str, splits: list[Split], where: Path) -> Iterator[tuple[str, str, str]]:
    """Of each split: its name, and what came of training and of resuming."""
    plain = alone(loop, kind, where / "plain")
    at = {"trainer": "plain/checkpoint-10", "lightning": "plain/step=10.ckpt", "accelerate": "plain/state"}[loop]
    resumed = alone(loop, kind, where / "plain_resumed", str(where / at))
    for number, split in enumerate(splits):
        said = []
        for name, wanted, resume in ((f"{number}", plain, ()), (f"{number}_resumed", resumed, (str(where / at),))):
            try:
                far = distance(over(loop, split, kind, where / name, *resume), wanted)
                said.append(f"{far:.1e}" if far <= NEAR else f"OTHER FIGURES: {far:.1e}")
            except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
                said.append(f"STOPS: {str(error)[:300]}")
        yield split.name, said[0], said[1]
    if "STOPS" not in said[0]:
        try:
            found = alone(loop, kind, where / "back", str(where / at.replace("plain", f"{number}")))
            far = distance(found, resumed)
            yield "one process, resumed", "", f"{far:.1e}" if far <= NEAR else f"OTHER FIGURES: {far:.1e}"
        except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
            yield "one process, resumed", "", f"STOPS: {str(error)[:300]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", action="append", choices=[*CHANGES])
    parser.add_argument("--model", action="append", choices=["gpt2", "bert"])
    parser.add_argument("--split", action="append", choices=[split.name for split in SPLITS])
    parser.add_argument("--out", type=Path, default=None, help="a file for the table")
    args = parser.parse_args()
    splits = [split for split in SPLITS if args.split is None or split.name in args.split]
    lines = [
        "| loop | model | split | ranks | lines changed | from one process | resumed |",
        "|---|---|---|---|---|---|---|",
    ]
    is_well = True
    for loop in args.loop or CHANGES:
        for kind in args.model or ("gpt2", "bert"):
            with tempfile.TemporaryDirectory() as folder:
                for name, trained, resumed in rows(loop, kind, splits, Path(folder)):
                    count = changed(loop, splits[0])[1] if trained else ""
                    lines.append(f"| {loop} | {kind} | {name} | {count} | {trained} | {resumed} |")
                    print(lines[-1], flush=True)
                    is_well &= "S: " not in trained + resumed
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
