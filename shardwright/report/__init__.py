"""Reports: timelines in the terminal, as SVG and as Perfetto traces."""

from shardwright.report.perfetto import perfetto_trace, save_perfetto
from shardwright.report.svg import timeline_svg
from shardwright.report.terminal import timeline_text

__all__ = ["perfetto_trace", "save_perfetto", "timeline_svg", "timeline_text"]
