"""The schema of the plan file: what each section holds."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FORMAT = "shardwright-plan"
VERSION = 7

Count = Annotated[int, Field(ge=1)]
Amount = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PlacementFile(Section):
    split: Amount | None = None
    blocks: list[Count] | None = None
    partial: Literal["sum", "max", "min", "mean"] | None = None


class DecisionFile(Section):
    pp: Count
    dp: Count
    tp: Count
    batch: Count
    microbatch: Count
    schedule: str
    virtual_stages: Count
    recompute: Literal["none", "selective", "full"]
    kept_units: list[Amount]
    offloaded_units: list[Amount]
    shard: Annotated[int, Field(ge=0, le=3)]
    shard_group: Count | None
    precision: Literal["fp32", "bf16", "fp16"]
    optimizer: str
    loss_scope: Literal["replica", "global"]
    sequence_parallel: bool
    gradient_precision: Literal["fp32", "bf16", "fp16"] | None
    placement_order: str
    generated: list[str]
    stage_starts: list[Amount]
    layouts: dict[str, dict[str, PlacementFile]]


class ModelFile(Section):
    name: str
    digest: str
    parameter_count: Amount
    unit_classes: list[Amount]
    classes: list[dict[str, list[Count]]]
    ties: list[list[str]]


class UnitFile(Section):
    calls: list[tuple[str, Amount]]
    parameters: dict[str, tuple[str, list[list[tuple[Amount, Count]]]]]


class BindingFile(Section):
    units: list[UnitFile]
    aliases: list[list[str]]
    unused: list[str]


class ClassCostFile(Section):
    forward_s: Seconds
    input_grad_s: Seconds
    weight_grad_s: Seconds
    activation_bytes: Amount
    parameter_elements: Amount
    trained_elements: Amount
    swapped_s: Seconds
    collective_s: Seconds


class RatesFile(Section):
    flops_per_s: Rate
    memory_bytes_per_s: Rate
    link_bytes_per_s: Rate


class RankCostsFile(Section):
    classes: list[ClassCostFile]
    boundary_s: list[Seconds]


class CostsFile(Section):
    unit_classes: list[Amount]
    classes: list[ClassCostFile]
    boundary_bytes: list[Amount]
    boundary_s: list[Seconds]
    rates: RatesFile
    ranks: list[RankCostsFile]
    idle_lent: Annotated[float, Field(ge=0, le=1)]


class MemoryFile(Section):
    parameters_bytes: Amount
    gradients_bytes: Amount
    optimizer_bytes: Amount
    activations_bytes: Amount
    buffers_bytes: Amount
    apart_bytes: Amount
    host_bytes: Amount
    batch_bytes: Amount
    copies_bytes: Amount
    model_buffers_bytes: Amount


class PredictedFile(Section):
    step_time_s: Seconds
    pipeline_s: Seconds
    bubble_fraction: Seconds
    tensor_collective_s: Seconds
    data_parallel_s: Seconds
    optimizer_s: Seconds
    memory_by_stage_rank: list[MemoryFile]


class AlternativeFile(Section):
    summary: str
    step_time_s: Seconds
    peak_memory_bytes: Amount
    reason: str


class LayoutAlternativeFile(Section):
    layout: dict[str, PlacementFile]
    extra_s: Annotated[float, Field(allow_inf_nan=False)]
    extra_bytes: Annotated[float, Field(allow_inf_nan=False)]


class AlternativesFile(Section):
    plans: list[AlternativeFile]
    unsplit: dict[str, str]
    layouts: dict[str, list[LayoutAlternativeFile]]


class ProvenanceFile(Section):
    shardwright: str
    captured_from: str
    cluster: str
    world_size: Count
    device_memory_bytes: Count
    pinned: list[str]
    left_out: str


class PlanFile(Section):
    """One plan file."""

    format: Literal["shardwright-plan"]
    version: int
    decision: DecisionFile
    model: ModelFile
    bindings: Annotated[dict[str, BindingFile], Field(min_length=1)]
    costs: CostsFile
    predicted: PredictedFile
    alternatives: AlternativesFile
    provenance: ProvenanceFile


def schema() -> dict[str, Any]:
    """The JSON schema of the plan file."""
    return PlanFile.model_json_schema()
