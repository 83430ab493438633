"""Fits profiles to measurements: `python -m maya_core.predictor.fitting DATA`. Predictions do not need this package."""
