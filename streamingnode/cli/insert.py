"""`streamingnode insert`: rows from JSON lines or Parquet into a collection, in bounded batches."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import streamingnode as sn
from streamingnode.cli.command import PROGRAM, Place, at_place, open_place
from streamingnode.cli.output import Output, format_count, format_tick
from streamingnode.progress import Progress
from wal.errors import AlreadyExists, InvalidArgument, StreamingNodeError

if TYPE_CHECKING:
    from streamingnode.cli.rows_in import JsonLines, ParquetRows, RowBatch
    from streamingnode.collections import Definition

    Source = JsonLines | ParquetRows


@dataclass(kw_only=True)
class _Insert:
    """One run with its arguments: writes batches, and counts what is acknowledged.

    As a producer it writes each batch of one input once, with the number of the batch's last line
    or row as its sequence. The producer's note holds the digest of the input up to that batch, and
    is written before the batch: so everything in the log has a digest, whenever the program dies.
    The note holds two digests, because either of the last two batches may be the last one in the
    log.
    """

    place: Place
    collection: str
    file: str
    upsert: bool
    producer: str | None
    partition: str | None
    create: bool
    primary_key: str | None
    shards: int | None
    rows: int = 0
    tick: int = 0
    passed_over: int = 0
    _newest: list[tuple[int, bytes]] = field(default_factory=list)

    async def run(self, source: "Source", progress: Progress) -> None:
        """Insert the rows of the input that are not inserted yet."""
        import anyio.to_thread

        from streamingnode.care.inspect import is_node

        # Cancelling abandons the thread that reads the input: a pipe may be silent forever.
        in_thread = partial(anyio.to_thread.run_sync, abandon_on_cancel=True)
        new = None
        if self.create and isinstance(self.place, Path) and not is_node(self.place):
            # refuse invalid input before the node is created
            new = await in_thread(self._new_collection, source)
        async with await open_place(self.place, lasting=True) as node:
            there = next(
                (each for each in node.collections() if each.name == self.collection), None
            )
            producer = None if self.producer is None else await node.producer(self.producer)
            if producer is not None:
                await in_thread(self._pass_over, source, producer, there)
            if there is None and self.create:
                made, batches = (
                    await in_thread(self._new_collection, source) if new is None else new
                )
                there = await node.create_collection(
                    made.name,
                    made.schema,
                    primary_key=made.primary_key,
                    shards=made.shards,
                    partitions=made.partitions,
                )
            else:
                there = node.collection(self.collection)
                shards = len(there.vchannels)
                if self.primary_key not in {None, there.primary_key} or self.shards not in {
                    None,
                    shards,
                }:
                    raise AlreadyExists(
                        f"collection {there.name!r} exists with primary key {there.primary_key!r} "
                        "and "
                        f"{format_count(shards, 'shard')} — leave out --create, or choose another "
                        "name"
                    )
                batches = source.batches(there.schema)
            progress.stage("inserting")
            while (batch := await in_thread(next, batches, None)) is not None:
                await self._write(node, producer, there, batch)
                progress.advance(self.rows, format_count(self.rows, "row"))

    def _new_collection(self, source: "Source") -> "tuple[Definition, Iterator[RowBatch]]":
        """Return the collection to create and the batches of rows, after checking the collection
        and the first batch.
        """
        from interceptors.shard.catalog import DEFAULT_PARTITION
        from streamingnode.collections import Definition
        from streamingnode.rows import row_shape, to_batches
        from streamingnode.writing.write import check_rows_fit

        key = str(self.primary_key)
        shards = 1 if self.shards is None else self.shards
        partitions = () if self.partition in {None, DEFAULT_PARTITION} else (str(self.partition),)
        new = Definition(self.collection, source.infer_schema(), key, shards, partitions).checked()
        batches = source.batches(new.schema)
        first = list(islice(batches, 1))
        for batch in first:
            with batch.placed():
                checked = to_batches(batch.rows, row_shape(new.schema, primary_key=key))
                check_rows_fit(checked, sn.load_config(environment=os.environ).wal.group_bytes_max)
        return new, chain(first, batches)

    def _pass_over(
        self, source: "Source", producer: "sn.Producer", collection: "sn.Collection | None"
    ) -> None:
        """Skip the part of the input that is already inserted. Raises `InvalidArgument` unless that
        part is unchanged.
        """
        import msgspec

        last = self.passed_over = producer.last_sequence
        if not last:
            return
        name = f"producer {producer.name!r}"
        another = "use another --producer for this one"
        other = InvalidArgument(
            f"{name} has inserted up to {source.unit} {last} of another input — {another}"
        )
        try:
            noted, marks = msgspec.msgpack.decode(
                producer.note, type=tuple[int, list[tuple[int, bytes]]]
            )
        except msgspec.DecodeError as error:
            raise other from error
        if collection is None or noted != collection.id:
            raise InvalidArgument(f"{name} inserts into another collection — {another}")
        digest = source.pass_over(last)
        if digest is None or (last, digest) not in marks:
            raise other
        self._newest = [(last, digest)]

    async def _write(
        self,
        node: "sn.Node",
        producer: "sn.Producer | None",
        collection: "sn.Collection",
        batch: "RowBatch",
    ) -> None:
        import msgspec

        options: dict[str, Any] = {"partition": self.partition}
        if producer is not None:
            options["sequence"] = last = batch.numbers[-1]
            self._newest = [*self._newest[-1:], (last, batch.digest)]
            await producer.put_note(msgspec.msgpack.encode((collection.id, self._newest)))
        target = producer or node
        with batch.placed():
            result = await (target.upsert if self.upsert else target.insert)(
                collection.name, batch.rows, **options
            )
        self.rows += len(batch.numbers)
        self.tick = max(self.tick, result.time_tick)


@PROGRAM.verb(
    "insert",
    "streamingnode insert data orders orders.jsonl --create --primary-key id --shards 2",
    "streamingnode insert data orders orders.parquet --partition eu",
    "cat stock.jsonl | streamingnode insert data stock --upsert -",
    "tail -n +1 -F orders.log | streamingnode insert data orders --producer orders-log",
    "streamingnode insert data orders orders.jsonl --json",
)
@at_place()
@click.argument("collection", help="The collection to insert into.")
@click.argument("file", default="-", help="JSON lines or Parquet; `-` is stdin (default).")
@click.option("--upsert", is_flag=True, help="Replace rows that have the same primary key.")
@click.option(
    "--producer",
    metavar="NAME",
    help="Insert only rows that no earlier run with this name inserted: a repeated run is exact.",
)
@click.option("--partition", help="The partition the rows go to (default: _default).")
@click.option(
    "--create",
    is_flag=True,
    help="Create the collection, with its --partition, if it is missing.",
)
@click.option("--primary-key", metavar="COLUMN", help="With --create: the primary key.")
@click.option(
    "--shards", type=int, metavar="N", help="With --create: number of shards (default: 1)."
)
def insert(output: Output, **given: Any) -> None:
    """Insert rows from JSON lines or Parquet.

    Reads a file (JSON lines, also compressed with gzip, or Parquet) or stdin in batches; each batch
    is applied whole or not at all. Lines from a pipe are durable within a second. An error names
    the line that does not fit, and nothing of its batch is inserted. In JSON, times are RFC 3339
    text, bytes are base64, and a missing field is null if its column allows it. A Parquet file must
    have every column of the collection, in a type that needs no lossy conversion. With --create the
    columns are those of the first batch, or of the Parquet file, in types that hold their values;
    after an error nothing is created.

    With --producer a repeated run is exact, after an error, a crash, or with more lines at the end:
    it continues after the last line or row that an earlier run inserted under this name. An input
    whose earlier part has changed is refused: another input needs another name. A Parquet file must
    not change at all.

    Page checksums in a Parquet file are verified. Times of type INT96, which Spark writes by
    default, count as UTC for a column with a time zone.
    """
    done = _Insert(**given)
    if done.create and done.primary_key is None:
        raise InvalidArgument("--create needs a primary key — add --primary-key COLUMN")
    if not done.create and (done.primary_key is not None or done.shards is not None):
        raise InvalidArgument("--primary-key and --shards describe a new collection — add --create")
    from streamingnode.care.inspect import check_node
    from streamingnode.cli.rows_in import open_rows
    from streamingnode.opening import run_async

    if not done.create and isinstance(done.place, Path):
        check_node(done.place)
    with open_rows(done.file, sys.stdin.buffer if sys.stdin else None) as source:
        if source.left_out:
            names = ", ".join(source.left_out)
            step = "name the index to keep it"
            output.note(f"{names} is left out: it is the index of a pandas frame — {step}")
        try:
            with Progress(output.stderr) as progress:
                run_async(partial(done.run, source, progress))
        except (StreamingNodeError, KeyboardInterrupt) as error:
            is_known = getattr(error, "retryable", "indeterminate") != "indeterminate"
            then = (
                "nothing of the batch that failed is" if is_known else "the next batch may be, too"
            )
            if done.rows:
                output.note(f"{done.rows} rows of earlier batches are inserted; {then}")
            raise
    last = f", last tick {done.tick} ({format_tick(done.tick)})" if done.tick else ""
    output.result(
        f"{'upserted' if done.upsert else 'inserted'} {format_count(done.rows, 'row')}{last}",
        {"rows": done.rows, "tick": done.tick, "passed_over": done.passed_over},
    )
