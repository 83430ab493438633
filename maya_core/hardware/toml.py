"""Reads TOML, on Python 3.10 too, whose library cannot."""

from __future__ import annotations

import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOMLDecodeError: type[ValueError] = tomllib.TOMLDecodeError


def loads(text: str) -> dict[str, Any]:
    tables: dict[str, Any] = tomllib.loads(text)
    return tables
