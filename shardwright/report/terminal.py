"""Timelines in the terminal: one line per rank, one letter per slice of time."""

from shardwright.core.schedule.timeline import Timeline

_IDLE = "."


def timeline_text(timeline: Timeline, width: int = 100) -> str:
    """The timeline as text, `width` letters for the makespan.

    A letter is the kind of action that took most of its slice of time: F, B, I, W, or X for an overlapped pair; a dot
    is idle time.
    """
    span = timeline.makespan_s or 1.0
    zero = min((float(row[0]) for row in timeline.start_s if len(row)), default=0.0)
    head = len(f"rank {timeline.ranks - 1}")
    lines = []
    for rank in range(timeline.ranks):
        share: list[dict[str, float]] = [{} for _ in range(width)]
        for item in timeline.spans(rank):
            start, end = ((time - zero) / span * width for time in (item.start_s, item.end_s))
            letter = "X" if item.action.parts else item.action.kind.value[0]
            for cell in range(int(start), min(width, int(end) + 1)):
                part = min(end, cell + 1) - max(start, cell)
                if part > 0:
                    share[cell][letter] = share[cell].get(letter, 0.0) + part
        letters = []
        for cell_share in share:
            best = max(cell_share, key=lambda letter: cell_share[letter], default=_IDLE)
            letters.append(best if sum(cell_share.values()) >= 0.5 else _IDLE)
        lines.append(f"{f'rank {rank}':<{head}}  {''.join(letters)}")
    worst = max(timeline.bubble_fraction, default=0.0)
    lines.append(f"{timeline.makespan_s:.6g} s; idle at most {worst:.1%} of it; at most "
                 f"{max(timeline.peak_live_activations, default=0)} activations live on a rank")  # fmt: skip
    return "\n".join(lines)
