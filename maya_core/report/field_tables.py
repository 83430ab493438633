"""The tables of a prediction's fields, for the documentation: names, types, units and meanings, from the schema."""

from __future__ import annotations

import re
from typing import Any

from maya_core.report import prediction
from maya_core.report.prediction import Prediction

# Fields of a prediction that have a section of their own on the page.
SECTIONS = {
    "step_time_range_s": "#how-wide-is-the-range",
    "mfu": "#how-are-mfu-and-hfu-counted",
    "memory": "#what-does-memory-contain",
    "time": "#where-does-the-time-of-a-step-go",
    "throughput": "#where-do-samples-and-tokens-come-from",
    "energy": "#how-is-energy-estimated",
    "assumptions": "#what-is-assumed",
}
# Units by the name of a field, the first pattern that matches.
UNITS = {
    r"bytes_per_s$": "bytes/s",
    r"^(samples|tokens)_per_s": r"\1/s",
    r"_flops_per_gpu$": "FLOP/s",
    r"bytes$|_bytes_": "bytes",
    r"_s$|^seconds$": "s",
    r"^usd_per_hour$": "US$/h",
    r"^usd_": "US$",
    r"_w$|_w_": "W",
    r"^joules_": "J",
    r"^kwh_": "kWh",
    r"^(mfu|hfu|measured|interpolated|extrapolated|bound|profiles)$": "share of 1",
    r"^(model|hardware)$": "FLOP",
    r"^every_steps$": "steps",
    r"^taken$": "share of 1, or as read",
}
JSON_TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "null": "null"}


def fields() -> str:
    """The table of a prediction's own fields."""
    return _table_of_fields(Prediction.model_json_schema()["properties"], SECTIONS)


def fields_of_parts() -> str:
    """A table for every part of a prediction, with what Python offers beside the fields."""
    lines: list[str] = []
    for part, content in Prediction.model_json_schema()["$defs"].items():
        lines += [f"### {part}", "", content["description"], "", _table_of_fields(content["properties"], {}), ""]
        for name, member in vars(getattr(prediction, part)).items():
            if isinstance(member, property):
                text = str(member.__doc__)
                lines += [f"In Python also `.{name}`: {text[0].lower()}{text[1:]}", ""]
    return "\n".join(lines)


def _table_of_fields(properties: dict[str, Any], sections: dict[str, str]) -> str:
    lines = ["| field | type | unit | meaning |", "|---|---|---|---|"]
    for name, field in properties.items():
        more = f" [More]({sections[name]})" if name in sections else ""
        lines.append(f"| `{name}` | {_json_type(field)} | {unit(name, field)} | {_cell(field['description'])}{more} |")
    return "\n".join(lines)


def unit(name: str, field: dict[str, Any]) -> str:
    """The unit of a number; empty for a count, and for what is no number."""
    if not re.search(r"number|integer", str(field)):
        return ""
    for pattern, words in UNITS.items():
        if found := re.search(pattern, name):
            return found.expand(words)
    return ""


def _json_type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_json_type(each) for each in field["anyOf"])
    if "$ref" in field:
        part = str(field["$ref"]).rpartition("/")[2]
        return f"[{part}](#{part.lower()})"
    if "enum" in field or "const" in field:
        return " or ".join(f'`"{value}"`' for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        pair = field.get("prefixItems")
        return f"list of {len(pair)} {_json_type(pair[0])}s" if pair else f"list of {_json_type(field['items'])}"
    if field.get("type") == "object":
        return f"object of {_json_type(field['additionalProperties'])}"
    return JSON_TYPES[field["type"]]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
