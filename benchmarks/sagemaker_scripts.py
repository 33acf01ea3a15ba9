"""AWS's public training scripts for SageMaker's model-parallel library, run as they are, on CPUs and small.

    git clone https://github.com/aws/amazon-sagemaker-examples
    pip install h5py einops humanize        # which the scripts import
    python benchmarks/sagemaker_scripts.py amazon-sagemaker-examples [--only gpt-neox] [--out results.md]

No line of a script is changed: it is started by ``python -m shardwright.compat``, with small sizes by its own arguments
and a few hundred lines of Python's own documentation as data. Each runs on one process, and under splits on 2 and 4
processes with Gloo; a split passes where every loss that the script logs, in training and validation, is the one
process's within 1e-4 (scripts print float32), in 16 bits within 2e-2. Where one stops, the table has the line of the
script and the error.

Of ``flash_attn``, which needs a GPU, there is a stand-in that raises where it is used.
"""

import argparse
import contextlib
import gzip
import json
import os
import pydoc_data.topics
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

_SIZES = (
    "--max_steps 4 --train_batch_size 4 --val_batch_size 4 --max_context_width 32 --vocab_size 100 --hidden_width 32 "
    "--num_layers 4 --num_heads 4 --lr 0.001 --resid_pdrop 0 --embd_pdrop 0 --attn_pdrop 0 --summary_first_pdrop 0 "
    "--validation_freq 2 --validation_batches 2 --checkpoint_freq 100 --use_adamw 1 --same_seed 1 "
    "--grad_clip 1e9 --lr_decay_iters 4"
)
SMALL = _SIZES.split()
OF_SCRIPT = {
    "neox": ["--model_type", "gpt_neox"],
    "t5": ["--model_type", "flan_t5", "--flash_attention", "0"],
    "gpt-j": ["--zipped_data", "1", "--hidden_width", "256"],  # its rotary dimensions are 64
    "falcon": ["--num_heads_kv", "2", "--flash_attention", "0", "--hidden_width", "256"],  # heads of 64
}
"""Arguments of scripts for other models, by a part of their folder's name."""
HUB, COMMIT = "tiiuae/falcon-7b", "0" * 40
"""The model of Hugging Face's hub whose configuration the script for Falcon loads, and a commit of it."""
FORM = {number: ["--use_distributed_transformer", str(int(number))] for number in (False, True)}
MICROBATCHES = ("--microbatches", "2")
"""Dropout, which the script for T5 has whatever its arguments, draws for each microbatch: one process has as many."""
LOSS = re.compile(r"Batch (\d+) (Validation loss|Loss): ([-\d.einfa]+)")


@dataclass(frozen=True)
class Split:
    name: str
    processes: int
    arguments: tuple[str, ...]
    near: float = 1e-4
    distributed: bool = False
    """Whether the script asks for SageMaker's distributed transformer."""


SPLITS = (
    Split("pp 2", 2, ("--pipeline_parallel_degree", "2", *MICROBATCHES)),
    Split("tp 2", 2, ("--tensor_parallel_degree", "2")),
    Split("pp 2 × tp 2", 4, (
        "--pipeline_parallel_degree", "2", "--tensor_parallel_degree", "2", *MICROBATCHES,
    )),
    Split("pp 2, bf16", 2, ("--pipeline_parallel_degree", "2", *MICROBATCHES, "--bf16", "1"), 2e-2),
    Split("pp 2, by hand", 2, (
        "--pipeline_parallel_degree", "2", *MICROBATCHES, "--manual_partition", "1",
        "--activation_checkpointing", "0",
    )),
    Split("tp 2, distributed transformer", 2, ("--tensor_parallel_degree", "2"), distributed=True),
    Split(
        "sharded 2", 2, ("--sharded_data_parallel_degree", "2", "--train_batch_size", "2", "--val_batch_size", "2"),
        distributed=True,
    ),
)  # fmt: skip
RESUMED = Split("tp 2, resumed from pp 2's checkpoint", 2, ("--tensor_parallel_degree", "2", *MICROBATCHES))


@dataclass(frozen=True)
class Outcome:
    losses: dict[tuple[str, str], float]
    stopped: str
    """The line of the script that stopped it, and the error; nothing where it came to its end."""


def data(folder: Path) -> None:
    """Files of tokens as the scripts read them."""
    text = " ".join(pydoc_data.topics.topics.values()).encode()
    for name in ("train", "test"):
        (folder / name).mkdir()
        for part in range(2):
            with gzip.open(folder / name / f"part{part}.json.gz", "wt") as out:
                for line in range(64):
                    at = random.Random(f"{name}{part}{line}").randrange(len(text) - 40)
                    tokens = [byte % 97 for byte in text[at : at + 32]]
                    out.write(json.dumps({"input_ids": tokens, "attention_mask": [1] * 32}) + "\n")


def hub(folder: Path, script: Path) -> None:
    """A cache of Hugging Face's hub with a small configuration of Falcon, of the class beside the script."""
    cached = folder / "hub" / "hub" / f"models--{HUB.replace('/', '--')}"
    source = script.parent / "configuration_RW.py"
    if cached.exists() or not source.exists():
        return
    snapshot = cached / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    (snapshot / source.name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    (snapshot / "config.json").write_text(json.dumps({
        "model_type": "RefinedWeb", "auto_map": {"AutoConfig": "configuration_RW.RWConfig"}, "vocab_size": 100,
        "parallel_attn": True, "bias": False, "new_decoder_architecture": True,
    }))  # fmt: skip


def scripts(folder: Path) -> list[Path]:
    """The training scripts for the library's first version, in any folder below, one of those with the same text."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("train*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if "import smdistributed.modelparallel.torch" in text:
            found.setdefault(text, path)
    return list(found.values())


def run(script: Path, processes: int, arguments: list[str], where: Path) -> Outcome:
    stand_in = where / "packages" / "flash_attn"
    if not stand_in.exists():
        stand_in.mkdir(parents=True)
        (stand_in / "__init__.py").touch()
        (stand_in / "flash_attention.py").write_text(
            "class FlashAttention:\n    def __init__(self, *_, **__):\n        raise RuntimeError('it needs a GPU')\n"
        )
    hub(where, script)
    environment = os.environ | {
        "HF_HOME": str(where / "hub"), "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(where / "packages"), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1", "SM_NUM_GPUS": str(processes), "SM_OUTPUT_DATA_DIR": str(where),
        "SM_MODEL_DIR": str(where), "SM_CHANNEL_TRAIN": str(where / "train"), "SM_CHANNEL_TEST": str(where / "test"),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m",
        "shardwright.compat", script.name, *arguments,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=script.parent, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        errors="replace",
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=900)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(Exception):
            process.communicate(timeout=10)
        return Outcome({}, "it ran longer than 15 minutes")
    losses = {(step, kind): float(value) for step, kind, value in LOSS.findall(text)}
    return Outcome(losses, "" if process.returncode == 0 and losses else stop_of(text, script))


def stop_of(text: str, script: Path) -> str:
    """The innermost line of the script's own files in the first traceback, and the error."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in text.splitlines()]
    own = ""
    for line in lines:
        at = re.match(r'\s*File "([^"]+)", line (\d+)', line)
        if at is not None and (at[1] == script.name or at[1].startswith(str(script.parent))):
            own = f"{Path(at[1]).name}:{at[2]}"
        failed = re.match(r"([\w.]*(?:Error|Exception|Warning|Exit))\b:? ?(.*)", line)
        if failed is not None and own:
            return f"{own}: {failed[1].rpartition('.')[2]}: {failed[2]}"[:300]
    return own or "it ended without a loss"


def cases(script: Path, where: Path) -> list[tuple[str, Outcome, float | None, float]]:
    """Of each split: what came of it, the largest distance of a loss from that on one process, and what is allowed."""
    own = next((more for part, more in OF_SCRIPT.items() if part in script.parent.name), [])
    alone = {
        (distributed, microbatches): run(
            script, 1, [*SMALL, *own, *FORM[distributed], *microbatches, "--checkpoint-dir", str(where / "none")], where
        )
        for distributed, microbatches in ((False, ()), (False, MICROBATCHES), (True, ()))
    }
    found: list[tuple[str, Outcome, float | None, float]] = [("one process", alone[False, ()], None, 0.0)]
    found.append(("one process, distributed transformer", alone[True, ()], None, 0.0))
    for split in (*SPLITS, RESUMED):
        plain = alone[split.distributed, MICROBATCHES if "--microbatches" in split.arguments else ()]
        if plain.stopped:
            continue
        folder = where / re.sub(r"\W+", "_", f"{script.parent.name} {split.name}")
        arguments = [*SMALL, *own, *FORM[split.distributed], *split.arguments, "--checkpoint-dir", str(folder)]
        if split is RESUMED:
            first = run(script, 2, [*SMALL, *own, *FORM[False], *SPLITS[0].arguments, "--checkpoint-dir", str(folder),
                                    "--checkpoint_freq", "2", "--max_steps", "2"], where)  # fmt: skip
            outcome = first if first.stopped else run(script, 2, [*arguments, "--load_partial", "1"], where)
        else:
            outcome = run(script, split.processes, arguments, where)
        far = None if outcome.stopped else distance(outcome, plain, sharded="--train_batch_size" in split.arguments)
        found.append((split.name, outcome, far, split.near))
    return found


def distance(found: Outcome, wanted: Outcome, *, sharded: bool) -> float:
    """The largest relative distance of a loss from the plain run's. Replicas log the loss of their own samples: there
    that of the validation, which is of all, is compared."""
    kinds = ("Validation loss",) if sharded else ("Loss", "Validation loss")
    pairs = [(value, wanted.losses[key]) for key, value in found.losses.items() if key[1] in kinds]
    return max(abs(one - other) / abs(other) for one, other in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a clone of aws/amazon-sagemaker-examples, or folders of it")
    parser.add_argument("--only", default="", help="scripts whose path has this")
    parser.add_argument("--out", type=Path, default=None, help="a file for the table")
    args = parser.parse_args()
    lines = ["| script | split | losses | |", "|---|---|---|---|"]
    passed = total = 0
    for script in scripts(args.folder.resolve()):
        if args.only not in str(script):
            continue
        with tempfile.TemporaryDirectory() as folder:
            data(Path(folder))
            for name, outcome, far, near in cases(script, Path(folder)):
                is_well = not outcome.stopped and (far is None or far <= near)
                total, passed = total + 1, passed + is_well
                said = outcome.stopped or ("" if far is None else f"{far:.1e} from one process")
                verdict = "pass" if is_well else "stops" if outcome.stopped else "OTHER LOSSES"
                lines.append(f"| {script.parent.name.strip()}/{script.name} | {name} | {verdict} | {said} |")
                print(lines[-1], flush=True)
    print(f"{passed} of {total} pass")
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if total and passed == total else 1


if __name__ == "__main__":
    sys.exit(main())
