"""From measurements to profiles: `python -m maya_core.predictor.fitting DATA`. Not needed to predict."""
