"""Random edits of plan files, valid or not (`tests/plan_edit_judge.py` says what must become of each)."""

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import shardwright as sw
from shardwright.core.execution import SYSTEMS
from shardwright.core.layout.placements import Layout
from shardwright.core.schedule import schedule_names
from tests.plan_edit_judge import Document, Edit, Original


def random_edit(rng: random.Random, original: Original) -> Edit:
    """One edit of a plan, valid or not."""
    edit = rng.choice(MAKERS)(rng, original)
    if edit.changes or rng.random() < 0.5 or not isinstance(edit.document.get("decision"), dict):
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
    if not isinstance(value, dict):
        return _NOT_SAYABLE
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
    "recompute": ("none", "selective", "elementwise", "full", "auto", "ful", "products:nothing"),
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
    "activation_loading_horizon": (1, 2, 4, 0),
    "offload_states": ("none", "optimizer", "parameters", "disk"),
    "reduce_after": ("each", "last", None, "first"),
    "generated": ([], ["0F0,0B0"], ["0F0"]),
    "fp8_weights": ([], ["0/w0"], ["9/w9"]),
    "like": (*SYSTEMS, None, "megatron", "torch compiled"),
}
TYPES: tuple[Any, ...] = (
    {}, [], "", "x", -1, 0.5, 1e300, math.nan, math.inf, -math.inf, None, True, [[]], [None], {"a": 1}, 1 << 70,
    "9" * 400, [-1], [1 << 62], ["\x00"],
)  # fmt: skip


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
    """Units that are kept, offloaded, or computed again in another mode."""
    units = len(original.plan.model.unit_classes)
    name = rng.choice(("kept_units", "kept_units", "offloaded_units"))
    some = rng.sample(range(units), rng.randrange(min(4, units)))
    some += rng.choice(([], [], [units + 3], some[:1]))
    if rng.random() < 0.2:
        modes = rng.choice((("full", "elementwise"), ("elementwise", "full"), ("full", "full"), ("full", None)))
        return _decision(original, recompute=modes[0], other_recompute=modes[1], other_units=some)
    if rng.random() < 0.2:
        return _decision(original, recompute="full", activation_loading_horizon=2, **{name: some})
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


def _types(rng: random.Random, original: Original) -> Edit:
    """A value of a type or a size that a part of the decision never has."""
    name = rng.choice(list(original.document["decision"]))
    return _decision(original, **{name: rng.choice(TYPES)})


def _several(rng: random.Random, original: Original) -> Edit:
    """Two or three parts of the decision at once."""
    values = {name: rng.choice(VALUES[name]) for name in rng.sample(list(VALUES), rng.choice((2, 2, 3)))}
    return _decision(original, **values)


def _keys(rng: random.Random, original: Original) -> Edit:
    """A key that is gone, or one too many, in a section of the file or in the file."""
    document = copy.deepcopy(original.document)
    where = rng.choice(["", *(name for name, section in document.items() if isinstance(section, dict))])
    section = document[where] if where else document
    if section and rng.random() < 0.5:
        key = rng.choice(list(section))
        del section[key]
        return Edit(f"{where}.{key} removed", (key, where or key), document, {})
    key = rng.choice(("extra", "micro_batch", "", "stages", "w0", "*", "decision"))
    section[key] = rng.choice((1, None, {}, [], "x"))
    return Edit(f"{where}.{key!r} added", (key or where, where or key), document, {})


CLUSTERS: tuple[tuple[str, Any], ...] = (
    ("device", "h100"), ("device", "a100-40gb"), ("device", "v100-32gb"), ("device", "h1000"), ("device", 3),
    ("intra_node", "nvlink4"), ("intra_node", "pcie4"), ("intra_node", "nvlink9"), ("intra_node", None),
    ("inter_node", "ib-hdr200"), ("inter_node", "ethernet"), ("nodes", 2), ("nodes", 0), ("nodes", "1"),
    ("devices_per_node", 4), ("devices_per_node", 1.5), ("groups", []), ("color", "red"),
)  # fmt: skip


def _cluster(rng: random.Random, original: Original) -> Edit:
    """Other devices: another kind, other links, as many in other nodes, or another number."""
    document = copy.deepcopy(original.document)
    cluster = document["input"]["cluster"]
    groups = [group for group in cluster.get("groups", [cluster]) if isinstance(group, dict)]
    held = rng.choice(groups)
    choice = rng.randrange(4)
    if choice == 0 and held.get("nodes", 1) * held.get("devices_per_node", 1) % 2 == 0:
        whole = held.get("nodes", 1) * held.get("devices_per_node", 1)
        nodes = rng.choice([n for n in range(1, whole + 1) if whole % n == 0])
        held.update(nodes=nodes, devices_per_node=whole // nodes)
        cluster.setdefault("inter_node", "ib-hdr200")
        text = f"{nodes} nodes of {whole // nodes}"
    elif choice == 1:
        held["device"] = rng.choice(("h100", "a100-80gb", "a100-40gb", "h200"))
        held["intra_node"] = rng.choice(("nvlink3", "nvlink4"))
        text = f"device {held['device']}, {held['intra_node']}"
    else:
        key, value = rng.choice(CLUSTERS)
        held[key] = value
        text = f"{key}={value!r}"
    names = ("cluster", "device", "nodes", "node", "link", "memory", "does not fit", *map(str, held))
    return Edit(f"input.cluster: {text}", names, document, {})


def _pins(rng: random.Random, original: Original) -> Edit:
    """Other pins, options and abilities of runtimes."""
    document = copy.deepcopy(original.document)
    given = document["input"]
    choice = rng.randrange(4)
    if choice == 0:
        parameter = next(iter(document["bindings"].values()))["units"][0]["parameters"]
        name = next(iter(parameter.values()), ["none"])[0] if isinstance(parameter, dict) else parameter[0][1]
        given["pins"] = [*given["pins"], {"parameter": name, "layout": {}, "source": "hand", "axes": ["tp"]}]
        text = f"a pin of {name}"
    elif choice == 1:
        name, value = rng.choice(
            (("headroom", 0.3), ("headroom", 0.999), ("headroom", 2), ("offload", False), ("price", 2.0),
             ("tokens", 1e9), ("tokens", -1), ("deadline", "10d"), ("answer", "fastest"), ("answer", "slowest"),
             ("devices", 3), ("pp", 1), ("budget", 1.0), ("frameworks", "torch"), ("progress", 1))
        )  # fmt: skip
        given["options"] = {**given["options"], name: value}
        text = f"options.{name}={value!r}"
    elif choice == 2 and given["runtimes"]:
        runtime = given["runtimes"][0]
        key = rng.choice(list(runtime))
        runtime[key] = rng.choice(([], False, "x", None, 0))
        text = f"runtimes.0.{key}={runtime[key]!r}"
    else:
        given["pins"] = []
        text = "no pins"
    names = ("pins", "options", "runtime", "headroom", "input", text.partition("=")[0].partition(".")[2], "memory")
    return Edit(f"input: {text}", names, document, {})


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


MAKERS: tuple[Callable[[random.Random, Original], Edit], ...] = (
    _value, _value, _value, _degrees, _degrees, _cut, _layout, _layout, _units, _sharing, _figure, _leaf, _leaf, _name,
    _types, _several, _keys, _cluster, _pins,
)  # fmt: skip
