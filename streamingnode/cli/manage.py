"""What an operator changes in a node, on the command line: `collection`, `reader` and `txn`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamingnode.cli.command import DRY_RUN, PLACE, argument, command, with_node
from streamingnode.cli.data import describe_collection, start_policy
from streamingnode.cli.output import Output, format_bytes, format_count
from wal.errors import InvalidArgument, shown

if TYPE_CHECKING:
    import pyarrow as pa

    from streamingnode.holders import ReaderInfo, TransactionInfo
    from streamingnode.node import Node
    from streamingnode.schema import AnyField


@command(
    argument("action", choices=["create", "drop"], help="what to do"),
    PLACE,
    argument("collection", help="the collection"),
    argument(
        "--schema",
        metavar="COLUMNS",
        help="for create: NAME:TYPE, separated by commas, with `not null` where that is meant; types as `ls` shows them",
    ),
    argument("--primary-key", metavar="COLUMN", help="for create: the primary key"),
    argument("--shards", type=int, default=1, metavar="N", help="for create: number of shards (default: 1)"),
    argument(
        "--partition", action="append", default=[], metavar="NAME", help="for create: a partition; may be repeated"
    ),
    DRY_RUN,
    examples=(
        'streamingnode collection create data orders --schema "id:int64 not null,item:string" --primary-key id',
        'streamingnode collection create data prices --schema "at:timestamp[us, tz=UTC],p:decimal(9, 2)" --primary-key at',
        "streamingnode collection drop data orders --dry-run",
        "streamingnode collection drop --node tcp://127.0.0.1:7070 orders --json",
    ),
)
def collection(
    output: Output,
    *,
    action: str,
    place: Path | str,
    collection: str,
    schema: str | None,
    primary_key: str | None,
    shards: int,
    partition: list[str],
    dry_run: bool,
) -> None:
    """Create a collection, or drop one with all its rows.

    `ls` shows which there are; `insert --create` makes one with the columns of a file, lists and structs too. Dropping
    is at once and for good, and ends open transactions on the collection.
    """
    creates, given = action == "create", [schema, primary_key]
    if (None in given or dry_run) if creates else any(each is not None for each in given):
        takes = "--schema and --primary-key, and no --dry-run" if creates else "neither --schema nor --primary-key"
        raise InvalidArgument(f"{action} takes {takes} — see collection --help")
    columns = None if schema is None else parse_schema(schema)

    async def apply(node: "Node") -> dict[str, object]:
        if columns is None:
            found = describe_collection(node.collection(collection))
            if not dry_run:
                await node.drop_collection(collection)
            return found
        made = await node.create_collection(
            collection, columns, primary_key=str(primary_key), shards=shards, partitions=partition
        )
        return describe_collection(made)

    described = with_node(place, apply)
    _print_change(output, "created" if creates else "dropped", f"collection {collection}", described, dry_run)


_BETWEEN_COLUMNS = re.compile(r",(?![^\[(]*[\])])")
_ZONED = re.compile(r"timestamp\[(ms|us), *(?:tz=)?([^\]]+)\]")
_DECIMAL = re.compile(r"decimal(?:128)?\((\d+), *(\d+)\)")


def parse_schema(text: str) -> "pa.Schema":
    """Return the columns of `--schema`. Raises `InvalidArgument`; whether a node keeps them is its own question."""
    import pyarrow as pa

    by_alias: Any = pa.type_for_alias  # its stub knows the aliases one by one
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
            raise InvalidArgument(
                f"--schema: {shown(column)} is no column — give NAME:TYPE with a type as `ls` shows them, as id:int64 or "
                "at:timestamp[us, UTC]; insert --create takes lists and structs from a file"
            ) from None
        fields.append(pa.field(name, of, nullable=bare == kind))
    return pa.schema(fields)


@command(
    argument("action", choices=["ls", "seek", "rm"], help="what to do"),
    PLACE,
    argument("collection", nargs="?", help="the reader's collection; for ls all by default"),
    argument("reader", nargs="?", help="the reader, for all but ls"),
    argument("--to", metavar="POSITION", help="for seek: where it goes on, as in `tail --from`, without -N"),
    DRY_RUN,
    examples=(
        "streamingnode reader ls data",
        "streamingnode reader seek data orders billing --to @1h --dry-run",
        "streamingnode reader seek data orders billing --to earliest",
        "streamingnode reader rm --node tcp://127.0.0.1:7070 orders billing --json",
    ),
)
def reader(
    output: Output,
    *,
    action: str,
    place: Path | str,
    collection: str | None,
    reader: str | None,
    to: str | None,
    dry_run: bool,
) -> None:
    """List, move or remove the named readers of a node.

    A named reader holds the log from its place on, also when nobody opens it any more: `behind_s` is how old that is,
    and `backlog` how many messages, of all collections, are behind it. `seek` makes it go on from another place: what
    lies between comes again, or never. `rm` forgets its place. A reader that is open can be neither moved nor removed
    (READER_BUSY): end its program first.
    """
    if (action == "ls") is (reader is not None) or (action == "seek") is (to is None):
        takes = {"ls": "a collection or nothing", "seek": "a collection, a reader and --to"}
        raise InvalidArgument(f"{action} takes {takes.get(action, 'a collection and a reader')} — see reader --help")
    policy = None if to is None else start_policy(to, "--to")

    async def look(node: "Node") -> "Sequence[ReaderInfo]":
        if collection is not None:
            node.collection(collection)
        return [each for each in await node.readers() if collection is None or collection in each.collections]

    async def change(node: "Node") -> "tuple[ReaderInfo, ReaderInfo]":
        before = next((each for each in await look(node) if each.name == reader), None)
        if before is None:
            raise InvalidArgument(f"{collection} has no reader {shown(reader)} — `streamingnode reader ls` names them")
        if policy is not None:
            return before, await node.seek_reader(before.collections[0], before.name, policy, dry_run=dry_run)
        if not dry_run:
            await node.delete_reader(before.collections[0], before.name)
        return before, before

    if reader is None:
        _print_list(output, "readers", with_node(place, look))
        return
    before, after = with_node(place, change)
    what = f"reader {reader} of {collection}"
    if action == "rm":
        _print_change(output, "removed", what, _plain(before), dry_run)
        return
    verb = "would go" if dry_run else "went"
    output.line(
        f"{what} {verb} from {before.message_id} to {after.message_id}: backlog {before.backlog} to {after.backlog}"
    )
    output.document({"moved": not dry_run, "before": before, "after": after})


@command(
    argument("action", choices=["ls", "abort"], help="what to do"),
    PLACE,
    argument("id", nargs="?", type=int, help="the transaction, for abort"),
    DRY_RUN,
    examples=(
        "streamingnode txn ls data",
        "streamingnode txn ls --node tcp://127.0.0.1:7070 --json",
        "streamingnode txn abort data 470693110239723521",
    ),
)
def txn(output: Output, *, action: str, place: Path | str, id: int | None, dry_run: bool) -> None:  # noqa: A002 - as shown
    """List the open transactions of a node, or end one.

    Those that are sent before their commit: small ones are never open in the node. One holds the log from its begin on.
    It ends by itself when it is idle for its keepalive; aborting rolls it back at once, and its client is told
    TRANSACTION_EXPIRED.
    """
    if (action == "ls") is (id is not None):
        raise InvalidArgument(f"{action} takes {'no' if id else 'an'} id — see txn --help")

    async def apply(node: "Node") -> "Sequence[TransactionInfo]":
        found = await node.transactions()
        if id is None:
            return found
        chosen = [each for each in found if each.txn_id == id]
        if not chosen:
            raise InvalidArgument(f"transaction {id} is not open — `streamingnode txn ls` names those that are")
        if not dry_run:
            await node.abort_transaction(id)
        return chosen

    found = with_node(place, apply)
    if id is None:
        _print_list(output, "transactions", found)
        return
    size = f"{format_count(found[0].bodies, 'message')}, {format_bytes(found[0].bytes)}"
    _print_change(output, "aborted", f"transaction {id} ({size})", _plain(found[0]), dry_run)


def _plain(info: "ReaderInfo | TransactionInfo") -> dict[str, object]:
    from msgspec.structs import asdict

    return asdict(info)


def _print_list(output: Output, name: str, found: "Sequence[ReaderInfo | TransactionInfo]") -> None:
    output.records([_plain(each) for each in found])
    output.document({name: found})


def _print_change(output: Output, done: str, what: str, document: dict[str, object], dry_run: bool) -> None:  # noqa: FBT001
    """Print what was done to something, or would be."""
    output.line(f"{'would be ' if dry_run else ''}{done}: {what}")
    output.document({done: not dry_run, **document})
