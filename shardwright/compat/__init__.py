"""SageMaker's module names, for scripts that were written for its libraries: opt-in.

    import shardwright.compat
    shardwright.compat.install()
    import smdistributed.modelparallel.torch as smp

or, without a change to a script, ``torchrun --nproc-per-node 4 -m shardwright.compat train.py …``, or with
``SHARDWRIGHT_COMPAT=1`` in the environment, under which every Python process begins with it. Every name of the
model-parallel library is carried out, or refused by its own name: `names.NAMES` says which, and `docs/sagemaker.md`
shows it. Of the data-parallel one there is ``smdistributed.dataparallel.torch.torch_smddp``, whose import registers
the backend ``smddp`` of process groups. The second version is ``torch.sagemaker``: `torch_sagemaker`.
"""

import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from shardwright.compat import hugging_face
from shardwright.core.errors import ShardwrightError

ROOT = "smdistributed"
VARIABLE = "SHARDWRIGHT_COMPAT"
"""The variable under which Python processes begin with `install`: ``shardwright_compat.pth`` is beside the package."""
MODULES = {
    f"{ROOT}.modelparallel.torch": "shardwright.compat.modelparallel",
    f"{ROOT}.modelparallel.torch.optimizers": "shardwright.compat.optimizers",
    f"{ROOT}.modelparallel.torch.utils": "shardwright.compat.undocumented",
    f"{ROOT}.modelparallel.test.torch.utils": "shardwright.compat.undocumented",
    f"{ROOT}.dataparallel.torch.torch_smddp": "shardwright.compat.torch_smddp",
}
"""The modules of SageMaker's that there are, and what is in their place."""
NN = f"{ROOT}.modelparallel.torch.nn"
SECOND = "torch.sagemaker"
WHOLE = {NN: "shardwright.compat.nn", SECOND: "shardwright.compat.torch_sagemaker"}
"""The packages whose modules are all found, each as the one in its place: as their folders are known, they would be
loaded a second time else."""
PACKAGES = frozenset(
    name.rsplit(".", depth)[0] for name in (*MODULES, NN) for depth in range(1, name.count(".") + 1)
)  # fmt: skip


class _Finder(MetaPathFinder, Loader):
    """Finds SageMaker's modules."""

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if (own := _in_place_of(name)) is not None:
            known = importlib.util.find_spec(own)
            is_package = known is not None and known.submodule_search_locations is not None
            return None if known is None else ModuleSpec(name, self, is_package=is_package)
        if name in MODULES or name in PACKAGES:
            return ModuleSpec(name, self, is_package=name in PACKAGES)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if (own := _in_place_of(spec.name)) is not None:
            return importlib.import_module(own)
        return importlib.import_module(MODULES[spec.name]) if spec.name in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == f"{ROOT}.modelparallel":
            from shardwright.compat.modelparallel import __version__

            module.__version__ = __version__  # type: ignore[attr-defined]


def _in_place_of(name: str) -> str | None:
    """The module in the place of one of a package of `WHOLE`."""
    for package, own in WHOLE.items():
        if name == package or name.startswith(f"{package}."):
            return f"{own}{name.removeprefix(package)}"
    return None


_FINDER = _Finder()


def install() -> None:
    """Let imports of SageMaker's modules find those in their place. A second call changes nothing. Raises
    ShardwrightError where SageMaker's own library is loaded already."""
    if _FINDER in sys.meta_path:
        return
    for loaded in (ROOT, SECOND):
        if loaded in sys.modules:
            raise ShardwrightError(
                f"{loaded} is loaded already, and is not Shardwright's: call shardwright.compat.install() before the "
                f"first import of it"
            )
    sys.meta_path.insert(0, _FINDER)
    hugging_face.install()
