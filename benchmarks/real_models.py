"""Models that nobody here wrote, of PyTorch libraries, split over two processes against the plain model.

    python benchmarks/real_models.py                                       # all, in pp 2 and tp 2
    python benchmarks/real_models.py --only diffusers:flux timm --cases pp
    python benchmarks/real_models.py --left                                # what the table has no row of

Needs packages that this one does not depend on; a model whose package lacks gets a row that names it. They are to be
installed without what they depend on, so that torch stays as it is:

    pip install --no-deps --target real-packages diffusers x-transformers torch_geometric peft monai timm torchvision \
        efficientnet_pytorch einops einx torch-einops-utils frozendict loguru accelerate xxhash requests urllib3 \
        certifi charset_normalizer importlib_metadata zipp pillow
    PYTHONPATH=real-packages python benchmarks/real_models.py

Each model has a small configuration, random weights, train mode, dropout as its library sets it. Two Gloo processes of
one thread train it for two steps of SGD, two microbatches of two samples each; the plain model takes the same
microbatches and draws its dropout masks by the same rule. Equal are losses within 1e-5, every gradient of both steps
within 1e-4 of its norm plus 1e-6 of the norm of all, and the whole state after them. What is not equal in float32 is
compared again in float64, as rounding alone takes some models beyond the bound. Parameters that are all zero get small
random numbers first, since whatever stands before them would have no gradients. Microbatches are meant to be taken by
themselves (`loss_scope="replica"`); where the library asks what a loss is to its batch, it is told
`reduction="mean"`, and the row says so.

Each model and case has a pair of processes and a time limit of its own, and a row in the table as soon as it is known.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import torch
from real_outcomes import BY_MESSAGES, EQUAL, FAILED, MISSING, REFUSED, WRONG, Row, Table, counts, version_of

from benchmarks.real_networks.registry import BUILDERS, Made, register_all
from benchmarks.real_rank import Trial
from tests.comparison import Comparison
from tests.torch.forked import run_ranks, world

CASES = {"pp": "pp 2", "tp": "tp 2"}
RESULTS = Path(__file__).parent / "results" / "real_models.md"


def build(name: str) -> Made:
    """A model, none of whose trained parameters is all zero."""
    torch.manual_seed(0)
    model, batch, loss = BUILDERS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point() and not parameter.any():
                parameter.normal_(std=0.05)
    return model.train(), batch, loss


def run(made: Made, axis: str, dtype: torch.dtype, limit_s: float) -> dict[str, Any]:
    """What two forks that train the model come to: an outcome with its detail."""
    trial = Trial(*made, axis=axis, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        ended = run_ranks(trial.run, world(2), Path(folder), limit_s)
    if any(end.was_killed for end in ended):
        return {"outcome": FAILED, "detail": f"no result within {limit_s:.0f} s"}
    reports = [json.loads(end.noted["report"]) if "report" in end.noted else None for end in ended]
    errors = [report["error"] for report in reports if report and "error" in report]
    if errors:
        own = [error for error in errors if not error["is_peers"]] or errors
        outcome = REFUSED if all(error["is_refusal"] for error in own) else FAILED
        return {"outcome": outcome, "detail": own[0]["text"][:600]}
    if None in reports:
        said = ended[reports.index(None)]
        return {"outcome": FAILED, "detail": f"a process ended with {said.code}: {said.output[-300:]}"}
    same = Comparison.of_ranks(report["same"] for report in reports)
    off = same.failures()
    if off:
        return {"outcome": WRONG, "detail": "; ".join(off[:4])[:600]}
    outcome = BY_MESSAGES if reports[0]["by_messages"] else EQUAL
    return {"outcome": outcome, "detail": f"{same.worst:.2g} of the bound{reports[0]['more']}"}


def row_of(name: str, axis: str, limit_s: float) -> Row:
    package = name.partition(":")[0]
    about = {"model": name, "case": CASES[axis]}
    begun = time.perf_counter()
    try:
        made = build(name)
    except ImportError as error:
        detail = f"package {error.name or package} is missing: {error}"
        return Row(**about, version="", parameters=0, outcome=MISSING, detail=detail, seconds=0.0)
    except Exception as error:
        detail = f"the plain model cannot be built: {type(error).__name__}: {error}"[:300]
        return Row(**about, version=version_of(package), parameters=0, outcome=FAILED, detail=detail, seconds=0.0)
    found = run(made, axis, torch.float32, limit_s)
    if found["outcome"] == WRONG:
        again = run(build(name), axis, torch.float64, limit_s)
        if again["outcome"] in (EQUAL, BY_MESSAGES):
            found = again | {"detail": f"{again['detail']}, in float64 ({found['detail'][:160]} in float32)"}
    parameters = sum(p.numel() for p in made[0].parameters())
    version = version_of(package)
    return Row(**about, version=version, parameters=parameters, **found, seconds=time.perf_counter() - begun)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="models as package:model, or whole packages")
    parser.add_argument("--cases", default="pp,tp", help="of pp and tp, with commas between")
    parser.add_argument("--left", action="store_true", help="only what the table has no row of")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one model in one case")
    parser.add_argument("--table", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    register_all()
    cases = arguments.cases.split(",")
    unknown = [case for case in cases if case not in CASES]
    names = [n for n in BUILDERS if not arguments.only or n in arguments.only or n.partition(":")[0] in arguments.only]
    if unknown or not names:
        parser.error(f"no case {', '.join(unknown)}" if unknown else f"no model is called {arguments.only}")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    table = Table(arguments.table)
    for name in names:
        for axis in cases:
            if arguments.left and (name, CASES[axis]) in table.rows:
                continue
            row = row_of(name, axis, arguments.limit)
            table.add(row)
            print(row, flush=True)
    rows = [row for row in table.rows.values() if row.model in names and row.case in [CASES[c] for c in cases]]
    print("\n" + "\n".join(f"{case}: {of_case}" for case, of_case in counts(rows).items()))
    judged = claims.real_models({(r.model, r.case): r.outcome for r in rows}, is_whole=not arguments.only)
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
