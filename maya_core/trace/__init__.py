"""Traces: what a rank asked of its GPU, kept on disk and read back as arrays."""

from maya_core.trace.rank import RankTrace, read_trace, write_trace

__all__ = ["RankTrace", "read_trace", "write_trace"]
