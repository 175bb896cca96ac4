"""Where a write goes, and how rows of many writes become one encoded batch for each shard. No I/O.

A few dicts are checked and copied when the call is made, as tuples of plain values, and become
Arrow once for all writes that go together; whatever is not plain becomes Arrow at the call.
"""

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, groupby
from operator import itemgetter
from struct import Struct
from types import NoneType
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from interceptors.errors import SchemaMismatch
from interceptors.shard.catalog import DEFAULT_PARTITION, CollectionInfo
from streamingnode.collections import check_text
from streamingnode.rows import RowShape, key_hashes, key_shape, row_shape
from streamingnode.schema import AnyArray, check_schema, decode_schema, python_type
from wal.headers import DeleteHeader, InsertHeader, MessageType
from wal.message import MESSAGE_OVERHEAD_BYTES, TRANSACTION_OVERHEAD_BYTES, MutableMessage
from wal.rows import Piece, RowTarget, ShardRows
from wal.shard_hash import shards_of

Kind = Literal["insert", "upsert", "delete"]
Cells = tuple[tuple[Any, ...], ...]
"""Rows as plain values, in the order of the columns; tuples, which garbage collection leaves alone
once it has seen them.
"""

PLAIN_ROWS_MAX = 16
"""Calls of more rows gain nothing from being encoded with others."""
PLAIN_TEXT_BYTES_MAX = 64 << 10
"""Longer texts and bytes become Arrow at the call, which says exactly what they take."""
PLAIN_DECODED_ROWS_MAX = 1 << 10
"""Of one message: a row of a few bytes is a hundred in memory."""
_PLAIN_TYPES = (bool, int, float, str, bytes, dt.date)
_CELL_BYTES = 16
"""What a cell takes in a batch beside its text, at most."""

_PAYLOAD_POOL = pa.system_memory_pool()
"""Arrow's own pool gives pages back to the system that the next payload needs again: up to 100 us
of page faults for 100 KiB, on the event loop."""


class PlainRows:
    """Takes rows of plain values of one shape: whole numbers, floats, truths, texts, bytes and
    dates that fit for sure.
    """

    def __init__(self, shape: RowShape) -> None:
        self._columns = len(shape.columns)
        names = [column.name for column in shape.columns]
        one = itemgetter(*names)
        self._cells: Callable[[Mapping[str, object]], tuple[Any, ...]] = (
            one if len(names) > 1 else lambda row: (one(row),)
        )
        self._types = tuple(map(python_type, shape.schema.types))
        # A 32-bit float may not hold what is given.
        self._is_plain = (
            all(map(_PLAIN_TYPES.__contains__, self._types))
            and pa.float32() not in shape.schema.types
        )
        bounds = [
            (i, 1 << (kind.bit_width - 1))
            for i, kind in enumerate(shape.schema.types)
            if pt.is_integer(kind)
        ]
        self._whole = [(i, -bound, bound - 1) for i, bound in bounds]
        self._texts = [i for i, kind in enumerate(self._types) if kind in (str, bytes)]
        self._required = shape.required

    def decode(self, data: bytes | memoryview) -> tuple[Cells, int]:
        """Return rows that another process encoded as MessagePack, checked, and what they take at
        most, in bytes.

        Raises `SchemaMismatch` for what is no rows of this shape, or more than
        `PLAIN_DECODED_ROWS_MAX`.
        """
        if not self._is_plain:
            raise SchemaMismatch(
                "the collection has columns whose values go as Arrow data — send a record batch"
            )
        try:
            cells = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, ValueError) as error:
            raise SchemaMismatch(f"rows do not fit the schema: {error} — read it again") from None
        return cells, len(data) + _CELL_BYTES * self._columns * len(cells)

    @cached_property
    def _decoder(self) -> msgspec.msgpack.Decoder[Cells]:
        kinds: list[Any] = list(self._types)
        for column, low, high in self._whole:
            kinds[column] = Annotated[int, msgspec.Meta(ge=low, le=high)]
        optional = [
            kind if column in self._required else kind | None for column, kind in enumerate(kinds)
        ]
        # made of the shape, which no checker knows
        row: Any = tuple.__class_getitem__(tuple(optional))
        rows: Any = Annotated[
            tuple[row, ...], msgspec.Meta(min_length=1, max_length=PLAIN_DECODED_ROWS_MAX)
        ]
        return msgspec.msgpack.Decoder(rows)

    def take(self, rows: Sequence[Any], *, are_keys: bool = False) -> tuple[Cells, int] | None:
        """Return a copy of a few dicts, or values of the only column, and what they take at most,
        in bytes.

        None for what has to be looked at as Arrow.
        """
        if not self._is_plain:
            return None
        if are_keys:
            cells = tuple(zip(rows))
        elif {dict}.issuperset(map(type, rows)) and {self._columns}.issuperset(map(len, rows)):
            try:
                cells = tuple(map(self._cells, rows))
            except KeyError:
                return None
        else:  # another mapping may make what it lacks
            return None
        size_bytes = self._size_of(cells)
        return None if size_bytes is None else (cells, size_bytes)

    def _size_of(self, rows: Cells) -> int | None:
        """Return what rows take at most, None when some value is not plain."""
        size_bytes = _CELL_BYTES * self._columns * len(rows)
        for cells in rows:
            types = tuple(map(type, cells))
            if types != self._types and not self._takes_nulls(types):
                return None
            for column, low, high in self._whole:
                value = cells[column]
                if value is not None and not low <= value <= high:
                    return None
            for column in self._texts:
                text = cells[column]
                if text is None:
                    continue
                length = (
                    len(text) if type(text) is bytes or text.isascii() else _encoded_length(text)
                )
                if not 0 <= length <= PLAIN_TEXT_BYTES_MAX:
                    return None
                size_bytes += length
        return size_bytes

    def _takes_nulls(self, types: tuple[type, ...]) -> bool:
        fits = all(
            given in (kind, NoneType) for given, kind in zip(types, self._types, strict=True)
        )
        return fits and not any(types[column] is NoneType for column in self._required)


def _encoded_length(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:  # a lone surrogate
        return -1


class BatchSlice(msgspec.Struct, frozen=True, gc=False):
    """Rows of a batch that has those of other writes, too."""

    batch: pa.RecordBatch
    start: int
    rows: int

    def __len__(self) -> int:
        return self.rows


class BatchTarget:
    """Rows of one partition of a collection, or deleted keys of it: what may share a batch."""

    def __init__(
        self, info: CollectionInfo, shape: RowShape, kind: MessageType, partition_id: int = 0
    ) -> None:
        self.type = kind
        self.collection_id = info.id
        self.partition_id = partition_id
        self.schema_version = info.schema_version
        self.vchannels = info.vchannels
        self.shape = shape
        self.plain = PlainRows(shape)
        self._row_type = pa.struct(list(shape.schema))
        self._cell_makers = [(_cell_maker(kind), kind) for kind in shape.schema.types]
        self._nothing = pa.RecordBatch.from_pylist([], schema=shape.schema)
        self.message_bytes = (
            2 * pa.ipc.get_record_batch_size(self._nothing) + MESSAGE_OVERHEAD_BYTES
        )
        """What each shard after the first adds to the messages of the same rows, at most: an empty
        message has 16 bytes for each buffer, and padding never takes that much more."""
        shards = min(PLAIN_ROWS_MAX, len(info.vchannels))
        self.plain_overhead_bytes = shards * self.message_bytes + TRANSACTION_OVERHEAD_BYTES
        """What a few rows take beside what is in them, at most."""

    def encode(self, pieces: Sequence[Any]) -> Sequence[ShardRows]:
        """Return the rows of pieces, plain or Arrow, in order, for each shard that gets some."""
        batch = self.joined(pieces)
        counts = list(map(len, pieces))
        if len(self.vchannels) == 1:
            return [ShardRows(0, encoded(batch), range(len(pieces)), counts)]
        shards = self.shards(batch)
        if (shards == shards[0]).all():
            return [ShardRows(int(shards[0]), encoded(batch), range(len(pieces)), counts)]
        # A stable sort keeps rows of a shard in order; 16-bit numbers are sorted by radix, in
        # linear time.
        by_shard = batch.take(np.argsort(shards.astype(np.uint16), kind="stable"))
        pieces_of_rows = np.repeat(np.arange(len(pieces)), counts)
        cells = len(self.vchannels) * len(pieces)
        rows_of = np.bincount(shards * len(pieces) + pieces_of_rows, minlength=cells).reshape(
            -1, len(pieces)
        )
        found = []
        start = 0
        for shard in np.flatnonzero(rows_of.any(axis=1)).tolist():
            present = np.flatnonzero(rows_of[shard])
            shard_counts = rows_of[shard, present].tolist()
            rows = sum(shard_counts)
            found.append(
                ShardRows(
                    shard, encoded(by_shard.slice(start, rows)), present.tolist(), shard_counts
                )
            )
            start += rows
        return found

    def encode_whole(self, batches: Sequence[pa.RecordBatch]) -> bytes:
        """Return all rows of batches, on whatever shards, as an Arrow IPC message without its
        schema.
        """
        return bytes(encoded(self.joined(batches or [self._nothing])))

    def size_bytes(self, batch: pa.RecordBatch) -> int:
        """Return what the messages of these rows take at most; of one row, exactly that."""
        shards = min(batch.num_rows, len(self.vchannels))
        return batch_bytes(batch) + (shards - 1) * self.message_bytes

    def shards(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """Return the shard of each row."""
        return shards_of(key_hashes(batch.column(self.shape.key_index)), len(self.vchannels))

    def part_of(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return what of rows goes here: all, or the keys alone."""
        return (
            rows
            if rows.num_columns == len(self.shape.columns)
            else rows.select(self.shape.schema.names)
        )

    def joined(self, pieces: Sequence[Any]) -> pa.RecordBatch:
        """Return the rows of pieces, plain or Arrow, in order, as one batch."""
        if len(pieces) == 1 and type(pieces[0]) is tuple and len(pieces[0]) == 1:
            return self._one_row(pieces[0][0])
        parts: list[pa.RecordBatch] = []
        for kind, run in groupby(pieces, type):
            if kind is pa.RecordBatch:
                parts += run
            elif kind is BatchSlice:
                parts += _joined_slices(run)
            else:
                rows = pa.array(list(chain.from_iterable(run)), self._row_type)
                # a struct's, by its type
                parts.append(pa.RecordBatch.from_struct_array(rows))  # type: ignore[arg-type]
        # stubs lack it
        return parts[0] if len(parts) == 1 else pa.concat_batches(parts)  # type: ignore[attr-defined]

    def _one_row(self, row: tuple[Any, ...]) -> pa.RecordBatch:
        """Return a plain row as a batch; a value alone takes less than Arrow's look at a list."""
        columns: list[AnyArray] = []
        for (make, kind), value in zip(self._cell_makers, row, strict=True):
            if make is None or value is None:
                columns.append(pa.array((value,), kind))
            else:
                columns.append(make(value))
        rows = pa.Array.from_buffers(self._row_type, 1, [None], 0, 0, columns)
        return pa.RecordBatch.from_struct_array(rows)  # type: ignore[arg-type]  # by its type


_FIXED_FORMATS: dict[pa.DataType, str] = {
    pa.int8(): "<b",
    pa.int16(): "<h",
    pa.int32(): "<i",
    pa.int64(): "<q",
    pa.float64(): "<d",
}
_pack_offsets = Struct("<ii").pack


def _cell_maker(kind: pa.DataType) -> Callable[[Any], AnyArray] | None:
    """Return what makes an array of one value of a type, None for types that Arrow looks at."""
    make = partial(pa.Array.from_buffers, kind, 1)
    if kind in _FIXED_FORMATS:
        pack = Struct(_FIXED_FORMATS[kind]).pack
        return lambda value: make([None, pa.py_buffer(pack(value))], 0)
    if kind == pa.binary():
        return lambda value: make([None, _offsets_of(value), pa.py_buffer(value)], 0)
    if kind == pa.string():

        def text(value: str) -> AnyArray:
            data = value.encode()
            return make([None, _offsets_of(data), pa.py_buffer(data)], 0)

        return text
    return None


def _offsets_of(data: bytes) -> pa.Buffer:
    return pa.py_buffer(_pack_offsets(0, len(data)))


def _joined_slices(slices: Iterable[BatchSlice]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of slices; those that follow each other in one batch together, mostly all of
    it.
    """
    batch = None
    start = 0
    end = 0
    for each in slices:
        if each.batch is batch and each.start == end:
            end += each.rows
            continue
        if batch is not None:
            yield batch.slice(start, end - start)
        batch = each.batch
        start = each.start
        end = each.start + each.rows
    if batch is not None:
        yield batch.slice(start, end - start)


def encoded(batch: pa.RecordBatch) -> memoryview:
    """Return a batch as an Arrow IPC message without its schema."""
    return memoryview(batch.serialize(memory_pool=_PAYLOAD_POOL))


def copied(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch in one buffer of its own: rows that wait must not change with buffers that
    their caller uses again.
    """
    return pa.ipc.read_record_batch(batch.serialize(), batch.schema)


def batch_bytes(batch: pa.RecordBatch) -> int:
    """Return what a batch takes as a message of its own."""
    return pa.ipc.get_record_batch_size(batch) + MESSAGE_OVERHEAD_BYTES


class WriteTarget:
    """One collection as writes see it: what they must know, worked out once and kept until the
    collection changes.
    """

    def __init__(self, info: CollectionInfo) -> None:
        self.info = info
        schema = check_schema(decode_schema(info.schema), primary_key=info.primary_key)
        self._rows = row_shape(schema, primary_key=info.primary_key)
        self._partitions = {each.name: each.id for each in info.partitions if not each.dropped_tick}
        self._inserts: dict[int, BatchTarget] = {}
        self.deletes = BatchTarget(info, key_shape(self._rows), MessageType.DELETE)
        self.usual: dict[Kind, tuple[BatchTarget, ...]] = {
            each: self.into(each) for each in get_args(Kind)
        }
        """Where writes go that name no partition."""

    def inserts(self, partition_id: int) -> BatchTarget:
        """Return where rows of a partition go."""
        target = self._inserts.get(partition_id)
        if target is None:
            target = BatchTarget(self.info, self._rows, MessageType.INSERT, partition_id)
            self._inserts[partition_id] = target
        return target

    def into(self, kind: Kind, partition: str = DEFAULT_PARTITION) -> tuple[BatchTarget, ...]:
        """Return where a write goes, in order. Raises `PartitionNotFound` or `InvalidArgument`."""
        if kind == "delete":
            return (self.deletes,)
        found = self._partitions.get(check_text("partition", partition))
        # looking up the name of an unknown one raises
        inserts = self.inserts(
            self.info.partition_by_name(partition).id if found is None else found
        )
        return (self.deletes, inserts) if kind == "upsert" else (inserts,)


def messages_of(
    pieces: Iterable[Piece], txn_id: int, *, together_bytes: int = 0
) -> Iterator[MutableMessage]:
    """Yield pieces as bodies of an open transaction; up to so many bytes for one target that follow
    each other are one.
    """
    for target, rows in _runs(pieces, together_bytes):
        for part, (shard, payload, _, counts) in enumerate(target.encode(rows)):
            count = sum(counts)
            header = (
                InsertHeader(
                    target.collection_id,
                    target.partition_id,
                    target.schema_version,
                    count,
                    part=part,
                )
                if target.type is MessageType.INSERT
                else DeleteHeader(target.collection_id, count, part=part)
            )
            yield MutableMessage(target.type, header, target.vchannels[shard], payload, txn_id)


def _runs(pieces: Iterable[Piece], bytes_max: int) -> Iterator[tuple[RowTarget, list[Any]]]:
    target = None
    run = list[Any]()
    size_bytes = 0
    for piece in pieces:
        if target is not None and (
            piece.target is not target or size_bytes + piece.size > bytes_max
        ):
            yield target, run
            run = []
            size_bytes = 0
        target = piece.target
        size_bytes = size_bytes + piece.size
        run.append(piece.rows)
    if target is not None:
        yield target, run
