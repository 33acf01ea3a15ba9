"""Timelines as traces that Perfetto opens (the JSON trace event format: complete events, flows and counters)."""

import json
from pathlib import Path
from typing import Any

from shardwright.core.errors import ShardwrightError
from shardwright.core.schedule.timeline import Timeline
from shardwright.core.values.text_files import path_of, write_text

_MICROSECONDS = 1e6
_LINKS = 1000  # Transfers are shown as threads of their own, numbered from here.


def perfetto_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace of a timeline: one process per rank with its actions, messages and activation memory over time."""
    events: list[dict[str, Any]] = []
    for rank in range(timeline.ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "compute"}})
        for span in timeline.spans(rank):
            for part in span.action.flat:
                args = {"stage": part.stage, "microbatch": part.microbatch}
                if part.slice is not None:
                    args["slice"] = part.slice
                kind = part.kind.value
                events.append(_complete(part.text, kind, rank, 0, span.start_s, span.end_s, args))
        times, held = timeline.memory(rank)
        for time, size in zip(times.tolist(), held.tolist(), strict=True):
            counter = {"ph": "C", "name": "activations", "pid": rank, "ts": time * _MICROSECONDS}
            events.append({**counter, "args": {"bytes": size}})
    links = {(t.source, t.target) for t in timeline.transfers}
    for source, target in sorted(links):
        name = {"name": f"to rank {target}"}
        events.append({"ph": "M", "name": "thread_name", "pid": source, "tid": _LINKS + target, "args": name})
    for t in timeline.transfers:
        events.append(_complete(t.action.text, "transfer", t.source, _LINKS + t.target, t.start_s, t.end_s, {}))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def save_perfetto(timeline: Timeline, path: str | Path) -> None:
    """Write a trace to a file that ui.perfetto.dev opens. Raises ShardwrightError when it cannot be written."""
    write_text(path_of(path, ShardwrightError), json.dumps(perfetto_trace(timeline)), ShardwrightError)


def _complete(
    name: str, category: str, pid: int, tid: int, start_s: float, end_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    start, length = start_s * _MICROSECONDS, (end_s - start_s) * _MICROSECONDS
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": start, "dur": length, "args": args}
