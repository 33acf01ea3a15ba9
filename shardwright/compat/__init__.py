"""SageMaker's module names, for scripts that were written for its model-parallel library: opt-in.

    import shardwright.compat
    shardwright.compat.install()
    import smdistributed.modelparallel.torch as smp

or, without a change to a script, ``torchrun --nproc-per-node 4 -m shardwright.compat train.py …``. Every name of that
library is carried out, or refused by its own name: `names.NAMES` says which, and `docs/sagemaker.md` shows it.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from shardwright.core.errors import ShardwrightError

PACKAGES = ("smdistributed", "smdistributed.modelparallel")
MODULE = "smdistributed.modelparallel.torch"


def install() -> None:
    """Let ``import smdistributed.modelparallel.torch`` find `shardwright.compat.modelparallel`. A second call changes
    nothing. Raises ShardwrightError where SageMaker's own library is loaded already."""
    from shardwright.compat import modelparallel

    if sys.modules.get(MODULE) is modelparallel:
        return
    if loaded := [name for name in (*PACKAGES, MODULE) if name in sys.modules]:
        raise ShardwrightError(
            f"{loaded[-1]} is loaded already, and is not Shardwright's: call shardwright.compat.install() before the "
            f"first import of it"
        )
    above: ModuleType | None = None
    for name in PACKAGES:
        package = ModuleType(name, f"Names of SageMaker's library: {MODULE} is shardwright.compat.modelparallel.")
        package.__path__ = []
        package.__spec__ = ModuleSpec(name, None, is_package=True)
        package.__version__ = modelparallel.__version__  # type: ignore[attr-defined]
        sys.modules[name] = package
        if above is not None:
            setattr(above, name.rpartition(".")[2], package)
        above = package
    sys.modules[MODULE] = modelparallel
    assert above is not None
    above.torch = modelparallel  # type: ignore[attr-defined]
