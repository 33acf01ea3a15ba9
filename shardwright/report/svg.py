"""Timelines as SVG: one lane per rank, one box per action, nothing but text and rectangles."""

from collections.abc import Mapping
from html import escape

from shardwright.core.events import Work
from shardwright.core.schedule.actions import Kind
from shardwright.core.schedule.timeline import Timeline

_OTHER = "#c9c9c9"
_COLOURS = {kind.value: _OTHER for kind in Kind} | {
    Kind.FORWARD.value: "#8fb8de",
    Kind.BACKWARD.value: "#9ccf9f",
    Kind.INPUT_GRAD.value: "#7fc4b8",
    Kind.WEIGHT_GRAD.value: "#d8c27a",
}
_JOBS = ("#8fb8de", "#9ccf9f", "#d8c27a", "#d99fa8", "#b3a6d9", "#7fc4b8", "#e0b183", "#a9b7c0", "#c4d37f", "#d7a3d0")
"""The colours of jobs, given in the order in which they first run, and again from the first."""
_LANE, _GAP, _LEFT, _TOP, _BOTTOM = 24, 6, 64, 28, 24
_TEXT_WIDTH = 6.5


def timeline_svg(timeline: Timeline[Work], width: int = 1200, title: str = "") -> str:
    """The timeline as an SVG image, `width` pixels wide; hovering over a box shows the action and its times."""
    span = timeline.makespan_s or 1.0
    scale = (width - _LEFT - 12) / span
    height = _TOP + timeline.ranks * (_LANE + _GAP) + _BOTTOM
    bubble = max(timeline.bubble_fraction, default=0.0)
    head = f"{title}  " if title else ""
    head += f"{timeline.makespan_s:.6g} s, bubble at most {bubble:.1%}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="18" font-size="13">{escape(head)}</text>',
    ]
    colours = dict(_COLOURS)
    zero = min((float(row[0]) for row in timeline.start_s if len(row)), default=0.0)
    for rank in range(timeline.ranks):
        top = _TOP + rank * (_LANE + _GAP)
        parts.append(f'<text x="4" y="{top + 16}" font-size="12">{timeline.lane} {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{top}" width="{span * scale:.2f}" height="{_LANE}" fill="#f2f2f2"/>')
        for item in timeline.spans(rank):
            if item.end_s > item.start_s:
                left, right = _LEFT + (item.start_s - zero) * scale, _LEFT + (item.end_s - zero) * scale
                hover = f"{item.action.text} {item.start_s:.6g} to {item.end_s:.6g} s"
                for part in item.action.flat:
                    colours.setdefault(part.series, _JOBS[(len(colours) - len(_COLOURS)) % len(_JOBS)])
                parts.append(_box(item.action, left, right - left, top, hover, colours))
    parts.append(f'<text x="{_LEFT}" y="{height - 8}" font-size="11">0 s</text>')
    end = f"{timeline.makespan_s:.6g} s"
    parts.append(f'<text x="{width - 12}" y="{height - 8}" font-size="11" text-anchor="end">{end}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(action: Work, left: float, wide: float, top: int, hover: str, colours: Mapping[str, str]) -> str:
    """The box of one action. The two halves of an overlapped pair share it, one above the other."""
    halves = action.flat
    tall = _LANE / len(halves)
    shapes = []
    for index, part in enumerate(halves):
        y = top + index * tall
        colour = colours[part.series]
        shapes.append(
            f'<rect x="{left:.2f}" y="{y:g}" width="{wide:.2f}" height="{tall:g}" fill="{colour}" stroke="#555" '
            'stroke-width="0.4"/>'
        )
        if wide > _TEXT_WIDTH * len(part.text):
            shapes.append(
                f'<text x="{left + wide / 2:.2f}" y="{y + tall / 2 + 3.5:g}" font-size="{10 if tall > 15 else 9}" '
                f'text-anchor="middle">{part.text}</text>'
            )
    return f"<g><title>{escape(hover)}</title>{''.join(shapes)}</g>"
