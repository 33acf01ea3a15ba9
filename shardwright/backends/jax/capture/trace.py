"""The marks that capture adds to a program while it is traced: the module call of an equation, and boxes around ops.

NNX leaves no names in an equation's name stack, and Linen's do not say which call of a module they mean. So, for as
long as a model is traced, every module call opens a name scope that carries a number; `Recorder.calls` says what the
number stands for. The scope's text survives `vmap`, `jit`, `remat` and `scan`.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

from shardwright.backends.jax.capture.checkpoint_policies import POLICIES
from shardwright.backends.jax.capture.recomputed_calls import Recomputing, recomputing

CALL_MARK = "shardwright:call:"
BOX_MARK = "shardwright:box:"
"""The prefix of the name of a jitted function whose equations become one op."""

PATH_ATTRIBUTE = "_shardwright_path"
"""A static attribute: NNX's own transforms split and merge modules, and it survives that where identity does not."""

NORMS = (nnx.LayerNorm, nnx.RMSNorm, linen.LayerNorm, linen.RMSNorm)
DROPOUTS = (nnx.Dropout, linen.Dropout)
BATCH_NORMS = (nnx.BatchNorm, linen.BatchNorm)


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One module call: its path, the number of the call around it, and the kind that all its equations make together
    ("normalization", "dropout", "batch_norm", or "" when they stay apart)."""

    path: str
    parent: int
    occurrence: int
    whole_kind: str = ""


@dataclass(slots=True)
class Recorder:
    """The module calls of one trace, in the order in which they began. Call 0 is the root."""

    calls: list[TracedCall] = field(default_factory=lambda: [TracedCall("", 0, 0)])
    open: list[int] = field(default_factory=lambda: [0])
    seen: dict[str, int] = field(default_factory=dict)
    whole_batch_norms: bool = False
    """Whether the equations of a batch norm make one op. A planner sees them as several."""

    @contextmanager
    def call(self, path: str, whole_kind: str = "") -> Iterator[None]:
        """A context in which the equations that are traced belong to a call of ``path``. The root, and a module inside
        itself (a method that calls its base class's), open nothing."""
        if not path or self.calls[self.open[-1]].path == path:
            yield
            return
        occurrence = self.seen.get(path, 0)
        self.seen[path] = occurrence + 1
        number = len(self.calls)
        if whole_kind == "batch_norm" and not self.whole_batch_norms:
            whole_kind = ""
        self.calls.append(TracedCall(path, self.open[-1], occurrence, whole_kind))
        self.open.append(number)
        try:
            with jax.named_scope(f"{CALL_MARK}{number}"):
                yield
        finally:
            self.open.pop()


def call_number(name_stack: Any, inherited: int, mark: str = CALL_MARK) -> int:
    """The innermost marked call of an equation's name stack; equations of an inner program inherit."""
    for entry in reversed(getattr(name_stack, "stack", ())):
        name = getattr(entry, "name", "")
        if name.startswith(mark):
            return int(name[len(mark) :])
    return inherited


def whole_kind(module: Any) -> str:
    """The kind of op that a call of this module makes as a whole."""
    if isinstance(module, DROPOUTS):
        return "dropout"
    if isinstance(module, BATCH_NORMS):
        return "batch_norm"
    if isinstance(module, NORMS) and _last_dim_only(getattr(module, "reduction_axes", -1)):
        return "normalization"
    return ""


def _last_dim_only(axes: Any) -> bool:
    return axes == -1 or (isinstance(axes, tuple | list) and tuple(axes) == (-1,))


# --- module calls


@contextmanager
def nnx_calls(model: nnx.Module, recorder: Recorder) -> Iterator[None]:
    """Mark the calls of an NNX model's modules. ``model`` must be a private copy: it is written to."""
    classes = set()
    for path, module in nnx.iter_modules(model):
        classes.add(type(module))
        setattr(module, PATH_ATTRIBUTE, ".".join(map(str, path)))
        attention = getattr(module, "attention_fn", None)
        if attention in ATTENTIONS:
            setattr(module, "attention_fn", boxed("attention", attention))  # noqa: B010
    with ExitStack() as undo:
        for cls in classes:
            if any("__call__" in base.__dict__ for base in cls.__mro__):
                undo.enter_context(patched(cls, "__call__", _marking(cls.__call__, recorder)))
        yield


def _marking(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(original)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with recorder.call(getattr(self, PATH_ATTRIBUTE, ""), whole_kind(self)):
            return original(self, *args, **kwargs)

    return marked


@contextmanager
def recomputed(model: nnx.Module, modes: Mapping[str, str]) -> Iterator[None]:
    """A context in which calls of modules, by path, keep what a mode says (`POLICIES`), and run again in the backward
    pass. ``model`` must be a private copy: it is written to."""
    if not modes:
        yield
        return
    chosen = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    classes = set()
    for path in chosen.keys() & modes.keys():
        setattr(chosen[path], PATH_ATTRIBUTE, path)
        classes.add(type(chosen[path]))
    with ExitStack() as undo:
        again = undo.enter_context(recomputing({mode: POLICIES[mode] for mode in modes.values()}))
        for cls in classes:
            undo.enter_context(patched(cls, "__call__", _recomputing(cls.__call__, modes, again)))
        yield
        for path in chosen.keys() & modes.keys():
            delattr(chosen[path], PATH_ATTRIBUTE)


def has_state(value: Any) -> bool:
    """Whether a value is a module, random streams or a variable, which a call may change."""
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _recomputing(original: Callable[..., Any], modes: Mapping[str, str], again: Recomputing) -> Callable[..., Any]:
    """The call, computed again in the backward pass. Arrays and arguments with state are handed through. Any other
    argument, as a function, a shape or a value that Python branches on, stays the value that it is."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        path: str | None = getattr(self, PATH_ATTRIBUTE, None)
        if path is None or path not in modes:
            return original(self, *args, **kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=has_state)
        traced = [has_state(leaf) or isinstance(leaf, jax.Array) for leaf in leaves]

        def same(module: Any, *given: Any) -> Any:
            rest = iter(given)
            every = [next(rest) if is_traced else leaf for leaf, is_traced in zip(leaves, traced, strict=True)]
            positional, named = jax.tree.unflatten(structure, every)
            with again.one():
                return original(module, *positional, **named)

        run: Any = nnx.remat(same, policy=again.policies[modes[path]])
        return run(self, *(leaf for leaf, is_traced in zip(leaves, traced, strict=True) if is_traced))

    return call


@contextmanager
def linen_calls(recorder: Recorder) -> Iterator[None]:
    """Mark the calls of Linen modules. Methods other than ``__call__`` belong to whoever calls them."""

    def intercept(next_call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != "__call__":
            return next_call(*args, **kwargs)
        module = context.module
        with ExitStack() as undo:
            undo.enter_context(recorder.call(".".join(module.path), whole_kind(module)))
            if getattr(module, "attention_fn", None) in ATTENTIONS:
                attention = boxed("attention", module.attention_fn)
                undo.enter_context(patched(module, "attention_fn", attention, object.__setattr__))
            return next_call(*args, **kwargs)

    with linen.intercept_methods(intercept):
        yield


@contextmanager
def patched(owner: Any, name: str, value: Any, put: Callable[[Any, str, Any], None] = setattr) -> Iterator[None]:
    """A context in which an attribute has a value. ``put`` sets it: for frozen modules `object.__setattr__`."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    put(owner, name, value)
    try:
        yield
    finally:
        if own:
            put(owner, name, before)
        else:
            delattr(owner, name)


# --- functions that stay one op

ATTENTIONS: tuple[Callable[..., Any], ...] = (
    jax.nn.dot_product_attention,
    nnx.dot_product_attention,
    linen.dot_product_attention,
)
BOXED: tuple[tuple[str, Callable[..., Any]], ...] = (
    *(("attention", function) for function in ATTENTIONS),
    ("softmax", jax.nn.softmax),
    ("log_softmax", jax.nn.log_softmax),
    ("gelu", jax.nn.gelu),
)


def boxed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The function ``original``, traced as one jitted equation called ``BOX_MARK + name`` whose operands are its array
    arguments in the order of its signature. Calls that do more than return arrays (sowing, residuals) stay as they are.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        arguments = dict(bound.arguments)
        if arguments.get("module") is not None or arguments.get("return_residual"):
            return original(*args, **kwargs)
        rest = arguments.pop("kwargs", {})
        arrays = {key: value for key, value in arguments.items() if isinstance(value, jax.Array)}

        def run(*values: Any) -> Any:
            given = arguments | dict(zip(arrays, values, strict=True))
            return original(**given, **rest)

        kind = f"{name}_causal" if arguments.get("is_causal") else name
        run.__name__ = run.__qualname__ = BOX_MARK + kind
        return jax.jit(run)(*arrays.values())

    return call


CROSS_ENTROPY: Callable[..., Any] = optax.softmax_cross_entropy_with_integer_labels


@functools.wraps(CROSS_ENTROPY)
def _cross_entropy(logits: Any, labels: Any, axis: Any = -1, where: Any = None) -> Any:
    """The cross-entropy of Optax in two ops. Optax spells the log-softmax out around the look-up; written as these two,
    one reduction serves both, as it does once the compiler has merged equal expressions."""
    if axis not in (-1, jnp.ndim(logits) - 1) or where is not None:
        return CROSS_ENTROPY(logits, labels, axis, where)
    scores = boxed("log_softmax", jax.nn.log_softmax)(logits)
    return -jnp.take_along_axis(scores, labels[..., None], axis=-1).squeeze(-1)


@contextmanager
def boxed_functions() -> Iterator[None]:
    """Box the functions of `BOXED` wherever a loaded module holds them under a name of its own."""
    replacements = {id(function): boxed(name, function) for name, function in BOXED}
    replacements[id(CROSS_ENTROPY)] = _cross_entropy
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict) or replacements.keys().isdisjoint(map(id, list(names.values()))):
            continue
        if names is globals():
            continue
        replaced += [(names, name, value) for name, value in list(names.items()) if id(value) in replacements]
    try:
        for names, name, value in replaced:
            names[name] = replacements[id(value)]
        yield
    finally:
        for names, name, value in replaced:
            names[name] = value
