"""Rows of messages as columns: payloads in, Arrow tables with the system columns out. No I/O.

Each payload is an encapsulated Arrow IPC record batch without its schema. Many of them after one schema message are an IPC
stream, so one call decodes thousands of small messages; nothing is done once per row, and next to nothing once per message.
"""

from collections.abc import Iterator, Sequence
from enum import Enum

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from wal.errors import Corrupt

TICK, OFFSET, VCHANNEL = "_tick", "_offset", "_vchannel"

JOIN_BYTES = 4 << 20
"""Payloads are copied together this many bytes at a time: `bytes.join` holds the interpreter, for about 1 ms then."""

JOINED_PAYLOAD_BYTES_MAX = 8 << 10
"""Payloads larger than this on average are decoded one by one: that takes 7 us each, and copies nothing."""

CHUNK_BYTES_MIN = 256 << 10
"""Smaller chunks are joined before Parquet sees them: chunks of 8 rows cost it 38 times as much, of 1000 narrow rows 1.5
times, and joining costs a twentieth of writing."""

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_VCHANNEL_TYPE = pa.dictionary(pa.int32(), pa.string())


class OffsetRule(Enum):
    """What the offset of a message says about its rows."""

    FIRST = "first"
    """It is the first row's; the others count up from it (inserts)."""
    ALL = "all"
    """It is every row's (deletes)."""


class Rows(msgspec.Struct, frozen=True, gc=False):
    """The rows of one message: an encoded batch of `count` rows at one tick, and their row offset."""

    payload: bytes | memoryview
    count: int
    tick: int
    offset: int


def stored_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns of a file: those of the messages, then `_tick`, `_offset`, `_vchannel`."""
    system = [pa.field(TICK, pa.int64()), pa.field(OFFSET, pa.int64()), pa.field(VCHANNEL, pa.string())]
    return pa.schema([*schema, *system])


def written_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns as the writer is given them: as stored, but `_vchannel` as a dictionary of one value."""
    stored = stored_schema(schema)
    return stored.set(len(stored) - 1, pa.field(VCHANNEL, _VCHANNEL_TYPE))


def decode_rows(rows: Sequence[Rows], schema: pa.Schema, *, vchannel: str, rule: OffsetRule) -> pa.Table:
    """Return messages of one vchannel as a table of `written_schema(schema)`, in order.

    Raises `Corrupt` when a payload does not decode, or has another number of rows than its header says.
    """
    batches = _decode_payloads(rows, schema)
    counts = np.fromiter((message.count for message in rows), np.int64, len(rows))
    decoded = np.fromiter((batch.num_rows for batch in batches), np.int64, len(batches))
    if not np.array_equal(counts, decoded):
        raise Corrupt(f"messages of {vchannel} hold {decoded.sum()} rows where their headers say {counts.sum()}")
    table = pa.Table.from_batches(batches, schema=schema)
    if table.nbytes < CHUNK_BYTES_MIN * len(batches):
        table = table.combine_chunks()
    system = _system_columns(rows, counts, vchannel=vchannel, rule=rule)
    return pa.table([*table.columns, *system.columns], schema=written_schema(schema))


def split_rows(rows: Sequence[Rows], bytes_max: int) -> Iterator[Sequence[Rows]]:
    """Yield consecutive messages whose payloads add up to at most `bytes_max`, or single ones that are larger alone."""
    start, total = 0, 0
    for index, message in enumerate(rows):
        if index > start and total + len(message.payload) > bytes_max:
            yield rows[start:index]
            start, total = index, 0
        total += len(message.payload)
    if start < len(rows):
        yield rows[start:]


def _decode_payloads(rows: Sequence[Rows], schema: pa.Schema) -> list[pa.RecordBatch]:
    prefix = schema.serialize().to_pybytes()
    batches: list[pa.RecordBatch] = []
    try:
        for part in split_rows(rows, JOIN_BYTES):
            payloads = [message.payload for message in part]
            if sum(map(len, payloads)) < JOINED_PAYLOAD_BYTES_MAX * len(payloads):
                batches += pa.ipc.open_stream(b"".join((prefix, *payloads, _END_OF_STREAM)))
            else:
                batches += (pa.ipc.read_record_batch(pa.py_buffer(payload), schema) for payload in payloads)
    except (pa.ArrowException, OSError) as error:
        raise Corrupt(f"a message passes its checksum but its rows do not decode: {error}") from error
    return batches


def _system_columns(
    rows: Sequence[Rows], counts: npt.NDArray[np.int64], *, vchannel: str, rule: OffsetRule
) -> pa.Table:
    ticks = np.repeat(np.fromiter((message.tick for message in rows), np.int64, len(rows)), counts)
    offsets = _offsets(np.fromiter((message.offset for message in rows), np.int64, len(rows)), counts, rule)
    names = pa.DictionaryArray.from_arrays(np.zeros(len(ticks), np.int32), [vchannel])
    return pa.table({TICK: ticks, OFFSET: offsets, VCHANNEL: names})


def _offsets(given: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], rule: OffsetRule) -> npt.NDArray[np.int64]:
    if rule is OffsetRule.ALL:
        return np.repeat(given, counts)
    total, starts = int(counts.sum()), np.cumsum(counts) - counts
    if len(given) and np.array_equal(
        given, given[0] + starts
    ):  # nearly always: one partition gets all rows for a while
        return np.arange(given[0], given[0] + total, dtype=np.int64)
    return np.repeat(given - starts, counts) + np.arange(total, dtype=np.int64)
