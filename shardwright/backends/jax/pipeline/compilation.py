"""The compilation of many programs: in the background, and each different one once.

XLA compiles for given devices. Stages that are alike lower to the same text, so the first is compiled and the others
load its executable onto their own devices, which takes a twentieth of the time.
"""

import gc
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from threading import Lock
from types import TracebackType
from typing import Any

import jax

from shardwright.backends.jax.capture.inner_programs import computes_loops_again
from shardwright.backends.jax.machine.compiler_options import compiler_options
from shardwright.backends.jax.pipeline.relocation import Devices, can_move, load_on

CALLBACK = re.compile(r"custom_call @xla_\w*python\w*callback")


@dataclass(slots=True)
class Compilation:
    """The counts of a `Compiler`: programs asked for, and those that were compiled rather than loaded again."""

    programs: int = 0
    compiled: int = 0


class Compiler:
    """A compiler in the background: traces are made under the interpreter's lock, compilations are not. Compilations
    that were started while it was entered go on after it, unless that ended in an error."""

    def __init__(self) -> None:
        self.done = Compilation()
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1)
        self._loaders = ThreadPoolExecutor(os.cpu_count() or 1)
        """Threads of their own for loading, so that a load that waits for its program keeps nobody from compiling."""
        self._counting = Lock()
        self._known: dict[tuple[Hashable, int], tuple[Devices, Future[jax.stages.Compiled]]] = {}
        """The compilations by the program's text, by the key they were started with, and by the number of devices."""

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.cancel()

    def close(self) -> None:
        """Start nothing more. Compilations that were started go on."""
        for pool in (self._pool, self._loaders):
            pool.shutdown(wait=False)

    def cancel(self) -> None:
        """Start nothing more, and drop what has not begun: whoever waits for it gets a CancelledError."""
        for pool in (self._pool, self._loaders):
            pool.shutdown(wait=False, cancel_futures=True)

    def start(
        self, lower: Callable[[], jax.stages.Lowered], devices: Devices, key: Hashable | None = None
    ) -> Callable[[], jax.stages.Compiled]:
        """Begin with a program, which ``lower`` lowers, and return a function that waits for it.

        A program whose text is known, for as many devices, is not compiled again where it can be loaded on others,
        unless it calls Python, of which the text says no more than that. A program whose ``key`` is known is not
        lowered again either; None is like no other key.
        """
        first, running = self._known.get((key, len(devices)), (devices, None))
        if key is None or running is None or not (devices == first or (can_move(first) and can_move(devices))):
            return self._start(lower(), devices, key)
        self.done.programs += 1
        loading = self._loaders.submit(_load, running, first, devices)

        @cache
        def wait() -> jax.stages.Compiled:
            return loading.result() or self._compiled(lower())

        return wait

    def _start(
        self, lowered: jax.stages.Lowered, devices: Devices, key: Hashable | None
    ) -> Callable[[], jax.stages.Compiled]:
        text = lowered.as_text()
        by_text = hashlib.sha256(text.encode()).hexdigest(), len(devices)
        self.done.programs += 1
        first, running = self._known.get(by_text, (devices, None))
        calls_python = CALLBACK.search(text) is not None
        if running is None or calls_python or not (devices == first or (can_move(first) and can_move(devices))):
            self._count()
            first, running = devices, self._pool.submit(lowered.compile)
            self._known[by_text] = first, running
            waiting = running
        else:
            waiting = self._loaders.submit(self._load_or_compile, lowered, running, first, devices)
        if key is not None and not calls_python:  # what calls Python cannot be loaded on other devices
            self._known[key, len(devices)] = first, running
        return waiting.result

    def _load_or_compile(
        self, lowered: jax.stages.Lowered, running: Future[jax.stages.Compiled], first: Devices, devices: Devices
    ) -> jax.stages.Compiled:
        return _load(running, first, devices) or self._compiled(lowered)

    def _compiled(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        self._count()
        return lowered.compile()

    def _count(self) -> None:
        with self._counting:
            self.done.compiled += 1


def _load(running: Future[jax.stages.Compiled], first: Devices, devices: Devices) -> jax.stages.Compiled | None:
    """A program for ``first`` once it is compiled, on other devices where it can be loaded there."""
    run = running.result()
    return run if devices == first else load_on(run, first, devices)


@contextmanager
def uncollected() -> Iterator[None]:
    """A context without garbage collection. Tracing makes many objects and next to no cycles, and going through all of
    them again and again is a quarter of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def lower(
    function: Callable[..., Any],
    avals: Sequence[Any],
    in_shardings: Any,
    out_shardings: Any,
    donate: tuple[int, ...],
    *,
    by_memory: bool = False,
) -> jax.stages.Lowered:
    """The lowered form of a function of flat arguments. Donated arguments that match no result are freed instead of
    reused, which JAX would warn of. ``by_memory``: as in `compiler_options`; programs that compute loops again are put
    in that order anyway."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        devices = {device for at in jax.tree.leaves((in_shardings, out_shardings)) for device in at.device_set}
        jitted: Any = partial(
            jax.jit, function, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=donate
        )
        traced = jitted(compiler_options=compiler_options(devices, by_memory=by_memory)).trace(*avals)
        if not by_memory and computes_loops_again(traced.jaxpr.jaxpr):
            traced = jitted(compiler_options=compiler_options(devices, by_memory=True)).trace(*avals)
        lowered: jax.stages.Lowered = traced.lower()
        return lowered
