"""What is legal, said a second time: none of this calls the checks that it is held against."""

from collections.abc import Sequence
from typing import Any

BACKWARDS = ("B", "I")


def gradients(
    rows: Sequence[Sequence[str]], placement: Sequence[int], microbatches: int
) -> tuple[list[int] | None, str]:
    """Train a toy chain under a table of actions, in whole numbers: stage s multiplies by s + 2, and the loss is what
    the last one gives. Returns each stage's gradient, or None and where it stops."""
    stages = len(placement)
    made: dict[tuple[str, int, int], int] = {}
    total, added = [0] * stages, [0] * stages
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                parts = row[at[rank]].removesuffix("OVERLAP_F_B").strip("()").split(";")
                # Both halves of a pair begin with what was there before: nothing is added until both have run.
                done = [_run(part, rank, placement, microbatches, made) for part in parts]
                if any(result is None for result in done):
                    break
                for result in done:
                    assert result is not None
                    for key, value in result.items():
                        if key[0] == "weight":
                            total[key[1]] += value
                            added[key[1]] += 1
                        if key in made:
                            return None, f"{key} a second time"
                        made[key] = value
                at[rank] += 1
                moved = True
    if any(position < len(row) for position, row in zip(at, rows, strict=True)):
        return None, f"stops at {at}"
    for stage in range(stages):
        for mb in range(microbatches):
            if ("forward", stage, mb) not in made:
                return None, f"no forward of stage {stage}, microbatch {mb}"
    return (total, "") if any(added) else (None, "no backward")


def _run(
    text: str, rank: int, placement: Sequence[int], microbatches: int, made: dict[tuple[str, int, int], int]
) -> dict[tuple[str, int, int], int] | None:
    """What an action makes; None while something that it needs is missing."""
    digits = len(text) - len(text.lstrip("0123456789"))
    stage, rest = int(text[:digits]), text[digits:]
    kind = rest.rstrip("0123456789")
    if kind not in ("F", "B", "I", "W"):
        return {}
    mb = int(rest[len(kind) :])
    last = len(placement) - 1
    if stage > last or mb >= microbatches or placement[stage] != rank:
        return None
    weight = stage + 2
    if kind == "F":
        entering = mb + 1 if stage == 0 else made.get(("forward", stage - 1, mb))
        return None if entering is None else {("forward", stage, mb): entering * weight}
    if ("forward", stage, mb) not in made:
        return None
    entered = made[("forward", stage, mb)] // weight
    if kind == "W":
        arrived = made.get(("kept", stage, mb))
        return None if arrived is None else {("weight", stage, mb): arrived * entered}
    arrived = 1 if stage == last else made.get(("backward", stage + 1, mb))
    if arrived is None:
        return None
    found = {("backward", stage, mb): arrived * weight}
    return found | ({("weight", stage, mb): arrived * entered} if kind == "B" else {("kept", stage, mb): arrived})


def expected_gradients(stages: int, microbatches: int) -> list[int]:
    """The gradients of the chain as one piece."""
    product = 1
    for stage in range(stages):
        product *= stage + 2
    inputs = sum(mb + 1 for mb in range(microbatches))
    return [inputs * product // (stage + 2) for stage in range(stages)]


def schedule_fault(schedule: Any, *, must_train: bool = False) -> str:
    """Why an accepted schedule is not legal; empty when it is."""
    rows = [[action.text for action in order] for order in schedule.table]
    found, why = gradients(rows, schedule.placement, schedule.microbatches)
    if found is None:
        return "" if why == "no backward" and not must_train and not schedule.trains else why
    wanted = expected_gradients(len(schedule.placement), schedule.microbatches)
    return "" if found == wanted else f"gradients {found}, expected {wanted}"


def plan_fault(document: dict[str, Any], schedule: Any) -> str:
    """Why an accepted plan, as its file has it, is not legal; empty when it is."""
    d, where = document["decision"], document["provenance"]
    units, stages = len(document["model"]["unit_classes"]), d["pp"] * d["virtual_stages"]
    starts = d["stage_starts"]
    classes = document["model"]["classes"]
    shapes = {f"{c}/{role}": shape for c, slots in enumerate(classes) for role, shape in slots.items()}
    facts = {
        "ranks are devices": d["pp"] * d["dp"] * d["tp"] == where["world_size"],
        "the batch divides": d["batch"] % (d["dp"] * d["microbatch"]) == 0,
        "stages are covered": len(starts) == stages and starts == sorted(set(starts)) and starts[0] == 0,
        "stages have units": starts[-1] < units,
        "shard groups divide": d["dp"] % (d["shard_group"] or 1) == 0,
        "memory for every rank": len(document["predicted"]["memory_by_stage_rank"]) == d["pp"],
        "an optimizer": d["optimizer"] in ("sgd", "momentum", "lion", "adam", "adamw"),
        "a precision": d["precision"] in ("fp32", "bf16", "fp16"),
        "the table is the decision's": (schedule.ranks, schedule.stages) == (d["pp"], stages),
        "microbatches": schedule.microbatches * d["dp"] * d["microbatch"] == d["batch"],
        "kept units are units": all(u < units for u in d["kept_units"] + d["offloaded_units"]),
        "no control characters": not any(ord(c) < 32 and c not in "\n\t" for c in document["model"]["name"]),
    }
    for slot, axes in d["layouts"].items():
        if slot.startswith("@"):
            unit, role = slot[1:].split("/")
            slot = f"{document['model']['unit_classes'][int(unit)]}/{role}"
        for axis, place in axes.items():
            dim = place.get("split")
            if axis != "tp" or dim is None or dim >= len(shapes[slot]):
                return f"layout {axes} of {slot} {shapes[slot]}"
            parts = place.get("blocks") or [shapes[slot][dim]]
            if sum(parts) != shapes[slot][dim] or any(part % d["tp"] for part in parts):
                return f"layout {axes} of {slot} {shapes[slot]} on {d['tp']}"
    wrong = [name for name, holds in facts.items() if not holds]
    return ", ".join(wrong) or schedule_fault(schedule, must_train=True)
