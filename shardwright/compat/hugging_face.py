"""`Trainer` of `shardwright.compat.trainer` for scripts that import it from transformers.

By itself the path that ``transformers.Trainer`` takes under SageMaker's names does not train. Where these are installed
and the environment says that the run is a model-parallel one, as SageMaker's launcher does, transformers' ``Trainer``
and ``TrainingArguments`` are those of `shardwright.compat.trainer` from the moment that their modules are loaded.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_OURS = "shardwright.compat.trainer"
_MODULES = {
    "transformers.trainer": ("Trainer", "TrainingArguments"),
    "transformers.training_args": ("TrainingArguments",),
}


class _Finder(MetaPathFinder):
    """Finds the modules of transformers that have the two classes, as the other finders do."""

    def __init__(self) -> None:
        self.packages: list[ModuleType] = []
        """The package when each module was found: it remembers classes, and puts another in its own place."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _MODULES:
            return None
        self.packages.append(sys.modules["transformers"])
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """Loads a module, and has its classes replaced."""

    def __init__(self, own: Loader) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        is_inside_trainer = module.__name__ != "transformers.trainer" and "transformers.trainer" in sys.modules
        if not is_inside_trainer:  # else it is replaced when that is loaded
            _replace()


def _replace() -> None:
    """Put the two classes in the place of transformers', in a model-parallel run that has not taken them itself."""
    from transformers.utils.import_utils import is_sagemaker_mp_enabled

    if _OURS in sys.modules or not is_sagemaker_mp_enabled():
        return
    ours = importlib.import_module(_OURS)
    for package in (*_FINDER.packages, sys.modules["transformers"]):
        for name in ("Trainer", "TrainingArguments"):
            setattr(package, name, getattr(ours, name))
    for module, names in _MODULES.items():
        for name in names:
            setattr(sys.modules[module], name, getattr(ours, name))


_FINDER = _Finder()


def install() -> None:
    """Have the classes replaced when transformers loads them. A second call changes nothing, nor one after that."""
    if _FINDER not in sys.meta_path and not any(name in sys.modules for name in _MODULES):
        sys.meta_path.insert(0, _FINDER)
