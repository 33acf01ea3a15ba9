"""The plans that `step_time.py` measures, and how they are asked for."""

from typing import Any

import shardwright as sw
from shardwright.core.model.fold import fold

PP, DP, TP = {"pp": 2, "dp": 1, "tp": 1}, {"pp": 1, "dp": 2, "tp": 1}, {"pp": 1, "dp": 1, "tp": 2}
PROFILED: dict[str, dict[str, Any]] = {"pp 2": PP, "dp 2": DP, "tp 2": TP}
"""Of a form that the profile runs: pipelines, and one stage on each device or shared by both."""
COMPOSED: dict[str, dict[str, Any]] = {
    "pp 2, gpipe": PP | {"schedule": "gpipe"},
    "pp 2, two stages a rank": PP | {"schedule": "interleaved-1f1b", "virtual_stages": 2},
    "pp 2, cut a unit earlier": PP | {"earlier": 1},
    "pp 2, all recomputed": PP | {"recompute": "full"},
    "pp 2, 16 microbatches": PP | {"microbatches": 16},
    "pp 2, 1.5 times as wide": PP | {"wider": 1.5},
    "dp 2, microbatches half as large": DP | {"divided": 2},
    "dp 2, optimizer shared": DP | {"shard": 1},
    "dp 2, 1.5 times as wide": DP | {"wider": 1.5},
    "pp 4": PP | {"pp": 4},
    "dp 2 × pp 2": PP | {"dp": 2},
}
"""Of another form: what is measured is put together otherwise. Units of another width are not in the profile, and take
as many times what is counted for them as those of the same form did; four ranks are held against a profile that four
ranks took at once."""
FORMS = PROFILED | COMPOSED
MICROBATCHES = 4


def ranks_of(form: str) -> int:
    pins = FORMS[form]
    return int(pins["pp"] * pins["dp"] * pins["tp"])


def width_of(form: str, width: int) -> int:
    """The width of the form's model, where that of the profile is ``width``."""
    return int(width * FORMS[form].get("wider", 1))


def too_few_units(form: str, graph: sw.Graph) -> bool:
    """Whether the model has fewer units than the form has stages."""
    return len(fold(graph).units) < FORMS[form]["pp"] * FORMS[form].get("virtual_stages", 1)


def planned(graph: sw.Graph, size: int, profile: str, form: str, before: sw.Plan | None = None) -> sw.Plan:
    """The plan that a form asks for, of microbatches as large as the sample unless it says otherwise; cut as the one by
    the profile ``before``."""
    pins: dict[str, Any] = {
        "schedule": "1f1b", "recompute": "none", "shard": 0, "precision": "fp32", "loss_scope": "replica",
    } | FORMS[form]  # fmt: skip
    earlier, divided, _ = pins.pop("earlier", 0), pins.pop("divided", 1), pins.pop("wider", 1)
    size //= divided
    batch = pins.pop("microbatches", MICROBATCHES * divided) * size * pins["dp"]
    cluster = sw.Cluster(profile, devices_per_node=ranks_of(form))
    if before is not None:
        return sw.plan(graph, cluster, batch=batch, microbatch=size, stage_starts=before.decision.stage_starts, **pins)
    plan = sw.plan(graph, cluster, batch=batch, microbatch=size, **pins)
    if not earlier:
        return plan
    starts = [max(stage, start - earlier) for stage, start in enumerate(plan.decision.stage_starts)]
    return sw.plan(graph, cluster, batch=batch, microbatch=size, stage_starts=starts, **pins)
