"""The guides' blocks, joined, are programs that run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")


@pytest.mark.parametrize(("guide", "launcher"), [("pytorch", TORCHRUN), ("jax", ()), ("planning", ())])
def test_a_guide_is_a_program_that_runs(tmp_path: Path, guide: str, launcher: tuple[str, ...]) -> None:
    text = (ROOT / "docs" / f"{guide}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) >= 3
    program = tmp_path / "guide.py"
    program.write_text("\n\n".join(blocks), encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, *launcher, str(program)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=200,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
