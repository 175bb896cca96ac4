"""Rows, shapes and refusals that tests of rows share."""

import datetime as dt
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from interceptors.errors import SchemaMismatch
from streamingnode.rows import RowShape, key_shape, row_shape, to_batches
from tests.streamingnode.append_double import schema_of

SCHEMA = schema_of(id=pa.int64(), item=pa.string(), amount=pa.float64())
SHAPE = row_shape(SCHEMA, primary_key="id")
KEYS = key_shape(SHAPE)
NOW = dt.datetime(2026, 3, 29, 1, 2, 3)  # noqa: DTZ001  # naive on purpose


def shape_of(kind: pa.DataType, *, nullable: bool = True) -> RowShape:
    return row_shape(
        pa.schema([pa.field("id", pa.int64()), pa.field("value", kind, nullable=nullable)]),
        primary_key="id",
    )


def values_back(kind: pa.DataType, values: Sequence[object]) -> list[object]:
    rows = [{"id": i, "value": value} for i, value in enumerate(values)]
    return [row["value"] for batch in to_batches(rows, shape_of(kind)) for row in batch.to_pylist()]


def refusal(rows: Any, shape: RowShape = SHAPE) -> SchemaMismatch:
    with pytest.raises(SchemaMismatch) as caught:
        to_batches(rows, shape)
    return caught.value
