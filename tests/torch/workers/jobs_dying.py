"""Jobs on three ranks, of which the third is gone in its third pass; the others say so."""

import sys
from typing import Any

import torch.distributed as dist
from launched import dying

from shardwright.backends.torch.jobs.job_run import JobRun
from shardwright.core.errors import PeerError
from shardwright.torch import run_jobs
from tests.torch.test_run_jobs import made


def main(how: str, timeout_s: float) -> None:
    plan, given = made(devices=3, steps=300)
    plain_run, die = JobRun.run, dying(how)

    def run(self: JobRun, own: Any) -> None:
        if dist.get_rank() == 2:
            die()
        plain_run(self, own)

    JobRun.run = run  # type: ignore[method-assign]
    try:
        run_jobs(plan, given, timeout_s=timeout_s)
    except PeerError as error:
        print(f"PeerError: {error}", flush=True)
        sys.exit(3)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
