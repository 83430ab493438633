"""The simulator: traces and durations, put on a clock."""
