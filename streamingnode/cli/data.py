"""What a node holds, on the command line: `ls`, `partitions`, `tail` and `flush`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from interceptors.errors import CollectionNotFound
from streamingnode.cli.command import NODE, argument, command, with_node
from streamingnode.cli.output import Output, format_bytes, format_count, format_tick, to_json
from wal.errors import AlreadyOwned, InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa

    from scanner.deliver_policy import DeliverPolicy
    from streamingnode.care.inspect import CollectionSummary
    from streamingnode.channel import FlushResult
    from streamingnode.collections import Collection
    from streamingnode.node import Node
    from streamingnode.read_message import ReadMessage


@command(
    NODE,
    argument("--count", action="store_true", help="count the current rows too, which reads all of them"),
    examples=("streamingnode ls data", "streamingnode ls data --count", "streamingnode ls data --json"),
)
def ls(output: Output, *, directory: Path, count: bool) -> None:
    """List a node's collections: rows ever inserted, shards, offsets, last tick.

    Every upsert is one more row ever inserted, and a delete takes none away; --count adds the rows there are now,
    which reads all of them. When another process has the node open, shows the state at its newest cut, and --count
    ends with exit code 4. Times are UTC.
    """
    as_of_cut, rows = 0, dict[str, int]()
    try:
        collections = with_node(directory, partial(_list_now, directory, rows if count else None))
    except AlreadyOwned as owned:
        if count:
            raise
        collections, as_of_cut = _at_newest_cut(directory, owned, output)
    collections.sort(key=lambda each: each.name)
    _print_collections(collections, rows, output)
    described = [_describe_collection(each, rows) for each in collections]
    output.document({"directory": str(directory), "as_of_cut": as_of_cut, "collections": described})


def _at_newest_cut(directory: Path, owned: AlreadyOwned, output: Output) -> "tuple[list[CollectionSummary], int]":
    """Return the collections at the newest cut of a node that another process has open, and its number."""
    from flusher.directory import CutLog
    from streamingnode.care.inspect import summaries_at_newest

    cuts = CutLog(directory)
    collections = list(summaries_at_newest(cuts).values())
    output.note(f"process {owned.pid or '?'} has the node open: this is its state at cut {cuts.newest}")
    return collections, cuts.newest


async def _list_now(directory: Path, rows: dict[str, int] | None, node: "Node") -> "list[CollectionSummary]":
    """Return the collections as they are, and count their `rows` if asked to."""
    import anyio.to_thread

    from flusher.directory import CutLog
    from streamingnode.care.inspect import summaries_at_newest

    cuts = await anyio.to_thread.run_sync(CutLog, directory)
    at_cut = await anyio.to_thread.run_sync(summaries_at_newest, cuts)
    cut_tick = cuts.read(cuts.newest).tick if cuts.numbers else 0
    found = []
    for collection in node.collections():
        found.append(await _summary_now(node, collection, at_cut.get(collection.id), cut_tick))
        if rows is not None:
            rows[collection.name] = (await node.snapshot(collection.name)).num_rows
    return found


async def _summary_now(
    node: "Node", collection: "Collection", at_cut: "CollectionSummary | None", cut_tick: int
) -> "CollectionSummary":
    """Return a collection's summary: what the newest cut says of its rows, brought up to date from the log after it."""
    from scanner.deliver_policy import DeliverPolicy
    from streamingnode.care.inspect import CollectionSummary

    next_offsets = dict.fromkeys(collection.vchannels, 0) | dict(at_cut.next_offsets if at_cut else {})
    last_tick = at_cut.last_tick if at_cut else 0
    policy = DeliverPolicy.start_after(cut_tick) if cut_tick else DeliverPolicy.all()
    async with node.read(collection.name, policy, until=await node.consistent_tick()) as messages:
        async for message in messages:
            if message.num_rows:
                last_tick = message.time_tick
            for part in message.bodies or (message,):
                next_offsets |= {vchannel: first + count for vchannel, (first, count) in part.row_offsets.items()}
    return CollectionSummary(
        id=collection.id,
        name=collection.name,
        primary_key=collection.primary_key,
        columns={field.name: str(field.type) for field in collection.schema},
        partitions=collection.partitions,
        next_offsets=next_offsets,
        last_tick=last_tick,
    )


def _describe_collection(summary: "CollectionSummary", rows: dict[str, int]) -> dict[str, object]:
    return {
        "name": summary.name,
        "id": summary.id,
        "primary_key": summary.primary_key,
        "columns": summary.columns,
        "inserted": summary.inserted,
        **({"rows": rows[summary.name]} if rows else {}),
        "shards": [{"vchannel": name, "next_offset": offset} for name, offset in summary.next_offsets.items()],
        "partitions": summary.partitions,
        "last_tick": summary.last_tick,
        "last_time": format_tick(summary.last_tick),
    }


def _print_collections(collections: "Sequence[CollectionSummary]", rows: dict[str, int], output: Output) -> None:
    if not collections:
        output.line("no collections")
        return
    counted = ["rows"] if rows else []
    rest = ["ever inserted", "shards", "next offsets", "partitions", "last tick", "last time"]
    output.table(
        ["collection", "key", *counted, *rest],
        [
            (
                each.name,
                each.primary_key,
                *([rows[each.name]] if rows else []),
                each.inserted,
                len(each.next_offsets),
                ",".join(map(str, each.next_offsets.values())),
                ",".join(each.partitions),
                each.last_tick or "-",
                format_tick(each.last_tick),
            )
            for each in collections
        ],
    )


@command(
    argument("action", choices=["list", "create", "drop"], help="what to do"),
    NODE,
    argument("collection", help="the collection"),
    argument("partition", nargs="?", help="the partition to create or drop, with all its rows"),
    examples=(
        "streamingnode partitions list data orders",
        "streamingnode partitions create data orders eu",
        "streamingnode partitions drop data orders eu --json",
    ),
)
def partitions(output: Output, *, action: str, directory: Path, collection: str, partition: str | None) -> None:
    """List, create or drop the partitions of a collection.

    Prints the partitions there are afterwards. Dropping one drops its rows, at once and for good, and ends open
    transactions on the collection; `_default` cannot be dropped. When another process has the node open, `list`
    shows the state at its newest cut, and the others end with exit code 4.
    """
    if action == "list" and partition is not None:
        raise InvalidArgument("list: all partitions are listed — leave out the last name")
    if action != "list" and partition is None:
        raise InvalidArgument(f"{action}: which partition? — add its name")

    async def apply(node: "Node") -> tuple[str, ...]:
        if partition is not None:
            change = node.create_partition if action == "create" else node.drop_partition
            await change(collection, partition)
        return node.collection(collection).partitions

    as_of_cut = 0
    try:
        names = with_node(directory, apply)
    except AlreadyOwned as owned:
        if action != "list":
            raise
        collections, as_of_cut = _at_newest_cut(directory, owned, output)
        found = {each.name: each.partitions for each in collections}
        if collection not in found:
            raise CollectionNotFound(
                f"no collection is named {collection!r} at cut {as_of_cut} — wait for the next cut, or run ls"
            ) from None
        names = found[collection]
    for name in names:
        output.line(name)
    output.document({"collection": collection, "partitions": names, "as_of_cut": as_of_cut})


TYPES = ("insert", "delete", "txn", "create_collection", "drop_collection", "create_partition", "drop_partition")


@command(
    NODE,
    argument("collection", help="the collection to read"),
    argument(
        "--from",
        dest="start",
        default="start",
        metavar="start|end|ID|TICK",
        help="start: the earliest message kept (default); end: only what is new; a message id such as rocksmq/1a: that "
        "message and what follows; a time tick: what follows it",
    ),
    [
        argument(
            "--until-now",
            action="store_false",
            default=False,
            dest="follow",
            help="end with what is there now (default)",
        ),
        argument("--follow", action="store_true", help="go on with new messages until interrupted"),
    ],
    argument("--limit", type=int, help="end after this many messages"),
    argument("--types", help=f"only these kinds, separated by commas: {', '.join(TYPES)}"),
    examples=(
        "streamingnode tail data orders",
        "streamingnode tail data orders --limit 10 --types insert,txn",
        "streamingnode tail data orders --from rocksmq/1a",
        "streamingnode tail data orders --from end --follow",
        "streamingnode tail data orders --json | head -1",
    ),
)
def tail(
    output: Output, *, directory: Path, collection: str, start: str, follow: bool, limit: int | None, types: str | None
) -> None:
    """Print the messages of a collection as JSON lines.

    One line for each message in tick order: an insert with its rows, a delete with its keys, a transaction (`txn`)
    with its bodies, schema changes. Ends with what is there now; --follow goes on. Opens the node, so exit code 4
    while another process has it open.
    """
    kinds = None if types is None else set(map(str.strip, types.split(",")))
    if unknown := sorted((kinds or set()) - set(TYPES)):
        raise InvalidArgument(f"--types does not know {', '.join(unknown)} — choose from {', '.join(TYPES)}")
    if limit is not None and limit < 1:
        raise InvalidArgument(f"--limit is {limit} — give 1 or more")
    policy = _start_policy(start)
    import anyio.to_thread

    def write(message: "ReadMessage") -> None:
        output.write(f"{to_json(_describe_message(message))}\n")
        output.flush()

    async def print_messages(node: "Node") -> None:
        until, left = None if follow else await node.consistent_tick(), limit
        async with node.read(collection, policy, until=until) as messages:
            async for message in messages:
                if kinds is None or message.type.name.lower() in kinds:
                    # In a thread: a pipe nobody reads from must not hold up the node.
                    await anyio.to_thread.run_sync(write, message)
                    left = None if left is None else left - 1
                if left == 0:
                    return

    with_node(directory, print_messages)


def _start_policy(text: str) -> "DeliverPolicy":
    """Return where to start, as `--from` says it. Raises `InvalidArgument`."""
    from scanner.deliver_policy import DeliverPolicy
    from wal.position import parse_message_id

    try:
        if text in {"start", "end"}:
            return DeliverPolicy.all() if text == "start" else DeliverPolicy.latest()
        if text.isdecimal():
            return DeliverPolicy.start_after(int(text))
        if "/" in text:
            return DeliverPolicy.start_from(parse_message_id(text))
    except InvalidArgument as error:
        step = "give --from start, or a message_id or tick that tail prints"
        raise InvalidArgument(f"--from {text!r}: {error.happened} — {step}") from error
    raise InvalidArgument(f"--from {text!r} is no place in a log — give start, end, a message id or a time tick")


def _describe_message(message: "ReadMessage") -> dict[str, object]:
    """Return a message as one JSON object: where and when it is, and its rows, keys or bodies."""
    return {
        "type": message.type.name.lower(),
        "message_id": str(message.message_id),
        "tick": message.time_tick,
        "time": format_tick(message.time_tick),
        "num_rows": message.num_rows,
        **_content(message),
    }


def _content(message: "ReadMessage") -> dict[str, object]:
    if message.bodies:
        return {"bodies": [{"type": body.type.name.lower(), **_content(body)} for body in message.bodies]}
    rows = message.to_arrow()
    return {} if rows is None else {"rows": _python_rows(rows)}


def _python_rows(rows: "pa.Table") -> list[dict[str, object]]:
    """Return rows as Python has them; where it has not the year, times and dates are the integers that are stored."""
    import pyarrow as pa
    import pyarrow.types as pt

    from streamingnode.schema import with_leaves

    def as_integer(kind: pa.DataType) -> pa.DataType:
        return pa.int64() if pt.is_timestamp(kind) else pa.int32() if pt.is_date32(kind) else kind

    try:
        return rows.to_pylist()
    except (OverflowError, ValueError):
        schema = [field.with_type(with_leaves(field.type, as_integer)) for field in rows.schema]
        return rows.cast(pa.schema(schema)).to_pylist()


@command(NODE, examples=("streamingnode flush data", "streamingnode flush data --json"))
def flush(output: Output, *, directory: Path) -> None:
    """Make a cut: everything acknowledged goes to files.

    Prints the cut's number, its tick and the segments it sealed; says so when there is nothing new.
    Exit code 4 when another process has the node open: it makes cuts by itself.
    """
    from flusher.directory import CutLog
    from streamingnode.care.inspect import check_node

    before = CutLog(check_node(directory)).newest
    try:
        cut = with_node(directory, lambda node: node.flush())
    except AlreadyOwned as owned:
        owned.newest_cut = _newest_cut(directory, owned.pid)
        raise
    made = cut.number > before
    if made:
        _print_cut(cut, output)
    else:
        newest = f"the newest cut is {cut.number}, at tick {cut.tick} ({format_tick(cut.tick)})"
        output.line(f"nothing new since the last cut: {newest if cut.number else 'the node has made none'}")
    # `spark_sink.cut_request` reads the document: an ingest asks for its cut by this command.
    output.document(
        {"made": made, "number": cut.number, "tick": cut.tick, "crc32c": cut.crc32c, "segments": cut.segments}
    )


def _newest_cut(directory: Path, pid: int | None) -> dict[str, int] | None:
    """Return what the owner said last of its newest cut; None when it said nothing yet in this term.

    A pid alone is no proof: where a node is process 1 of its container, every owner before it was, too.
    """
    from streamingnode.statistics import read_statistics
    from wal.rocks.floor import read_floor

    floor, said = read_floor(directory), read_statistics(directory, pid=pid)
    if floor is None or said is None or said.log.term != floor.term:
        return None
    cut = said.flusher
    return {"number": cut.cut_number, "tick": cut.cut_tick, "crc32c": cut.cut_crc32c}


def _print_cut(cut: "FlushResult", output: Output) -> None:
    rows = format_count(sum(segment.rows for segment in cut.segments), "row")
    segments = format_count(len(cut.segments), "segment")
    output.line(f"cut {cut.number} at tick {cut.tick} ({format_tick(cut.tick)}): {segments}, {rows}")
    if cut.segments:
        output.table(
            ("segment", "collection", "partition", "rows", "size", "path"),
            [
                (s.segment_id, s.collection_id, s.partition_id, s.rows, format_bytes(s.bytes), s.path)
                for s in cut.segments
            ],
        )
