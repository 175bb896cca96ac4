"""The rows of segments without those that deletes removed, as Arrow batches. Runs on an executor; no Spark in it.

Vectorised over batches, in file order, in bounded memory: one batch, and the deletes that can reach these segments.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flusher.manifest import DeleteFile, SegmentFile
from spark_sink.cuts.integrity import verify_file
from spark_sink.table.arrow_types import AnyArray, AnyField
from spark_sink.table.columns import OFFSET, PARTITION, TICK

AnyRows = TypeVar("AnyRows", pa.RecordBatch, pa.Table)

BATCH_ROWS = 65_536
"""Rows handed to Spark at a time; larger brought nothing, a tenth of it cost a fifth of the speed."""

DELETE_SETS_KEPT = 8
"""Sets of deletes a worker process keeps between tasks; the tasks of one vchannel mostly share one."""


@dataclass(frozen=True, slots=True)
class SegmentGroup:
    """Segments of one vchannel and one partition, and the deletes that can reach them."""

    partition: str
    key: str
    segments: tuple[SegmentFile, ...]
    deletes: tuple[DeleteFile, ...]
    until_tick: int | None = None
    """Rows and deletes after it are left out."""


@dataclass(frozen=True, slots=True)
class DeletedKeys:
    """Each deleted key and the offset below which its rows are gone."""

    keys: AnyArray
    below: AnyArray

    def keep(self, keys: AnyArray, offsets: AnyArray) -> AnyArray:
        """Return a mask of the rows that stay."""
        at = pc.index_in(keys, value_set=self.keys)
        mask: AnyArray = pc.or_kleene(pc.is_null(at), pc.greater_equal(offsets, self.below.take(at)))
        return mask


def rows_of(node: Path, group: SegmentGroup, target: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a group with exactly the columns and types of `target`.

    Raises `Corrupt` naming a file that is not what its cut says, `Truncated` when one is gone.
    """
    deleted = _deleted_keys(node, group.key, group.deletes, group.until_tick) if group.deletes else None
    read = [name for name in target.names if name != PARTITION]
    for segment in group.segments:
        verify_file(node, segment)
        with pq.ParquetFile(node / segment.path) as file:
            present = set(file.schema_arrow.names)
            wanted = sorted(present.intersection([*read, OFFSET, TICK, *([group.key] if deleted else [])]))
            for found in file.iter_batches(BATCH_ROWS, columns=wanted):
                batch = _up_to(found, group.until_tick)
                kept = batch if deleted is None else batch.filter(deleted.keep(_plain(batch[group.key]), batch[OFFSET]))
                if kept.num_rows:
                    yield _shaped(kept, target, group.partition)


def _shaped(batch: pa.RecordBatch, target: pa.Schema, partition: str) -> pa.RecordBatch:
    """Return the batch with the columns of `target`; one that the file is older than holds null."""
    columns = [_column(batch, field, partition) for field in target]
    return pa.RecordBatch.from_arrays(columns, schema=target)


def _column(batch: pa.RecordBatch, field: AnyField, partition: str) -> AnyArray:
    if field.name == PARTITION:
        named: AnyArray = pa.repeat(pa.scalar(partition, pa.string()), batch.num_rows)
        return named
    if field.name not in batch.schema.names:
        missing: AnyArray = pa.nulls(batch.num_rows, field.type)
        return missing
    found: AnyArray = batch[field.name]
    if found.type != field.type:
        found = found.cast(field.type)
    return found


@lru_cache(maxsize=DELETE_SETS_KEPT)
def _deleted_keys(node: Path, key: str, files: Sequence[DeleteFile], until_tick: int | None) -> DeletedKeys:
    for file in files:
        verify_file(node, file)
    tables = [_up_to(pq.read_table(node / file.path, columns=[key, OFFSET, TICK]), until_tick) for file in files]
    largest = pa.concat_tables(tables).group_by(key).aggregate([(OFFSET, "max")]).combine_chunks()
    keys = largest[key].combine_chunks()
    return DeletedKeys(_plain(keys), largest[f"{OFFSET}_max"].combine_chunks())


def _up_to(rows: AnyRows, until_tick: int | None) -> AnyRows:
    return rows if until_tick is None else rows.filter(pc.less_equal(rows[TICK], pa.scalar(until_tick, pa.int64())))


def _plain(keys: AnyArray) -> AnyArray:
    """Return keys in the one type that both sides of a comparison have."""
    return keys.dictionary_decode() if isinstance(keys, pa.DictionaryArray) else keys
