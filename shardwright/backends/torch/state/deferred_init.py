"""Parameters whose initialisation is run, noted, and run again where their values are wanted.

While a model is built its ops run as ever, so that random numbers are drawn in the usual order and code may read what
it likes. What makes or writes memory is noted beside (`noted_ops`), with the state of the generator before each draw.
The memory of parameters is given back soon; an op that needs it again has it made again. So no more than a few
parameters are there at once, and in the end each is made on the ranks that hold it, with the bits of a plain
initialisation.
"""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwright.backends.torch.capture.replaced import replaced
from shardwright.backends.torch.compat import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    TorchDispatchMode,
    pytree,
    without_dispatch_modes,
)
from shardwright.backends.torch.machine.digests import digest_of
from shardwright.backends.torch.state.noted_ops import (
    Memory,
    NotedOp,
    View,
    generator_of,
    ops_behind,
    overwritten,
    run_again,
    viewed,
    with_dtype,
    written_views,
)
from shardwright.core.errors import ShardwrightError

LIVE_BYTES = 16 * 2**20
"""The bytes of parameters that stay in memory between ops, beside the parameter that was used last."""


_building = 0
"""The number of contexts in which models are built now."""


def require_built() -> None:
    """Raise ShardwrightError inside of a context in which models are built."""
    if _building:
        raise ShardwrightError(
            "sw.DistributedModel is called inside of sw.delay_param_initialization(): build the model there, and wrap "
            "it after that block"
        )


class DeferredInit:
    """The noted initialisation of models that are built in one context."""

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}
        self._of_parameters: dict[Memory, None] = {}
        """The memory of parameters that is there, the one that was used last at the end."""
        self._away: set[Memory] = set()
        self._parameters: dict[int, weakref.ref[nn.Parameter]] = {}
        self.count = 0
        """The number of ops that were noted."""

    @contextmanager
    def noting(self) -> Iterator[None]:
        """A context in which models are built. At its end their parameters have no memory."""
        register, copied = nn.Module.register_parameter, nn.Parameter.__deepcopy__

        def register_noted(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            register(module, name, param)
            if param is not None:
                self.defer(param)

        def copy_noted(parameter: nn.Parameter, memo: Any) -> nn.Parameter:
            made: nn.Parameter = copied(parameter, memo)  # type: ignore[no-untyped-call]
            self.defer(made)
            return made

        global _building
        _building += 1
        try:
            with self._in_place(register_noted, copy_noted):
                yield
        finally:
            _building -= 1
        self._leave()

    @contextmanager
    def _in_place(self, register_noted: Any, copy_noted: Any) -> Iterator[None]:
        with (
            replaced(nn.Module, "register_parameter", register_noted),
            replaced(nn.Parameter, "__deepcopy__", copy_noted),
            _Functions(self),
            _Ops(self),
        ):
            yield

    def defer(self, parameter: nn.Parameter) -> None:
        """Note that a tensor is a parameter of a module: its memory may be given back."""
        if not _has_memory(parameter):
            return
        self._parameters[id(parameter)] = weakref.ref(parameter)
        self._use(self.memory_of(parameter))

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was noted as a parameter."""
        known = self._parameters.get(id(tensor))
        return known is not None and known() is tensor

    def memory_of(self, tensor: torch.Tensor) -> Memory:
        """The memory of a tensor; one that no noted op made has its contents as its base."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        memory = self._memories.get(key)
        if memory is None:
            memory = self._memories[key] = Memory.of(storage, storage)
        return memory

    def run(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an op, and note it where it makes or writes memory."""
        given = [t for t in pytree.tree_leaves((args, dict(kwargs))) if isinstance(t, torch.Tensor)]
        if not all(_has_memory(tensor) for tensor in given):
            return self._run_unnoted(function, args, kwargs, [t for t in given if _has_memory(t)])
        arguments = viewed((args, dict(kwargs)), self.memory_of)
        writes = written_views(function, arguments)
        overwrites = overwritten(function, writes, arguments)
        for tensor in given:
            self.bring_back(self.memory_of(tensor), with_contents=self.memory_of(tensor) is not overwrites)
        for view in writes:
            self._keep_base(view.memory)
        generator = generator_of(function, args, kwargs)
        draws = None if generator is None else (generator, generator.get_state())
        result = function(*args, **kwargs)
        memories = tuple(dict.fromkeys(view.memory for view in writes))
        op = NotedOp(self.count, function, with_dtype(function, arguments, result), memories, overwrites, draws)
        for place, leaf in enumerate(pytree.tree_leaves(result)):
            if isinstance(leaf, torch.Tensor) and _has_memory(leaf):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._memories:
                    op.made[place] = self._memories[storage._cdata] = Memory.of(storage, None)
        if op.made or writes:
            self.count += 1
            for memory in (*op.made.values(), *memories):
                memory.history.append(op)
        self._make_room({self.memory_of(tensor) for tensor in given})
        return result

    def _run_unnoted(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: list[torch.Tensor]
    ) -> Any:
        """Run an op on tensors of other kinds too. What it may have written to is noted as a copy of what is there."""
        for tensor in given:
            self.bring_back(self.memory_of(tensor))
            self._keep_base(self.memory_of(tensor))
        result = function(*args, **kwargs)
        arguments = pytree.tree_map_only(
            torch.Tensor, lambda t: View.of(t, self.memory_of(t)) if _has_memory(t) else t, (args, dict(kwargs))
        )
        for memory in dict.fromkeys(view.memory for view in written_views(function, arguments)):
            storage = memory.storage()
            assert storage is not None
            copied = storage.clone()
            source = Memory.of(copied, copied)
            whole = (memory.size_bytes,), (1,), 0, torch.uint8
            both = (View(memory, *whole), View(source, *whole)), dict[str, Any]()
            op = NotedOp(self.count, torch.ops.aten.copy_.default, both, (memory,), memory)
            memory.history.append(op)
            self.count += 1
        return result

    def _keep_base(self, memory: Memory) -> None:
        """Keep what a memory held before it is written to for the first time, unless a noted op made it."""
        if memory.base is not None and not memory.history and memory.base._cdata == memory.reference.cdata:
            memory.base = memory.base.clone()

    def _use(self, memory: Memory) -> None:
        self._of_parameters.pop(memory, None)
        self._of_parameters[memory] = None

    def bring_back(self, memory: Memory, *, with_contents: bool = True) -> None:
        """Make sure that a memory is there."""
        if memory in self._of_parameters:
            self._use(memory)
        if memory not in self._away:
            return
        self._away.discard(memory)
        self._use(memory)
        storage = memory.storage()
        assert storage is not None
        with without_dispatch_modes(), DisableTorchFunction():
            storage.resize_(memory.size_bytes)
            if with_contents:
                storage.copy_(run_again(memory, self.count))

    def _make_room(self, used: set[Memory]) -> None:
        """Give back the memory of the parameters that were used longest ago, but for that of the last op."""
        live = sum(memory.size_bytes for memory in self._of_parameters)
        for memory in list(self._of_parameters):
            if live <= LIVE_BYTES:
                return
            if memory in used:
                continue
            live -= memory.size_bytes
            self._give_back(memory)
        if len(self._memories) > 4096:
            self._memories = {k: m for k, m in self._memories.items() if not m.reference.expired()}

    def _give_back(self, memory: Memory) -> None:
        del self._of_parameters[memory]
        storage = memory.storage()
        if storage is not None and storage.resizable() and not memory.needs_base(self.count):
            storage.resize_(0)
            self._away.add(memory)

    def _leave(self) -> None:
        for memory in list(self._of_parameters):
            self._give_back(memory)
        for reference in self._parameters.values():
            parameter = reference()
            if parameter is not None and self.memory_of(parameter) in self._away:
                view = View.of(parameter, self.memory_of(parameter))
                _remember(parameter, Recipe(view, self.count))
                if type(parameter) is nn.Parameter:
                    parameter.__class__ = DeferredParameter
        self._memories, self._parameters = {}, {}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The way to the values of one parameter: the ops before number ``end``."""

    view: View
    end: int

    def make(self) -> torch.Tensor:
        """The values."""
        return self.view.on(run_again(self.view.memory, self.end))

    def digest(self) -> int:
        """A number that two ranks share where they make the same values."""
        said = []
        for op in ops_behind(self.view.memory, self.end):
            state = "" if op.draws is None else digest_of(op.draws[1].numpy().tobytes())
            plain = [leaf for leaf in pytree.tree_leaves(op.arguments) if isinstance(leaf, bool | int | float)]
            said.append(f"{op.function} {plain} {state}")
        return digest_of(*said, str(self.view.shape))


class DeferredValues(Mapping[str, torch.Tensor]):
    """The values of the parameters of a model that have none yet, by first name. Each is made when it is asked for."""

    def __init__(self, recipes: Mapping[str, Recipe]) -> None:
        self._recipes = dict(recipes)

    @classmethod
    def of(cls, model: nn.Module) -> "DeferredValues | None":
        """Those of a model; None where all its parameters have values, or come from elsewhere. Raises ShardwrightError
        for tensors that share the memory of a parameter."""
        found = {name: recipe_of(parameter) for name, parameter in model.named_parameters()}
        recipes = {name: recipe for name, recipe in found.items() if recipe is not None}
        first: dict[Memory, str] = {}
        for name, recipe in recipes.items():
            other = first.setdefault(recipe.view.memory, name)
            if other != name:
                raise ShardwrightError(
                    f"parameters {other} and {name} lie in the same memory, which a deferred initialisation does not "
                    f"keep: register one parameter, and take views of it in forward"
                )
        for name, buffer in model.named_buffers() if recipes else ():
            if not buffer.is_meta and buffer.numel() and not buffer.untyped_storage().nbytes():
                raise ShardwrightError(
                    f"buffer {name} lies in the memory of a parameter, whose values are made later: register a copy of "
                    f"it, parameter.detach().clone()"
                )
        return cls(recipes) if recipes else None

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._recipes[name].make()

    def __iter__(self) -> Iterator[str]:
        return iter(self._recipes)

    def __len__(self) -> int:
        return len(self._recipes)

    def digest(self) -> int:
        """A number that two ranks share where they make the same values."""
        return digest_of(*(f"{name} {recipe.digest()}" for name, recipe in self._recipes.items()))


_recipes: dict[int, tuple["weakref.ref[nn.Parameter]", Recipe]] = {}
"""The recipe of each parameter without values, by the id of the parameter."""


def _remember(parameter: nn.Parameter, recipe: Recipe) -> None:
    key = id(parameter)
    _recipes[key] = weakref.ref(parameter, lambda _: _recipes.pop(key, None)), recipe


def recipe_of(parameter: torch.Tensor) -> Recipe | None:
    """The recipe of a parameter that was built in a `DeferredInit.noting`; None for another tensor."""
    found = _recipes.get(id(parameter))
    return None if found is None or found[0]() is not parameter else found[1]


class DeferredParameter(nn.Parameter):
    """A parameter whose values are made later. What asks for them before is refused."""

    has_no_values = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if name not in _WITHOUT_VALUES:
            with DisableTorchFunctionSubclass():
                shapes = [tuple(t.shape) for t in pytree.tree_leaves(args) if isinstance(t, DeferredParameter)]
            raise ShardwrightError(
                f"{name} asks for the values of a parameter of shape {shapes[0] if shapes else ()} that was built "
                f"under sw.delay_param_initialization(): it has none before sw.DistributedModel makes them. Do this "
                f"inside of that context, or after the first step"
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


_WITHOUT_VALUES = frozenset({
    "shape", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "is_meta", "ndim", "names", "grad_fn",
    "is_cuda", "is_cpu", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "itemsize", "nbytes", "_version",
    "output_nr", "_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad", "is_mps", "is_xpu", "is_mkldnn",
    "name", "size", "stride", "dim", "numel", "nelement", "element_size", "storage_offset", "is_contiguous",
    "ndimension", "requires_grad_", "is_floating_point", "is_complex", "is_signed", "get_device", "__hash__", "__len__",
    "untyped_storage", "register_hook", "register_post_accumulate_grad_hook", "is_same_size", "is_inference",
})  # fmt: skip
"""What can be asked of a tensor without its values."""


class _Ops(TorchDispatchMode):
    """A mode that runs and notes every op."""

    def __init__(self, noted: DeferredInit) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted = noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunction():
            return self._noted.run(func, args, kwargs or {})


_READING = frozenset({
    "numpy", "tolist", "__array__", "data_ptr", "storage", "_typed_storage", "__dlpack__", "__reduce_ex__",
    "share_memory_", "__deepcopy__", "untyped_storage",
})  # fmt: skip
"""Methods that reach the memory of a tensor without an op."""


class _Functions(TorchFunctionMode):
    """A mode that sees what is no op: memory that is read as it is, and data that is assigned to a parameter."""

    def __init__(self, noted: DeferredInit) -> None:
        super().__init__()
        self._noted = noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READING and isinstance(args[0], torch.Tensor) and _has_memory(args[0]):
            self._noted.bring_back(self._noted.memory_of(args[0]))
        result = func(*args, **(kwargs or {}))
        if name == "__set__" and getattr(func.__self__, "__name__", "") == "data" and self._noted.is_parameter(args[0]):
            self._noted.defer(args[0])
        return result


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and type(tensor) in (torch.Tensor, nn.Parameter)
