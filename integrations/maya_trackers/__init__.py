"""Experiment trackers under emulation: what the program logs goes nowhere, because its losses are made up. MLflow has a package of its own."""
