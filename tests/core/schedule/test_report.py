"""Timelines as SVG, as a Perfetto trace, and in the terminal."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from shardwright.core.schedule import Schedule, StageCosts
from shardwright.core.schedule.simulate import simulate
from shardwright.core.schedule.timeline import Timeline
from shardwright.report import save_perfetto, timeline_svg, timeline_text


@pytest.fixture
def timeline() -> Timeline:
    schedule = Schedule.build("dualpipev", ranks=2, microbatches=6, virtual_stages=2)
    return simulate(schedule, StageCosts.uniform(4, 1.0, 1.0, 1.0, 0.25, activation_bytes=10))


def test_the_svg_has_a_box_for_every_action(timeline: Timeline) -> None:
    root = ElementTree.fromstring(timeline_svg(timeline, title="dualpipev <2>"))
    name = "{http://www.w3.org/2000/svg}"
    hovers = [title.text for title in root.iter(f"{name}title")]
    assert len(hovers) == sum(len(actions) for actions in timeline.actions)
    assert all(float(box.get("width", 0)) >= 0 for box in root.iter(f"{name}rect"))
    assert any("dualpipev <2>" in (text.text or "") for text in root.iter(f"{name}text"))


def test_the_trace_holds_the_same_times(timeline: Timeline, tmp_path: Path) -> None:
    save_perfetto(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    parts = [part.text for actions in timeline.actions for action in actions for part in action.flat]
    work = [event for event in events if event["ph"] == "X" and event["cat"] != "transfer"]
    assert sorted(event["name"] for event in work) == sorted(parts)
    assert max(event["ts"] + event["dur"] for event in work) == pytest.approx(timeline.makespan_s * 1e6)
    assert len([event for event in events if event.get("cat") == "transfer"]) == len(timeline.transfers)
    held = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert max(held) == timeline.peak_activation_bytes[0]


def test_the_terminal_shows_idle_time_to_scale() -> None:
    timeline = simulate(Schedule.build("gpipe", ranks=2, microbatches=1), StageCosts.uniform(2, 1.0, 1.0, 1.0))
    lines = timeline_text(timeline, width=12).splitlines()
    assert lines[0] == "rank 0  FF......BBBB"
    assert lines[1] == "rank 1  ..FFBBBB...."
    assert "6 s" in lines[2]
    assert "50.0%" in lines[2]
