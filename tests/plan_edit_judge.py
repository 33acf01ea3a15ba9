"""What must become of an edited plan: a refusal that names the edit, or the plan that `plan()` makes with the edited
decision pinned. The oracle is `plan()` of the captured graph, by its public options."""

import copy
import json
import re
import warnings
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import shardwright as sw
from shardwright.cli import app
from shardwright.core.layout.placements import Layout
from shardwright.core.plan.decision import Decision
from shardwright.core.plan.file import to_document
from shardwright.core.plan.plan import Plan, stale_note
from shardwright.core.search.options import Options

Document = dict[str, Any]

FOUND_ANEW: dict[str, set[str]] = {
    "pp": {"stage_starts"},
    "virtual_stages": {"stage_starts"},
    "tp": {"layouts", "sequence_parallel"},
    "recompute": {"kept_units", "offloaded_units", "other_recompute", "other_units"},
    "shard": {"shard_group", "gathered_stages", "look_ahead", "reduce_after"},
}
"""What follows from an edit, as `docs/plan-file.md` has it."""
DERIVED = {"bucket_bytes", "whole_below_bytes", "hierarchical_gathers", "fp8_weights", "generated"}
"""What plans derive, by the same page."""
FIGURES = ("decision", "predicted", "costs", "work", "model", "run", "unsplit", "not_in_fp8")
"""The parts of a plan that are counted anew, beside its program."""
ORIGIN = ("cluster", "world_size", "device_memory_bytes", "peak_flops_per_s", "captured_from", "headroom")
"""The parts of a plan's provenance that are counted anew."""


@dataclass(frozen=True)
class Outcome:
    """What became of one edit: "refused", "rescored" or "wrong", with the reason."""

    kind: str
    edit: str
    said: str


@dataclass(frozen=True)
class Original:
    """A plan whose file is edited. ``twin`` is the same model in the other framework, where the plan has its names."""

    graph: sw.Graph
    plan: Plan
    document: Document
    twin: sw.Graph | None = None

    @classmethod
    def of(
        cls, graph: sw.Graph, cluster: sw.Cluster, batch: int, twin: sw.Graph | None = None, **pins: Any
    ) -> "Original":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return cls.given(graph, sw.plan(graph, cluster, batch=batch, **pins), twin)

    @classmethod
    def given(cls, graph: sw.Graph, plan: Plan, twin: sw.Graph | None = None) -> "Original":
        plan = plan if twin is None else plan.rebind(twin)
        return cls(graph, plan, json.loads(json.dumps(to_document(plan))), twin)


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
    runtimes = () if plan.input is None else plan.input.runtimes
    if len(runtimes) == 1 and runtimes[0] != graph.capabilities:
        graph = replace(graph, capabilities=runtimes[0])  # which is how plan() takes others
    found = _planned(graph, plan, plan.decision, frozenset())
    return replace(found, decision=replace(found.decision, reduce_after=plan.decision.reduce_after))


def _planned(graph: sw.Graph, plan: Plan, decision: Decision, free: Collection[str]) -> Plan:
    """What `plan()` makes of a decision, all of it but ``free`` pinned by public options, for a plan's devices."""
    options = {field.name for field in fields(Options)}
    pins = {f.name: getattr(decision, f.name) for f in fields(Decision) if f.name in options and f.name != "layouts"}
    pins["gathered_stages"] = decision.gathered_stages or 0
    pins |= {name: list(pins[name]) or None for name in ("kept_units", "offloaded_units", "other_units")}
    if decision.shard >= 2 and decision.reduce_after is None:
        pins["reduce_after"] = "each"  # what None means there, and says in a decision
    if decision.tp > 1 and "layouts" not in free:
        names = replace(plan, decision=decision).parameter_layouts(graph.framework)
        pins["layouts"] = [(f"^{re.escape(name)}$", layout) for name, layout in names.items()]
    pins = {name: value for name, value in pins.items() if name not in free}
    assert plan.input is not None
    given = {
        name: value
        for name, value in plan.input.options
        if name not in pins and not (name == "partitioner" and "stage_starts" in pins)
    }
    return sw.plan(graph, plan.input.cluster, **pins, **given, devices="all")


def judge(original: Original, edit: Edit) -> Outcome:
    """What becomes of an edit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        edited = None
        try:
            edited = Plan.from_text(json.dumps(edit.document))
            if silent := _silent(original, edited):
                return Outcome("wrong", edit.text, silent)
            rescored = sw.rescore(edited, **edit.changes)
        except sw.ShardwrightError as error:
            said = str(error)
            if not any(name in said for name in edit.names):
                return Outcome("wrong", edit.text, f"not named: {said}")
            if edited is not None and (made := _planned_all_the_same(original, edited, edit)):
                return Outcome("wrong", edit.text, f"{said}, and yet {made}")
            return Outcome("refused", edit.text, said)
        except Exception as error:  # what is no refusal is a bug
            return Outcome("wrong", edit.text, f"{type(error).__name__}: {error}")
        try:
            wrong = _difference(original, edited, edit, rescored)
        except sw.ShardwrightError as error:
            wrong = f"it cannot be compared: {error}"
    return Outcome("wrong" if wrong else "rescored", edit.text, wrong or rescored.summary())


def _silent(original: Original, edited: Plan) -> str:
    """What an edited file says otherwise than before although it passes for one that was not edited."""
    if edited.is_stale:
        return ""
    before = original.plan
    # Names and programs that do not fit the model are refused when they are used, and are no figures.
    parts = (*FIGURES, "counted", "input", "alternatives", "layout_alternatives")
    unlike = [name for name in parts if getattr(before, name) != getattr(edited, name)]
    unlike += [name for name in ORIGIN if getattr(before.provenance, name) != getattr(edited.provenance, name)]
    return f"the file loads as one that was not edited, with another {', '.join(unlike)}" if unlike else ""


def _asked(edited: Plan, edit: Edit) -> dict[str, Any]:
    """The parts of the decision that were edited, in the file or by name."""
    before = edited.counted or edited.decision
    values = {f.name: getattr(edited.decision, f.name) for f in fields(Decision)}
    found = {name: value for name, value in values.items() if value != getattr(before, name)}
    for name, value in edit.changes.items():
        if name == "layouts":
            found[name] = tuple(sorted((dict(edited.decision.layouts) | dict(value)).items()))
        else:
            found[name] = tuple(value) if isinstance(value, list) else value
    return found


def _free(asked: dict[str, Any]) -> set[str]:
    """The parts of a decision that are found anew."""
    return {name for cause in asked for name in FOUND_ANEW.get(cause, ())} - set(asked)


def _planned_all_the_same(original: Original, edited: Plan, edit: Edit) -> str:
    """The plan that `plan()` makes of an edit that was refused; empty where it refuses it too."""
    layouts = edit.changes.get("layouts", {})
    if not isinstance(layouts, dict) or not all(isinstance(layout, Layout) for layout in layouts.values()):
        return ""
    try:
        asked = _asked(edited, edit)
        free, decision = _free(asked), edited.decision
        if {"pp", "virtual_stages"} & set(asked) and "stage_starts" in free:
            return ""  # a decision needs a cut, and there is none to pin
        if not asked or "layouts" in free:
            return ""
        decision = replace(decision, **asked)
        found = _planned(original.graph, edited, decision, free | (DERIVED - set(asked)))
    except (sw.ShardwrightError, TypeError, AttributeError, ValueError):
        return ""
    kept = [f.name for f in fields(Decision) if f.name not in free | (DERIVED - set(asked)) | {"layouts"}]
    if any(_unlike(getattr(found.decision, name), getattr(decision, name)) for name in kept):
        return ""
    try:
        before = replace(edited, decision=decision).parameter_layouts(original.graph.framework)
    except sw.ShardwrightError:
        return ""
    same = found.parameter_layouts(original.graph.framework) == before
    return f"plan() makes {found.summary()}" if same else ""


def _unlike(one: Any, other: Any) -> bool:
    return bool(one != other and (not isinstance(one, tuple) or sorted(one) != sorted(other)))


def _difference(original: Original, edited: Plan, edit: Edit, rescored: Plan) -> str:
    """How a rescored plan differs from the plan that its decision is planned to; empty where it does not."""
    if rescored.is_stale or Plan.from_text(json.dumps(to_document(rescored))) != rescored:
        return "it is stale, or another plan once it is saved"
    asked, framework = _asked(edited, edit), original.graph.framework
    before = edited.counted or edited.decision
    for name in (field.name for field in fields(Decision) if field.name != "layouts"):
        wanted, got = asked.get(name, getattr(before, name)), getattr(rescored.decision, name)
        if name in asked and _unlike(got, wanted):
            return f"{name} was edited to {wanted} and is {got}"
        if name not in asked and name not in _free(asked) | DERIVED and _unlike(got, wanted):
            return f"{name} was {wanted}, was not edited, and is {got}"
    if "layouts" in asked or "layouts" not in _free(asked):
        wanted_layouts = asked.get("layouts", before.layouts)
        wished = replace(edited, decision=replace(rescored.decision, layouts=wanted_layouts))
        if wished.parameter_layouts(framework) != rescored.parameter_layouts(framework):
            return "layouts are not those that were asked for"
    if edited.input != rescored.input:
        return "its input is another"
    try:
        oracle = planned_with_pins(original.graph, rescored)
    except sw.ShardwrightError as error:
        return f"plan() refuses it: {error}"
    if original.twin is not None:
        oracle = oracle.rebind(original.twin)
    unlike = [name for name in FIGURES if getattr(oracle, name) != getattr(rescored, name)]
    unlike += [] if oracle.binding(framework) == rescored.binding(framework) else [f"bindings.{framework}"]
    unlike += [name for name in ORIGIN if getattr(oracle.provenance, name) != getattr(rescored.provenance, name)]
    programs, others = dict(oracle.programs), dict(rescored.programs)
    # The program of the other framework is left out, with a warning, where it was of the plan before.
    unlike += [f"programs.{name}" for name, program in others.items() if programs.get(name) != program]
    unlike += [f"programs.{framework}"] if framework in programs and framework not in others else []
    return f"plan() differs in {', '.join(unlike)}" if unlike else ""


# The command line -------------------------------------------------------------------------------------------------

OLD = ("before the edit", "before it was edited", "are old", "do not belong together")
"""The words by which a command says that figures are of another plan."""


LISTS = ("stage_starts", "kept_units", "offloaded_units", "other_units")
"""The parts of a decision that are lists of numbers."""


def judge_commands(original: Original, edit: Edit, folder: Path) -> str:
    """What is wrong with what the commands say of an edited file; empty where it is right: they refuse it as one
    message, or say that its figures are old, unless they are not."""
    whole, path = folder / "whole.json", folder / "edited.json"
    whole.write_text(json.dumps(original.document))
    path.write_text(json.dumps(edit.document))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            stale: str | None = stale_note(Plan.load(path))
            loads = True
        except sw.ShardwrightError:
            stale, loads = None, False
        sets = _sets(edit.changes)
        commands = [["show", path], ["explain", path], ["simulate", path], ["compare", whole, path]]
        commands += [["rescore", path, *sets]] if sets is not None else []
        for words in commands:
            ran = CliRunner().invoke(app, [str(word) for word in words])
            said = " ".join((ran.stdout + ran.stderr).split())
            name = words[0]
            if ran.exception is not None and not isinstance(ran.exception, SystemExit):
                return f"{name}: {type(ran.exception).__name__}: {ran.exception}"
            if ran.exit_code not in (0, 2) or (ran.exit_code == 2) != said.startswith("error:"):
                return f"{name}: exit code {ran.exit_code}: {said[:200]}"
            if name != "rescore" and (ran.exit_code == 0) != loads:
                return f"{name}: exit code {ran.exit_code} of a file that {'loads' if loads else 'does not'}"
            if name != "rescore" and loads and any(word in said for word in OLD) != (stale is not None):
                return f"{name}: does not say that figures are old, or says so of figures that are not: {said[:200]}"
            if name == "rescore" and (ran.exit_code == 0) != _rescores(path, edit.changes):
                return f"{name} {' '.join(sets or ())}: exit code {ran.exit_code}, unlike rescore(): {said[:200]}"
    return ""


def _rescores(path: Path, changes: dict[str, Any]) -> bool:
    try:
        sw.rescore(Plan.load(path), **copy.deepcopy(changes))
    except sw.ShardwrightError:
        return False
    return True


def _sets(changes: dict[str, Any]) -> list[str] | None:
    """Changes as ``--set`` takes them; None where it takes no such value."""
    words: list[str] = []
    for name, value in changes.items():
        if name == "layouts" and isinstance(value, dict):
            for slot, layout in value.items():
                if not isinstance(layout, Layout) or len(layout.placements) > 1:
                    return None
                words += ["--set", f"layouts.{slot}={dict(layout.placements).get('tp', 'R')}"]
                if layout.placements and "tp" not in dict(layout.placements):
                    return None
        elif value is None or isinstance(value, bool | int):
            words += ["--set", f"{name}={'null' if value is None else str(value).lower()}"]
        elif name in LISTS and isinstance(value, list | tuple) and all(isinstance(unit, int) for unit in value):
            words += ["--set", f"{name}={','.join(map(str, value))}"]
        elif isinstance(value, str) and not value.isdecimal() and name not in LISTS:  # where text is a list
            words += ["--set", f"{name}={value}"]
        else:
            return None
    return words
