"""Reads measurements for fits from a folder of CSV and Parquet files."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pyarrow.compute as compute
import pyarrow.csv as csv
import pyarrow.parquet as parquet
from pyarrow import types

from maya_core.errors import MayaError

Table = dict[str, np.ndarray]


@functools.cache
def read_table(folder: Path, name: str) -> Table:
    """The columns of the file `name` in `folder`: texts as objects, numbers as float64, missing numbers as nan.

    Several families use the same file, so it is read once, and the columns must not be changed.
    """
    path = folder / name
    if not path.exists():
        raise MayaError(f"no measurements at {path}.", "`maya help predictor` lists the files of a data folder.")
    table = parquet.read_table(path) if name.endswith(".parquet") else csv.read_csv(path)
    found: Table = {}
    for column in table.column_names:
        values = table[column]
        if types.is_dictionary(values.type):
            values = compute.cast(values, values.type.value_type)
        number = types.is_integer(values.type) or types.is_floating(values.type) or types.is_boolean(values.type)
        found[column] = (
            compute.cast(values, "double").to_numpy() if number else np.array(values.to_pylist(), dtype=object)
        )
    return found


def where(table: Table, mask: np.ndarray) -> Table:
    """The rows that `mask` selects."""
    return {name: column[mask] for name, column in table.items()}


def rows(table: Table) -> int:
    return len(next(iter(table.values())))
