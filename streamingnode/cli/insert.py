"""`streamingnode insert`: rows from JSON lines or Parquet into a collection, in bounded batches."""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interceptors.errors import AlreadyExists, CollectionNotFound
from streamingnode.cli.command import NODE, argument, command
from streamingnode.cli.output import Output, format_count, format_tick
from wal.errors import InvalidArgument, StreamingNodeError

if TYPE_CHECKING:
    import pyarrow as pa

    from streamingnode.cli.rows_in import JsonLines, ParquetRows, RowBatch
    from streamingnode.collections import Collection
    from streamingnode.node import Node
    from streamingnode.writing.producer import Producer

NOTE_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class _Arguments:
    directory: Path
    collection: str
    file: str
    upsert: bool
    producer: str | None
    partition: str | None
    create: bool
    primary_key: str
    """Empty for that of the collection."""
    shards: int | None

    @property
    def definition(self) -> dict[str, Any]:
        """What --create makes, besides the columns."""
        from interceptors.shard.catalog import DEFAULT_PARTITION

        partitions = () if self.partition in {None, DEFAULT_PARTITION} else (self.partition,)
        shards = 1 if self.shards is None else self.shards
        return {"primary_key": self.primary_key, "shards": shards, "partitions": partitions}


@command(
    NODE,
    argument("collection", help="the collection to insert into"),
    argument("file", nargs="?", default="-", help="JSON lines or Parquet; `-` is stdin (default)"),
    argument("--upsert", action="store_true", help="replace rows that have the same primary key"),
    argument(
        "--producer", metavar="NAME", help="insert what no earlier run with this name has: a repeated run is exact"
    ),
    argument("--partition", help="the partition the rows go to (default: _default)"),
    argument("--create", action="store_true", help="create the collection, and its --partition, if missing"),
    argument("--primary-key", default="", metavar="COLUMN", help="with --create: the primary key"),
    argument("--shards", type=int, metavar="N", help="with --create: number of shards (default: 1)"),
    examples=(
        "streamingnode insert data orders orders.jsonl --create --primary-key id --shards 2",
        "streamingnode insert data orders orders.parquet --partition eu",
        "cat stock.jsonl | streamingnode insert data stock --upsert -",
        "streamingnode insert data orders orders.jsonl --producer import-2026",
        "tail -n +1 -F orders.log | streamingnode insert data orders --producer orders-log",
        "streamingnode insert data orders orders.jsonl --json",
    ),
)
def insert(output: Output, **given: Any) -> None:
    """Insert rows from JSON lines or Parquet.

    Reads a file or stdin in batches; each batch is applied whole or not at all. What comes through a pipe is durable
    within a second. Where a line does not fit, the lines of its batch are named, and none of them is inserted. In
    JSON, times are ISO 8601 text, bytes are base64, and a field left out is null where its column may be. A Parquet
    file has every column of the collection, in a type that goes in unchanged. With --create the columns are those of
    the first batch, or of the Parquet file; when that is refused, nothing is created.

    With --producer a repeated run is exact, after an error, a crash, or with more lines at the end: it goes on
    behind the last line or row that an earlier run inserted under this name. When what comes before is not the same
    any more, it is refused: another input needs another name. A Parquet file may not change at all.
    """
    arguments = _Arguments(**given)
    _check(arguments)
    from streamingnode.cli.rows_in import open_rows
    from streamingnode.opening import run_async

    with open_rows(arguments.file, sys.stdin.buffer) as rows:
        done = run_async(partial(_insert, arguments, rows, output))
    last = f", last tick {done.time_tick} ({format_tick(done.time_tick)})" if done.time_tick else ""
    batches = f"{done.batches} batch{'' if done.batches == 1 else 'es'}"
    output.line(f"{'upserted' if arguments.upsert else 'inserted'} {format_count(done.rows, 'row')} in {batches}{last}")
    passed_over = {} if arguments.producer is None else {"passed_over": done.passed_over}
    output.document({"rows": done.rows, "batches": done.batches, "tick": done.time_tick, **passed_over})


def _check(arguments: _Arguments) -> None:
    from streamingnode.care.inspect import check_node

    if arguments.create:
        if not arguments.primary_key:
            raise InvalidArgument("--create needs to know the key — add --primary-key COLUMN")
        return
    if arguments.primary_key or arguments.shards is not None:
        raise InvalidArgument("--primary-key and --shards describe a new collection — add --create, or leave them out")
    try:
        check_node(arguments.directory)
    except InvalidArgument as error:
        raise InvalidArgument(f"{error}, or add --create --primary-key COLUMN to make one") from error


async def _insert(arguments: _Arguments, rows: "JsonLines | ParquetRows", output: Output) -> "_Writer":
    import anyio.to_thread

    from streamingnode.care.inspect import is_node
    from streamingnode.opening import open_node

    # Threads that read the input are abandoned when this is cancelled: a pipe may be silent for ever.
    new = None
    if arguments.create and not is_node(arguments.directory):  # what is refused now leaves no empty node behind
        new = await anyio.to_thread.run_sync(_new_collection, arguments, rows, abandon_on_cancel=True)
    async with open_node(arguments.directory) as node:
        there = next((each for each in node.collections() if each.name == arguments.collection), None)
        producer = None if arguments.producer is None else await node.producer(arguments.producer)
        writer = _Writer(arguments, node, producer, output)
        if producer is not None:
            collection_id = None if there is None else there.id
            await anyio.to_thread.run_sync(writer.pass_over, rows, collection_id, abandon_on_cancel=True)
        if there is not None:
            _check_same(there, arguments)
            batches = rows.batches(there.schema)
        elif arguments.create:
            if new is None:
                new = await anyio.to_thread.run_sync(_new_collection, arguments, rows, abandon_on_cancel=True)
            schema, batches = new
            there = await node.create_collection(arguments.collection, schema, **arguments.definition)
        else:
            names = ", ".join(sorted(each.name for each in node.collections())[:20]) or "none"
            raise CollectionNotFound(
                f"no collection is named {arguments.collection!r} (there are: {names}) — add --create --primary-key COLUMN"
            )
        try:
            while (batch := await anyio.to_thread.run_sync(next, batches, None, abandon_on_cancel=True)) is not None:
                await writer.write(there, batch)
        except StreamingNodeError:
            if writer.rows:
                output.note(f"{writer.rows} rows of earlier batches are inserted; nothing of the batch that failed is")
            raise
        finally:
            writer.end_line()
    return writer


def _new_collection(arguments: _Arguments, rows: "JsonLines | ParquetRows") -> "tuple[pa.Schema, Iterator[RowBatch]]":
    """Return columns and rows of the collection that --create makes, once creating it and the first batch would succeed."""
    from streamingnode.collections import check_definition
    from streamingnode.config import load_config
    from streamingnode.rows import row_shape, to_batches
    from streamingnode.writing.write import check_rows_fit

    schema = rows.infer_schema()
    definition = check_definition(arguments.collection, schema, **arguments.definition)
    batches = rows.batches(schema)
    first = list(islice(batches, 1))
    for batch in first:
        with batch.placed():
            checked = to_batches(batch.rows, row_shape(definition.schema, primary_key=definition.primary_key))
            check_rows_fit(checked, load_config(environment=os.environ).wal.group_bytes_max)
    return schema, chain(first, batches)


def _check_same(there: "Collection", arguments: _Arguments) -> None:
    """Raise `AlreadyExists` when --create describes another collection than the one there is."""
    shards = len(there.vchannels)
    if arguments.primary_key not in {"", there.primary_key} or arguments.shards not in {None, shards}:
        raise AlreadyExists(
            f"collection {there.name!r} exists with primary key {there.primary_key!r} and "
            f"{format_count(shards, 'shard')} — leave out --create, or choose another name"
        )


class _Writer:
    """Writes batches and counts what is acknowledged; on a terminal a line says how much, rewritten in place.

    As a producer it writes each batch of one input once, under the number of its last line or row. What was written is known
    by its digest, which is noted before it is written: then there is one for everything in the log, whenever the program
    dies. The note has two, because nobody knows which of the last batches got there.
    """

    def __init__(self, arguments: _Arguments, node: "Node", producer: "Producer | None", output: Output) -> None:
        self._producer, self._output = producer, output
        target = producer or node
        self._write = partial(target.upsert if arguments.upsert else target.insert, partition=arguments.partition)
        self._newest: list[tuple[int, bytes]] = []
        self.rows = self.batches = self.time_tick = self.passed_over = 0
        self._began = self._shown = time.monotonic()

    def pass_over(self, rows: "JsonLines | ParquetRows", collection_id: int | None) -> None:
        """Go on in the input behind what is inserted. Raises `InvalidArgument` unless it is the same up to there."""
        import msgspec

        assert self._producer is not None, "without one nothing was inserted"
        last = self.passed_over = self._producer.last_sequence
        if not last:
            return
        name, another = f"producer {self._producer.name!r}", "use another --producer for this one"
        other = InvalidArgument(f"{name} has inserted up to {rows.unit} {last} of another input — {another}")
        try:
            noted, marks = msgspec.msgpack.decode(self._producer.note, type=tuple[int, list[tuple[int, bytes]]])
        except msgspec.DecodeError as error:
            raise other from error
        if noted != collection_id:
            raise InvalidArgument(f"{name} inserts into another collection — {another}")
        digest = rows.pass_over(last)
        if digest is None or (last, digest) not in marks:
            raise other
        self._newest = [(last, digest)]

    async def write(self, collection: "Collection", batch: "RowBatch") -> None:
        import msgspec

        with batch.placed():
            if self._producer is None:
                result = await self._write(collection.name, batch.rows)
            else:
                last = batch.numbers[-1]
                self._newest = [*self._newest[-1:], (last, batch.digest)]
                await self._producer.put_note(msgspec.msgpack.encode((collection.id, self._newest)))
                result = await self._write(collection.name, batch.rows, sequence=last)
        self.rows += batch.rows.num_rows
        self.batches += 1
        self.time_tick = max(self.time_tick, result.time_tick)
        now, stderr = time.monotonic(), self._output.stderr
        if stderr.isatty() and now - self._shown >= NOTE_INTERVAL_S:
            self._shown = now
            stderr.write(f"\r{self.rows} rows, {self.rows / (now - self._began):.0f}/s ")
            stderr.flush()

    def end_line(self) -> None:
        if self._shown > self._began:
            self._output.stderr.write("\n")
