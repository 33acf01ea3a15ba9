"""The form of the steps that the configuration asks for: recorded pipelines, or message passing."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.program.stage_map import StageMap
from shardwright.backends.torch.training.messages.engine import BACKWARD_FIRST, FORWARD_FIRST
from shardwright.core.errors import MissingCapabilityError
from shardwright.core.model.graph import Graph
from shardwright.core.partition.placed_modules import innermost, require_all_ranks
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule import Schedule
from shardwright.torch.config import Config
from shardwright.torch.planning import owners_by_hand, plan_at_first_step

_CARRIED_OUT = ", ".join(sorted(BACKWARD_FIRST | FORWARD_FIRST))


def require_carried_out(config: Config) -> None:
    """Raise MissingCapabilityError for ``pipeline_mode="messages"`` beside keys that only recorded pipelines heed."""
    if config.pipeline_mode != "messages":
        return
    asked = [f"pipeline={_name(config.pipeline)!r}"] if not _is_carried_out(config.pipeline) else []
    asked += _without_effect(config)
    if config.cluster is not None:
        asked.append(f"cluster={config.cluster!r}")
    if asked:
        raise MissingCapabilityError(
            f"pipeline_mode='messages' does not carry out {' nor '.join(asked)}: leave that out. Messages take the "
            f"pipeline keys {_CARRIED_OUT}, which say whether forwards or backwards come first, and active_microbatches"
        )


@dataclass(frozen=True, slots=True)
class ConfiguredMode:
    """The `StepMode` of a configuration, on the mesh of this run.

    Attributes:
        has_plan: whether the model was given a plan. A plan that is made at the first step recomputes what the
            configuration, the model's own checkpoints and marks say, and nothing else.
    """

    config: Config
    bound: BoundMesh
    has_plan: bool = False

    @property
    def name(self) -> str:
        return self.config.pipeline_mode

    @property
    def schedule(self) -> str:
        return _name(self.config.pipeline)

    @property
    def active_microbatches(self) -> int | None:
        return self.config.active_microbatches

    def plan(self, model: nn.Module, graph: Graph) -> StageMap:
        """Plan a model that came without a plan. Raises PlanError when none satisfies the configuration."""
        return plan_at_first_step(self.config, self.bound, model, graph)

    def owners(self, model: nn.Module) -> Mapping[str, int] | None:
        """The rank of the pipeline that owns each module, where modules are placed by hand. Raises PlanError where a
        rank has none."""
        given = owners_by_hand(self.config, model)
        if given is None:
            return None
        require_all_ranks(given, self.bound.size("pp"))
        return {path: innermost(path, given) for path, _ in model.named_modules()}

    def require_messages(self, plan: Plan | None, model: nn.Module) -> None:
        """Raise MissingCapabilityError where steps that are to run by messages would compute, or hold, something else
        than the configuration or the plan asks for. Modules that are marked to be computed again are, and calls that
        the model checkpoints."""
        config, decision = self.config, None if plan is None else plan.decision
        asked = {
            "recompute": config.recompute != "none"
            or (self.has_plan and decision is not None and decision.recompute != "none"),
            "offload_activations": config.offload_activations,
            "offload_states": config.offload_states != "none",
            "loss_scope='global'": config.loss_scope == "global"
            or (decision is not None and decision.loss_scope == "global"),
            "compile": bool(config.compile),
            "debug='numerics'": config.debug is not None,
            "slices of sequences": decision is not None and decision.slice_count > 1,
            "sharded state": config.shard_level > 0 or (decision is not None and decision.shard > 0),
        }
        refused = [name for name, is_asked in asked.items() if is_asked]
        if refused:
            raise MissingCapabilityError(
                f"the step runs by message passing, which does not do {' nor '.join(refused)}: leave that out, or "
                f"change the model so that it can be recorded ('pipeline_mode': 'recorded' says what hinders it)"
            )

    def unheeded(self, stage_map: StageMap | None) -> str:
        """The settings that steps by messages leave out although these change no result: a sentence, or nothing."""
        config = self.config
        schedule: str | Schedule = config.pipeline if stage_map is None else stage_map.schedule.name
        left = [] if _is_carried_out(schedule) else [f"the schedule {_name(schedule)}"]
        if stage_map is not None and stage_map.schedule.virtual_stages > config.virtual_stages:
            left.append(f"its {stage_map.schedule.virtual_stages} stages on each rank by turns")
        left += _without_effect(config)
        if not left:
            return ""
        return f" What is not carried out by messages: {', '.join(left)}; backwards go before forwards."


def _without_effect(config: Config) -> list[str]:
    asked = {"virtual_stages": config.virtual_stages > 1, "layouts": config.layouts is not None,
             "optimize": config.optimize is not None, "partitioner": config.partitioner is not None,
             "memory_weight": config.memory_weight is not None}  # fmt: skip
    return [f"{name}={getattr(config, name)!r}" for name, is_asked in asked.items() if is_asked]


def _is_carried_out(schedule: str | Schedule) -> bool:
    return isinstance(schedule, str) and schedule in BACKWARD_FIRST | FORWARD_FIRST


def _name(schedule: str | Schedule) -> str:
    return schedule if isinstance(schedule, str) else schedule.name
