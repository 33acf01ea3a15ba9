"""The table of backends: a framework is one entry, and nothing else names it.

Backends of other packages come by an entry point of the group ``shardwright.backends``, which names a
`Registration`:

    [project.entry-points."shardwright.backends"]
    numpy = "my_package.backend:REGISTRATION"

`docs/backends.md` says what a backend has, and how it is tested.
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from shardwright.backends.capabilities import JAX, JAX_MEMORY, TORCH, TORCH_MEMORY
from shardwright.backends.protocol import Backend
from shardwright.core.capabilities import PLAIN_MEMORY, Capabilities, MemoryTraits
from shardwright.core.errors import CaptureError, MissingFrameworkError, PlanError, ShardwrightError, nearest

GROUP = "shardwright.backends"
LEVELS = ("capture", "one rank", "pp", "dp", "tp", "state")
"""The levels that a backend can claim: to capture models, so that they are planned; to train plans of one rank, of
stages, of replicas, on a tensor axis; to carry sharded state. `tests/conformance` has a level for each."""


@dataclass(frozen=True, slots=True)
class Registration:
    """One backend.

    Attributes:
        module: the module to import on first use; its ``BACKEND`` is a `protocol.Backend`.
        owns: a function that says whether a model is of this framework; it must not import the framework, which a model
            has loaded.
        models: the models that ``owns`` takes, in words.
        needs: the modules without which the framework does not run.
        install: the package to install for them.
        levels: the levels that the backend claims, of `LEVELS`.
        memory_traits: the behaviour of the backend's memory; the graphs that it captures have the same.
    """

    capabilities: Capabilities
    module: str
    owns: Callable[[Any], bool]
    models: str
    needs: tuple[str, ...] = ()
    install: str = ""
    levels: tuple[str, ...] = LEVELS
    memory_traits: MemoryTraits = PLAIN_MEMORY

    def __post_init__(self) -> None:
        unknown = [level for level in self.levels if level not in LEVELS]
        if unknown:
            raise ShardwrightError(f"backend {self.name!r} claims level {unknown[0]!r}: {nearest(unknown[0], LEVELS)}")
        for axis in self.capabilities.axes:
            if axis not in self.levels:
                raise ShardwrightError(f"backend {self.name!r} has axis {axis!r} and does not claim that level")

    @property
    def name(self) -> str:
        """The framework's name, as graphs, plans and requests have it."""
        return self.capabilities.framework

    @property
    def trains(self) -> bool:
        """Whether the backend runs plans, or only captures models for them."""
        return "one rank" in self.levels


def _is_torch(model: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _is_jax(model: Any) -> bool:
    parts = model if isinstance(model, tuple) else (model,)
    modules = {cls.__module__.split(".")[0] for part in parts for cls in type(part).__mro__}
    return "flax" in modules or (callable(model) and not isinstance(model, type))


_OWN = (
    Registration(
        TORCH, "shardwright.backends.torch", _is_torch, "a torch.nn.Module", needs=("torch",),
        install="shardwright[torch]", memory_traits=TORCH_MEMORY,
    ),
    Registration(
        JAX, "shardwright.backends.jax", _is_jax,
        "a flax.nnx.Module, a pair (flax.linen module, variables), or a JAX function of (params, batch)",
        needs=("jax", "flax", "optax"), install="shardwright[jax]",
        memory_traits=JAX_MEMORY,
    ),
)  # fmt: skip
_others: dict[str, Registration] = {}
_looked_for: list[str] = []


def registered() -> Mapping[str, Registration]:
    """Every backend, by name: those of other packages first, as JAX takes any function for a model."""
    if not _looked_for:
        _looked_for.append(GROUP)
        for entry in entry_points(group=GROUP):
            try:
                register(entry.load())
            except Exception as error:  # one broken package must not take the others' backends away
                said = f"{type(error).__name__}: {error}"
                warnings.warn(f"the backend {entry.name!r} ({entry.value}) cannot be used: {said}", stacklevel=2)
    return _others | {own.name: own for own in _OWN}


def register(registration: Registration) -> None:
    """Add a backend. Raises ShardwrightError for anything but a registration, or when its name is taken."""
    if not isinstance(registration, Registration):
        raise ShardwrightError(f"{registration!r} is no backend: expected a shardwright.backends.registry.Registration")
    taken = registered().get(registration.name)
    if taken is not None:
        raise ShardwrightError(
            f"a backend called {registration.name!r} is registered already ({taken.module}), and {registration.module} "
            f"wants the name too: each framework has one backend"
        )
    _others[registration.name] = registration


def registration_of(name: str) -> Registration:
    """A backend's entry. Raises ShardwrightError, with the nearest name, when there is none."""
    found = registered().get(name) if isinstance(name, str) else None
    if found is None:
        raise ShardwrightError(f"no backend is called {name!r}: {nearest(str(name), registered())}")
    return found


def load(name: str) -> Backend:
    """The backend of a framework, imported on first use. Raises MissingFrameworkError naming the package to install,
    and ShardwrightError for a module that cannot be imported or has no backend."""
    found = registration_of(name)
    require_framework(name)
    try:
        backend: Backend = importlib.import_module(found.module).BACKEND
    except (ImportError, AttributeError) as error:
        raise ShardwrightError(
            f"backend {name!r} has no BACKEND that can be imported from {found.module}: {type(error).__name__}: {error}"
        ) from error
    return backend


def require_framework(name: str) -> None:
    """Raise MissingFrameworkError unless the framework can be imported."""
    found = registration_of(name)
    missing = [module for module in found.needs if not is_installed(module)]
    if missing:
        raise MissingFrameworkError(
            f"shardwright.{name} needs {' and '.join(missing)}, which cannot be imported: pip install "
            f"{found.install or ' '.join(missing)!r}"
        )


def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def framework_of(model: Any) -> str:
    """The framework of a model. Looks only at modules that are loaded already: a model's framework is. Raises
    CaptureError for a value that no backend takes for a model."""
    for found in registered().values():
        if found.owns(model):
            return found.name
    known = ", ".join(found.models for found in reversed(list(registered().values())))
    raise CaptureError(f"a {type(model).__name__} is not a model: expected {known}")


def runtimes_of(captured: Capabilities, frameworks: Sequence[str] | None = None) -> tuple[Capabilities, ...]:
    """The runtimes that must be able to carry a plan out: those named, else that of the captured model.

    Raises PlanError for a framework that there is no runtime for.
    """
    if frameworks is None:
        return (captured,)
    runtimes = {found.name: found.capabilities for found in registered().values() if found.trains}
    if not isinstance(frameworks, Sequence) or isinstance(frameworks, str) or not frameworks:
        raise PlanError(f"frameworks={frameworks!r}: expected names, such as ['torch'] or ['torch', 'jax']")
    for name in frameworks:
        if not isinstance(name, str) or name not in runtimes:
            raise PlanError(f"frameworks: there is no runtime for {name!r}: {nearest(str(name), runtimes)}")
    return tuple(runtimes[name] for name in dict.fromkeys(frameworks))
