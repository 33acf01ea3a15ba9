"""A model split over this run's ranks, and the training steps that it runs."""

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright.backends.torch.capture.batch_dims import Sample
from shardwright.backends.torch.capture.model_call import growth_of, sample_of
from shardwright.backends.torch.data_parallel.batch_norm import RunningStatistics, norm_over_replicas
from shardwright.backends.torch.data_parallel.gradients import Gradients
from shardwright.backends.torch.loss.read import Batching, Losses, LossReading, read_losses
from shardwright.backends.torch.loss.shares import LossSemantics, LossShares, Microbatch, of_own
from shardwright.backends.torch.machine.agreement import Agreement, Claim
from shardwright.backends.torch.machine.digests import digest_of
from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.pipeline_messages import Mailroom
from shardwright.backends.torch.machine.watchdog import Watch
from shardwright.backends.torch.messages.engine import Messages
from shardwright.backends.torch.messages.owners import Owners
from shardwright.backends.torch.pipeline.action_times import Recorder
from shardwright.backends.torch.pipeline.actions import Pipeline, closing_order
from shardwright.backends.torch.pipeline.compiling import Compiler
from shardwright.backends.torch.pipeline.sentinels import Sentinel
from shardwright.backends.torch.pipeline.step_results import Returned, Shares, even_split, homes_of, share, total_weight
from shardwright.backends.torch.program.early_checks import (
    ModuleTree,
    require_alike,
    require_hooks_fire,
    require_results,
    require_whole_gradients,
)
from shardwright.backends.torch.program.program import Literal, Loss, NumberRef, Program, Tree, name_of
from shardwright.backends.torch.program.python_places import Holder
from shardwright.backends.torch.program.python_reads import left_as_it_is
from shardwright.backends.torch.program.randomness import Moment, Streams
from shardwright.backends.torch.program.recording_cache import Recordings
from shardwright.backends.torch.program.recording_check import Varying, record_varying
from shardwright.backends.torch.program.refusals import computes_with_a_clock
from shardwright.backends.torch.program.stage_map import StageMap, keep_microbatches
from shardwright.backends.torch.program.stages import Division, divide
from shardwright.backends.torch.program.step_recorder import StepRecorder, record
from shardwright.backends.torch.program.value_names import text_of
from shardwright.backends.torch.state.model_agreement import LiveFlags, module_claim, parameters_claim
from shardwright.backends.torch.state.ownership import Holding, Placement, place
from shardwright.backends.torch.state.parameter_shards import Shards
from shardwright.backends.torch.state.weight_transfer import add_holders, synchronize
from shardwright.backends.torch.state.weights import Weights, materialize
from shardwright.backends.torch.tensor_parallel.engine import TensorParallel
from shardwright.backends.torch.tensor_parallel.expanded_step import MODEL_CALL
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError
from shardwright.core.errors import CaptureError, LossError, PlanError, ShardwrightError, UnrecordableError
from shardwright.core.schedule import Schedule
from shardwright.core.schedule.checks import require_trains

COMPILED = 16
"""Of each signature so many steps are kept ready that differ in the recordings of their microbatches."""

DIGESTS = 1024
"""Digests of so many recordings are kept."""

StepBody = Callable[[list[torch.Tensor]], Any]


@dataclass(slots=True)
class _Compiled:
    """A recorded step, ready to run."""

    pipeline: Pipeline
    result: Tree
    order: tuple[str, ...]
    """This rank's parameters in the order in which their gradients become whole."""

    def runs(self, divisions: Sequence[Division]) -> bool:
        """Whether this is for these recordings of the microbatches."""
        return all(one is other for one, other in zip(self.pipeline.divisions, divisions, strict=True))


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a step that can be run from a recording is run with."""

    compiled: _Compiled
    losses: LossShares
    numbers: Sequence[Sequence[Any]]
    """For each microbatch what its program is given of Python values."""

    @property
    def result(self) -> Tree:
        """That of the body, with numbers of the last microbatch."""
        given, result = self.numbers[-1], self.compiled.result
        leaves = [Literal(given[leaf.index]) if isinstance(leaf, NumberRef) else leaf for leaf in result.leaves]
        return Tree(tuple(leaves), result.spec)


class Runtime:
    """One rank's part of a model and of its training.

    Args:
        model: the whole model, on any device; it is split in place.
        bound: the mesh of this run.
        weights: where a model on the meta device gets its data; see `weights.materialize`.
        seed: the seed of dropout and of init functions.
        agreement: by which ranks see what they have alike; default: one of its own, which every rank makes then.
    """

    def __init__(
        self, model: nn.Module, bound: BoundMesh, watch: Watch, *, seed: int, weights: Weights | None,
        agreement: Agreement | None = None,
    ) -> None:  # fmt: skip
        self.agreement = agreement or Agreement(bound, watch)
        self.model, self.bound, self.watch, self.seed = model, bound, watch, seed
        self.weights = weights
        self.holding = Holding(model, bound.coordinate("pp"))
        self._tree = ModuleTree(self.holding.modules)
        self.flags = LiveFlags(self.holding.modules)
        self.gradients = Gradients(self.holding, bound, watch)
        group = dist.group.WORLD
        assert group is not None
        self.mailroom = Mailroom(
            bound.groups["pp"], bound.coordinate("pp"), bound.device, watch, peers=bound.handles["pp"], group=group
        )
        self.stage_map: StageMap | None = None
        self._schedule_digest = ""
        self.messages: Messages | None = None
        """What runs the steps when the model's control flow depends on values."""
        self.recorder: StepRecorder | Messages | Losses | _Unheard | None = None
        """Who hears of the losses that the body gives to ``backward``."""
        self.in_body = False
        """Whether the body of a step runs now, on stand-ins."""
        self.steps_run = 0
        self.recorded = 0
        """How often the body of a step was recorded."""
        self.listeners: list[Callable[[], None]] = []
        """Called whenever the parameters of this rank have changed identity."""
        self.before_whole: list[Callable[[Shards], None]] = []
        """Called before parameters that lie in pieces are put together for good, on every rank alike."""
        self.recorders: list[Recorder] | None = None
        """While timelines are recorded: of each step when its actions ran."""
        self.tensor: TensorParallel | None = None
        self.compiler: Compiler | None = None
        """Compiles the units of this rank's stages, if asked to."""
        self.sentinel = Sentinel("warn", False, watch, bound.device)
        """Looks for NaN and infinity in losses and gradients."""
        self.statistics: RunningStatistics | None = None
        self.semantics = LossSemantics(bound, watch, None)
        """What the losses of steps are to their batches."""
        self._undo_norms: Callable[[], None] | None = None
        self._compiled: dict[Hashable, list[_Compiled]] = {}
        self._ahead: tuple[Hashable, Division, Varying] | None = None
        self._recordings = Recordings(type(model).__name__)
        self._synchronized = False
        self._digests: dict[int, tuple[Division, int]] = {}
        """Of recordings, by id: the same on all ranks that recorded the same."""

    # Splitting ---------------------------------------------------------------------------------------------------

    def split(self, stage_map: StageMap) -> None:
        """Keep this rank's parameters and drop the others; give data to those on the meta device."""
        self.stage_map, self._schedule_digest = stage_map, stage_map.schedule.digest
        schedule = stage_map.schedule
        calls = [[path for path, _ in held] for held in stage_map.calls]
        placement = place(self.model, calls, stage_map.parameter_stages, schedule.stage_to_rank, schedule.ranks)
        if self.bound.size("tp") > 1 and stage_map.plan is not None:
            layouts = stage_map.plan.parameter_layouts("torch")
            planned = {self.holding.first_name[name]: layout.on("tp") for name, layout in layouts.items()}
            shards = Shards(self.holding, self.bound, self.watch, planned)
            self.tensor = TensorParallel(self.model, shards, stage_map.plan)
            self.gradients.shards = shards
        self._hold(placement)
        if self.bound.size("dp") > 1 and stage_map.loss_scope == "global":
            self._undo_norms = norm_over_replicas(self.model, self.bound, self.watch, lambda: self.in_body)
        elif self.bound.size("dp") > 1:
            self.statistics = RunningStatistics(self.model, self.bound, self.watch)

    def _hold(self, placement: Placement) -> None:
        wanting = self.holding.split(placement)
        cutter = self.tensor.shards if self.tensor is not None else None
        materialize(self.holding, wanting, self.weights, self.bound.device, self.seed, cutter)
        self.weights = None
        self.holding.to(self.bound.device)
        self._changed()

    @property
    def schedule_text(self) -> str:
        """The schedule by which steps run, in words that two schedules share that do the same."""
        if self.messages is not None or self.stage_map is None:
            return "none yet" if self.messages is None else "messages"
        return f"{self.stage_map.schedule.name} ({self._schedule_digest[:12]})"

    def use_schedule(self, schedule: Schedule) -> None:
        """Run the steps from now on under another schedule of the same stages. Every rank calls this.

        Raises ShardwrightError when it places stages on other ranks than the one that the model was split for.
        """
        stage_map = self.stage_map
        if stage_map is None:
            raise ShardwrightError("the model is not split yet: run a step first")
        if schedule is stage_map.schedule:
            return
        if schedule.placement != stage_map.schedule.placement:
            raise ShardwrightError(
                f"{schedule.name} places the stages on ranks {schedule.placement}, and the model was split for "
                f"{stage_map.schedule.placement}: choose a schedule with that placement"
            )
        if schedule.microbatches != stage_map.schedule.microbatches:
            raise ShardwrightError(
                f"{schedule.name} is for {schedule.microbatches} microbatches, and the steps have "
                f"{stage_map.schedule.microbatches}: build it for that number"
            )
        self.stage_map, self._schedule_digest = replace(stage_map, schedule=schedule), schedule.digest

    def _changed(self) -> None:
        for listener in self.listeners:
            listener()

    # Steps -------------------------------------------------------------------------------------------------------

    def begin(
        self, call: str, samples: Sequence[int], claims: Sequence[Claim] = (), failure: Exception | None = None
    ) -> Shares:
        """Begin a step when all ranks do, with the same claims; every rank calls this at the same time.

        Args:
            call: the same text on all ranks.
            samples: how many each microbatch of this rank has, as `results.even_split` gives them.
            failure: why this rank cannot begin.

        Returns:
            how many samples each microbatch of each replica has.

        Raises:
            DisagreementError: on every rank; see `Agreement.meet`.
            Exception: ``failure``, on this rank.
        """
        self.watch.doing("the start of the step")
        try:
            self._tree.require_same()
        except PlanError as error:
            failure = failure or error
        told = self.agreement.meet(call, claims, failure=failure, notes=(len(samples), sum(samples)))
        every = [told[ranks[0]] for ranks in self.agreement.replicas]
        return Shares(tuple(even_split(total, count) for count, total, *_ in every), self.bound.coordinate("dp"))

    def claims_in_full(self) -> list[Claim]:
        """Of what takes too long to compare in every step: what the modules are, and the values of parameters that
        other replicas hold too."""
        claims = [module_claim(self.holding.modules)]
        if self._synchronized:
            claims.append(parameters_claim(self.holding.local_parameters()))
        return claims

    def step(
        self,
        signature: Hashable,
        body: StepBody,
        microbatches: Sequence[Sequence[torch.Tensor]],
        shares: Shares | None = None,
        prepared: Prepared | None = None,
        axes: Sequence[int | None] | None = None,
    ) -> tuple[Tree, dict[int, Returned]]:
        """Run one training step; every rank calls this at the same time.

        Args:
            signature: what a recorded program stands for, beside the shapes; the same on all pp peers.
            body: what the user's step does, from stand-ins for the tensors of one microbatch.
            microbatches: the tensors of each microbatch, on this run's device. There may be fewer than planned.
            shares: what `begin` gave: the samples of each microbatch are the weight of its losses, where the step gives
                none. Default: `begin` is called here, and all weigh alike.
            prepared: what `prepare` gave for it.
            axes: of each input, the dim that is its batch; None where every microbatch gets it whole. Default: losses
                are means over samples.

        Returns:
            the result of the body as a tree, and its tensors by their position among the leaves.
        """
        shares = shares or self.begin("a step", [1] * len(microbatches))
        if self.messages is not None:
            return self._step_by_messages(self.messages, signature, body, microbatches, shares, axes)
        stage_map = self.stage_map
        assert stage_map is not None
        prepared = prepared or self.prepare(signature, body, microbatches, shares, axes)
        if not self._synchronized:
            synchronize(self.holding, self.bound, self.watch)
            self._synchronized = True
        pipeline = prepared.compiled.pipeline
        training = pipeline.trains
        if stage_map.loss_scope == "global" and len({len(held) for held in shares.samples}) > 1:
            raise ShardwrightError(
                f"the replicas were given {[sum(held) for held in shares.samples]} samples, which make different "
                f"numbers of microbatches, and loss_scope='global' norms those of all replicas together: give each "
                f"replica at least {stage_map.schedule.microbatches} samples"
            )
        if self.statistics is not None:
            self.statistics.begin()
        exchange = None
        if training:
            exchange = self.gradients.begin(prepared.compiled.order)
        pipeline.streams.seed, pipeline.numbers = self.seed, prepared.numbers
        recorder = None
        if self.recorders is not None:
            recorder = Recorder(self.bound.device)
            self.recorders.append(recorder)
        stage_rank = [stage_map.schedule.stage_to_rank(s) for s in range(stage_map.schedule.stages)]
        if training:
            self.sentinel.begin(self.steps_run)
        try:
            values = pipeline.run(
                microbatches, self.steps_run, shares.first, training and torch.is_grad_enabled(),
                of_own(prepared.losses, shares), recorder, exchange,
                self.holding.local_parameters() if exchange is not None else None,
                self.sentinel if training else None,
            )  # fmt: skip
            if self.statistics is not None:
                self.statistics.finish()
            self.watch.doing("the end of the step")
            total, weights = total_weight(pipeline.divisions, values, stage_rank, self.bound, self.mailroom, shares)
            if training:
                self.gradients.finish(total)
        except BaseException:
            if training:
                self.gradients.abandon()
            raise
        self.steps_run += int(training)
        self.watch.doing("the results of the step")
        returned = share(
            pipeline.divisions, values, stage_rank, self.bound, self.mailroom, shares, weights, prepared.losses
        )
        if training:
            for text, loss in values.losses:
                self.sentinel.loss(text, loss)
            self.sentinel.finish(self.holding.local_parameters())
        self.watch.doing("between steps")
        return prepared.result, returned

    def prepare(
        self,
        signature: Hashable,
        body: StepBody,
        microbatches: Sequence[Sequence[torch.Tensor]],
        shares: Shares,
        axes: Sequence[int | None] | None = None,
    ) -> Prepared:
        """The recording by which a step can be run, made now if there is none yet; every rank calls this.

        Raises:
            UnrecordableError: there is none, on this rank or on another.
            DisagreementError: ranks run different recordings, or only some of a replica record the step anew.
            LossError: see `LossSemantics.shares`.
        """
        stage_map = self.stage_map
        assert stage_map is not None
        shapes = tuple(map(_shapes, microbatches))
        if self._ahead is not None and self.tensor is None:
            self._recordings.add((signature, self._ahead[0], self._schedule_digest), *self._ahead[1:])
        self._ahead = None
        numbers: list[tuple[Any, ...]] = []
        compared: list[list[Any]] = []

        def divided(anew: bool) -> list[Division] | None:
            numbers.clear()
            compared.clear()
            left: list[tuple[Holder, Any, Any]] = []
            try:
                return each_divided(anew, left)
            finally:
                for holder, key, value in reversed(left):
                    holder.put(key, value)

        def each_divided(anew: bool, left: list[tuple[Holder, Any, Any]]) -> list[Division] | None:
            divisions = []
            holding: dict[Hashable, Division] = {}  # for all microbatches of a shape, whatever is in them
            for number, microbatch in enumerate(microbatches):
                division = holding.get(shapes[number])
                if division is None:
                    moment = Moment(self.seed, self.steps_run, shares.first + number)
                    key = (signature, shapes[number], self._schedule_digest)
                    if anew:
                        make = partial(self.record, stage_map, body, microbatch, moment)
                        division = self._recordings.find(key, microbatch, moment, make)
                    else:
                        division = self._recordings.held(key, microbatch, moment)
                    if division is None:
                        return None
                    if not division.program.guards and not division.program.python.effects:
                        holding[shapes[number]] = division
                divisions.append(division)
                numbers.append(division.program.python.numbers())
                compared.append(division.program.python.compared(numbers[-1]))
                left += division.program.python.leave()
            return divisions

        def ready(divisions: Sequence[Division]) -> _Compiled | None:
            variants = self._compiled.get((signature, shapes, self._schedule_digest), ())
            return next((made for made in variants if made.runs(divisions)), None)

        divisions, all_ready = self._agree_on_recordings(
            partial(divided, False), ready, compared, "looking for the recording"
        )
        if divisions is None:
            divisions, all_ready = self._agree_on_recordings(
                partial(divided, True), ready, compared, "recording the step"
            )
        assert divisions is not None
        compiled = ready(divisions)
        if not all_ready:
            self._agree_to_compile(stage_map, divisions if compiled is None else ())
        variants = self._compiled.setdefault((signature, shapes, self._schedule_digest), [])
        if compiled is None:
            if len(variants) >= COMPILED:
                variants.pop(0).pipeline.streams.close()
            compiled = self._compile(stage_map, divisions)
            variants.append(compiled)
        losses = divisions[0].program.losses if torch.is_grad_enabled() else ()
        found = self.loss_shares(losses, signature, body, microbatches, divisions, shares, axes)
        for division in divisions:
            division.program.python.leave()
        return Prepared(compiled, found, tuple(numbers))

    def loss_shares(
        self,
        losses: Sequence[Loss],
        signature: Hashable,
        body: StepBody,
        microbatches: Sequence[Sequence[torch.Tensor]],
        divisions: Sequence[Division | None],
        shares: Shares,
        axes: Sequence[int | None] | None,
    ) -> LossShares:
        """The share of each microbatch in the losses of a step; every rank calls this.

        Args:
            divisions: the recordings of the microbatches, which may differ in what the model does; None: none are made.
        """
        if axes is None:
            losses = [replace(loss, reduction=loss.reduction or "mean") for loss in losses]
        asked = []
        for inputs, division, held in zip(microbatches, divisions, shares.own, strict=True):
            asked.append(self._microbatch(signature, body, inputs, division, held, sum(shares.flat), axes))
        return self.semantics.shares(losses, asked, shares, type(self.model).__name__)

    def _microbatch(
        self, signature: Hashable, body: StepBody, inputs: Sequence[torch.Tensor], division: Division | None,
        samples: int, whole: int, axes: Sequence[int | None] | None,
    ) -> Microbatch:  # fmt: skip
        which = None if division is None else division.program.python.serial
        batching = Batching(tuple(axes if axes is not None else [None] * len(inputs)), samples, whole)
        read = partial(self._read_losses, body, inputs, batching)
        return Microbatch(inputs, (signature, _shapes(inputs), which, whole), read)

    def _loss_shares_by_messages(
        self, signature: Hashable, body: StepBody, microbatches: Sequence[Sequence[torch.Tensor]], shares: Shares,
        axes: Sequence[int | None] | None,
    ) -> LossShares | LossError | None:  # fmt: skip
        """As `loss_shares`, of a step whose losses are not known before it is read; None where there is one microbatch,
        whose loss is all. Of a step that could not be run for that an error comes back: the step fails when it is run,
        or the error is raised once it gives its loss."""
        if not torch.is_grad_enabled() or len(shares.flat) == 1:
            return None
        first = self._microbatch(signature, body, microbatches[0], None, shares.own[0], sum(shares.flat), axes)
        losses, unknown = self.semantics.losses_of(first), [None] * len(microbatches)
        if losses is not None:
            return self.loss_shares(losses, signature, body, microbatches, unknown, shares, axes)
        try:
            return self.loss_shares([Loss(0, None)], signature, body, microbatches, unknown, shares, axes)
        except LossError as error:
            return error

    def _read_losses(self, body: StepBody, inputs: Sequence[torch.Tensor], batching: Batching) -> list[LossReading]:
        def once(given: list[torch.Tensor]) -> Any:
            with left_as_it_is(self.model, getattr(body, "python_roots", ())):
                return body(given)

        with nullcontext() if self.tensor is None else self.tensor.shards.as_whole():
            return read_losses(
                self.model, once, inputs, batching, self.bound.device, self._heard_by,
                norms_are_plain=self.semantics.scope is not None,
            )  # fmt: skip

    def _agree_on_recordings(
        self,
        find: Callable[[], list[Division] | None],
        ready: Callable[[Sequence[Division]], object],
        numbers: Sequence[Sequence[Any]],
        call: str,
    ) -> tuple[list[Division] | None, bool]:
        """The recordings that all ranks run by, unless one of them has none; and whether all ranks are ready to run.
        ``numbers`` has, once they are found, what they are given of Python values."""
        divisions: list[Division] | None = None
        failure: Exception | None = None
        is_ready = False
        try:
            divisions = find()
            is_ready = divisions is not None and ready(divisions) is not None
        except Exception as error:
            failure = error
        digest = 0 if divisions is None else digest_of(*map(self._digest, divisions))
        has = "held" if divisions is not None else "to be made anew"
        claims = [
            Claim.of(
                "whether there is a recording of the step", has,
                "A value that the step or the model reads has changed on some of the ranks only: change it on all.",
                "replica",
            ),
            Claim(
                "what the step does", digest, lambda: f"recording {digest & 0xFFFFFF:06x}",
                "The step body, and the code of the model, must do the same on all pipeline peers.", "pipeline",
            ),
            Claim(
                "numbers that the step reads of Python", 0 if divisions is None else digest_of(_said(numbers)),
                lambda: _said(numbers), "Set attributes, globals and variables that a step reads alike.", "replica",
            ),
        ]  # fmt: skip
        notes = (int(divisions is not None), int(is_ready))
        told = self.agreement.meet(call, claims, failure=failure, notes=notes).values()
        return divisions if all(found for found, *_ in told) else None, all(ready for _, ready, *_ in told)

    def _digest(self, division: Division) -> int:
        known = self._digests.get(id(division))
        if known is None:
            if len(self._digests) >= DIGESTS:
                self._digests.clear()
            known = self._digests[id(division)] = (division, digest_of(text_of(division.program)))
        return known[1]

    def _agree_to_compile(self, stage_map: StageMap, divisions: Sequence[Division]) -> None:
        """Check recordings that were never run, none where this rank is ready. Every rank calls this."""
        failure: Exception | None = None
        try:
            if divisions:
                programs = [division.program for division in divisions]
                require_alike(programs)
                for program in programs:
                    require_results(program, self.bound.size("pp"))
                require_hooks_fire(self.holding.modules, {path for held in stage_map.calls for path, _ in held})
                if programs[0].losses:
                    require_whole_gradients(self.model, len(divisions), self.bound.mesh.size, self.bound.size("tp"))
                if any(program.losses for program in programs):
                    require_trains(stage_map.schedule)
        except Exception as error:
            failure = error
        self.agreement.meet("checking the recorded step", failure=failure)

    def run_by_messages(self, owners: Owners, *, active: int | None, schedule: str) -> None:
        """Run steps by messages from now on; every rank calls this at the same time. See `messages.engine.Messages`."""
        if self.holding.placement is None:
            self._hold(owners.placement(self.model))
        if self.tensor is not None:
            for listener in self.before_whole:
                listener(self.tensor.shards)
            self.tensor.shards.restore()
        if self.bound.size("dp") > 1 and self.statistics is None:
            self.statistics = RunningStatistics(self.model, self.bound, self.watch)
        self.messages = Messages(
            owners, self.holding, self.gradients, self.bound, self.watch, timeout_s=self.watch.timeout_s, active=active,
            schedule=schedule,
        )  # fmt: skip

    def _step_by_messages(
        self, messages: Messages, signature: Hashable, body: StepBody, microbatches: Sequence[Sequence[torch.Tensor]],
        shares: Shares, axes: Sequence[int | None] | None,
    ) -> tuple[Tree, dict[int, Returned]]:  # fmt: skip
        if not self._synchronized:
            synchronize(self.holding, self.bound, self.watch, ("dp", "tp"))
            self._synchronized = True
        if self.statistics is not None:
            self.statistics.begin()
        loss_shares = self._loss_shares_by_messages(signature, body, microbatches, shares, axes)
        self.sentinel.begin(self.steps_run)
        with self._heard_by(messages):
            tree, returned, trained = messages.step(
                body, microbatches, shares, loss_shares, seed=self.seed, step=self.steps_run
            )
        if self.statistics is not None:
            self.statistics.finish()
        self.steps_run += int(trained)
        for text, loss in messages.losses:
            self.sentinel.loss(text, loss)
        if trained:
            self.sentinel.finish(self.holding.local_parameters())
        return tree, returned

    @contextmanager
    def _heard_by(self, listener: "Messages | Losses | _Unheard | None") -> Iterator[None]:
        """A step body runs, and gives its losses to ``listener``; None: to the recorders that say so themselves."""
        self.recorder, self.in_body = listener, True
        try:
            yield
        finally:
            self.recorder, self.in_body = None, False

    def _listen_to(self, recorder: StepRecorder) -> None:
        self.recorder = recorder

    def try_running(self, body: StepBody, inputs: Sequence[torch.Tensor]) -> None:
        """Run a step body on tensors, on a model that is not split, without a backward pass."""
        with self._heard_by(_Unheard()):
            body(list(inputs))

    def try_recording(self, body: StepBody, inputs: Sequence[torch.Tensor]) -> bool:
        """Record a step body for no plan; whether it calls modules of the model. Raises CaptureError."""
        with self._heard_by(None):
            _, recorder = record(self.model, {}, self.bound.device, body, list(inputs), self._listen_to)
        return bool(recorder.counts)

    def record_ahead(self, stage_map: StageMap, body: StepBody, inputs: Sequence[torch.Tensor]) -> None:
        """Record the step that comes next, before the model is split."""
        moment, varying = Moment(self.seed, self.steps_run, 0), Varying()
        self._ahead = (_shapes(inputs), self.record(stage_map, body, inputs, moment, varying), varying)

    def sample_of(self, body: StepBody, inputs: Sequence[torch.Tensor]) -> Sample:
        """The arguments with which a step body first calls the model; see `model_call.sample_of`."""
        with self._heard_by(_Unheard()):
            return sample_of(self.model, body, inputs, self.bound.device)

    def record(
        self, stage_map: StageMap, body: StepBody, inputs: Sequence[torch.Tensor], moment: Moment, varying: Varying
    ) -> Division:
        """Record a step body and divide it into stages."""
        self.watch.doing("recording the step")
        tensor = self.tensor
        if tensor is not None and not tensor.by_calls_because:
            try:
                return self._record_on_pieces(tensor, stage_map, body, inputs, moment, varying)
            except NotReplayableError as reason:
                tensor.by_calls_because = str(reason)
        with nullcontext() if tensor is None else tensor.shards.as_whole():
            program, recorder = self._recorded(stage_map.stage_of_call, body, inputs, moment, varying)
        written = next((step.function for step in program.steps if step.stage is not None), None)
        if written is not None and stage_map.recompute:
            raise UnrecordableError(
                f"{type(self.model).__name__} is recomputed in the backward pass, and {name_of(written)} is done for "
                f"each microbatch anew, so that it would be that of another one then: take recompute='none'"
            )
        missing = [call for held in stage_map.calls for call in held if call not in recorder.seen_calls]
        if missing and program.losses and not program.is_one_of_many:
            path, occurrence = missing[0]
            if program.guards:
                raise UnrecordableError(
                    f"{type(self.model).__name__} does not call {path!r} (call {occurrence}) for this batch: which "
                    f"modules it calls depends on the batch, so that no recording fits the plan; let the model run by "
                    f"message passing"
                )
            raise UnrecordableError(
                f"the plan has {len(missing)} module calls that the step does not make, {path!r} (call {occurrence}) "
                f"first: plan from a capture with the arguments that the step passes to the model, or let steps that "
                f"train different parts of the model run by message passing"
            )
        stage_of_call = stage_map.stage_of_call
        if tensor is not None:
            with self._before_the_cut(tensor), tensor.shards.as_whole(), left_as_it_is(self.model):
                program = tensor.by_calls(program, stage_of_call, self.bound.device)
            tensor.cut()
            stage_of_call = tensor.stage_of_call
        return divide(program, stage_of_call, stage_map.parameter_stages, stage_map.schedule.stages)

    def _recorded(
        self, stage_of_call: Mapping[tuple[str, int], int], body: StepBody, inputs: Sequence[torch.Tensor],
        moment: Moment, varying: Varying,
    ) -> tuple[Program, StepRecorder]:  # fmt: skip
        def once(places: Sequence[tuple[Holder, Any]], readings: Sequence[Any] | None) -> tuple[Program, StepRecorder]:
            self.recorded += 1
            with self._heard_by(None):
                return record(
                    self.model, stage_of_call, self.bound.device, body, list(inputs), self._listen_to, moment,
                    units_run_again=self.tensor is None, places=places, readings=readings,
                )  # fmt: skip

        found: tuple[Program, StepRecorder] | None = None
        failure: Exception | None = None
        try:
            found = record_varying(once, varying)
            if self.bound.mesh.size > 1 and found[0].rests_on_clocks:
                hindered = computes_with_a_clock(self.model, found[0].python.clocks, ranks=self.bound.mesh.size)
                raise hindered if self.tensor is None else CaptureError(str(hindered))
        except Exception as error:
            failure = error
        if self.tensor is not None:  # what follows takes collectives of the tensor axis
            digest = 0 if found is None else digest_of(text_of(found[0]))
            fix = "The step body, and the code of the model, must do the same on all peers."
            said = f"recording {digest & 0xFFFFFF:06x}"
            claim = Claim("what the step does", digest, lambda: said, fix, "replica")
            self.agreement.meet("recording the step", [claim], failure=failure, in_replica=True)
        elif failure is not None:
            raise failure
        assert found is not None
        return found

    def _record_on_pieces(
        self, tensor: TensorParallel, stage_map: StageMap, body: StepBody, inputs: Sequence[torch.Tensor],
        moment: Moment, varying: Varying,
    ) -> Division:  # fmt: skip
        """Record a step body with the model's units in place of the model."""
        with tensor.shards.as_whole():
            program, _ = self._recorded({MODEL_CALL: 0}, body, inputs, moment, varying)
            with self._before_the_cut(tensor), left_as_it_is(self.model, getattr(body, "python_roots", ())):
                with self._heard_by(_Unheard()):
                    growth = growth_of(self.model, body, inputs, self.bound.device)
                expanded = tensor.expand(program, inputs, self.bound.device, growth)
        tensor.cut()
        return divide(expanded, tensor.stage_of_call, stage_map.parameter_stages, stage_map.schedule.stages)

    @contextmanager
    def _before_the_cut(self, tensor: TensorParallel) -> Iterator[None]:
        """Read how units run on pieces. The cut that follows is a collective of the tensor axis: what fails on one rank
        alone, or comes out in another way there, is told on all of them first."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        unreplayable = isinstance(failure, NotReplayableError)
        because = str(failure) if unreplayable else tensor.by_calls_because
        how = tensor.how(by_calls=bool(because))
        said = f"{how}, as {because}" if because else how
        fix = "Hooks, and what else is done to the model between steps, must be the same on all peers."
        claim = Claim("how the model runs on the tensor axis", digest_of(how), lambda: said, fix, "replica")
        alike = None if unreplayable else failure
        self.agreement.meet("laying the step over the tensor axis", [claim], failure=alike, in_replica=True)
        if failure is not None:
            raise failure

    def _compile(self, stage_map: StageMap, divisions: Sequence[Division]) -> _Compiled:
        used = list({id(division): division for division in divisions}.values())
        programs = [division.program for division in used]
        schedule = keep_microbatches(stage_map.schedule, len(divisions))
        for division in used:
            self._place_needs(division, schedule)
        modules = self.holding.modules
        streams = Streams(programs, modules, self.seed, self.bound.device)
        if self.tensor is not None:
            modules = {**modules, **self.tensor.take(streams)}
        if self.compiler is not None:
            self.compiler.require(stage_map, used)
            stages = stage_map.schedule.stages_of(self.bound.coordinate("pp"))
            modules = {**modules, **self.compiler.units(modules, used, stages)}
        recompute = stage_map.recompute if self.tensor is None else stage_map.recompute | self.tensor.recompute
        pipeline = Pipeline(
            divisions, schedule, modules, self.bound.coordinate("pp"), self.mailroom, self.watch, streams,
            recompute,
        )  # fmt: skip
        stage_rank = [schedule.stage_to_rank(stage) for stage in range(schedule.stages)]
        pipeline.open(set[int]().union(*(homes_of(division, stage_rank) for division in used)))
        rank, names = self.bound.coordinate("pp"), tuple(self.holding.local_parameters())
        return _Compiled(pipeline, programs[0].result, closing_order(stage_map.schedule, rank, used[0], names))

    def _place_needs(self, division: Division, schedule: Schedule) -> None:
        needs: dict[int, set[str]] = {}
        for part in division.parts:
            needs.setdefault(schedule.stage_to_rank(part.stage), set()).update(part.parameters, part.buffers)
        placement = self.holding.placement
        assert placement is not None
        lacking = {r: sorted(n for n in names if r not in placement.holders(n)) for r, names in needs.items()}
        if not any(lacking.values()):
            return
        if self.steps_run:
            rank, names = next((r, n) for r, n in lacking.items() if n)
            raise PlanError(
                f"this step uses {names[0]} on pp rank {rank}, which has no copy of it, and training has begun: run "
                f"every kind of step once before the first optimizer step"
            )
        if add_holders(self.holding, lacking, self.bound, self.watch):
            self._changed()

    def close(self) -> None:
        """End what runs beside the main thread, and take the hooks off the model."""
        if self._undo_norms is not None:
            self._undo_norms()
        for compiled in itertools.chain.from_iterable(self._compiled.values()):
            compiled.pipeline.streams.close()
        self._compiled.clear()
        if self.messages is not None:
            self.messages.close()
        self.mailroom.close()


class _Unheard:
    """Takes losses and does nothing with them."""

    def backward(self, loss: Any, weight: Any = None, reduction: str | None = None) -> None:
        pass


def _shapes(inputs: Sequence[torch.Tensor]) -> Hashable:
    return tuple((tuple(t.shape), t.dtype) for t in inputs)


def _said(numbers: Sequence[Sequence[Any]]) -> str:
    """The numbers of each microbatch, as ranks compare them; of a tensor its shape."""
    return str([[tuple(n.shape) if isinstance(n, torch.Tensor) else n for n in each] for each in numbers])
