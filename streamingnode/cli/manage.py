"""The commands for collections, partitions, readers and transactions."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import streamingnode as sn
from streamingnode.cli.command import DRY_RUN, Place, at_node, at_place, group, with_node
from streamingnode.cli.data import COLLECTION, describe_collection, start_policy
from streamingnode.cli.output import Output, format_bytes, format_count
from wal.errors import InvalidArgument, shown

if TYPE_CHECKING:
    import pyarrow as pa

    from streamingnode.holders import ReaderInfo
    from streamingnode.schema import AnyField

_COLLECTION = click.argument("collection", help="The collection.")


@COLLECTION.verb(
    "create",
    'streamingnode collection create data orders --schema "id:int64 not null,item:string" '
    "--primary-key id",
    'streamingnode collection create data prices --schema "at:timestamp[us, tz=UTC],p:decimal(9, '
    '2)" --primary-key at',
    "streamingnode collection create data orders --schema id:int64 --primary-key id --json",
)
@at_place()
@_COLLECTION
@click.option(
    "--schema",
    required=True,
    metavar="COLUMNS",
    help="NAME:TYPE, separated by commas, with `not null` if required; types as `collection ls` "
    "shows them.",
)
@click.option("--primary-key", required=True, metavar="COLUMN", help="The primary key.")
@click.option("--shards", default=1, metavar="N", help="Number of shards (default: 1).")
@click.option("--partition", multiple=True, metavar="NAME", help="A partition; may be repeated.")
def create_collection(
    output: Output,
    *,
    place: Place,
    collection: str,
    schema: str,
    primary_key: str,
    shards: int,
    partition: tuple[str, ...],
) -> None:
    """Create a collection, and the node if the directory does not exist or is empty.

    `insert --create` makes one with the columns of a file, lists and structs too.
    """
    from streamingnode.care.inspect import is_vacant
    from streamingnode.collections import Definition

    # refuse an invalid definition before the node is created
    new = Definition(collection, parse_schema(schema), primary_key, shards, partition).checked()

    async def create(node: "sn.Node") -> "sn.Collection":
        return await node.create_collection(
            new.name,
            new.schema,
            primary_key=new.primary_key,
            shards=new.shards,
            partitions=new.partitions,
        )

    is_new = isinstance(place, Path) and is_vacant(place)
    made = with_node(place, create, may_be_new=is_new)
    if is_new:  # shows a mistyped name
        output.note(f"{place} is a new node")
    output.change("created", f"collection {collection}", describe_collection(made))


@COLLECTION.verb(
    "drop",
    "streamingnode collection drop data orders --dry-run",
    "streamingnode collection drop --node tcp://127.0.0.1:7070 orders --json",
)
@at_node
@_COLLECTION
@DRY_RUN
async def drop_collection(
    output: Output, node: "sn.Node", *, collection: str, dry_run: bool
) -> None:
    """Drop a collection with all its rows.

    Takes effect at once, without undo; it ends open transactions on the collection.
    """
    found = node.collection(collection)
    if not dry_run:
        await node.drop_collection(collection)
    output.change(
        "dropped", f"collection {collection}", describe_collection(found), dry_run=dry_run
    )


_TYPES = "int64, float64, string, bool, timestamp[us, tz=UTC] or decimal128(9, 2)"
_BETWEEN_COLUMNS = re.compile(r",(?![^\[(]*[\])])")
_ZONED = re.compile(r"timestamp\[(ms|us), *(?:tz=)?([^\]]+)\]")
_DECIMAL = re.compile(r"decimal(?:128)?\((\d+), *(\d+)\)")


def parse_schema(text: str) -> "pa.Schema":
    """Return the columns of `--schema`. Raises `InvalidArgument`; does not check whether a node
    keeps the types.
    """
    import pyarrow as pa

    by_alias: Any = pa.type_for_alias  # its stub lists the aliases one by one
    fields: list[AnyField] = []
    for column in _BETWEEN_COLUMNS.split(text):
        name, _, kind = map(str.strip, column.partition(":"))
        bare = kind.removesuffix("not null").rstrip()
        try:
            if zoned := _ZONED.fullmatch(bare):
                of: pa.DataType = pa.timestamp("ms" if zoned[1] == "ms" else "us", zoned[2])
            elif decimal := _DECIMAL.fullmatch(bare):
                of = pa.decimal128(int(decimal[1]), int(decimal[2]))
            else:
                of = by_alias(bare)
        except ValueError:
            wrong = (
                f"{shown(bare)} is not a type"
                if name and bare
                else (f"{shown(column)} is not a column")
            )
            raise InvalidArgument(
                f"--schema: {wrong} — give NAME:TYPE with a type such as {_TYPES}; insert "
                "--create takes lists and structs from a file"
            ) from None
        fields.append(pa.field(name, of, nullable=bare == kind))
    return pa.schema(fields)


PARTITION = group("partition", "List, create or drop the partitions of a collection.")
_PARTITION = click.argument("partition", help="The partition.")


@PARTITION.verb(
    "ls",
    "streamingnode partition ls data orders",
    "streamingnode partition ls data orders --json",
)
@at_node
@_COLLECTION
async def list_partitions(output: Output, node: "sn.Node", *, collection: str) -> None:
    """List the partitions of a collection."""
    _print_partitions(output, node, collection)


@PARTITION.verb(
    "create",
    "streamingnode partition create data orders eu",
    "streamingnode partition create data orders eu --json",
)
@at_node
@_COLLECTION
@_PARTITION
async def create_partition(
    output: Output, node: "sn.Node", *, collection: str, partition: str
) -> None:
    """Create a partition, and print the partitions afterwards."""
    await node.create_partition(collection, partition)
    _print_partitions(output, node, collection)


@PARTITION.verb(
    "drop",
    "streamingnode partition drop data orders eu --dry-run",
    "streamingnode partition drop data orders eu --json",
)
@at_node
@_COLLECTION
@_PARTITION
@DRY_RUN
async def drop_partition(
    output: Output, node: "sn.Node", *, collection: str, partition: str, dry_run: bool
) -> None:
    """Drop a partition with all its rows.

    Takes effect at once, without undo; it ends open transactions on the collection. `_default`
    cannot be dropped.
    """
    from interceptors.shard.catalog import DEFAULT_PARTITION

    names = node.collection(collection).partitions
    if dry_run and partition == DEFAULT_PARTITION:
        raise InvalidArgument(
            f"partition {partition!r} cannot be dropped — `streamingnode collection drop` drops "
            "the collection"
        )
    if partition not in names:
        raise sn.errors.PartitionNotFound(
            f"collection {collection!r} has no partition {shown(partition)} — `streamingnode "
            "partition ls` lists them"
        )
    if not dry_run:
        await node.drop_partition(collection, partition)
    left = [each for each in names if each != partition]
    output.change(
        "dropped",
        f"partition {partition} of {collection}",
        {"collection": collection, "partitions": left},
        dry_run=dry_run,
    )


def _print_partitions(output: Output, node: "sn.Node", collection: str) -> None:
    names = node.collection(collection).partitions
    for name in names:
        output.line(name)
    output.document({"collection": collection, "partitions": names})


READER = group("reader", "List, move or remove the named readers of a node.")
_READER = click.argument("reader", help="The reader.")


@READER.verb(
    "ls",
    "streamingnode reader ls data",
    "streamingnode reader ls data orders --json",
)
@at_node
@click.argument("collection", required=False, help="The readers' collection (default: all).")
async def list_readers(output: Output, node: "sn.Node", *, collection: str | None) -> None:
    """List the named readers of a node.

    A named reader holds the log from its position on, even if it is never opened again. `behind_s`
    is the age of that position, and `backlog` the number of messages, of all collections, after it.
    """
    output.listing("readers", await _readers_of(node, collection))


@READER.verb(
    "seek",
    "streamingnode reader seek data orders billing --to @1h --dry-run",
    "streamingnode reader seek data orders billing --to earliest",
    "streamingnode reader seek data orders billing --to earliest --json",
)
@at_node
@_COLLECTION
@_READER
@click.option(
    "--to",
    required=True,
    metavar="POSITION",
    help="The new position, as in `tail --from`, without -N.",
)
@DRY_RUN
async def seek_reader(
    output: Output, node: "sn.Node", *, collection: str, reader: str, to: str, dry_run: bool
) -> None:
    """Move a named reader to another position.

    Messages between the two positions are delivered again, or never. An open reader cannot be moved
    (READER_BUSY): end its program first.
    """
    policy = start_policy(to, "--to")
    before = await _reader_of(node, collection, reader)
    after = await node.seek_reader(before.collections[0], reader, policy, dry_run=dry_run)
    moved = f"{'would go' if dry_run else 'went'} from {before.message_id} to {after.message_id}"
    output.result(
        f"reader {reader} of {collection} {moved}: backlog {before.backlog} to {after.backlog}",
        {"moved": not dry_run, "before": before, "after": after},
    )


@READER.verb(
    "rm",
    "streamingnode reader rm data orders billing --dry-run",
    "streamingnode reader rm --node tcp://127.0.0.1:7070 orders billing --json",
)
@at_node
@_COLLECTION
@_READER
@DRY_RUN
async def remove_reader(
    output: Output, node: "sn.Node", *, collection: str, reader: str, dry_run: bool
) -> None:
    """Remove a named reader, which then no longer holds the log.

    An open reader cannot be removed (READER_BUSY): end its program first.
    """
    before = await _reader_of(node, collection, reader)
    if not dry_run:
        await node.delete_reader(before.collections[0], reader)
    output.change("removed", f"reader {reader} of {collection}", before, dry_run=dry_run)


async def _readers_of(node: "sn.Node", collection: str | None) -> "list[ReaderInfo]":
    """Return the named readers of an existing collection, or of all collections."""
    if collection is not None:
        node.collection(collection)
    return [
        each
        for each in await node.readers()
        if collection is None or collection in each.collections
    ]


async def _reader_of(node: "sn.Node", collection: str, name: str) -> "ReaderInfo":
    """Return a named reader. Raises `ReaderNotFound`."""
    for each in await _readers_of(node, collection):
        if each.name == name:
            return each
    text = f"collection {collection!r} has no reader {shown(name)}"
    raise sn.errors.ReaderNotFound(f"{text} — `streamingnode reader ls` lists them")


TXN = group("txn", "List the open transactions of a node, or end one.")


@TXN.verb(
    "ls",
    "streamingnode txn ls data",
    "streamingnode txn ls --node tcp://127.0.0.1:7070 --json",
)
@at_node
async def list_transactions(output: Output, node: "sn.Node") -> None:
    """List the open transactions of a node.

    Only transactions that are sent before their commit: small ones are never open in the node. An
    open transaction holds the log from its begin on, and ends by itself after being idle for its
    keepalive.
    """
    output.listing("transactions", await node.transactions())


@TXN.verb(
    "abort",
    "streamingnode txn abort data 470693110239723521",
    "streamingnode txn abort data 470693110239723521 --dry-run --json",
)
@at_node
@click.argument("id_", type=int, metavar="ID", help="The transaction.")
@DRY_RUN
async def abort_transaction(output: Output, node: "sn.Node", *, id_: int, dry_run: bool) -> None:
    """Roll an open transaction back at once.

    Its client then gets TRANSACTION_EXPIRED.
    """
    found = await node.transactions()
    chosen = next((each for each in found if each.txn_id == id_), None)
    if chosen is None:
        step = "`streamingnode txn ls` lists the open ones"
        raise sn.errors.TransactionExpired(f"transaction {id_} is not open — {step}")
    if not dry_run:
        await node.abort_transaction(chosen.txn_id)
    size = f"{format_count(chosen.bodies, 'message')}, {format_bytes(chosen.bytes)}"
    output.change("aborted", f"transaction {id_} ({size})", chosen, dry_run=dry_run)
