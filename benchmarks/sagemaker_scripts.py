"""AWS's public training scripts for SageMaker's model-parallel library, run as they are, on CPUs and small.

    git clone https://github.com/aws/amazon-sagemaker-examples
    pip install h5py einops humanize requests        # which the scripts import
    python benchmarks/sagemaker_scripts.py amazon-sagemaker-examples [--only gpt-neox] [--split "pp 2"] [--out FILE.md]

No line of a script is changed: it is started by ``python -m shardwright.compat``, with small sizes by its own arguments
and with small data; `sagemaker_stand_ins` has what stands in for packages that need a GPU or a cloud. Each runs on one
process, and under splits on 2 and 4 processes with Gloo; a split passes where every loss that the script logs, in
training and validation, is the one process's within 1e-4 (scripts print float32), in 16 bits within 2e-2. Where one
stops, the table has the line of the script and the error. The scripts for MNIST and BERT, of the repository's history,
are told that CUDA is available, and take their configuration from the environment, as the launcher gave it.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import sagemaker_stand_ins  # noqa: E402

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
FORM = {number: ["--use_distributed_transformer", str(int(number))] for number in (False, True)}
MICROBATCHES = ("--microbatches", "2")
"""Dropout, which the script for T5 has whatever its arguments, draws for each microbatch: one process has as many."""
KINDS = ("Loss", "Validation loss", "Average loss")
LOSS = re.compile(rf"(?:Batch (\d+) )?({'|'.join(KINDS[::-1])}): ([-\d.einfa]+)")


@dataclass(frozen=True)
class Split:
    name: str
    processes: int
    arguments: tuple[str, ...]
    near: float = 1e-4
    distributed: bool = False
    """Whether the script asks for SageMaker's distributed transformer."""
    keys: dict[str, Any] | None = None
    """The configuration that the launcher gives, for scripts that call ``smp.init()`` without one."""
    copies: int = 1
    """The replicas, each of which is given the same data."""


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

CONTINUED = Split(
    "pp 4, resumed from pp 2's checkpoint", 4,
    ("--resume_from_checkpoint", "1", "--resume_step", "2", "--steps_this_run", "-96", "--s3_checkpoint_uri", "s3://b/c"),
    keys={"partitions": 4},
)  # fmt: skip
"""The script for BERT adds 100 to the steps of a run that resumes. One process resumes the same checkpoint."""
_BERT = (
    "--input_dir {where}/bert --config_file {where}/bert/config.json --output_dir {folder} --max_predictions_per_seq 5 "
    "--train_batch_size 4 --learning_rate 1e-3 --max_steps 4 --steps_this_run 4 --do_train 1 --smp 1 "
    "--disable_progress_bar 1 --num_microbatches 2"
)
WITH_TRAINER = "train_gptj_smp_script.py"
"""Its class derives from Hugging Face's `Trainer`, of releases 4."""
_GPTJ = (
    "--model_name_or_path {where}/gptj --dataset_name {where}/text --do_train --max_steps 20 --lr 1e-3 --same_seed 1 "
    "--per_device_train_batch_size 4 --microbatches 2 --ddp 1 --output_dir {folder}"
)
BY_ENVIRONMENT: dict[str, tuple[tuple[str, ...], tuple[Split, ...]]] = {
    "pt_mnist.py": ((), (
        Split("pp 2", 2, (), keys={"partitions": 2}),
        Split("pp 2 × dp 2", 4, (), keys={"partitions": 2, "ddp": True}, copies=2),
        Split("tp 2", 2, (), keys={"partitions": 1, "tensor_parallel_degree": 2, "ddp": True}, copies=2),
    )),
    "sagemaker_smp_pretrain.py": (tuple(_BERT.split()), (
        Split("pp 2", 2, (), keys={"partitions": 2}),
        Split("pp 4", 4, (), keys={"partitions": 4}),
        Split("pp 2, recompute", 2, ("--checkpoint_activations", "1"), keys={"partitions": 2}),
        Split("pp 2, layers in a row", 2, ("--use_sequential", "1"), keys={"partitions": 2}),
        CONTINUED,
    )),
    WITH_TRAINER: (tuple(_GPTJ.split()), (
        Split("pp 2", 2, ("--pipeline_parallel_degree", "2"), keys={"partitions": 2}),
        Split("pp 4", 4, ("--pipeline_parallel_degree", "4"), keys={"partitions": 4}),
    )),
}  # fmt: skip
"""Of scripts that take their configuration from the environment, by name: arguments, and splits."""


@dataclass(frozen=True)
class Outcome:
    losses: dict[tuple[int, str], float]
    """By the batch that the script names, or else their number among those of a kind, and the kind."""
    stopped: str
    """The line of the script that stopped it, and the error; nothing where it came to its end."""


Row = tuple[str, Outcome, float | None, float]
"""A split, what came of it, the largest distance of a loss from that on one process, and what is allowed."""


def scripts(folder: Path) -> list[Path]:
    """The training scripts for the library's first version, in any folder below, one of those with the same text."""
    found: dict[str, Path] = {}
    for path in sorted(path for name in ("train*.py", *BY_ENVIRONMENT) for path in folder.rglob(name)):
        text = path.read_text(encoding="utf-8", errors="replace")
        if "import smdistributed.modelparallel.torch" in text:
            found.setdefault(text, path)
    return list(found.values())


def run(script: Path, processes: int, arguments: list[str], where: Path, keys: dict[str, Any] | None = None) -> Outcome:
    packages, commands = sagemaker_stand_ins.packages(where)
    sagemaker_stand_ins.hub(where, script)
    environment = os.environ | {
        "HF_HOME": str(where / "hub"), "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(packages), os.environ.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(commands), os.environ.get("PATH", "")]),
        "OMP_NUM_THREADS": "1", "SM_NUM_GPUS": str(processes), "SM_OUTPUT_DATA_DIR": str(where),
        "SM_MODEL_DIR": str(where), "SM_CHANNEL_TRAIN": str(where / "train"), "SM_CHANNEL_TEST": str(where / "test"),
        "SM_MODULE_DIR": "s3://bucket/job/source", "SM_CURRENT_HOST": "algo-1",
    }  # fmt: skip
    begin, at, told = script.name, script.parent, []
    if keys is not None:
        environment["SM_HP_MP_PARAMETERS"] = json.dumps(keys)
        if script.name == WITH_TRAINER:
            environment["SM_FRAMEWORK_PARAMS"] = '{"sagemaker_mpi_enabled": true}'
        begin, at, told = str(script), where / "run", ["--cuda-is-available"]
        at.mkdir(exist_ok=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m",
        "shardwright.compat", *told, begin, *arguments,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=at, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=900)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(Exception):
            process.communicate(timeout=10)
        return Outcome({}, "it ran longer than 15 minutes")
    count: Counter[str] = Counter()
    losses: dict[tuple[int, str], float] = {}
    for batch, kind, value in LOSS.findall(text):
        losses[int(batch or count[kind]), kind] = float(value)
        count[kind] += 1
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


def cases(script: Path, where: Path, splits: set[str]) -> Iterator[Row]:
    """The rows of a script that takes its configuration as arguments."""
    own = next((more for part, more in OF_SCRIPT.items() if part in script.parent.name), [])
    alone: dict[tuple[bool, tuple[str, ...]], Outcome] = {}

    def on_one_process(distributed: bool, microbatches: tuple[str, ...]) -> Outcome:
        if (distributed, microbatches) not in alone:
            given = [*SMALL, *own, *FORM[distributed], *microbatches, "--checkpoint-dir", str(where / "none")]
            alone[distributed, microbatches] = run(script, 1, given, where)
        return alone[distributed, microbatches]

    yield "one process", on_one_process(False, ()), None, 0.0
    yield "one process, distributed transformer", on_one_process(True, ()), None, 0.0
    for split in (*SPLITS, RESUMED):
        if split.name not in splits:
            continue
        plain = on_one_process(split.distributed, MICROBATCHES if "--microbatches" in split.arguments else ())
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
        # Replicas log the loss of their own samples: there that of the validation, which is of all, is compared.
        kinds = ("Validation loss",) if "--train_batch_size" in split.arguments else KINDS
        yield split.name, outcome, None if outcome.stopped else distance(outcome, plain, kinds), split.near


def by_environment(script: Path, where: Path, splits: set[str]) -> Iterator[Row]:
    """The rows of a script whose configuration is that of the environment."""
    arguments, known = BY_ENVIRONMENT[script.name]

    def outcome(split: Split, *more: str, folder: str = "") -> Outcome:
        shutil.rmtree(where / "data", ignore_errors=True)
        sagemaker_stand_ins.images(where / "data", split.copies)
        folder = str(where / re.sub(r"\W+", "_", folder or split.name))
        given = [part.format(where=where, folder=folder) for part in (*arguments, *split.arguments, *more)]
        return run(script, split.processes, given, where, {"microbatches": 2, **(split.keys or {})})

    def row(split: Split, found: Outcome, plain: Outcome) -> Row:
        far = None if found.stopped else distance(found, plain, copies=split.copies)
        return split.name, found, far, split.near

    alone = Split("one process", 1, (), keys={"partitions": 1})
    plain = outcome(alone)
    yield alone.name, plain, None, 0.0
    for split in known:
        if split.name not in splits or plain.stopped:
            continue
        if split is not CONTINUED:
            yield row(split, outcome(split), plain)
            continue
        begun = outcome(known[0], "--steps_this_run", "2", folder=split.name)
        again = begun if begun.stopped else outcome(alone, *split.arguments, folder=split.name)
        yield row(split, again if again.stopped else outcome(split), again)


def distance(found: Outcome, wanted: Outcome, kinds: tuple[str, ...] = KINDS, copies: int = 1) -> float:
    """The largest relative distance of a loss of these kinds from the plain run's. Each of ``copies`` replicas logs the
    average loss over the test set."""
    pairs = [
        (value, wanted.losses[number // copies if kind == "Average loss" else number, kind])
        for (number, kind), value in found.losses.items()
        if kind in kinds
    ]
    return max(abs(one - other) / abs(other) if math.isfinite(one) else math.inf for one, other in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a clone of aws/amazon-sagemaker-examples, or folders of it")
    parser.add_argument("--only", default="", help="scripts whose path has this")
    parser.add_argument("--split", action="append", help="this split alone (several may be given)")
    parser.add_argument("--out", type=Path, default=None, help="a file for the table")
    args = parser.parse_args()
    known = {one.name: one for _, splits in BY_ENVIRONMENT.values() for one in splits}
    known |= {one.name: one for one in (*SPLITS, RESUMED)}
    if unknown := set(args.split or ()) - set(known):
        parser.error(f"there is no split {sorted(unknown)}; there are {list(known)}")
    splits = set(args.split or known)
    lines = ["| script | split | losses | |", "|---|---|---|---|"]
    passed = total = 0
    for script in scripts(args.folder.resolve()):
        if args.only not in str(script):
            continue
        with tempfile.TemporaryDirectory() as folder:
            sagemaker_stand_ins.tokens(Path(folder))
            sagemaker_stand_ins.pretraining(Path(folder))
            if script.name == WITH_TRAINER:
                sagemaker_stand_ins.language_model(Path(folder))
            rows = by_environment if script.name in BY_ENVIRONMENT else cases
            for name, outcome, far, near in rows(script, Path(folder), splits):
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
