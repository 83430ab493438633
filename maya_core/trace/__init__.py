"""Traces: the calls that each rank made to its GPU, stored on disk and read back as arrays, and collated into a job."""

from maya_core.trace.rank import RankTrace, read_trace, write_trace

__all__ = ["RankTrace", "read_trace", "write_trace"]
