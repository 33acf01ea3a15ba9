"""Every model class of `transformers` that can be built tiny, split over 2 and 4 ranks, against the plain model.

    python benchmarks/zoo.py                                   # all classes, 2 and 4 ranks: hours on two cores
    python benchmarks/zoo.py --ranks 2 --classes T5ForConditionalGeneration WhisperForConditionalGeneration
    python benchmarks/zoo.py --table                           # of what the result files hold so far
    python benchmarks/zoo.py --tracer --ranks                  # what torch.distributed.pipelining.pipeline() splits

Models are made from configurations with random weights, in train mode, dropout on, with the configuration as it is.
One step of two microbatches is compared with the plain model in one process, which draws its dropout masks by the same
rule: the loss within 1e-5, every gradient within 1e-4 of its norm plus 1e-6 of the norm of all, None where the plain
model has None. Where gradients are off, the plain model is run twice more: its own may differ from run to run, so that
there is nothing to compare with; or its rounding may be beyond the bound, which float64 tells, and then the comparison
is made in float64. The plan is made as for users, by capture and search for a CPU cluster.

One process group per number of ranks takes the classes one by one; it is started again after a failure, so that no
class ends the run. Results go to JSON lines in --out, and a run goes on where the last one ended.

Torch's tracer gets the same models in evaluation mode, without labels and caches, and splits them in two where our plan
for two ranks does; where that is no module of its graph, at one of the next units. It has split a model when there are
two stages that together give what the model gives.
"""

import argparse
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import claims

from benchmarks.zoo_processes import serve
from tests.comparison import Comparison
from tests.models.own import OWN

TASKS = (
    "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "SPEECH_SEQ_2_SEQ", "CTC", "RNNT", "TDT",
    "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM", "AUDIO_CLASSIFICATION", "AUDIO_FRAME_CLASSIFICATION", "AUDIO_XVECTOR",
    "VIDEO_CLASSIFICATION", "DEPTH_ESTIMATION", "OBJECT_DETECTION", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION",
    "INSTANCE_SEGMENTATION", "MASKED_IMAGE_MODELING", "CAUSAL_IMAGE_MODELING", "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "ZERO_SHOT_OBJECT_DETECTION", "VISUAL_QUESTION_ANSWERING", "DOCUMENT_QUESTION_ANSWERING",
    "TABLE_QUESTION_ANSWERING", "TIME_SERIES_CLASSIFICATION", "TIME_SERIES_PREDICTION", "TIME_SERIES_REGRESSION",
    "IMAGE_TEXT_TO_TEXT", "PRETRAINING", "KEYPOINT_DETECTION", "KEYPOINT_MATCHING", "IMAGE_MATTING", "IMAGE_TO_IMAGE",
    "POSE_ESTIMATION", "TABLE_RECOGNITION", "TEXT_RECOGNITION", "NORMAL_ESTIMATION", "POINTMAP_ESTIMATION", "DECISION",
)  # fmt: skip


def all_classes() -> dict[str, str]:
    """Class → the task under which `transformers` lists it first."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for task in TASKS:
        for names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
            for name in names if isinstance(names, (tuple, list)) else (names,):
                found.setdefault(name, task)
    return found


# What the parent does -------------------------------------------------------------------------------------------------


class Group:
    """Processes that serve one role, one after the other's failure."""

    def __init__(self, role: str, size: int, ranks: Sequence[int]) -> None:
        self.role, self.size, self.ranks = role, size, ranks
        self.processes: list[subprocess.Popen[str]] = []
        self.answers: list[queue.Queue[str | None]] = []

    def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.size):
            environment = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.size), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            if self.role != "split":
                for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                    environment.pop(key)
            process = subprocess.Popen(
                [sys.executable, __file__, "--serve", self.role, "--ranks", *map(str, self.ranks)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
            )  # fmt: skip
            answers: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=_read, args=(process, answers), daemon=True).start()
            self.processes.append(process)
            self.answers.append(answers)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes, self.answers = [], []

    def ask(self, name: str, folder: Path, timeout_s: float, more: str = "") -> list[dict[str, Any]]:
        """What every process answers to a class, with a word ``more`` for the process. One that dies, hangs or fails
        ends the group, which starts anew for the next."""
        if not self.processes:
            self.start()
        found = []
        until = time.monotonic() + timeout_s
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.write(f"{name} {folder} {more}\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass
        for answers in self.answers:
            try:
                line = answers.get(timeout=max(0.1, until - time.monotonic()))
                found.append({"error": "the process died"} if line is None else json.loads(line))
            except queue.Empty:
                found.append({"error": f"no answer within {timeout_s:.0f} s"})
        if any("error" in answer for answer in found):
            self.stop()
        return found


def _read(process: "subprocess.Popen[str]", answers: "queue.Queue[str | None]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(line)
    answers.put(None)


def merged(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of what all ranks found: the first error, or the worst figures."""
    errors = [a["error"] for a in answers if "error" in a]
    if errors:
        first = [e for e in errors if "Peer" not in e and "answer" not in e]
        return {"exact": False, "reason": (first or errors)[0]}
    same = Comparison.of_ranks(a["same"] for a in answers)
    off = same.failures()
    return {
        "exact": not off, "reason": "; ".join(off[:3]), "mode": answers[0]["mode"], "worst": same.worst,
        "elements": [a["elements"] for a in answers], "time_s": max(a["time_s"] for a in answers),
    }  # fmt: skip


def doubted(
    found: dict[str, Any], plain: Group, group: Group, name: str, folder: Path, timeout_s: float
) -> dict[str, Any]:
    """A result that is not exact, after a look at what the plain model's own gradients are worth."""
    (about,) = plain.ask(name, folder, timeout_s, "doubt")
    if "error" in about:
        return found
    if about["again"] > 1.0:
        reason = f"the plain model's own gradients differ between two runs by {about['again']:.0f} times the bound"
        return found | {"reason": f"{reason}, so that there is nothing to compare with. ({found['reason']})"}
    if about["rounding"] <= 1.0 or "worst" not in found:
        return found
    again = merged(group.ask(name, folder, timeout_s, "float64"))
    note = f"in float64: in float32 rounding takes the plain model's own gradients {about['rounding']:.0f} bounds away"
    return again | {"reason": f"{note}. {again['reason']}", "note": note}


class Results:
    """JSON lines on disk: by class, what was found under each heading."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.of: dict[str, dict[str, Any]] = {}
        for file in (folder / "zoo.jsonl", folder / "tracer.jsonl"):
            for line in file.read_text().splitlines() if file.exists() else ():
                entry = json.loads(line)
                self.of.setdefault(entry["class"], {})[entry["heading"]] = entry["result"]

    def add(self, name: str, heading: str, result: dict[str, Any]) -> None:
        """A run of torch's tracer and one of ours write to files of their own, so that both can be under way."""
        self.of.setdefault(name, {})[heading] = result
        with (self.folder / ("tracer.jsonl" if heading == "tracer" else "zoo.jsonl")).open("a") as file:
            file.write(json.dumps({"class": name, "heading": heading, "result": result}) + "\n")


def run(classes: Sequence[str], ranks: Sequence[int], out: Path, timeout_s: float, tracer: bool) -> Results:
    out.mkdir(parents=True, exist_ok=True)
    results = Results(out)
    plain = Group("reference", 1, ranks)
    groups = {pp: Group("split", pp, [pp]) for pp in ranks}
    tracing = Group("tracer", 1, ranks)
    for number, name in enumerate(classes):
        with tempfile.TemporaryDirectory() as folder:
            known = results.of.get(name, {})
            wanted = [pp for pp in ranks if str(pp) not in known]
            if tracer and "tracer" not in known and known.get("plain", {}).get("built", True):
                (traced,) = tracing.ask(name, Path(folder), timeout_s)
                results.add(name, "tracer", traced)
                print(f"{number + 1}/{len(classes)} {name}: torch's tracer: {_of_tracer(traced)[:200]}", flush=True)
            if not wanted:
                continue
            (about,) = plain.ask(name, Path(folder), timeout_s)
            if "error" in about:
                about = {"built": False, "reason": about["error"]}
            if "plain" not in known:
                results.add(name, "plain", about)
            if not about["built"]:
                print(f"{number + 1}/{len(classes)} {name}: not built: {about['reason'][:150]}", flush=True)
                continue
            for pp in wanted:
                found = merged(groups[pp].ask(name, Path(folder), timeout_s))
                if not found["exact"]:
                    found = doubted(found, plain, groups[pp], name, Path(folder), timeout_s)
                results.add(name, str(pp), found)
                told = found["mode"] if found["exact"] else f"FAILS: {found['reason'][:300]}"
                print(f"{number + 1}/{len(classes)} {name}: {pp} ranks: {told}", flush=True)
    for group in (plain, tracing, *groups.values()):
        group.stop()
    return results


def table(results: Results, ranks: Sequence[int]) -> str:
    """The table, and what it adds up to."""
    tasks = all_classes()
    lines = [
        "| class | task | " + " | ".join(f"{pp} ranks | share of FLOPs" for pp in ranks) + " | torch's tracer |",
        "|---|---|" + "---|---|" * len(ranks) + "---|",
    ]
    built = {name: found for name, found in results.of.items() if found.get("plain", {}).get("built")}
    for name, found in built.items():
        cells = [name, tasks.get(name, "").lower().replace("_", " ")]
        for pp in ranks:
            cells += _cells(found, pp)
        traced = found.get("tracer")
        cells.append("" if traced is None else _of_tracer(traced))
        lines.append("| " + " | ".join(cell.replace("|", "/")[:160] for cell in cells) + " |")
    lines += ["", f"{len(results.of)} classes tried, {len(built)} built and run plainly."]
    for pp in ranks:
        ran = [found[str(pp)] for found in built.values() if str(pp) in found]
        modes = Counter(found["mode"] for found in ran if found["exact"])
        shares = [f["plain"]["shares"][str(pp)] for f in built.values() if "shares" in f["plain"]]
        fair = sum(min(s["ranks"]) >= 0.5 / pp for s in shares)
        barred = sum(min(s["ranks"]) < 0.5 / pp and s["best_least"] < 0.5 / pp for s in shares)
        lines.append(
            f"{pp} ranks: {sum(f['exact'] for f in ran)} of {len(ran)} exact ({modes['recorded']} recorded, "
            f"{modes['messages']} by messages); of {len(shares)} plans {fair} give every rank half its fair share of "
            f"FLOPs or more, {barred} cannot because of single units."
        )
    traced = [found["tracer"] for found in built.values() if "tracer" in found]
    if traced:
        count = sum(bool(t.get("traced")) for t in traced)
        lines.append(f"torch's tracer splits {count} of {len(traced)}, forward only.")
    notes = [
        f"- {name}, {pp} ranks, compared {found[str(pp)]['note']}"
        for name, found in built.items()
        for pp in ranks
        if found.get(str(pp), {}).get("note") and found[str(pp)]["exact"]
    ]
    lines += ["", "Notes:", *notes] if notes else []
    failures = [
        f"- {name}, {pp} ranks: {found[str(pp)]['reason']}"
        for name, found in built.items()
        for pp in ranks
        if str(pp) in found and not found[str(pp)]["exact"]
    ]
    lines += ["", "Failures:", *failures] if failures else []
    unbuilt = [
        f"- {name}: {f['plain']['reason'][:200]}"
        for name, f in results.of.items()
        if name not in built and "plain" in f
    ]
    lines += ["", "Not built:", *unbuilt] if unbuilt else []
    return "\n".join(lines)


def _of_tracer(traced: dict[str, Any]) -> str:
    return "splits" if traced.get("traced") else str(traced.get("reason") or traced.get("error", ""))


def _cells(found: dict[str, Any], pp: int) -> tuple[str, str]:
    result = found.get(str(pp))
    if result is None:
        return "", ""
    shares = found["plain"].get("shares", {}).get(str(pp))
    text = "" if shares is None else " ".join(f"{100 * share:.0f}" for share in shares["ranks"])
    if shares is not None and min(shares["ranks"]) < 0.5 / pp:
        largest = shares["largest"]
        text += f" (best cut: {100 * shares['best_least']:.0f}; {largest['name']}: {100 * largest['share']:.0f})"
    return (result["mode"] if result["exact"] else "fails"), text


def judge(results: Results, classes: Sequence[str], ranks: Sequence[int], is_whole: bool) -> int:
    """Print which claims hold for the classes that were built; the exit code."""
    built = {name: f for name, f in results.of.items() if name in classes and f.get("plain", {}).get("built")}
    found = {pp: {name: f[str(pp)]["exact"] for name, f in built.items() if str(pp) in f} for pp in ranks}
    judged = claims.zoo(found, is_whole)
    print("\n" + judged.verdict())
    return judged.exit_code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="*", help="these classes alone")
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--out", type=Path, default=Path("zoo-results"))
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one class")
    parser.add_argument("--tracer", action="store_true", help="torch's tracer too")
    parser.add_argument("--table", action="store_true", help="print the table of the results so far, and run nothing")
    parser.add_argument("--serve", choices=["reference", "split", "tracer"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.ranks)
        return 0
    if given.table:
        print(table(Results(given.out), given.ranks))
        return 0
    classes = given.classes or [*all_classes(), *OWN]
    results = run(classes, given.ranks, given.out, given.timeout, given.tracer)
    print(table(results, given.ranks))
    return judge(results, classes, given.ranks, not given.classes)


if __name__ == "__main__":
    sys.exit(main())
