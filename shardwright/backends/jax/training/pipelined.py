"""Training with compiled programs for each stage, run under the plan's schedule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.backends.jax.capture.samples import FlatBatch
from shardwright.backends.jax.capture.tree import Parts, abstract, shape_key
from shardwright.backends.jax.loss.metrics import Metrics
from shardwright.backends.jax.loss.microbatches import Microbatches
from shardwright.backends.jax.machine.process_transfers import absent, across, is_here, on_own_device, placed
from shardwright.backends.jax.memory.compiled_peak import pipeline_bytes
from shardwright.backends.jax.pipeline.action_times import ActionTimer
from shardwright.backends.jax.pipeline.actions import Observer, Pipeline, PipelineResult, dispatch_order
from shardwright.backends.jax.pipeline.compilation import uncollected
from shardwright.backends.jax.pipeline.microbatch import cut_microbatch
from shardwright.backends.jax.pipeline.optimizer_cut import OptimizerCut, Places, cut_up, from_pieces, is_stack, pieces
from shardwright.backends.jax.pipeline.sentinels import Evidence, Staged, chosen, is_sound
from shardwright.backends.jax.program.equations import evaluate, needed, value_of
from shardwright.backends.jax.program.flattening import flatten
from shardwright.backends.jax.state.checks import require_like, require_places
from shardwright.backends.jax.state.ownership import Holding, StageMeshes, holdings_of
from shardwright.backends.jax.state.shardings import parameter_shardings
from shardwright.backends.jax.state.train_state import StepResult, TrainState, own_copy, parts_of
from shardwright.backends.jax.tensor_parallel.constrained_loss import FusedParameters, TensorParallel, in_fp8
from shardwright.backends.jax.training.protocol import InStages
from shardwright.core.errors import MissingCapabilityError, PlanError
from shardwright.core.schedule.passes.slices_as_stages import slices_as_stages
from shardwright.core.schedule.timeline import Timeline


@dataclass(eq=False)
class PipelinedTraining(InStages):
    """The state on the meshes of the stages that hold it, and a step that is many programs."""

    def __post_init__(self) -> None:
        schedule = self.plan.build_schedule()
        self.schedule, self.order = slices_as_stages(schedule), dispatch_order(schedule)
        self.meshes = StageMeshes(self.plan, self.devices, self.schedule.placement)
        self._cuts: dict[Any, tuple[tuple[Holding, ...], OptimizerCut]] = {}

    def placed(self, params: Any, names: tuple[str, ...]) -> tuple[tuple[Holding, ...], OptimizerCut]:
        """The holdings of parameters of these shapes, and the optimizer over them."""
        key = shape_key(params)
        if key not in self._cuts:
            shapes = jax.tree.map(abstract, params)
            holdings = holdings_of(self.plan, names, [leaf.shape for leaf in jax.tree.leaves(params)])
            layouts = self.plan.parameter_layouts("jax")
            shardings = parameter_shardings(names, shapes, layouts, self.meshes.meshes[0])
            shard, trained = self.plan.decision.shard, self.loss.trained
            cut = OptimizerCut(
                self.optimizer, shapes, holdings, shardings, shard, self.is_kept_sharded, self.meshes, trained
            )
            self._cuts[key] = holdings, cut
        return self._cuts[key]

    @property
    def _beside(self) -> NamedSharding:
        """The sharding of the count of steps, of random keys, and of other state that no step has changed yet."""
        return self.meshes.everywhere if self.meshes.several else self.meshes.whole[0]

    def put(self, batch: FlatBatch) -> FlatBatch:
        """The batch as it is, in arrays that every process has whole: its leaves are split into microbatches first."""
        return replace(batch, leaves=tuple(map(_of_process, batch.leaves))) if self.meshes.several else batch

    # --- state

    def init(self, given: Parts, make: Callable[[], Parts] | None) -> TrainState:
        """The state of a model: of its arrays, or of its shapes and the function that makes them."""
        holdings, optimizer = self.placed(given.params, given.names)
        fused = FusedParameters.of(self.plan, given.names)
        places = [place for held in optimizer.parameters for place in held]
        whole = self._beside
        if make is None:
            leaves = jax.tree.leaves(fused.hold(given.params))
            own = [leaves[h.leaf] if h.rows is None else leaves[h.leaf][h.rows[0] : h.rows[1]] for h in holdings]
            arrays = [own_copy(a, p.sharding) for a, p in zip(own, places, strict=True)]
            random, other = jax.tree.map(lambda leaf: own_copy(leaf, whole), (given.random, given.other))
        else:

            def held() -> Parts:
                parts = make()
                return replace(parts, params=fused.hold(parts.params))

            arrays, random, other = self._make(held, holdings, places)
        params = from_pieces(given.params, optimizer.parameters, arrays)
        step = placed(np.zeros((), np.int32), whole)
        scaling = jax.tree.map(lambda leaf: placed(np.asarray(leaf), whole), self.first_scaling())
        return TrainState(step, params, optimizer.init(params), random, other, given.graphdef, fused.order, scaling)

    def _make(self, init: Callable[[], Parts], holdings: Sequence[Holding], places: Any) -> tuple[list[Any], Any, Any]:
        """The results of an init function that is run on every stage, each making nothing but its share."""
        shapes = jax.eval_shape(init)
        flat = flatten(jax.make_jaxpr(lambda: jax.tree.leaves(init()))())
        count = len(jax.tree.leaves(shapes.params))
        wanted: list[tuple[int, int, Any, Any]] = [
            (h.stage, h.leaf, h.rows, place.sharding) for h, place in zip(holdings, places, strict=True)
        ]
        last = len(self.meshes) if self.meshes.several else 0  # what every device has is a program of its own
        wanted += [(last, leaf, None, self._beside) for leaf in range(count, len(flat.outputs))]
        made: list[Any] = [None] * len(wanted)
        for stage in dict.fromkeys(item[0] for item in wanted):
            own = [index for index, item in enumerate(wanted) if item[0] == stage]
            atoms = [(flat.outputs[wanted[index][1]], wanted[index][2]) for index in own]
            equations = needed(flat.equations, (atom for atom, _ in atoms if isinstance(atom, int)))

            def run(equations: Any = equations, atoms: Any = atoms) -> list[Any]:
                known = dict(flat.constants)
                evaluate(equations, known)
                values = [(value_of(flat, atom, known), rows) for atom, rows in atoms]
                return [value if rows is None else value[rows[0] : rows[1]] for value, rows in values]

            for index, array in zip(own, self._run_init(run, [wanted[i][3] for i in own]), strict=True):
                made[index] = array
        beside = jax.tree.structure((shapes.random, shapes.other))
        return made[: len(holdings)], *jax.tree.unflatten(beside, made[len(holdings) :])

    def _run_init(self, run: Callable[[], list[Any]], places: Sequence[NamedSharding]) -> list[Any]:
        """The results of a stage's share of an init function, absent where the stage is of other processes."""
        if is_here(places[0]):
            return list(jax.jit(run, out_shardings=places)())
        return [absent(aval, at) for aval, at in zip(jax.eval_shape(run), places, strict=True)]

    def whole(self, state: TrainState) -> Any:
        """The parameters as they were given, every stack whole, on the devices of its first stage; over several
        processes all of them on one device of each process."""
        given = on_own_device(state.params, self.meshes.all_devices) if self.meshes.several else state.params

        def join(node: Any) -> Any:
            if not is_stack(node):
                return node
            first = node.pieces[0].sharding
            return jnp.concatenate([jax.device_put(piece, first) for piece in node.pieces])

        params = jax.tree.map(join, given, is_leaf=is_stack)
        fused = FusedParameters.of(self.plan, parts_of(replace(state, params=params)).names)
        fused.require(state)
        return fused.restore(params)

    def place(self, state: TrainState) -> TrainState:
        """The state with copies of its arrays, wherever they are, on the devices of their stages."""
        optimizer = self._require(state)
        whole = self._beside

        def put(tree: Any, places: Sequence[Places]) -> Any:
            at = [place.sharding for held in places for place in held]
            leaves, structure = jax.tree.flatten(tree)
            return jax.tree.unflatten(
                structure, [own_copy(leaf, sharding) for leaf, sharding in zip(leaves, at, strict=True)]
            )

        alone = (state.step, state.random, state.other, self.scaling_of(state))
        step, random, other, scaling = jax.tree.map(lambda leaf: own_copy(leaf, whole), alone)
        params, states = put(state.params, optimizer.parameters), put(state.optimizer, optimizer.states)
        return replace(state, step=step, params=params, optimizer=states, random=random, other=other, scaling=scaling)

    def require_places(self, state: TrainState) -> None:
        """Raise PlanError when arrays of a state are not where this plan keeps them."""
        optimizer = self._require(state)
        held = [place.sharding for places in (*optimizer.parameters, *optimizer.states) for place in places]
        require_places([*pieces(state.params), *pieces(state.optimizer)], held)

    def _require(self, state: TrainState) -> OptimizerCut:
        """The cut optimizer of a state. Raises PlanError unless it is a state of this plan."""
        shapes = self._shapes(state)
        self.require_precision(shapes)
        _, optimizer = self.placed(shapes.params, shapes.names)
        FusedParameters.of(self.plan, shapes.names).require(state)
        for tree, whole, places in (
            (state.params, optimizer.params, optimizer.parameters),
            (state.optimizer, optimizer.state, optimizer.states),
        ):
            require_like(jax.tree.leaves(tree), jax.eval_shape(partial(cut_up, places=places), whole))
        return optimizer

    # --- steps

    def step_for(self, state: TrainState, batch: FlatBatch) -> "PipelinedStep":
        """The step for batches of one form, whose programs are compiled in the background."""
        with uncollected():
            self._require(state)
            shapes = self._shapes(state)
            microbatches = Microbatches.of(self.loss, self.plan, shapes, batch)
            holdings, optimizer = self.placed(shapes.params, shapes.names)
            mesh = self.meshes.meshes[0].abstract_mesh
            laid_out = TensorParallel.lay_out(microbatches, self.plan, mesh, shapes.names)
            microbatches = in_fp8(microbatches, self.plan, mesh, shapes.names)
            laid_out = replace(laid_out, copies=_behind_rows(laid_out.copies, holdings))
            places = [NamedSharding(mesh, at.spec) for at in optimizer.layouts]
            micro = cut_microbatch(
                self.plan, laid_out, shapes, batch.leaves, holdings, places, is_scaled=self.rule is not None
            )
            if self.nonfinite != "ignore":
                micro = micro.watched(microbatches.replicas)
            recompute = self.plan.decision.recompute
            pipeline = Pipeline(
                self.schedule,
                self.order,
                micro,
                optimizer,
                self.meshes,
                recompute=recompute,
                nonfinite=self.nonfinite,
                rule=self.rule,
                compute=self.compute,
            )
        fields = (state.step, state.params, state.optimizer, state.random, state.other)
        ends = tuple(accumulate(len(pieces(tree)) for tree in fields))
        metrics = None if microbatches.metrics is None else StagedMetrics(microbatches.metrics, pipeline)
        return PipelinedStep(pipeline, microbatches, ends, metrics)  # type: ignore[arg-type]

    def _shapes(self, state: TrainState) -> Parts:
        """The model taken apart, as shapes."""

        def shape(node: Any) -> jax.ShapeDtypeStruct:
            if not is_stack(node):
                return abstract(node)
            rows = sum(piece.shape[0] for piece in node.pieces)
            return jax.ShapeDtypeStruct((rows, *node.pieces[0].shape[1:]), node.pieces[0].dtype)

        found: Parts = jax.tree.map(shape, parts_of(state), is_leaf=is_stack)
        return found


def _behind_rows(copies: tuple[int | None, ...], holdings: Sequence[Holding]) -> tuple[int | None, ...]:
    """The `Microbatches.copies` of parameters, of which stages hold rows of some: there the rows come first."""
    found = list(copies)
    for holding in holdings if copies else ():
        if holding.rows is not None and found[holding.leaf] is not None:
            found[holding.leaf] = 1
    return tuple(found)


class StagedMetrics:
    """The metrics of a batch from those of its microbatches, each on the stage that makes it."""

    def __init__(self, metrics: Metrics, pipeline: Pipeline) -> None:
        """Compile the metrics of a pipeline's stages."""
        self.metrics, self.uses = metrics, metrics.uses()
        operands = pipeline.micro.operands
        of_stage: dict[int, list[int]] = {}
        for number, (sums, rows) in enumerate(self.uses):
            home = pipeline.sums[operands.rows[rows[0]] if rows else operands.sums[sums[0]]]
            of_stage.setdefault(home, []).append(number)
        self.meshes = pipeline.meshes
        self.stages = [
            (numbers, at := pipeline.meshes.whole[stage], jax.jit(partial(self._made, numbers), out_shardings=at))
            for stage, numbers in of_stage.items()
        ]

    def _made(self, numbers: Sequence[int], given: Sequence[Any]) -> list[Any]:
        return [
            self.metrics.whole(number, sums, [jnp.stack(each) for each in rows])
            for number, (sums, rows) in zip(numbers, given, strict=True)
        ]

    def __call__(self, made: PipelineResult) -> Any:
        """The metrics as the loss function returns them, on the devices of their stages; over several processes on all
        devices."""
        found: dict[int, Any] = {}
        for numbers, at, run in self.stages:
            given = [
                (self._moved([made.metric_sums[i] for i in sums], at), [made.metric_rows[i] for i in rows])
                for sums, rows in (self.uses[number] for number in numbers)
            ]
            if is_here(at):
                found.update(zip(numbers, run(given), strict=True))
            else:
                shapes = jax.eval_shape(partial(self._made, numbers), given)
                found.update((number, absent(aval, at)) for number, aval in zip(numbers, shapes, strict=True))
        return self.metrics.unflatten(self.meshes.for_all([found[number] for number in range(len(self.uses))]))

    def _moved(self, arrays: Sequence[jax.Array], at: NamedSharding) -> list[jax.Array]:
        if self.meshes.several:
            return across(arrays, [at] * len(arrays))
        moved: list[jax.Array] = jax.device_put(list(arrays), at)
        return moved


@dataclass(frozen=True, slots=True, eq=False)
class PipelinedStep:
    """A compiled step, from state to state."""

    pipeline: Pipeline
    microbatches: Microbatches
    ends: tuple[int, int, int, int, int]
    """The ends of the step, the parameters, the optimizer's state, the random state and the other state among the
    leaves of a state."""
    metrics: StagedMetrics | None

    @property
    def teller(self) -> Staged:
        """The teller of what the evidence of a step means."""
        pipeline = self.pipeline
        labels = [(stage, key[1]) for stage, key in pipeline.faults]
        return Staged(pipeline.micro.cut, pipeline.micro.names, pipeline.schedule.microbatches, labels)

    def __call__(self, state: TrainState, leaves: Sequence[Any], observe: Observer | None = None) -> StepResult:
        """The result of one step on a state, which is used up."""
        held, structure = jax.tree.flatten(state)  # once: models' own containers are flattened by Python
        ends = self.ends
        step, params, optimizer, random, other, scaling = (
            held[start:end] for start, end in zip((0, *ends), (*ends, len(held)), strict=True)
        )
        _require_on_devices((*params, *optimizer))
        dims = self.microbatches.dims
        batch = [self.microbatches.split(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)]
        if (masks := self.pipeline.micro.masks) is not None:
            masks.require(batch)
        made = self.pipeline([*step, params, optimizer, random, other, scaling], batch, observe)
        for leaf in (*params, *optimizer):
            if is_here(leaf.sharding):  # the others have no memory, and serve again
                leaf.delete()  # what was not donated: an array whose memory no result could take
        changed = made.other
        rule, answer = self.pipeline.rule, self.pipeline.nonfinite
        if answer == "error" or rule is not None:
            loss = made.loss if answer == "error" else made.grad_norm
            changed = [
                new if new is old else _sound_state(loss, made.grad_norm, new, old)
                for new, old in zip(made.other, other, strict=True)
            ]
        after = jax.tree.unflatten(
            structure, [made.step, *made.params, *made.optimizer, *random, *changed, *made.scaling]
        )
        aux = None if self.metrics is None else self.metrics(made)
        evidence = None
        if made.bad_stage is not None or made.scales is not None:
            evidence = Evidence(step[0], made.loss, made.grad_norm, (made.bad_stage, made.faults), made.scales)
        return StepResult(after, made.loss, aux, made.grad_norm, evidence)

    def measure(self, state: TrainState, leaves: Sequence[Any]) -> tuple[StepResult, Timeline]:
        """The result of one step and its timeline. Nothing is compiled meanwhile. Raises MissingCapabilityError over
        several processes, whose clocks are not one."""
        self._require_alone("train.measure")
        self.pipeline.finish()
        micro = self.pipeline.micro
        with ActionTimer(micro.cut, micro.names, self.pipeline.schedule.ranks) as timer:
            made = self(state, leaves, timer)
        return made, timer.timeline()

    def memory_bytes(self, state: TrainState, leaves: Sequence[Any]) -> tuple[int, ...]:
        """The bytes that every device holds at the peak, those of the first stage's first."""
        self._require_alone("train.memory_bytes")
        meshes = self.pipeline.meshes
        devices = dict.fromkeys(d for stage in range(len(meshes)) for d in meshes.devices(stage))
        return pipeline_bytes(self.pipeline, state, list(devices))

    def _require_alone(self, name: str) -> None:
        if self.pipeline.meshes.several:
            raise MissingCapabilityError(
                f"{name} looks at the programs of all stages, and those of this plan are divided among processes: call "
                "it in one process that has all devices, or look at plan.predicted and jax.profiler"
            )

    def cancel(self) -> bool:
        """Compile no more of the step. Returns whether something was left to be compiled."""
        if self.pipeline.is_compiled:
            return False
        self.pipeline.cancel()
        return True


@jax.jit
def _select_sound(loss: jax.Array, norm: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    found: jax.Array = chosen(is_sound(loss, norm), new, old)
    return found


def _sound_state(loss: jax.Array, norm: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """The state after a step with finite loss and gradients, on its stage's devices; else as it was before."""
    whole = new.sharding
    if not isinstance(whole, NamedSharding):
        return new
    at = NamedSharding(whole.mesh, PartitionSpec())
    arrays, places = [loss, norm, new, old], [at, at, whole, whole]
    if loss.sharding.is_fully_addressable:
        found: jax.Array = _select_sound(*jax.device_put(arrays, places))
        return found
    moved = across(arrays, places)
    return _select_sound(*moved) if is_here(whole) else new


def _of_process(leaf: Any) -> Any:
    """A leaf of the batch as an array that this process has whole. Raises PlanError for one that it has a part of."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    if not leaf.is_fully_replicated:
        raise PlanError(
            f"a leaf of the batch, {leaf.dtype}{list(leaf.shape)}, is divided among processes, and pipeline stages "
            "take what they read from a batch that every process gives whole: give the global batch as NumPy arrays, "
            "the same in all processes"
        )
    return np.asarray(leaf.addressable_data(0))


def _require_on_devices(leaves: Sequence[Any]) -> None:
    if any(not isinstance(leaf, jax.Array) for leaf in leaves):
        raise PlanError(
            "a state of arrays in the host's memory was given, and a pipeline's lie on the devices of their stages: "
            "put them there with state = train.place(state)"
        )
