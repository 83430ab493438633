"""Writes predictions to files and reads them."""

from __future__ import annotations

from pathlib import Path

from maya_core.errors import MayaError
from maya_core.files import FileKind, write_file
from maya_core.installation import installation
from maya_core.report.prediction import VERSION, Prediction


def write_prediction(path: Path, prediction: Prediction) -> None:
    write_file(path, prediction.model_dump_json(indent=2) + "\n", FileKind.PREDICTION)


def read_prediction(path: Path) -> Prediction:
    """Reads a prediction. A file that is not one is reported with what is wrong."""
    try:
        prediction = Prediction.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise MayaError(f"no prediction at {path}.", "`maya run --json FILE` writes one.") from error
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise MayaError(f"{path} is not a prediction: {first}", "Write it again with `maya report`.") from error
    if prediction.version > VERSION:
        raise MayaError(
            f"{path} was written by a newer Maya (prediction version {prediction.version}, this one reads up to {VERSION}).",
            installation().upgrade_advice(),
        )
    return prediction
