"""The README's code is the examples', and its commands exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!-- (examples/\S+) -->\n```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_readme_shows_the_examples_as_they_are() -> None:
    assert [path for path, _ in BLOCKS] == ["examples/quickstart_torch.py", "examples/quickstart_jax.py"]
    for path, code in BLOCKS:
        assert code == (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [path for path, _ in BLOCKS])
def test_the_shown_examples_run_and_learn(path: str) -> None:
    command = (ROOT / path).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").split()
    if command[0] == "torchrun":
        command = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", *command[1:]]
    else:
        command = command[1:]
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=200,
        check=True,
        capture_output=True,
        text=True,
    )
    losses = [float(line.split()[1]) for line in ran.stdout.splitlines() if line.startswith("loss ")]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_files_that_a_page_links_to_exist(page: str) -> None:
    at = ROOT / page
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", at.read_text(encoding="utf-8")):
        assert (at.parent / target).exists(), target
