"""A model split over this run's ranks: this rank's part of it, and the state of its training."""

import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardwright.backends.torch.capture.precision import step_dtype
from shardwright.backends.torch.data_parallel.batch_norm import RunningStatistics, norm_over_replicas
from shardwright.backends.torch.data_parallel.gradients import Gradients
from shardwright.backends.torch.machine.agreement import Agreement, Claim
from shardwright.backends.torch.machine.data_groups import DataGroups
from shardwright.backends.torch.machine.host_store import store_of
from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.tensor_axis import Axis
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.memory.fp8_linear import compute_in_fp8, require_fp8
from shardwright.backends.torch.memory.residency import Residency
from shardwright.backends.torch.pipeline.action_times import Recorder
from shardwright.backends.torch.pipeline.sentinels import Sentinel
from shardwright.backends.torch.program.early_checks import ModuleTree
from shardwright.backends.torch.program.stage_map import StageMap
from shardwright.backends.torch.program.stages import Division
from shardwright.backends.torch.slices.engine import TokenSlices
from shardwright.backends.torch.state.awaited_weights import AwaitedWeights
from shardwright.backends.torch.state.deferred_init import DeferredValues
from shardwright.backends.torch.state.elementwise import is_elementwise, require_no_hooks
from shardwright.backends.torch.state.flat_shards import PARAMETERS, FlatShards, copy_span
from shardwright.backends.torch.state.model_agreement import LiveFlags, module_claim, parameters_claim
from shardwright.backends.torch.state.ownership import Ownership, Placement, place
from shardwright.backends.torch.state.parameter_shards import Shards
from shardwright.backends.torch.state.parts import Parts
from shardwright.backends.torch.state.weight_transfer import add_holders, synchronize
from shardwright.backends.torch.state.weights import Weights, materialize
from shardwright.backends.torch.tensor_parallel.engine import TensorParallel
from shardwright.backends.torch.training.step_body import StepBodies
from shardwright.core.errors import MissingCapabilityError, PlanError, ShardwrightError
from shardwright.core.model.loss.scaling import LossScale
from shardwright.core.schedule import Schedule


class SplitModel:
    """One rank's part of a model.

    Args:
        model: the whole model, on any device; it is split in place.
        bound: the mesh of this run.
        seed: the seed of dropout and of init functions.
        weights: where a model on the meta device gets its data; see `weights.materialize`.
        sentinel: looks for NaN and infinity in losses and gradients.
        compute: the dtype in which steps compute, with parameters in float32 between them; None: that of the
            parameters.

    Attributes:
        stage_map: the split of the model; None until it is split, and where it is divided by its module tree.
        schedule_digest: the digest of the stage map's schedule.
        tensor: the tensor axis of the model, where it has one.
        slices: the slices of its sequences, where the plan has any.
        statistics: the running statistics that replicas bring in line, where each norms its own microbatches.
        steps_run: the number of training steps that were run.
        loss_scale: the factor of losses, for gradients of 16 bits.
        recorders: while timelines are recorded, one for each step; None while they are not.
        listeners: called whenever the parameters of this rank have changed identity.
        before_whole: called before sharded parameters are put together for good, on every rank.
        after_sharding: called when parameters were sharded over the data axis, on every rank.
        before_sharding: asked whether each parameter is to lie whole on one rank of a shard group, because an optimizer
            needs whole matrices.
        parts: the parts of parameters that this rank holds.
        residency: gathers sharded parameters in steps.
        weights: the source of the values of parameters on the meta device, until they are made.
        awaited: the parameters that get their memory once they are cut into pieces.
        most_summed: under shard 3, the most entries of gradients that are summed at once; None: those of a module call.
        clips_at: the norm to which `DistributedOptimizer` clips gradients; None: it does not.
    """

    def __init__(
        self, model: nn.Module, bound: BoundMesh, watchdog: Watchdog, agreement: Agreement, *, seed: int,
        weights: Weights | None, sentinel: Sentinel, compute: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.model, self.bound, self.watchdog, self.agreement = model, bound, watchdog, agreement
        self.seed, self.sentinel = seed, sentinel
        self.ownership = Ownership(model, bound.coordinate("pp"))
        self.tree = ModuleTree(self.ownership.modules)
        self.flags = LiveFlags(self.ownership.modules)
        self.parts = Parts(self.ownership, compute)
        self.gradients = Gradients(self.ownership, bound, watchdog, self.parts)
        self.residency = Residency(self.ownership, watchdog)
        self.bodies = StepBodies(model, bound.device)
        self.loss_scale = LossScale()
        self.stage_map: StageMap | None = None
        self.schedule_digest = ""
        self.tensor: TensorParallel | None = None
        self.slices: TokenSlices | None = None
        self.statistics: RunningStatistics | None = None
        self.steps_run = 0
        self.recorders: list[Recorder] | None = None
        self.listeners: list[Callable[[], None]] = []
        self.before_whole: list[Callable[[Parts], None]] = []
        self.before_sharding: list[Callable[[], bool]] = []
        self.after_sharding: list[Callable[[Parts], None]] = []
        deferred = DeferredValues.of(model)
        self.weights = weights if weights is not None else deferred
        self.most_summed: int | None = None
        self.clips_at: float | None = None
        for name in deferred or ():
            self.ownership.drop(name)
        self.awaited: AwaitedWeights | None = None
        self._undo_norms: Callable[[], None] | None = None
        self._undo_fp8: Callable[[], None] | None = None
        self._synchronized = False
        self.awaits_masters = False
        """Whether parameters in 16 bits are to have values in float32 from the first step on."""
        self._stays_whole = False
        """Whether steps run by messages, which cut no parameters."""
        self._looked_at: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        """Whether optimizers, as far as they were looked at, train pieces of parameters."""
        self._handles: list[RemovableHandle] = [register_optimizer_step_pre_hook(self._look_at_optimizer)]

    def split(self, stage_map: StageMap) -> None:
        """Keep this rank's parameters and drop the others; give data to those on the meta device."""
        self.use(stage_map)
        schedule = stage_map.schedule
        calls = [[path for path, _ in held] for held in stage_map.calls]
        placement = place(self.model, calls, stage_map.parameter_stages, schedule.stage_to_rank, schedule.ranks)
        if self.bound.size("tp") > 1 and stage_map.plan is not None:
            layouts = stage_map.plan.parameter_layouts("torch")
            planned = {self.ownership.first_name[name]: layout.on("tp") for name, layout in layouts.items()}
            shards = Shards(self.ownership, self.bound, self.watchdog, planned)
            self.tensor = TensorParallel(self.model, shards, stage_map.plan)
            self.parts.tensor = shards
        if stage_map.plan is not None and stage_map.schedule.slices > 1:
            alone = Axis(self.bound.handles["tp"], (self.bound.rank,), 0, self.watchdog)
            axis = alone if self.tensor is None else self.tensor.shards.axis
            self.slices = TokenSlices(self.model, stage_map.plan, axis, self.tensor)
        self._hold(placement)
        if stage_map.plan is not None and stage_map.plan.decision.precision == "fp8":
            self._compute_in_fp8(stage_map.plan.fp8_parameters("torch"))
        if self.bound.size("dp") > 1 and stage_map.loss_scope == "global":
            self._undo_norms = norm_over_replicas(self.model, self.bound, self.watchdog, lambda: self.bodies.is_running)
        else:
            self._share_statistics()

    def _compute_in_fp8(self, weights: Collection[str]) -> None:
        """Let the modules that hold these weights, by first name, multiply with them in fp8.

        Raises MissingCapabilityError for a device that has no such products.
        """
        require_fp8(self.bound.device)
        first = self.ownership.first_name
        own = (name.rpartition(".")[::2] for name, other in first.items() if other in weights)
        self._undo_fp8 = compute_in_fp8([self.ownership.modules[path] for path, last in own if last == "weight"])

    def use(self, stage_map: StageMap) -> None:
        """Let this stage map, from now on, say which rank does what."""
        self.stage_map, self.schedule_digest = stage_map, stage_map.schedule.digest
        decision = None if stage_map.plan is None else stage_map.plan.decision
        if decision is not None and decision.dp > 1 and decision.shard < 2:
            self.gradients.bucket_bytes = decision.bucket_bytes

    def split_whole_modules(self, placement: Placement) -> None:
        """Make modules whole, as message passing calls them: split the model by ``placement`` unless it is split
        already, and put together the sharded parameters."""
        self._stays_whole = True
        if self.ownership.placement is None:
            self._hold(placement)
        if self.tensor is not None:
            for listener in self.before_whole:
                listener(self.parts)
            self.tensor.shards.restore()
        if self.statistics is None:
            self._share_statistics()

    def _share_statistics(self) -> None:
        if self.bound.size("dp") > 1:
            self.statistics = RunningStatistics(self.model, self.bound, self.watchdog)

    def _hold(self, placement: Placement) -> None:
        wanting, weights = self.ownership.split(placement), self.weights
        if self.shard_level == PARAMETERS and (isinstance(weights, (str, Path, Mapping))):
            cut_later = [name for name in wanting if name in self.ownership.parameter_names]
            wanting = [name for name in wanting if name not in self.ownership.parameter_names]
            self.awaited = AwaitedWeights(self.ownership, self.parts, cut_later, weights, self.bound.device)
        cutter = self.tensor.shards if self.tensor is not None else None
        materialize(self.ownership, wanting, weights, self.bound.device, self.seed, cutter)
        self.weights = None
        self.ownership.to(self.bound.device)
        self._tell_of_change()

    def make_values(self) -> None:
        """Make the values that parameters do not have yet: somebody asks for them before the first step has cut them.
        Before the model is split they are whole on this rank until then."""
        if self.awaited is not None:
            self.awaited.fill()
            self.awaited = None
        if self.ownership.placement is None and self.weights is not None:
            known = (*sorted(self.ownership.parameter_names), *sorted(self.ownership.buffer_names))
            wanting = [name for name in known if self.ownership.tensor(name).is_meta]
            if wanting and self.bound.rank == 0:
                warnings.warn(
                    "the values of a model without memory are asked for before its first step: every rank makes the "
                    "whole model for that; ask for them after the first step",
                    stacklevel=4,
                )
            materialize(self.ownership, wanting, self.weights, self.bound.device, self.seed)
            self.weights = None
            self._tell_of_change()

    def take_values(self, weights: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Have the values that parameters do not have yet come from these weights. Returns the first names of what has
        none until the first step."""
        found = self.lacking_values()
        if self.ownership.placement is None and found:
            self.weights = weights
        if self.awaited is not None:
            self.awaited.take(weights)
        return found

    def lacking_values(self) -> frozenset[str]:
        """The first names of what has no values yet that this rank holds."""
        names = (*self.ownership.parameter_names, *self.ownership.buffer_names)
        found = {name for name in names if self.ownership.holds(name) and self.ownership.tensor(name).is_meta}
        return frozenset(found if self.awaited is None else found | self.awaited.names)

    def _tell_of_change(self) -> None:
        self._looked_at.clear()
        for listener in self.listeners:
            listener()

    def place_needs(self, division: Division, schedule: Schedule) -> None:
        """Bring parameters and buffers to the ranks whose stages turned out to use them. All ranks call this.

        Raises PlanError once training has begun.
        """
        needs: dict[int, set[str]] = {}
        for part in division.parts:
            needs.setdefault(schedule.stage_to_rank(part.stage), set()).update(part.parameters, part.buffers)
        placement = self.ownership.placement
        assert placement is not None
        lacking = {r: sorted(n for n in names if r not in placement.holders(n)) for r, names in needs.items()}
        if not any(lacking.values()):
            return
        if self.steps_run or self.parts.flat is not None:
            rank, names = next((r, n) for r, n in lacking.items() if n)
            raise PlanError(
                f"this step uses {names[0]} on pp rank {rank}, which has no copy of it, and training has begun: run "
                f"every kind of step once before the first optimizer step"
            )
        self.make_values()
        if add_holders(self.ownership, lacking, self.bound, self.watchdog):
            self._tell_of_change()

    @property
    def shard_level(self) -> int:
        """The stage of ZeRO that the plan has over several replicas, or between one of them and the host."""
        if self.stage_map is None or (self.bound.size("dp") == 1 and self.stage_map.offload_states == "none"):
            return 0
        return self.stage_map.shard

    @property
    def is_cut_for_tensor_axis(self) -> bool:
        """Whether the parameters are shards along the tensor axis by now."""
        return self.parts.tensor is not None and self.parts.tensor.is_cut

    @property
    def has_cut_parameters(self) -> bool:
        """Whether every parameter that is to be cut, along the tensor axis or the data axis, has been."""
        if self._stays_whole:
            return True
        if self.bound.size("tp") > 1 and not self.is_cut_for_tensor_axis:
            return False
        # Without stages yet, the first step may still cut.
        return self.parts.flat is not None or (self.stage_map is not None and not self.shard_level)

    def shard_state(self, calls: Sequence[Sequence[str]]) -> None:
        """Keep this rank's pieces alone of parameters that replicas share, once: their gradients and the states of
        optimizers follow. Every rank calls this at the same time.

        Args:
            calls: the parameters of each module call of this rank's stages, in the order of the forward pass.
        """
        level = self.shard_level
        if self.parts.flat is not None or not (level or self.parts.compute):
            return
        assert self.stage_map is not None
        ways = self.stage_map.shard_group or self.bound.size("dp") if level else 1
        asked = [needs_whole() for needs_whole in self.before_sharding] if ways > 1 else []
        self.watchdog.doing("sharding the parameters over dp")
        hierarchical = self.stage_map.hierarchical and level > 0
        data = DataGroups.bind(self.bound, ways, self.watchdog, hierarchical)
        if not data.have_alike(
            "; ".join(map(str, calls)), self.bound.device, self.watchdog
        ):  # layers are dropped on some replicas only
            calls = [
                tuple(f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False))
                for path, module in self.model.named_modules()
            ]
        apart = frozenset(name for name, _ in self.ownership.ties)
        values = copy_span if self.awaited is None else self.awaited.copy_span
        plan = self.stage_map.plan
        flat = FlatShards(
            self.ownership, data, self.watchdog, level, calls, apart, any(asked), self.parts.compute, values,
            0 if plan is None else plan.decision.whole_below_bytes,
            self.most_summed if level == PARAMETERS else None,
            store_of(self.bound.device) if self.stage_map.offload_states != "none" else None,
        )  # fmt: skip
        self.awaited = None
        self.parts.flat = self.residency.flat = flat
        self._say_dtypes_of_others()
        if level:
            self.gradients.data = data
        self._looked_at.clear()
        for listener in self.after_sharding:
            listener(self.parts)
        self.watchdog.doing("between steps")

    def _say_dtypes_of_others(self) -> None:
        """Let parameters that other ranks hold have the dtype that they have there between steps."""
        compute, held = self.parts.compute, self.ownership.local_parameters()
        for name in self.ownership.parameter_names if compute is not None else ():
            parameter = self.ownership.parameter(name)
            if name not in held and parameter.requires_grad and step_dtype(parameter.dtype, compute) is compute:
                parameter.data = parameter.data.to(torch.float32)

    def _look_at_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raise an error before the step of an optimizer, wrapped or not, that pieces of parameters will not do for, or
        that holds parameters as they were before they had values."""
        known = self._looked_at.get(optimizer)
        if known is None:
            known = self._looked_at[optimizer] = self._trains_pieces(optimizer)
            self._require_clipped(optimizer)
        flat = self.parts.flat
        if not known or flat is None:
            return
        require_no_hooks(optimizer)
        if not flat.holds_whole_parameters and not is_elementwise(optimizer):
            raise MissingCapabilityError(
                f"{type(optimizer).__name__} may need whole parameters, and those of this model were cut into pieces "
                f"by its first step: wrap it by sw.DistributedOptimizer before the first step"
            )

    def _require_clipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ShardwrightError for an optimizer of the model's parameters whose step clips no gradients, where they
        are to be clipped."""
        held = (p for group in optimizer.param_groups for p in group["params"])
        if self.clips_at is not None and not self.gradients.is_clipped and any(map(self.ownership.name_of, held)):
            raise ShardwrightError(
                f"sdp_gradient_clipping={self.clips_at:g} clips gradients in the step of sw.DistributedOptimizer, and "
                f"{type(optimizer).__name__} is not wrapped: wrap it, sw.DistributedOptimizer(optimizer)"
            )

    def _trains_pieces(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer trains pieces of parameters. Raises ShardwrightError where it holds parameters that are
        others by now."""
        held = [(self.ownership.name_of(p), p) for group in optimizer.param_groups for p in group["params"]]
        for name, parameter in held:
            if name is not None and self.ownership.holds(name) and self.ownership.tensor(name) is not parameter:
                raise ShardwrightError(
                    f"{type(optimizer).__name__} was made before sw.DistributedModel gave {name} its values, and would "
                    f"train what is no longer part of the model: wrap it, sw.DistributedOptimizer(optimizer), or make "
                    f"it after the first step"
                )
        flat = self.parts.flat
        return flat is not None and flat.is_shared and any(name in flat.group_of for name, _ in held if name)

    def begin_step(self) -> None:
        """Begin a step: parameters that are sharded between steps alone are gathered for it."""
        if self.parts.flat is not None:
            self.parts.flat.begin_step()

    def end_step(self) -> None:
        """Give every sharded parameter its piece again."""
        if self.parts.flat is not None:
            self.parts.flat.end_step()

    def settle(self) -> None:
        """Wait until all ranks have what they gathered of this one's parameters, after `end_step`."""
        if self.parts.flat is not None:
            self.parts.flat.settle()

    @property
    def are_replicas_alike(self) -> bool:
        """Whether replicas have the same values by now: the first step sees to it."""
        return self._synchronized or self.bound.size("dp") == 1

    def synchronize(self, axes: Sequence[str] = ("dp",)) -> None:
        """Start all peers on ``axes``, and all holders of a tied parameter, from the same numbers: once."""
        if not self._synchronized:
            awaited = () if self.awaited is None else self.awaited.names
            synchronize(self.ownership, self.bound, self.watchdog, axes, awaited)
            self._synchronized = True

    def claims_in_full(self) -> list[Claim]:
        """The claims that take too long to compare in every step: of the modules, and of the values of parameters that
        other replicas hold too."""
        claims = [module_claim(self.ownership.modules)]
        if self._synchronized:
            local = self.ownership.local_parameters()
            flat = self.parts.flat
            shared = flat.group_of if flat is not None and flat.is_shared else {}
            claims.append(parameters_claim({name: p for name, p in local.items() if name not in shared}))
        return claims

    def close(self) -> None:
        """Undo the changes to the model that were made for its training."""
        for undo in (self._undo_norms, self._undo_fp8):
            if undo is not None:
                undo()
        self.gradients.close()
        for handle in self._handles:
            handle.remove()
