"""Emulation in this process: for its whole life under `maya run`, around a block of code, or for the lifetime of a plugin."""
