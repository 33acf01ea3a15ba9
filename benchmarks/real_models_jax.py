"""Models that nobody here wrote, of JAX libraries, split over two virtual devices against the plain model.

    python benchmarks/real_models_jax.py                                   # all, in pp 2 and tp 2
    python benchmarks/real_models_jax.py --only haiku esm2quinox:esm2 --cases pp
    python benchmarks/real_models_jax.py --left                            # what the table has no row of

Needs packages that this one does not depend on; a model whose package lacks gets a row that names it. They are to be
installed without what they depend on, so that JAX and Flax stay as they are:

    pip install --no-deps --target real-packages equinox jaxtyping wadler-lindig esm2quinox equimo jaxonmodels \
        dm-haiku jmp tabulate jraph jax-resnet jax-models flaxmodels flaxdiff attnax einops h5py requests urllib3 \
        certifi idna charset-normalizer tqdm beartype ftfy wcwidth typeguard
    PYTHONPATH=real-packages python benchmarks/real_models_jax.py

Transformers 5 has no Flax models, Flax ships its examples in no package, jax-bonsai is an empty package, and eqxvision
needs an Equinox of 2023: none of them is here.

Each model has a small configuration and random weights, and trains for two steps of SGD, two microbatches of two
samples each; the plain model takes the same microbatches with the same random keys. Equal are losses within 1e-5, all
parameters after the first step, and every gradient of the second within 1e-4 of its norm plus 1e-6 of the norm of all.
Microbatches are taken by themselves, batch norms among them (`loss_scope="replica"`); where the library asks
what a loss is to its batch, it is told `reduction="mean"`, and the row says so then. Parameters that are all zero get
small random numbers first. Each model and case has a process and a time limit of its own, and a row in the table as
soon as it is known. With `--quick` XLA leaves out most optimisations, which takes less time.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
from real_outcomes import FAILED, Row, Table, counts, version_of

from benchmarks.real_device import judge
from benchmarks.real_networks.jax_models import BUILDERS
from tests.torch.forked import run_ranks

CASES = {"pp": "pp 2", "tp": "tp 2"}
RESULTS = Path(__file__).parent / "results" / "real_models_jax.md"


def row_of(name: str, axis: str, limit_s: float, is_quick: bool) -> Row:
    """What a fork of this process, which has run nothing in JAX, says of one model in one case."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        (ended,) = run_ranks(lambda: judge(name, axis, is_quick), [{}], Path(folder), limit_s)
    if ended.was_killed:
        found = {"outcome": FAILED, "detail": f"no result within {limit_s:.0f} s"}
    elif "report" not in ended.noted:
        found = {"outcome": FAILED, "detail": f"the process ended with {ended.code}: {ended.output[-300:]}"}
    else:
        found = json.loads(ended.noted["report"])
    seconds = time.perf_counter() - begun
    version = version_of(name.partition(":")[0])
    return Row(name, version, found.pop("parameters", 0), CASES[axis], **found, seconds=seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="models as package:model, or whole packages")
    parser.add_argument("--cases", default="pp,tp", help="of pp and tp, with commas between")
    parser.add_argument("--left", action="store_true", help="only what the table has no row of")
    parser.add_argument("--quick", action="store_true", help="compile with most of XLA's optimisations off")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one model in one case")
    parser.add_argument("--table", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    cases = arguments.cases.split(",")
    unknown = [case for case in cases if case not in CASES]
    names = [n for n in BUILDERS if not arguments.only or n in arguments.only or n.partition(":")[0] in arguments.only]
    if unknown or not names:
        parser.error(f"no case {', '.join(unknown)}" if unknown else f"no model is called {arguments.only}")
    table = Table(arguments.table)
    for name in names:
        for axis in cases:
            if arguments.left and (name, CASES[axis]) in table.rows:
                continue
            row = row_of(name, axis, arguments.limit, arguments.quick)
            table.add(row)
            print(row, flush=True)
    rows = [row for row in table.rows.values() if row.model in names and row.case in [CASES[c] for c in cases]]
    print("\n" + "\n".join(f"{case}: {of_case}" for case, of_case in counts(rows).items()))
    judged = claims.real_models_jax({(r.model, r.case): r.outcome for r in rows}, is_whole=not arguments.only)
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
