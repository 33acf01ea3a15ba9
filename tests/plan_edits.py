"""Random edits of plan files, and what must become of each: a refusal that names it, or the plan that `plan()` makes
with the edited decision pinned."""

import copy
import json
import math
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import shardwright as sw
from shardwright.core.layout.placements import Layout
from shardwright.core.plan.decision import Decision
from shardwright.core.plan.file import to_document
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule import schedule_names
from shardwright.core.search.request import Options

Document = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What became of one edit: "refused", "rescored" or "wrong", with the reason."""

    kind: str
    edit: str
    said: str


@dataclass(frozen=True)
class Original:
    """A plan whose file is edited."""

    graph: sw.Graph
    plan: Plan
    document: Document

    @classmethod
    def of(cls, graph: sw.Graph, cluster: sw.Cluster, batch: int, **pins: Any) -> "Original":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return cls.given(graph, sw.plan(graph, cluster, batch=batch, **pins))

    @classmethod
    def given(cls, graph: sw.Graph, plan: Plan) -> "Original":
        return cls(graph, plan, json.loads(json.dumps(to_document(plan))))


@dataclass
class Edit:
    """An edit: of the file's document, or changes by name for `rescore`. ``names`` are the words of which a refusal has
    one or more."""

    text: str
    names: tuple[str, ...]
    document: Document
    changes: dict[str, Any]


# The oracle -------------------------------------------------------------------------------------------------------


def planned_with_pins(graph: sw.Graph, plan: Plan) -> Plan:
    """What `plan()` makes of a plan's decision, all of it pinned by public options."""
    decision = plan.decision
    options = {field.name for field in fields(Options)}
    pins = {f.name: getattr(decision, f.name) for f in fields(Decision) if f.name in options and f.name != "layouts"}
    pins["gathered_stages"] = decision.gathered_stages or 0
    pins |= {name: list(pins[name]) or None for name in ("kept_units", "offloaded_units")}
    if decision.shard >= 2 and decision.reduce_after is None:
        pins["reduce_after"] = "each"  # what None means there, and says in a decision
    if decision.tp > 1:
        names = plan.parameter_layouts(graph.framework)
        pins["layouts"] = [(f"^{re.escape(name)}$", layout) for name, layout in names.items()]
    given = {name: value for name, value in plan.input.options if name not in pins and name != "partitioner"}
    found = sw.plan(graph, plan.input.cluster, **pins, **given, devices="all")
    return replace(found, decision=replace(found.decision, reduce_after=decision.reduce_after))


def judge(original: Original, edit: Edit) -> Outcome:
    """What becomes of an edit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            edited = Plan.from_text(json.dumps(edit.document))
            rescored = sw.rescore(edited, **edit.changes)
        except sw.ShardwrightError as error:
            said = str(error)
            named = any(name in said for name in edit.names)
            return Outcome("refused" if named else "wrong", edit.text, said if named else f"not named: {said}")
        except Exception as error:  # what is no refusal is a bug
            return Outcome("wrong", edit.text, f"{type(error).__name__}: {error}")
        wrong = _difference(original, edited, edit, rescored)
    return Outcome("wrong" if wrong else "rescored", edit.text, wrong or rescored.summary())


def _difference(original: Original, edited: Plan, edit: Edit, rescored: Plan) -> str:
    """How a rescored plan differs from the plan that its decision is planned to; empty where it does not."""
    if rescored.is_stale or Plan.from_text(json.dumps(to_document(rescored))) != rescored:
        return "it is stale, or another plan once it is saved"
    before = edited.counted
    for field in fields(Decision):
        was, is_now = getattr(before, field.name), getattr(edited.decision, field.name)
        asked = edit.changes.get(field.name, is_now)
        if field.name == "layouts" or (asked == was and field.name not in edit.changes):
            continue
        got = getattr(rescored.decision, field.name)
        if got != asked and sorted(got) != sorted(asked):
            return f"{field.name} was edited to {asked} and is {got}"
    try:
        oracle = planned_with_pins(original.graph, rescored)
    except sw.ShardwrightError as error:
        return f"plan() refuses it: {error}"
    parts = ["decision", "predicted", "costs", "work", "model", "programs"]
    unlike = [name for name in parts if getattr(oracle, name) != getattr(rescored, name)]
    return f"plan() differs in {', '.join(unlike)}" if unlike else ""


# Edits ------------------------------------------------------------------------------------------------------------


def random_edit(rng: random.Random, original: Original) -> Edit:
    """One edit of a plan, valid or not."""
    makers = (_value, _value, _value, _degrees, _degrees, _cut, _layout, _units, _sharing, _figure, _leaf, _leaf, _name)
    edit = rng.choice(makers)(rng, original)
    if edit.changes or rng.random() < 0.5 or not set(edit.document["decision"]) >= set(_changed(original, edit)):
        return edit
    changed = _changed(original, edit)
    if not changed or any(isinstance(v, float) for v in changed.values()):
        return edit
    changes = {name: _as_changes(name, value, original) for name, value in changed.items()}
    if any(value is _NOT_SAYABLE for value in changes.values()):
        return edit
    return Edit(f"rescore({edit.text})", edit.names, original.document, changes)


_NOT_SAYABLE = object()


def _changed(original: Original, edit: Edit) -> dict[str, Any]:
    before, after = original.document["decision"], edit.document["decision"]
    if {k: v for k, v in edit.document.items() if k != "decision"} != {
        k: v for k, v in original.document.items() if k != "decision"
    }:
        return {}
    return {name: value for name, value in after.items() if name not in before or before[name] != value}


def _as_changes(name: str, value: Any, original: Original) -> Any:
    if name == "generated":
        return _NOT_SAYABLE
    if name != "layouts":
        return value
    before = original.document["decision"]["layouts"]
    found = {}
    for slot in before.keys() | value.keys():
        if before.get(slot) != value.get(slot):
            try:
                found[slot] = _layout_of(value.get(slot, {}))
            except sw.ShardwrightError:
                return _NOT_SAYABLE
    return found


def _layout_of(document: dict[str, Any]) -> Layout:
    places = {axis: sw.Split(p["split"], tuple(p.get("blocks", ()))) for axis, p in document.items() if "split" in p}
    if len(places) != len(document):
        raise sw.ShardwrightError("no split")
    return Layout.of(places)


def _edited(original: Original, text: str, names: tuple[str, ...], change: Callable[[Document], object]) -> Edit:
    document = copy.deepcopy(original.document)
    change(document)
    return Edit(text, names, document, {})


def _decision(original: Original, **values: Any) -> Edit:
    text = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return _edited(original, text[:160], (*values, "does not fit", "memory"), lambda d: d["decision"].update(values))


VALUES: dict[str, tuple[Any, ...]] = {
    "microbatch": (1, 2, 4, 8, 16, 3, 0, -1, 1.5, "2", None, True, float("nan"), 1 << 50),
    "batch": (8, 16, 32, 64, 128, 24, 7, 0, None),
    "schedule": (*schedule_names(), "auto", "1f1bb", "zero-bubble", ""),
    "virtual_stages": (1, 2, 3, 0, 100),
    "recompute": ("none", "selective", "full", "auto", "ful"),
    "shard": (0, 1, 2, 3, 4, "3"),
    "precision": ("fp32", "bf16", "fp16", "fp8", "bf61"),
    "optimizer": ("adamw", "sgd", "adam", "adafactor", "adamx"),
    "loss_scope": ("replica", "global", None, "batch"),
    "sequence_parallel": (True, False, None, 1),
    "gradient_precision": ("fp32", "bf16", None, "fp64"),
    "placement_order": ("PDT", "DPT", "TPD", "PTD", "PPT", "pdt", 3),
    "hierarchical_gathers": (True, False),
    "whole_below_bytes": (0, 1, 1000, 1 << 20, -1),
    "bucket_bytes": (None, 1, 1 << 20, 0),
    "reduce_after": ("each", "last", None, "first"),
    "generated": ([], ["0F0,0B0"], ["0F0"]),
    "fp8_weights": ([], ["0/w0"], ["9/w9"]),
}


def _value(rng: random.Random, original: Original) -> Edit:
    name = rng.choice(list(VALUES))
    return _decision(original, **{name: rng.choice(VALUES[name])})


def _degrees(rng: random.Random, original: Original) -> Edit:
    """Other degrees: such that multiply to the devices, with or without a cut, or such that do not."""
    world = original.plan.mesh.size
    if rng.random() < 0.3:
        name = rng.choice(("pp", "dp", "tp"))
        edit = _decision(original, **{name: rng.choice((1, 2, 3, 4, 8, 16, 0))})
        return replace_names(edit, ("ranks", name, "pp"))
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    pp = rng.choice([d for d in divisors if d <= 4])
    tp = rng.choice([d for d in divisors if world // pp % d == 0 and d <= 4])
    values: dict[str, Any] = {"pp": pp, "dp": world // pp // tp, "tp": tp}
    units = len(original.plan.model.unit_classes)
    stages = pp * original.plan.decision.virtual_stages
    if pp != original.plan.decision.pp and stages <= units and rng.random() < 0.7:
        values["stage_starts"] = [0, *sorted(rng.sample(range(1, units), stages - 1))]
    edit = _decision(original, **values)
    return replace_names(edit, ("schedule", "microbatches", "layout", "parameter", "shard", "virtual", *edit.names))


def replace_names(edit: Edit, names: tuple[str, ...]) -> Edit:
    return Edit(edit.text, names, edit.document, edit.changes)


def _cut(rng: random.Random, original: Original) -> Edit:
    units, starts = len(original.plan.model.unit_classes), list(original.plan.decision.stage_starts)
    choice = rng.randrange(5)
    if choice == 0 and len(starts) > 1:
        at = rng.randrange(1, len(starts))
        starts[at] = max(1, starts[at] + rng.choice((-1, 1)))
    elif choice == 1:
        starts = sorted(rng.sample(range(units), min(len(starts), units)))
    elif choice == 2:
        starts = [0, *sorted(rng.sample(range(1, units), min(len(starts), units) - 1))]
    elif choice == 3:
        starts[-1] = units + rng.randrange(5)
    else:
        starts.append(units - 1)
    return _decision(original, stage_starts=starts)


def _layout(rng: random.Random, original: Original) -> Edit:
    """Another layout of a slot: split elsewhere, by blocks, whole, on another axis, or of a slot that is not there."""
    shapes = original.plan.model.slot_shapes
    slot = rng.choice(list(shapes))
    if rng.random() < 0.15:
        slot = rng.choice(("99/w0", "0/w77", "@1", "x", "1/q0"))
    size = shapes.get(slot, (8,))[-1]
    layout: dict[str, Any] = rng.choice(
        (
            {"tp": {"split": 0}},
            {"tp": {"split": 0}},
            {"tp": {"split": 1}},
            {"tp": {"split": 1}},
            {},
            {"tp": {"split": 2}},
            {"tp": {"split": len(shapes.get(slot, (8,))) - 1, "blocks": [size // 2, size - size // 2]}},
            {"tp": {"split": 0, "blocks": [3, 4]}},
            {"dp": {"split": 0}},
            {"ep": {"split": 0}},
            {"tp": {"partial": "sum"}},
        )
    )
    text = f"layouts[{slot}]={layout}"
    names = (slot, slot.split("/")[0], "layouts", "blocks", "axis", "parameter", "Layout")
    return _edited(original, text, names, lambda d: d["decision"]["layouts"].update({slot: layout}))


def _units(rng: random.Random, original: Original) -> Edit:
    """Units that are kept, or offloaded, under full recompute."""
    units = len(original.plan.model.unit_classes)
    name = rng.choice(("kept_units", "kept_units", "offloaded_units"))
    some = rng.sample(range(units), rng.randrange(min(4, units)))
    some += rng.choice(([], [], [units + 3], some[:1]))
    if rng.random() < 0.7:
        return _decision(original, recompute="full", **{name: some})
    return _decision(original, **{name: some})


def _sharing(rng: random.Random, original: Original) -> Edit:
    values: dict[str, Any] = {"shard": rng.choice((0, 1, 2, 3, 3, 3))}
    for name, choices in (
        ("shard_group", (None, 1, 2, 4, 3)),
        ("gathered_stages", (None, 1, 2, 5)),
        ("look_ahead", (None, 0, 1)),
        ("reduce_after", (None, "each", "last")),
    ):
        if rng.random() < 0.5:
            values[name] = rng.choice(choices)
    return _decision(original, **values)


def _figure(rng: random.Random, original: Original) -> Edit:
    """A figure, or what the figures were counted from."""

    def change(document: Document) -> None:
        document[section][key] = value

    section, key, value = rng.choice(
        (
            ("predicted", "step_time_s", rng.choice((0.0, 1e-9, -1.0, float("nan"), float("inf"), "1", None))),
            ("predicted", "counted_for", rng.choice(("", "0" * 16, "x"))),
            ("costs", "idle_lent", rng.choice((0.5, -0.1, 2.0))),
            ("costs", "boundary_s", rng.choice(([], [1.0], [1.0] * len(original.plan.model.unit_classes)))),
            ("provenance", "world_size", rng.choice((1, 2, 16, 0))),
            ("provenance", "captured_from", rng.choice(("torch", "jax", "toy", "mxnet", ""))),
            ("model", "digest", "0" * 16),
            ("model", "parameter_count", 12345),
            ("input", "digest", "0" * 16),
            ("input", "graphs", []),
            ("input", "cluster", {"device": rng.choice(("h100", "h10", "/etc/passwd", "x.toml"))}),
            ("input", "options", {rng.choice(("partitioner", "headrom")): rng.choice(("tree", "tre", 3))}),
            ("input", "runtimes", []),
        )
    )
    names = (key, section, "cluster", "hardware", "device", "partitioner", "headrom", str(value)[:20])
    return _edited(original, f"{section}.{key}={value!r}", names, change)


def _leaf(rng: random.Random, original: Original) -> Edit:
    """Any value anywhere in the file."""
    document = copy.deepcopy(original.document)
    path: list[str] = []
    holder: Any = document
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = rng.choice(keys)
        path.append(str(key))
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.03:
            break
        holder = inner
    old, action = holder[key], rng.randrange(4)
    if action == 0 and isinstance(holder, dict):
        del holder[key]
        text = "removed"
    elif action == 1 and isinstance(holder, dict):
        holder[f"{key}x"] = holder.pop(key)
        text = "renamed"
    else:
        new = _other(rng, old)
        holder[key] = new
        text = f"{old!r} → {new!r}"
    names = (*(part for part in path if not part.isdigit()), "plan file", "version")
    return Edit(f"{'.'.join(path)}: {text}"[:200], names, document, {})


def _other(rng: random.Random, value: Any) -> Any:
    if isinstance(value, bool):
        return rng.choice((not value, None, "true"))
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, 0, -7, value * 2, 1 << 60, 0.5, None, "1"))
    if isinstance(value, float):
        return rng.choice((value * 2, -value, 0.0, math.nan, math.inf, "x"))
    if isinstance(value, str):
        return rng.choice((f"{value}x", "", value[:-1], value.upper(), 3, None))
    return rng.choice((None, 1, "x", [], {}, [value]))


def _name(rng: random.Random, original: Original) -> Edit:
    """A change by name that no decision has, or of a slot that no model has."""
    name, value = rng.choice(
        (
            ("microbach", 2), ("stages", 2), ("layout", {}), ("cluster", "h100"), ("progress", None), ("offload", True),
            ("devices", 4), ("layouts", {"77/w0": Layout.of(tp=sw.Split(0))}), ("layouts", {"0/w0": "S0"}),
            ("layouts", [("0/w0", Layout())]), ("layouts", {"0/w0": Layout.of(dp=sw.Split(0))}),
            ("stage_starts", "0,1"), ("stage_starts", 3), ("kept_units", [0.5]), ("microbatch", [1]),
        )
    )  # fmt: skip
    return Edit(f"rescore({name}={value!r})", (name, "0/w0", "77/w0"), original.document, {name: value})
