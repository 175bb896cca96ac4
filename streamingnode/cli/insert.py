"""`streamingnode insert`: rows from JSON lines or Parquet into a collection, in bounded batches."""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from interceptors.errors import AlreadyExists, CollectionNotFound
from streamingnode.cli.command import Command, take
from streamingnode.cli.output import EXIT_OK, Output, format_count, format_tick
from wal.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa

    from streamingnode.cli.row_batch import RowBatch
    from streamingnode.cli.row_source import RowSource
    from streamingnode.collections import Collection
    from streamingnode.node import Node
    from streamingnode.writing.producer import Producer
    from streamingnode.writing.result import WriteResult

STDIN = "-"
DEFAULT_PARTITION = "_default"
NOTE_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class _Arguments:
    directory: Path
    collection: str
    file: str
    create: bool
    primary_key: str | None
    shards: int | None
    upsert: bool
    partition: str | None
    producer: str | None


@dataclass(slots=True)
class _Totals:
    """What has been acknowledged."""

    rows: int = 0
    batches: int = 0
    time_tick: int = 0
    passed_over: int = 0
    """The last line or row that an earlier run had inserted."""

    def add(self, rows: int, result: "WriteResult") -> None:
        self.rows += rows
        self.batches += 1
        self.time_tick = max(self.time_tick, result.time_tick)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="the node's directory")
    parser.add_argument("collection", help="the collection to insert into")
    parser.add_argument("file", nargs="?", default=STDIN, help="JSON lines or Parquet; `-` is stdin (default)")
    parser.add_argument("--upsert", action="store_true", help="replace rows that have the same primary key")
    parser.add_argument(
        "--producer", metavar="NAME", help="insert what no earlier run with this name has: a repeated run is exact"
    )
    parser.add_argument("--partition", help="the partition the rows go to (default: _default)")
    parser.add_argument("--create", action="store_true", help="create the collection, and its --partition, if missing")
    parser.add_argument("--primary-key", metavar="COLUMN", help="with --create: the primary key")
    parser.add_argument("--shards", type=int, metavar="N", help="with --create: number of shards (default: 1)")


def _run(namespace: argparse.Namespace, output: Output) -> int:
    arguments = take(_Arguments, namespace)
    _check(arguments)
    from streamingnode.cli.row_source import open_rows
    from streamingnode.opening import run_async

    with open_rows(arguments.file, sys.stdin.buffer) as rows:
        totals = run_async(partial(_insert, arguments, rows, output))
    verb = "upserted" if arguments.upsert else "inserted"
    batches = "1 batch" if totals.batches == 1 else f"{totals.batches} batches"
    last = f", last tick {totals.time_tick} ({format_tick(totals.time_tick)})" if totals.time_tick else ""
    output.line(f"{verb} {format_count(totals.rows, 'row')} in {batches}{last}")
    passed_over = {} if arguments.producer is None else {"passed_over": totals.passed_over}
    output.document({"rows": totals.rows, "batches": totals.batches, "tick": totals.time_tick, **passed_over})
    return EXIT_OK


def _check(arguments: _Arguments) -> None:
    from streamingnode.care.inspect import check_node

    if not arguments.create:
        if arguments.primary_key is not None or arguments.shards is not None:
            raise InvalidArgument(
                "--primary-key and --shards describe a new collection — add --create, or leave them out"
            )
        try:
            check_node(arguments.directory)
        except InvalidArgument as error:
            raise InvalidArgument(f"{error}, or add --create --primary-key COLUMN to make one") from error
    elif arguments.primary_key is None:
        raise InvalidArgument("--create needs to know the key — add --primary-key COLUMN")


async def _insert(arguments: _Arguments, rows: "RowSource", output: Output) -> _Totals:
    import anyio.to_thread

    from streamingnode.care.inspect import is_node
    from streamingnode.opening import open_node

    new = None
    if arguments.create and not is_node(arguments.directory):  # what is refused now leaves no empty node behind
        new = await anyio.to_thread.run_sync(_new_collection, arguments, rows, abandon_on_cancel=True)
    async with open_node(arguments.directory) as node:
        producer = None if arguments.producer is None else await node.producer(arguments.producer)
        feed = None if producer is None else _Feed(producer, rows)
        batches = await _batches(node, arguments, rows, new, feed)
        return await _insert_batches(node, arguments, batches, feed, output)


class _Feed:
    """One producer's writes of one input: each batch once, under the number of its last line or row.

    What was written is known by its digest, which is noted before it is written: then there is one for everything in the
    log, whenever the program dies. The note has two, because nobody knows which of the last batches got there.
    """

    def __init__(self, producer: "Producer", rows: "RowSource") -> None:
        self.passed_over = producer.last_sequence
        self._producer = producer
        self._rows = rows
        self._newest: list[tuple[int, bytes]] = []

    def pass_over(self, collection_id: int | None) -> None:
        """Go on in the input behind what is inserted. Raises `InvalidArgument` unless it is the same up to there."""
        import msgspec

        if not self.passed_over:
            return
        name, last = self._producer.name, f"{self._rows.unit} {self.passed_over}"
        other = f"producer {name!r} has inserted up to {last} of another input — use another --producer for this one"
        try:
            noted, marks = msgspec.msgpack.decode(self._producer.note, type=tuple[int, list[tuple[int, bytes]]])
        except msgspec.DecodeError as error:
            raise InvalidArgument(other) from error
        if noted != collection_id:
            raise InvalidArgument(
                f"producer {name!r} inserts into another collection — use another --producer for this one"
            )
        digest = self._rows.pass_over(self.passed_over)
        if digest is None or (self.passed_over, digest) not in marks:
            raise InvalidArgument(other)
        self._newest = [(self.passed_over, digest)]

    async def write(self, collection: "Collection", batch: "RowBatch", arguments: _Arguments) -> "WriteResult":
        import msgspec

        self._newest = [*self._newest[-1:], (batch.numbers[-1], batch.digest)]
        await self._producer.put_note(msgspec.msgpack.encode((collection.id, self._newest)))
        write = self._producer.upsert if arguments.upsert else self._producer.insert
        return await write(collection.name, batch.rows, sequence=batch.numbers[-1], partition=arguments.partition)


@dataclass(frozen=True, slots=True)
class _NewCollection:
    """The columns a collection is made with, and the rows for it, the first of which are checked."""

    schema: "pa.Schema"
    batches: "Iterator[RowBatch]"


def _new_collection(arguments: _Arguments, rows: "RowSource") -> _NewCollection:
    """Return what --create makes of the input; raises what creating it and inserting the first batch would raise."""
    from interceptors.errors import SchemaMismatch
    from streamingnode.collections import check_definition
    from streamingnode.config import load_config
    from streamingnode.rows.rows import row_shape, to_batches
    from streamingnode.writing.write import check_rows_fit

    assert arguments.primary_key is not None, "checked with the other arguments"
    schema = rows.infer_schema()
    shards, partitions = _shape(arguments)
    definition = check_definition(
        arguments.collection, schema, primary_key=arguments.primary_key, shards=shards, partitions=partitions
    )
    batches = rows.batches(schema)
    first = list(islice(batches, 1))
    for batch in first:
        try:
            checked = to_batches(batch.rows, row_shape(definition.schema, primary_key=definition.primary_key))
            check_rows_fit(checked, load_config(environment=os.environ).wal.group_bytes_max)
        except SchemaMismatch as error:
            raise batch.placed(error) from error
    return _NewCollection(schema, chain(first, batches))


async def _batches(
    node: "Node", arguments: _Arguments, rows: "RowSource", new: _NewCollection | None, feed: _Feed | None
) -> "Iterator[RowBatch]":
    """Return the rows with the collection's columns, after making it if need be."""
    import anyio.to_thread

    known = {collection.name: collection for collection in node.collections()}
    there = known.get(arguments.collection)
    if feed is not None:
        collection_id = None if there is None else there.id
        await anyio.to_thread.run_sync(feed.pass_over, collection_id, abandon_on_cancel=True)
    if there is not None:
        return rows.batches(_existing(there, arguments))
    if not arguments.create:
        names = ", ".join(sorted(known)[:20]) or "none"
        raise CollectionNotFound(
            f"no collection is named {arguments.collection!r} (there are: {names}) — add --create --primary-key COLUMN"
        )
    if new is None:
        new = await anyio.to_thread.run_sync(_new_collection, arguments, rows, abandon_on_cancel=True)
    assert arguments.primary_key is not None, "checked with the other arguments"
    shards, partitions = _shape(arguments)
    await node.create_collection(
        arguments.collection, new.schema, primary_key=arguments.primary_key, shards=shards, partitions=partitions
    )
    return new.batches


def _shape(arguments: _Arguments) -> tuple[int, tuple[str, ...]]:
    """Return shards and partitions of a collection that is made."""
    partitions = () if arguments.partition in {None, DEFAULT_PARTITION} else (str(arguments.partition),)
    return 1 if arguments.shards is None else arguments.shards, partitions


def _existing(collection: "Collection", arguments: _Arguments) -> "pa.Schema":
    """Return the columns of a collection that is there. Raises `AlreadyExists` when --create describes another."""
    shards = len(collection.vchannels)
    if arguments.primary_key in {None, collection.primary_key} and arguments.shards in {None, shards}:
        return collection.schema
    raise AlreadyExists(
        f"collection {collection.name!r} exists with primary key {collection.primary_key!r} and "
        f"{format_count(shards, 'shard')} — leave out --create, or choose another name"
    )


async def _insert_batches(
    node: "Node", arguments: _Arguments, batches: "Iterator[RowBatch]", feed: _Feed | None, output: Output
) -> _Totals:
    import anyio.to_thread

    from interceptors.errors import SchemaMismatch
    from wal.errors import StreamingNodeError

    collection = node.collection(arguments.collection)
    write = node.upsert if arguments.upsert else node.insert
    totals, counter = _Totals(passed_over=feed.passed_over if feed else 0), _Counter(output)
    try:
        while (batch := await anyio.to_thread.run_sync(next, batches, None, abandon_on_cancel=True)) is not None:
            try:
                if feed is None:
                    result = await write(collection.name, batch.rows, partition=arguments.partition)
                else:
                    result = await feed.write(collection, batch, arguments)
            except SchemaMismatch as error:
                raise batch.placed(error) from error
            totals.add(batch.rows.num_rows, result)
            counter.show(totals.rows)
    except StreamingNodeError:
        if totals.rows:
            output.note(f"{totals.rows} rows of earlier batches are inserted; nothing of the batch that failed is")
        raise
    finally:
        counter.close()
    return totals


class _Counter:
    """How many rows are in, rewritten in place on a terminal; silent elsewhere."""

    def __init__(self, output: Output) -> None:
        self._stream = output.stderr if output.stderr.isatty() else None
        self._began = self._shown = time.monotonic()

    def show(self, rows: int) -> None:
        now = time.monotonic()
        if self._stream is not None and now - self._shown >= NOTE_INTERVAL_S:
            self._shown = now
            self._stream.write(f"\r{rows} rows, {rows / (now - self._began):.0f}/s ")
            self._stream.flush()

    def close(self) -> None:
        if self._stream is not None and self._shown > self._began:
            self._stream.write("\n")


COMMAND = Command(
    name="insert",
    summary="insert rows from JSON lines or Parquet",
    details=(
        "Reads a file or stdin in batches; each batch is applied whole or not at all. What comes through a pipe is durable\n"
        "within a second. Where a line does not fit, the lines of its batch are named, and none of them is inserted. In\n"
        "JSON, times are ISO 8601 text, bytes are base64, and a field left out is null where its column may be. A Parquet\n"
        "file has every column of the collection, in a type that goes in unchanged. With --create the columns are those of\n"
        "the first batch, or of the Parquet file; when that is refused, nothing is created.\n\n"
        "With --producer a repeated run is exact, after an error, a crash, or with more lines at the end: it goes on\n"
        "behind the last line or row that an earlier run inserted under this name. When what comes before is not the same\n"
        "any more, it is refused: another input needs another name. A Parquet file may not change at all."
    ),
    examples=(
        "streamingnode insert data orders orders.jsonl --create --primary-key id --shards 2",
        "streamingnode insert data orders orders.parquet --partition eu",
        "cat stock.jsonl | streamingnode insert data stock --upsert -",
        "streamingnode insert data orders orders.jsonl --producer import-2026",
        "tail -n +1 -F orders.log | streamingnode insert data orders --producer orders-log",
        "streamingnode insert data orders orders.jsonl --json",
    ),
    add_arguments=_add_arguments,
    run=_run,
)
