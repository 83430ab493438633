"""The simulator: computes when everything in a job happens, from its traces and durations."""
