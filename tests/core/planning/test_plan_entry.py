"""What a plan file may say: every field is checked, and the fields against one another; and how files are saved."""

import json
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

import shardwright as sw
from shardwright.core.errors import ClusterError, PlanError, PlanFileError, PlanWarning, ShardwrightError
from shardwright.core.plan.file import to_text
from shardwright.core.plan.plan import Plan
from shardwright.core.values import fields, text_files
from tests.core.toy import decoder

GRAPH = decoder(layers=4, hidden=64, heads=4, vocabulary=256, sequence=16)
EIGHT = sw.Cluster("a100-80gb", devices_per_node=8)


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    return sw.plan(GRAPH, EIGHT, batch=16, pp=2, dp=2, tp=2, microbatch=2, schedule="1f1b", shard=1, recompute="none")


@pytest.mark.parametrize(
    ("kind", "taken", "refused"),
    [
        (fields.Count, (1, 1 << 40), (0, -1, (1 << 40) + 1)),
        (fields.Amount, (0, 1 << 62), (-1, (1 << 62) + 1)),
        (fields.Seconds, (0.0, 1e12), (-1e-9, 1.1e12, float("nan"), float("inf"))),
        (fields.Rate, (1e-9, 0.5, 1e30), (0.0, -1.0, 1.1e30, float("nan"), float("inf"))),
    ],
)
def test_numbers_have_bounds(kind: Any, taken: tuple[float, ...], refused: tuple[float, ...]) -> None:
    check = TypeAdapter(kind)
    assert [check.validate_python(number) for number in taken] == list(taken)
    for number in refused:
        with pytest.raises(ValidationError):
            check.validate_python(number)


Edit = Callable[[dict[str, Any]], object]


def edited(plan: sw.Plan, edit: Edit) -> str:
    document = json.loads(to_text(plan))
    edit(document)
    return json.dumps(document)


def first_binding(d: dict[str, Any]) -> Any:
    return d["bindings"]["toy"]["units"][0]["parameters"]


def rename(d: dict[str, Any]) -> None:
    """Another name for one of two slots that are one parameter."""
    units = d["bindings"]["toy"]["units"]
    unit, role = d["model"]["ties"][0][1].split("/")
    units[int(unit)]["parameters"][role][0] = "another"


REFUSED: dict[str, tuple[Edit, str]] = {
    "more ranks than devices": (lambda d: d["decision"].update(dp=4), "16 ranks, and the plan was made for the 8"),
    "more devices than ranks": (
        lambda d: d["provenance"].update(world_size=16),
        "has 8 devices, and provenance.world_size is 16",
    ),
    "ranks beyond all machines": (lambda d: d["decision"].update(dp=1 << 38, batch=1 << 40), "at most 1048576"),
    "an optimizer": (lambda d: d["decision"].update(optimizer="adamx"), "optimizer='adamx': did you mean 'adam"),
    "a shard group": (lambda d: d["decision"].update(shard_group=7), "shard_group=7 does not divide dp=2"),
    "a shard group of nothing": (lambda d: d["decision"].update(shard=0, shard_group=2), "nothing is sharded"),
    "no backwards": (lambda d: d["decision"].update(schedule="forward-only"), "no backward passes"),
    "a schedule of other sizes": (lambda d: d["decision"].update(schedule="zbv"), "does not admit these sizes"),
    "too many microbatches": (lambda d: d["decision"].update(batch=1 << 32), "make 1073741824 microbatches"),
    "a parameter over replicas": (
        lambda d: d["decision"]["layouts"].update({"1/w0": {"dp": {"split": 0}}}),
        "lies on axis 'dp'",
    ),
    "a partial parameter": (
        lambda d: d["decision"]["layouts"].update({"1/w0": {"tp": {"partial": "sum"}}}),
        "split or whole, not partial",
    ),
    "a count of parameters": (lambda d: d["model"].update(parameter_count=7), "model.parameter_count: 7"),
    "dims of another slot": (
        lambda d: first_binding(d).update({next(iter(first_binding(d))): ["x", [[[0, 3]], [[1, 5]]]]}),
        r"make up a slot of shape \(3, 5\)",
    ),
    "tied by one section alone": (rename, "are one parameter in model.ties or by their name, and not in both"),
    "an alias of nothing": (lambda d: d["bindings"]["toy"].update(aliases=[["a"]]), "expected two names"),
    "a slot that is not": (lambda d: d["alternatives"]["unsplit"].update({"77/w0": "?"}), "slot '77/w0'"),
    "an escape code": (lambda d: d["model"].update(name="a\x1b]0;owned\x07"), r"control character '\\x1b'"),
    "a name that turns around": (lambda d: d["provenance"].update(cluster="a\u202eb"), "control character"),
    "a number beyond all": (lambda d: d["costs"]["classes"][0].update(forward_s=1e300), "less than or equal"),
    "an integer beyond all": (
        lambda d: d["predicted"]["memory_by_stage_rank"][0].update(host_bytes=10**300), "host_bytes"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_plan_that_contradicts_itself_is_refused(plan: sw.Plan, what: str) -> None:
    edit, said = REFUSED[what]
    assert Plan.from_text(to_text(plan)) == plan
    with pytest.raises(PlanFileError, match=said):
        Plan.from_text(edited(plan, edit), "plan.json")


RAW = {
    "deep": ("[" * 200_000, "nested too deeply"),
    "deep inside": ('{"format": "shardwright-plan", "version": 9, "decision": ' + "[" * 100_000, "not|nested"),
    "digits": ('{"version": ' + "9" * 5000 + "}", "not a plan file"),
    "values": ("[" + "0," * 2_000_001 + "0]", "more than 2000000 values"),
    "twice": ('{"format": "shardwright-plan", "version": 9, "version": 9}', "the key 'version' stands twice"),
    "nothing": ("", "not JSON at line 1"),
    "a list": ("[]", "not a plan file"),
    "NaN": ('{"format": "shardwright-plan", "version": NaN}', "version is nan"),
}


@pytest.mark.parametrize("what", RAW)
def test_text_that_is_no_plan(what: str) -> None:
    text, said = RAW[what]
    with pytest.raises(PlanFileError, match=said):
        Plan.from_text(text)


def test_a_file_beyond_all_sizes_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        file.truncate(80 << 20)
    with pytest.raises(PlanFileError, match="larger than 64 MiB"):
        sw.Plan.load(path)
    path = tmp_path / "cluster.toml"
    with path.open("wb") as file:
        file.truncate(80 << 20)
    with pytest.raises(ClusterError, match="larger than 4 MiB"):
        sw.Cluster.load(path)


def test_toml_that_readers_take_long_for(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    for text, said in (
        (".".join(["a"] * 20_000) + " = 1", "key of more than 32 parts"),
        ("x = " + "[" * 50_000, "nested too deeply"),
        ("x = " + "9" * 5000, "is not a TOML cluster file"),
        ('device = "a\\u001b[31m"', "control character"),
        ("nodes = 1\nnodes = 2", "is not a TOML cluster file"),
    ):
        path.write_text(text)
        with pytest.raises(ClusterError, match=said):
            sw.Cluster.load(path)


@pytest.mark.parametrize("path", ["\0", "x" * 5000, 7, None, b"plan.json"])
def test_paths_that_are_none(plan: sw.Plan, path: Any) -> None:
    for ask in (sw.Plan.load, plan.save):
        with pytest.raises(PlanFileError):
            ask(path)
    for ask in (sw.Cluster.load, EIGHT.save):
        with pytest.raises(ClusterError):
            ask(path)


# Figures of another decision --------------------------------------------------------------------------------------


def test_figures_that_were_counted_for_another_decision_are_said(plan: sw.Plan) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not Plan.from_text(to_text(plan)).is_stale
    for edit, said in (
        (lambda d: d["decision"].update(microbatch=4), "counted for another decision .*microbatch 2 → 4"),
        (lambda d: d["decision"].update(optimizer="sgd"), "counted for another decision .*optimizer adamw → sgd"),
        (lambda d: d["costs"]["classes"][0].update(forward_s=1.0), "do not belong together"),
        (lambda d: d["predicted"].update(step_time_s=1.0), "do not belong together"),
        (lambda d: d["predicted"]["decision"].update(shard=0), "counted for another decision .*shard 0 → 1"),
        (lambda d: d["input"]["cluster"].update(device="h100"), "do not belong together"),
    ):
        with pytest.warns(PlanWarning, match=said):
            other = Plan.from_text(edited(plan, edit))
        assert other.is_stale
        assert "rescore" in sw.explain(other)
        assert "rescore" in str(sw.compare(plan, other))
    assert "rescore" not in sw.explain(plan)
    assert replace(plan, decision=replace(plan.decision, microbatch=4)).is_stale


# Saving -----------------------------------------------------------------------------------------------------------


class FullDisk:
    """A file that takes some letters, and then has no room."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, text: str) -> None:
        self.file.write(text[:100])
        self.file.flush()
        raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_file_that_was_there(
    plan: sw.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {tmp_path / "plan.json": plan.save, tmp_path / "cluster.toml": EIGHT.save}
    for path, save in paths.items():
        save(path)
    before = {path: path.read_text() for path in paths}
    opened = Path.open

    def full(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = opened(self, mode, *args, **options)
        return FullDisk(file) if "w" in mode else file

    monkeypatch.setattr(Path, "open", full)
    for path, save in paths.items():
        with pytest.raises(ShardwrightError, match=rf"{re.escape(str(path))} cannot be written: No space left"):
            save(path)
    monkeypatch.undo()
    assert {path: path.read_text() for path in paths} == before
    assert sorted(tmp_path.iterdir()) == sorted(paths), "nothing is left beside them"


def test_what_a_saved_file_keeps(plan: sw.Plan, tmp_path: Path) -> None:
    path, link = tmp_path / "plan.json", tmp_path / "link.json"
    path.write_text("before")
    path.chmod(0o640)
    link.symlink_to(path)
    plan.save(link)
    assert link.is_symlink()
    assert sw.Plan.load(path) == plan
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(PlanFileError, match="cannot be written"):
        plan.save(tmp_path)
    with pytest.raises(PlanFileError, match="cannot be written"):
        plan.save(tmp_path / "none" / "plan.json")
    plan.save("/dev/null")
    assert not os.path.isfile("/dev/null")


def test_what_is_shown_of_text() -> None:
    assert text_files.visible("a\x1b[31mb\x9bc\u202e\td\n") == "a\\x1b[31mb\\x9bc\\u202e\td\n"


# Requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"loss_scope": "nonsense"}, "loss_scope='nonsense'"),
        ({"optimizer": ["adamw"]}, r"optimizer=\['adamw'\]"),
        ({"shard": True}, "shard=True"),
        ({"stage_starts": 7, "pp": 2}, "stage_starts=7"),
        ({"stage_starts": "0,1", "pp": 2}, "stage_starts='0,1'"),
        ({"stage_starts": [0, 1.5], "pp": 2}, "given 1.5"),
        ({"stage_starts": [], "pp": 2}, r"stage_starts=\[\]"),
        ({"batch": 1 << 50}, "expected at most"),
        ({"batch": 10**9, "microbatch": 1}, "makes 125000000 microbatches of 1"),
        ({"schedule": ["1f1b"]}, "schedule="),
        ({"partitioner": 7}, "partitioner=7: known: blocks, exact"),
        ({"partitioner": ["exact"]}, r"partitioner=\['exact'\]: did you mean"),
    ],
)
def test_a_request_of_other_kinds_is_named(pins: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        sw.plan(GRAPH, EIGHT, **{"batch": 16, **pins})


def test_a_cluster_beyond_all_machines() -> None:
    with pytest.raises(ClusterError, match="at most 1048576 devices; given 8000000000"):
        sw.Cluster("a100-80gb", nodes=10**9, devices_per_node=8)


def test_other_things_than_plans(plan: sw.Plan) -> None:
    for ask in (lambda: sw.compare(plan, 7), lambda: sw.explain("plan"), lambda: sw.explain(plan, 7)):
        with pytest.raises(PlanError):
            ask()


def test_the_guide_has_the_version_and_every_section_and_field_of_a_decision(plan: sw.Plan) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "plan-file.md").read_text(encoding="utf-8")
    document = json.loads(to_text(plan))
    assert f'`"{document["format"]}"`, {document["version"]} |' in guide
    assert [name for name in document if f"`{name}`" not in guide] == []
    assert [name for name in document["decision"] if f"`{name}`" not in guide] == []
