"""What users rely on: Python names, commands with their options, and the fields of a prediction. Additions are free; whatever disappears or
changes its type fails here, and belongs in CHANGELOG.md with its new name.

    python tests/test_public_interface.py     # writes the present fields of a prediction to public_fields.json
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import typer

import maya_core
from maya_core.cli import app
from maya_core.report.prediction import VERSION, Prediction

FIELDS = Path(__file__).with_name("public_fields.json")

COMMANDS = {
    "run": "assume attention burst gpu gpus-per-node hardware host html json keep-files mlflow mlflow-experiment name network node nodes out pair "
    "price-per-gpu-hour profile ranks samples-per-step step-at steps tokens-per-step",
    "report": "attention burst hardware host html json memory-snapshot network price-per-gpu-hour profile rank samples-per-step timeline "
    "tokens-per-step",
    "what-if": "attention burst gpu gpus-per-node hardware host html json network node nodes price-per-gpu-hour profile samples-per-step "
    "tokens-per-step",
    "kernels": "burst gpu rank top",
    "gpus": "hardware json networks nodes",
    "doctor": "json",
    "runs": "json keep",
    "help": "",
    "search": "batch budget cache deadline executor hardware memory-margin mlflow mlflow-experiment objective profile prune ray-address "
    "sampler samples seed study tokens trials workers",
    "size": "budget deadline emit executor gpu hardware memory-margin nodes profile ray-address samples study tokens workers",
    "check": "baseline hardware junit markdown max-cost-per-1k-steps max-memory max-regression max-step-time profile study write-baseline",
}


def test_python_names() -> None:
    assert set(maya_core.__all__) == {
        "EmulatedBlock",
        "JobTrace",
        "MayaError",
        "Prediction",
        "__version__",
        "emulate",
        "predict",
        "read_job",
        "step",
        "what_if",
    }
    for name in maya_core.__all__:
        assert getattr(maya_core, name) is not None
    assert list(inspect.signature(maya_core.emulate).parameters) == ["gpu", "rank", "rerun", "steps", "options"]
    assert list(inspect.signature(maya_core.predict).parameters) == ["job", "options"]
    assert list(inspect.signature(maya_core.what_if).parameters) == ["job", "options"]
    assert (Path(maya_core.__file__).parent / "py.typed").exists()


def test_commands_and_their_options() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, expected in COMMANDS.items():
        flags = {flag.removeprefix("--") for parameter in commands[name].params for flag in parameter.opts}
        assert set(expected.split()) <= flags, name
    assert "--version" in typer.main.get_command(app).params[0].opts


def test_fields_of_a_prediction() -> None:
    assert VERSION == 1
    before, now = json.loads(FIELDS.read_text()), fields()
    assert {name: now.get(name) for name in before} == before


def test_every_field_is_described() -> None:
    schema = Prediction.model_json_schema()
    for name, part in {"Prediction": schema, **schema["$defs"]}.items():
        for field, content in part["properties"].items():
            assert content.get("description"), f"{name}.{field} has no text under it"


def fields() -> dict[str, str]:
    """Every field of the JSON, and its type."""
    schema = Prediction.model_json_schema()
    parts = {"Prediction": schema, **schema["$defs"]}
    return {
        f"{name}.{field}": _kind(content)
        for name, part in parts.items()
        for field, content in part["properties"].items()
    }


def _kind(content: dict[str, Any]) -> str:
    if "anyOf" in content:
        return " or ".join(sorted(_kind(each) for each in content["anyOf"]))
    if "$ref" in content:
        return str(content["$ref"]).rpartition("/")[2]
    if content.get("type") == "array":
        inner = content.get("prefixItems") or [content["items"]]
        return f"array of {', '.join(_kind(each) for each in inner)}"
    if content.get("type") == "object":
        return f"object of {_kind(content['additionalProperties'])}"
    return "one of " + ", ".join(content["enum"]) if "enum" in content else str(content.get("const") or content["type"])


if __name__ == "__main__":
    FIELDS.write_text(json.dumps(fields(), indent=1) + "\n")
    sys.stdout.write(f"Written: {FIELDS}\n")
