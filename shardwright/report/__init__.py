"""Reports: timelines in the terminal, as SVG and as Perfetto traces."""

from shardwright.report.perfetto import perfetto_trace, save_perfetto
from shardwright.report.svg import timeline_svg

__all__ = ["perfetto_trace", "save_perfetto", "timeline_svg"]
