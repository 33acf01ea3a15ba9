"""The schema of the plan file: what each section holds."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field

from shardwright.core.text_files import printable

FORMAT = "shardwright-plan"
VERSION = 8

Count = Annotated[int, Field(ge=1, le=1 << 40)]
Amount = Annotated[int, Field(ge=0, le=1 << 62)]
Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
Text = Annotated[str, AfterValidator(printable)]
"""Names and sentences: what they hold reaches terminals."""
Entry = TypeVar("Entry")
List = Annotated[list[Entry], FailFast()]
"""Of which the first wrong entry is named: a file may have millions."""


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
    schedule: Text
    virtual_stages: Count
    recompute: Literal["none", "selective", "full"]
    kept_units: List[Amount]
    offloaded_units: List[Amount]
    shard: Annotated[int, Field(ge=0, le=3)]
    shard_group: Count | None
    precision: Literal["fp32", "bf16", "fp16"]
    optimizer: Text
    loss_scope: Literal["replica", "global"] | None
    sequence_parallel: bool
    gradient_precision: Literal["fp32", "bf16", "fp16"] | None
    placement_order: Text
    generated: List[Text]
    stage_starts: List[Amount]
    layouts: dict[Text, dict[Text, PlacementFile]]


class ModelFile(Section):
    name: Text
    digest: Text
    parameter_count: Amount
    unit_classes: List[Amount]
    classes: List[dict[Text, List[Count]]]
    ties: List[List[Text]]


class UnitFile(Section):
    calls: List[tuple[Text, Amount]]
    parameters: dict[Text, tuple[Text, List[List[tuple[Amount, Count]]]]]


class BindingFile(Section):
    units: List[UnitFile]
    aliases: List[List[Text]]
    unused: List[Text]


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
    classes: List[ClassCostFile]
    boundary_s: List[Seconds]


class CostsFile(Section):
    unit_classes: List[Amount]
    classes: List[ClassCostFile]
    boundary_bytes: List[Amount]
    boundary_s: List[Seconds]
    rates: RatesFile
    ranks: List[RankCostsFile]
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
    counted_for: Text
    memory_by_stage_rank: List[MemoryFile]


class AlternativeFile(Section):
    summary: Text
    step_time_s: Seconds
    peak_memory_bytes: Amount
    reason: Text


class LayoutAlternativeFile(Section):
    layout: dict[Text, PlacementFile]
    extra_s: Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False)]
    extra_bytes: Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]


class AlternativesFile(Section):
    plans: List[AlternativeFile]
    unsplit: dict[Text, Text]
    layouts: dict[Text, List[LayoutAlternativeFile]]


class ProvenanceFile(Section):
    shardwright: Text
    captured_from: Text
    cluster: Text
    world_size: Count
    device_memory_bytes: Annotated[int, Field(ge=1, le=1 << 62)]
    pinned: List[Text]
    left_out: Text


class PlanFile(Section):
    """One plan file."""

    format: Literal["shardwright-plan"]
    version: int
    decision: DecisionFile
    model: ModelFile
    bindings: Annotated[dict[Text, BindingFile], Field(min_length=1)]
    costs: CostsFile
    predicted: PredictedFile
    alternatives: AlternativesFile
    provenance: ProvenanceFile


def schema() -> dict[Text, Any]:
    """The JSON schema of the plan file."""
    return PlanFile.model_json_schema()
