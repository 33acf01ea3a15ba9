"""``python -m shardwright.compat SCRIPT …``: run a script with SageMaker's module names."""

import os
import runpy
import sys
from pathlib import Path

from shardwright.compat import VARIABLE, install

AVAILABLE = "--cuda-is-available"
USAGE = f"""usage: python -m shardwright.compat [{AVAILABLE}] SCRIPT [ARGUMENT …]

  {AVAILABLE}   where there is no CUDA device: torch.cuda.is_available() is True for files beside the script"""


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(USAGE, file=sys.stderr)
        return 0 if len(sys.argv) > 1 else 2
    if is_told_available := sys.argv[1] == AVAILABLE:
        del sys.argv[1]
        if len(sys.argv) < 2:
            print(USAGE, file=sys.stderr)
            return 2
    script = Path(sys.argv[1])
    if not script.is_file():
        print(f"{script}: there is no such script", file=sys.stderr)
        return 2
    from shardwright.compat import cuda_stand_in  # which imports torch

    install()
    if cuda_stand_in.install(script.parent if is_told_available else None) and os.environ.get("RANK", "0") == "0":
        print("no CUDA device is there: calls of torch.cuda are answered by a stand-in", file=sys.stderr)
    os.environ[VARIABLE] = "1"  # for the processes that it starts, as loaders of data do
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.resolve().parent)  # as `python SCRIPT` has it
    runpy.run_path(str(script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
