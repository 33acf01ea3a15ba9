"""Timelines in the terminal: one line per rank, one letter per slice of time."""

from shardwright.core.events import Work
from shardwright.core.schedule.timeline import Timeline

_IDLE = "."


def timeline_text(timeline: Timeline[Work], width: int = 100) -> str:
    """The timeline as text, `width` letters for the makespan.

    A letter is the kind of action that took most of its slice of time: F, B, I, W, or X for an overlapped pair; of jobs
    it is the job, 0 to 9 and then letters. A dot is idle time.
    """
    span = timeline.makespan_s or 1.0
    zero = min((float(row[0]) for row in timeline.start_s if len(row)), default=0.0)
    head = len(f"{timeline.lane} {timeline.ranks - 1}")
    lines = []
    for rank in range(timeline.ranks):
        share: list[dict[str, float]] = [{} for _ in range(width)]
        for item in timeline.spans(rank):
            start, end = ((time - zero) / span * width for time in (item.start_s, item.end_s))
            letter = item.action.letter
            for cell in range(int(start), min(width, int(end) + 1)):
                part = min(end, cell + 1) - max(start, cell)
                if part > 0:
                    share[cell][letter] = share[cell].get(letter, 0.0) + part
        letters = []
        for cell_share in share:
            best = max(cell_share, key=lambda letter: cell_share[letter], default=_IDLE)
            letters.append(best if sum(cell_share.values()) >= 0.5 else _IDLE)
        lines.append(f"{f'{timeline.lane} {rank}':<{head}}  {''.join(letters)}")
    worst = max(timeline.bubble_fraction, default=0.0)
    said = f"{timeline.makespan_s:.6g} s; idle at most {worst:.1%} of it"
    if timeline.held is None:
        said += f"; at most {max(timeline.peak_live_activations, default=0)} activations live on a rank"
    elif most := max(timeline.peak_activation_bytes, default=0):
        said += f"; at most {most} bytes held on a {timeline.lane}"
    lines.append(said)
    return "\n".join(lines)
