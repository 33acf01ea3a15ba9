"""Timelines as traces that Perfetto opens (the JSON trace event format: complete events, flows and counters)."""

import json
from pathlib import Path
from typing import Any

from shardwright.core.errors import ShardwrightError
from shardwright.core.events import Work
from shardwright.core.schedule.timeline import HOST, Timeline, Transfer
from shardwright.core.values.text_files import path_of, write_text

_MICROSECONDS = 1e6
_LINKS = 1000  # Transfers are shown as threads of their own, numbered from here.


def perfetto_trace(timeline: Timeline[Work]) -> dict[str, Any]:
    """The trace of a timeline: one process per rank with its actions, messages and activation memory over time."""
    events: list[dict[str, Any]] = []
    for rank in range(timeline.ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"{timeline.lane} {rank}"}})
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "compute"}})
        for span in timeline.spans(rank):
            for part in span.action.flat:
                args = dict(part.numbers)
                events.append(_complete(part.text, part.series, rank, 0, span.start_s, span.end_s, args))
        times, held = timeline.memory(rank)
        for time, size in zip(times.tolist(), held.tolist(), strict=True):
            name = "activations" if timeline.held is None else "memory"
            counter = {"ph": "C", "name": name, "pid": rank, "ts": time * _MICROSECONDS}
            events.append({**counter, "args": {"bytes": size}})
    links = {_link(timeline, t) for t in timeline.transfers}
    for pid, tid, name in sorted(links):
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
    for t in timeline.transfers:
        pid, tid, _ = _link(timeline, t)
        events.append(_complete(t.action.text, "transfer", pid, tid, t.start_s, t.end_s, {}))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _link(timeline: Timeline[Work], t: Transfer[Work]) -> tuple[int, int, str]:
    """The process, thread and name of the link that a transfer takes. Links with the host are shown with the device."""
    if t.source == HOST:
        return t.target, _LINKS + timeline.ranks, "from the host"
    if t.target == HOST:
        return t.source, _LINKS + timeline.ranks + 1, "to the host"
    return t.source, _LINKS + t.target, f"to {timeline.lane} {t.target}"


def save_perfetto(timeline: Timeline[Work], path: str | Path) -> None:
    """Write a trace to a file that ui.perfetto.dev opens. Raises ShardwrightError when it cannot be written."""
    write_text(path_of(path, ShardwrightError), json.dumps(perfetto_trace(timeline)), ShardwrightError)


def _complete(
    name: str, category: str, pid: int, tid: int, start_s: float, end_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    start, length = start_s * _MICROSECONDS, (end_s - start_s) * _MICROSECONDS
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": start, "dur": length, "args": args}
