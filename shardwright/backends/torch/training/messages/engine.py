"""Training steps of a program whose control flow depends on values, over the ranks of a pipeline.

The rank at pp coordinate 0, the driver, runs the step body for every microbatch; the others serve calls of their
modules until it tells them that the step is over. At most ``active`` microbatches are under way at once.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.backends.torch.data_parallel.gradients import Gradients
from shardwright.backends.torch.loss.shares import LossShares
from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.process import wait_longer
from shardwright.backends.torch.machine.watchdog import PeerError, Watchdog, report
from shardwright.backends.torch.memory.module_attributes import Attributes
from shardwright.backends.torch.pipeline.step_results import Shares
from shardwright.backends.torch.program.python_reads import Reads, left_as_it_is
from shardwright.backends.torch.program.randomness import kept_generators
from shardwright.backends.torch.state.ownership import Ownership
from shardwright.backends.torch.training.call import Result
from shardwright.backends.torch.training.messages.call_patches import patched_calls
from shardwright.backends.torch.training.messages.calls import Calls
from shardwright.backends.torch.training.messages.microbatch_threads import (
    Fiber,
    StoppedError,
    Threads,
    Turns,
    current_fiber,
)
from shardwright.backends.torch.training.messages.owners import Owners
from shardwright.backends.torch.training.messages.random_by_call import Draws
from shardwright.backends.torch.training.messages.remote_errors import describe
from shardwright.backends.torch.training.messages.remote_parameters import make_proxies
from shardwright.backends.torch.training.messages.step_failures import StepFailures
from shardwright.backends.torch.training.messages.step_outcome import MicrobatchResult, Outcome
from shardwright.backends.torch.training.messages.thread_modes import Modes
from shardwright.backends.torch.training.messages.transport import Envelope, Kind, Wire
from shardwright.core.errors import LossError, ShardwrightError

StepBody = Callable[[list[torch.Tensor]], Any]

DRIVER = 0
"""The pp coordinate that runs the step body."""

MORE_THAN_RANKS = 2
"""The default number of active microbatches beyond the pipeline's degree, which is SageMaker's."""

FORWARD_FIRST = frozenset({"simple", "gpipe"})
"""Schedules that finish the forwards before they start the backwards."""

BACKWARD_FIRST = frozenset({"interleaved", "1f1b"})
"""Schedules that start a backward as soon as there is one."""


class Messages:
    """One rank's part of the steps. Every rank of the run makes one at the same time.

    Args:
        ownership: of the parameters, split by ``owners``.
        active: the number of microbatches that are under way at once; None for the number of ranks and two more.
        schedule: the name of the schedule; it says whether forwards or backwards come first.
    """

    def __init__(
        self,
        owners: Owners,
        ownership: Ownership,
        gradients: Gradients,
        bound: BoundMesh,
        watchdog: Watchdog,
        *,
        timeout_s: float,
        active: int | None,
        schedule: str,
    ) -> None:
        self.ownership, self.gradients, self.bound, self.watchdog = ownership, gradients, bound, watchdog
        self.me, self.size = bound.coordinate("pp"), bound.size("pp")
        self.active = active or self.size + MORE_THAN_RANKS
        self.turns = Turns(schedule not in FORWARD_FIRST)
        self.threads = Threads()
        group = _group(bound, timedelta(seconds=timeout_s))
        if group is not None:
            wait_longer(group)
            if watchdog.pulse is not None:
                watchdog.pulse.groups.append(group)
        self.failures = StepFailures(bound, watchdog, self.turns)
        self.wire = self.failures.wire = Wire(group, self.me, self.size, self._deliver, self.failures.lose)
        self.draws = Draws(bound.device)
        self.calls = Calls(
            owners, ownership, self.wire, self.turns, self.draws, bound.device, bound.describe(), bound.groups["pp"],
            self._begin_gradients,
        )  # fmt: skip
        held = {*ownership.local_parameters(), *ownership.local_buffers()}
        absent = [n for n in (*ownership.parameter_names, *ownership.buffer_names) if n not in held]
        make_proxies(((name, ownership.tensor(name)) for name in sorted(absent)), self.calls.fetch, bound.device)
        self._writes: dict[bool, bool] = {}
        """Whether modules write to their buffers or Python values, by whether the model trains: then the forwards of
        two microbatches may not overlap. It is not known before the first step, which is run in order."""
        self._looked_at: set[bool] = set()
        """The modes of the model in which the attributes of modules on this rank were looked at."""
        self._fibers: dict[int, Fiber] = {}
        self._lock = threading.Lock()
        self._begun = False
        self._shares = Shares(((1,),), 0)
        self._loss_shares: LossShares | LossError | None = None
        self._outcome: Outcome | None = None
        self._wrote = False
        self._ordered = self._leaves_python = True
        self._body: StepBody | None = None
        self._modes = Modes(True, False, None)
        self._results: dict[int, MicrobatchResult] = {}
        self.losses: list[tuple[str, torch.Tensor]] = []
        """The losses of the last step, on the driver."""
        self._next_microbatch = 0
        self._under_way = 0

    # A step ------------------------------------------------------------------------------------------------------

    def step(
        self,
        body: StepBody,
        microbatches: Sequence[Sequence[torch.Tensor]],
        shares: Shares,
        loss_shares: LossShares | LossError | None,
        *,
        seed: int,
        step: int,
        leaves_python: bool = True,
    ) -> Result:
        """Run a step; every rank calls this at the same time.

        Args:
            shares: the number of samples of each microbatch of each replica.
            loss_shares: the shares in each loss of the step; None: every loss counts whole. An error is raised once the
                body has given a loss.
            leaves_python: whether what the body writes to Python values stays.

        Returns:
            the result; see `Result`.

        Raises:
            StepFailedError: a module, or the body, failed on some rank. The next step may be run.
            PeerError: a peer died, or did not answer in time.
        """
        self.failures.require_peers()
        self._begin(body, microbatches)
        self._shares, self._loss_shares, self._leaves_python = shares, loss_shares, leaves_python
        self.draws.seed, self.draws.step = seed, step
        self.draws.first_microbatch = self._shares.first
        self.draws.begin(training=self.ownership.model.training)
        self.watchdog.doing(f"step {step}, by messages")
        with kept_generators(True, self.bound.device), patched_calls(self.calls), self.watchdog.waiting(_Waits(self)):
            try:
                self.wire.open()  # only now: calls are served from here on
                outcome = self._run(len(microbatches))
            except BaseException as error:
                self.failures.fail(error)
                self.failures.unwind()
                if self._begun:
                    self.gradients.abandon()
                if self.bound.mesh.size == self.size:
                    error._shardwright_heard = True  # type: ignore[attr-defined]
                else:  # the replicas of this pipeline do not hear of it over the wire
                    self.watchdog.under_way()
                raise
            finally:
                self._clear()
        self.watchdog.doing("the end of the step")
        if outcome.training:
            self._begin_gradients()
            self.gradients.finish(outcome.total_weight)
        self.watchdog.doing("between steps")
        given = loss_shares if isinstance(loss_shares, tuple) else ()
        return outcome.result(given, shares)

    def _run(self, count: int) -> Outcome:
        versions, training = self._buffer_versions(), self.ownership.model.training
        is_first = self.me != DRIVER and training not in self._looked_at  # the driver notes them as it runs the body
        attributes = Attributes(self.ownership.model) if is_first else None
        if self.me == DRIVER:
            self._admit()
        self.failures.wait()
        if not self.failures.comes(self.turns.ended):
            raise PeerError(f"{self.bound.describe()}: a microbatch that was over did not end")
        wrote = self._buffer_versions() != versions or (attributes is not None and attributes.have_changed())
        self._looked_at.add(training)
        if not self.draws.end():
            report(
                f"{self.bound.describe()}: something drew from Python's or NumPy's generator for the first time; the "
                f"numbers of this step depend on how the model is split, later ones do not"
            )
        if self.me == DRIVER:
            results = [self._results[m] for m in range(count)]
            self._outcome = Outcome.of(results).over_dp(self._shares, self.bound, self.watchdog)
            self.wire.say_last(Kind.END, *self._outcome.packed())
        else:
            self.wire.say_last(Kind.BYE, wrote)
        if not self.failures.comes(self.wire.quiet):
            raise PeerError(f"{self.bound.describe()}: a peer did not end its step in time")
        self.failures.raise_if_failed()
        self.wire.drain()
        self._note_writes(wrote or self._wrote)
        assert self._outcome is not None
        return self._outcome

    def _note_writes(self, wrote: bool) -> None:
        if self.me != DRIVER:
            return
        if wrote and not self._ordered:
            report(
                f"{self.bound.describe()}: a module wrote to its buffers for the first time, in a step whose "
                f"microbatches overlapped: they may have come to it in another order; from now on they do not overlap"
            )
        training = self.ownership.model.training
        self._writes[training] = wrote or self._writes.get(training, False)

    def backward(self, loss: Any, weight: Any = None, reduction: str | None = None) -> None:
        """``model.backward`` inside the body: the loss is noted, and its backward pass is run when the body has ended.

        Raises ShardwrightError for a value that is no loss.
        """
        fiber = current_fiber()
        if fiber is None:
            raise ShardwrightError("model.backward(loss) belongs inside a function decorated with @sw.step")
        if not isinstance(loss, torch.Tensor):
            raise ShardwrightError(f"model.backward takes the loss, a tensor: given a {type(loss).__name__}")
        if loss.numel() != 1:
            raise ShardwrightError(
                f"model.backward takes a loss of one element: given shape {tuple(loss.shape)}; reduce it by mean or sum"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ShardwrightError("model.backward was given a loss that depends on no trainable parameter")
        if isinstance(weight, torch.Tensor):
            weight = weight.detach()
        elif weight is not None:
            weight = float(weight)
        fiber.losses.append((loss, weight))
        fiber.reductions.append(reduction)

    def close(self) -> None:
        """End the threads. No step is run afterwards."""
        self.threads.close()
        self.wire.close()

    # The driver --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start microbatches, in order, as many as may be under way."""
        while True:
            with self._lock:
                limit = 1 if self._ordered and self._forwards_open() else self.active
                if self._next_microbatch >= len(self.calls.microbatches) or self._under_way >= limit:
                    return
                fiber = Fiber(self._next_microbatch)
                self._fibers[fiber.microbatch] = fiber
                self._next_microbatch += 1
                self._under_way += 1
            self.turns.add(fiber, self._guarded(self._drive), self.threads)

    def _forwards_open(self) -> bool:
        return len(self._results) < self._next_microbatch

    def _drive(self, fiber: Fiber) -> None:
        """Run one microbatch on the driver: the body, then the backward pass."""
        m = fiber.microbatch
        fiber.batch = {i: _copied(tensor) for i, tensor in enumerate(self.calls.microbatches[m])}
        self.draws.body(fiber)
        assert self._body is not None
        roots = getattr(self._body, "python_roots", ())
        undone = contextlib.nullcontext() if self._leaves_python else left_as_it_is(self.ownership.model, roots)
        with self._modes.applied(self.bound.device), undone, self._noting_python_writes(self._body):
            result = self._body([fiber.batch[i] for i in range(len(fiber.batch))])
        losses, fiber.losses = fiber.losses, []
        reductions, fiber.reductions = fiber.reductions, []
        found = self._results[m] = MicrobatchResult.of(result, losses)
        self.losses += [(f"loss of microbatch {m}", loss.detach()) for loss, _ in losses]
        del result
        if self._ordered:
            self._admit()
        if losses and self._modes.grad:
            fiber.backward_depth += 1
            self.turns.rest(fiber)
            self._begin_gradients()
            scales = self._scales(m, reductions) if found.weight is None else [found.weight] * len(losses)
            counted = [(loss, scale) for (loss, _), scale in zip(losses, scales, strict=True) if scale != 0.0]
            gradients = [torch.full_like(loss, scale) for loss, scale in counted]
            if counted:
                self.calls.backward(fiber, [loss for loss, _ in counted], gradients)
            del counted
            fiber.backward_depth -= 1
        del losses
        for peer in self.wire.peers:
            self.wire.send(peer, Kind.DONE, m, 0, None)
        with self._lock:
            del self._fibers[m]
            self._under_way -= 1
            finished = not self._under_way and self._next_microbatch == len(self.calls.microbatches)
        if finished:
            self.failures.done.set()
        else:
            self._admit()

    def _scales(self, m: int, reductions: Sequence[str | None]) -> list[float]:
        """The factor of each loss of a microbatch: by the shares that were determined beforehand, or else by the
        reduction that the body states for each. Raises LossError where neither is known."""
        found, number = self._loss_shares, self._shares.first + m
        if found is None:
            return [1.0] * len(reductions)
        if isinstance(found, LossError):
            if None in reductions:
                raise found
            samples = self._shares.flat
            return [1.0 if said == "sum" else samples[number] / sum(samples) for said in reductions]
        if len(found) != len(reductions):
            raise LossError(
                f"the step gave {len(reductions)} losses to model.backward for microbatch {m}, and {len(found)} when "
                f"it was read before: say what each is to the batch, by model.backward(loss, reduction='mean') or 'sum'"
            )
        return [1.0 if one is None else one[number] for one in found]

    @contextlib.contextmanager
    def _noting_python_writes(self, body: StepBody) -> Iterator[None]:
        """A context for the first step, which is run in order. It notes whether the body, or modules that run here,
        write to Python values such as counters: two overlapping microbatches would see each other's."""
        if self.ownership.model.training in self._writes or self._wrote:
            yield
            return
        reads = Reads(self.ownership.model, lambda: False)
        with reads.watching(getattr(body, "python_roots", ())):
            yield
        reads.close()
        self._wrote = self._wrote or bool(reads.writes())

    # Every rank --------------------------------------------------------------------------------------------------

    def _begin(self, body: StepBody, microbatches: Sequence[Sequence[torch.Tensor]]) -> None:
        self._modes = Modes.here(self.bound.device)
        self._outcome = None
        self._begun = self._wrote = False
        self._ordered = self._writes.get(self.ownership.model.training, True)
        self._clear()
        self._body, self.calls.microbatches = body, microbatches
        self.losses = []
        self._next_microbatch = self._under_way = 0
        self.failures.begin()
        self.turns.begin()

    def _clear(self) -> None:
        """Let go of everything that belongs to one step."""
        self._body, self.calls.microbatches = None, ()
        self._fibers, self._results = {}, {}

    def _begin_gradients(self) -> None:
        if not self._begun:
            self._begun = True
            self.gradients.begin()

    def _buffer_versions(self) -> list[tuple[int, int]]:
        return [(id(b), 0 if b.is_inference() else b._version) for b in self.ownership.local_buffers().values()]

    def _serve(self, fiber: Fiber) -> None:
        """Run one microbatch on a rank that is not the driver."""
        while True:
            envelope = self.turns.take(fiber)
            if envelope.kind is Kind.DONE:
                break
            self.calls.serve(fiber, envelope)

    def _guarded(self, work: Callable[[Fiber], None]) -> Callable[[Fiber], None]:
        def run(fiber: Fiber) -> None:
            try:
                work(fiber)
            except StoppedError:
                raise
            except BaseException as error:  # sys.exit in a model, too, must not leave the others waiting
                self.failures.fail(error, describe(error, self.bound.describe(), fiber.microbatch))

        return run

    def _deliver(self, envelope: Envelope) -> None:
        """Take a message that has come; on the thread that receives from its sender."""
        if envelope.kind is Kind.ABORT:
            self.failures.hear(envelope.body, envelope.source)
        elif envelope.kind is Kind.END:
            self._outcome = Outcome.unpacked(envelope.body, envelope.tensors, self.bound.device)
            self.failures.done.set()
        elif envelope.kind is Kind.BYE:
            self._wrote = self._wrote or bool(envelope.body)
        else:
            with self._lock:
                fiber = self._fibers.get(envelope.microbatch)
                is_new = fiber is None
                if fiber is None:
                    if envelope.kind is Kind.DONE:
                        return
                    fiber = self._fibers[envelope.microbatch] = Fiber(envelope.microbatch)
            self.turns.deliver(fiber, envelope)
            if is_new:
                self.turns.add(fiber, self._guarded(self._serve), self.threads)
            if envelope.kind is Kind.DONE:
                with self._lock:
                    del self._fibers[envelope.microbatch]


class _Waits:
    """A description of this rank's waits, made when it is asked for."""

    def __init__(self, engine: Messages) -> None:
        self._engine = engine

    def __str__(self) -> str:
        engine = self._engine
        waits = engine.turns.waits()
        if not waits:
            return f"calls from the driver, rank {engine.bound.peer('pp', DRIVER)}" if engine.me else "its own work"
        return "; ".join(
            f"{what} of microbatch {m} from rank {engine.bound.peer('pp', peer)} (for {since_s:.1f} s)"
            for m, what, peer, since_s in waits
        )


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor of the batch for the body, which may write to it: the other ranks have the batch as it was.
    Its gradient goes to that tensor."""
    return tensor.clone()


def _group(bound: BoundMesh, timeout: timedelta) -> ProcessGroup | None:
    """A Gloo group over this rank's pipeline peers; every rank of the run takes part in making all of them."""
    mine: ProcessGroup | None = None
    for ranks in bound.mesh.groups("pp"):
        group = dist.new_group(list(ranks), timeout, "gloo") if len(ranks) > 1 else None
        if bound.rank in ranks and isinstance(group, ProcessGroup):
            mine = group
    return mine
