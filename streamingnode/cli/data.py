"""What a node holds, on the command line: `ls`, `partitions`, `tail`, `flush` and `ingest`."""

from collections.abc import Sequence
from pathlib import Path

import anyio.to_thread
import pyarrow as pa
import pyarrow.types as pt

from flusher.directory import CutLog, lives
from flusher.manifest import collection_info
from scanner.deliver_policy import DeliverPolicy
from streamingnode.care.inspect import check_node
from streamingnode.channel import FlushResult
from streamingnode.cli.command import NODE, PLACE, SPARK, argument, command, require, with_node
from streamingnode.cli.output import Output, format_count, format_tick, to_json
from streamingnode.collections import Collection, collection_of
from streamingnode.node import Node
from streamingnode.progress import Progress
from streamingnode.read_message import ReadMessage
from streamingnode.schema import with_leaves
from streamingnode.statistics import read_statistics
from wal.errors import AlreadyOwned, InvalidArgument
from wal.position import parse_message_id
from wal.rocks.floor import read_floor


@command(
    PLACE,
    argument("--count", action="store_true", help="count the rows too, which reads all of them"),
    examples=("streamingnode ls data", "streamingnode ls data --count", "streamingnode ls data --json"),
)
def ls(output: Output, *, place: Path | str, count: bool) -> None:
    """List a node's collections: primary key, shards, partitions, columns.

    Works beside a process that has the node open. When that takes no clients, shows those of its newest cut, and
    --count ends with exit code 4.
    """
    as_of_cut, rows = 0, dict[str, int]()

    async def look(node: Node) -> Sequence[Collection]:
        found = node.collections()
        for each in found if count else ():
            rows[each.name] = (await node.snapshot(each.name)).num_rows
        return found

    try:
        collections = with_node(place, look)
    except AlreadyOwned as owned:
        if count or isinstance(place, str):
            raise
        collections, as_of_cut = _at_newest_cut(place)
        output.note(f"process {owned.pid or '?'} has the node open: these are its collections at cut {as_of_cut}")
    described = [
        {
            "name": each.name,
            "id": each.id,
            "primary_key": each.primary_key,
            "shards": len(each.vchannels),
            "partitions": each.partitions,
            "columns": {field.name: str(field.type) for field in each.schema},
            "rows": rows.get(each.name),
        }
        for each in sorted(collections, key=lambda each: each.name)
    ]
    output.records(described)
    output.document({"directory": str(place), "as_of_cut": as_of_cut, "collections": described})


def _at_newest_cut(directory: Path) -> tuple[list[Collection], int]:
    """Return the collections at the newest cut of a node that another process has open, and its number."""
    cuts = CutLog(directory)
    if not cuts.numbers:
        return [], 0
    newest = cuts.read(cuts.newest).manifest
    living = (entry for entry in newest.collections if lives(entry, newest.tick))
    return [collection_of(collection_info(entry)) for entry in living], newest.number


@command(
    argument("action", choices=["list", "create", "drop"], help="what to do"),
    PLACE,
    argument("collection", help="the collection"),
    argument("partition", nargs="?", help="the partition to create or drop, with all its rows"),
    examples=(
        "streamingnode partitions list data orders",
        "streamingnode partitions create data orders eu",
        "streamingnode partitions drop data orders eu --json",
    ),
)
def partitions(output: Output, *, action: str, place: Path | str, collection: str, partition: str | None) -> None:
    """List, create or drop the partitions of a collection.

    Prints the partitions there are afterwards. Dropping one drops its rows, at once and for good, and ends open
    transactions on the collection; `_default` cannot be dropped.
    """
    if (action == "list") is not (partition is None):
        raise InvalidArgument(f"{action} takes {'no' if partition else 'a'} partition — see partitions --help")

    async def apply(node: Node) -> tuple[str, ...]:
        if partition is not None:
            await (node.create_partition if action == "create" else node.drop_partition)(collection, partition)
        return node.collection(collection).partitions

    names = with_node(place, apply)
    for name in names:
        output.line(name)
    output.document({"collection": collection, "partitions": names})


TYPES = ("insert", "delete", "txn", "create_collection", "drop_collection", "create_partition", "drop_partition")


@command(
    PLACE,
    argument("collection", help="the collection to read"),
    argument(
        "--from",
        dest="start",
        default="start",
        metavar="start|end|ID|TICK",
        help="start: the earliest message kept (default); end: only what is new; a message id such as rocks/1a: that "
        "message and what follows; a time tick: what follows it",
    ),
    argument("--follow", action="store_true", help="go on with new messages until interrupted"),
    argument("--limit", type=int, help="end after this many messages"),
    argument("--types", help=f"only these kinds, separated by commas: {', '.join(TYPES)}"),
    examples=(
        "streamingnode tail data orders",
        "streamingnode tail data orders --limit 10 --types insert,txn",
        "streamingnode tail data orders --from rocks/1a",
        "streamingnode tail data orders --from end --follow",
        "streamingnode tail data orders --json | head -1",
    ),
)
def tail(
    output: Output,
    *,
    place: Path | str,
    collection: str,
    start: str,
    follow: bool,
    limit: int | None,
    types: str | None,
) -> None:
    """Print the messages of a collection as JSON lines.

    One line for each message in tick order: an insert with its rows, a delete with its keys, a transaction (`txn`)
    with its bodies, schema changes. Ends with what is there now; --follow goes on.
    """
    kinds = None if types is None else set(map(str.strip, types.split(",")))
    if unknown := sorted((kinds or set()) - set(TYPES)):
        raise InvalidArgument(f"--types does not know {', '.join(unknown)} — choose from {', '.join(TYPES)}")
    if limit is not None and limit < 1:
        raise InvalidArgument(f"--limit is {limit} — give 1 or more")
    policy = _start_policy(start)

    def write(message: ReadMessage) -> None:
        output.write(f"{to_json(_describe_message(message))}\n")
        output.flush()

    async def print_messages(node: Node) -> None:
        until, printed = None if follow else await node.consistent_tick(), 0
        async with node.read(collection, policy, until=until) as messages:
            async for message in messages:
                if kinds is None or message.type.name.lower() in kinds:
                    # In a thread: a pipe nobody reads from must not hold up the node.
                    await anyio.to_thread.run_sync(write, message)
                    printed += 1
                if printed == limit:
                    return

    with_node(place, print_messages, lasting=follow)


def _start_policy(text: str) -> DeliverPolicy:
    """Return where to start, as `--from` says it. Raises `InvalidArgument`."""
    if text in {"start", "end"}:
        return DeliverPolicy.all() if text == "start" else DeliverPolicy.latest()
    try:
        if text.isdecimal():
            return DeliverPolicy.start_after(int(text))
        return DeliverPolicy.start_from(parse_message_id(text))
    except InvalidArgument as error:
        step = "give start, end, or a message_id or tick that tail prints"
        raise InvalidArgument(f"--from {text!r}: {error.happened} — {step}") from error


def _describe_message(message: ReadMessage) -> dict[str, object]:
    """Return a message as one JSON object: where and when it is, and its rows, keys or bodies."""
    return {
        "type": message.type.name.lower(),
        "message_id": str(message.message_id),
        "tick": message.time_tick,
        "time": format_tick(message.time_tick),
        "num_rows": message.num_rows,
        **_content(message),
    }


def _content(message: ReadMessage) -> dict[str, object]:
    if message.bodies:
        return {"bodies": [{"type": body.type.name.lower(), **_content(body)} for body in message.bodies]}
    rows = message.to_arrow()
    return {} if rows is None else {"rows": _python_rows(rows)}


def _python_rows(rows: pa.Table) -> list[dict[str, object]]:
    """Return rows as Python has them; where it has not the year, times and dates are the integers that are stored."""

    def as_integer(kind: pa.DataType) -> pa.DataType:
        return pa.int64() if pt.is_timestamp(kind) else pa.int32() if pt.is_date32(kind) else kind

    try:
        return rows.to_pylist()
    except (OverflowError, ValueError):
        schema = [field.with_type(with_leaves(field.type, as_integer)) for field in rows.schema]
        return rows.cast(pa.schema(schema)).to_pylist()


@command(PLACE, examples=("streamingnode flush data", "streamingnode flush data --json"))
def flush(output: Output, *, place: Path | str) -> None:
    """Make a cut: everything acknowledged goes to files.

    Prints the cut's number, its tick and the segments it sealed; says so when there is nothing new.
    Exit code 4 when another process has the node open and takes no clients: it makes cuts by itself.
    """

    async def cut_it(node: Node) -> tuple[int, FlushResult]:
        return (await node.statistics()).flusher.cut_number, await node.flush()

    try:
        before, cut = with_node(place, cut_it)
    except AlreadyOwned as owned:
        if isinstance(place, Path):
            owned.newest_cut = _newest_cut(place, owned.pid)
        raise
    made = cut.number > before
    if not cut.number:
        output.line("nothing to cut: the node has no rows yet")
    else:
        rows = format_count(sum(segment.rows for segment in cut.segments), "row")
        news = f"{format_count(len(cut.segments), 'segment')}, {rows}" if made else "nothing new since"
        output.line(f"cut {cut.number} at tick {cut.tick} ({format_tick(cut.tick)}): {news}")
    # `spark_sink.cut_request` reads the document: an ingest asks for its cut by this command.
    output.document(
        {"made": made, "number": cut.number, "tick": cut.tick, "crc32c": cut.crc32c, "segments": cut.segments}
    )


def _newest_cut(directory: Path, pid: int | None) -> dict[str, int] | None:
    """Return what the owner said last of its newest cut; None when it said nothing yet in this term.

    A pid alone is no proof: where a node is process 1 of its container, every owner before it was, too.
    """
    floor, said = read_floor(directory), read_statistics(directory, pid=pid)
    if floor is None or said is None or said.log.term != floor.term:
        return None
    cut = said.flusher
    return {"number": cut.cut_number, "tick": cut.cut_tick, "crc32c": cut.cut_crc32c}


@command(
    NODE,
    argument("--tables", type=Path, required=True, help="where the tables are, one for each collection"),
    argument("--no-cut", action="store_false", dest="cut", help="take the cuts that are there, ask for none"),
    argument(
        "--every-cut", action="store_true", help="make each cut a version of its own: slower, and no state is hidden"
    ),
    examples=(
        "streamingnode ingest data --tables tables",
        "streamingnode ingest data --tables tables --no-cut",
        "streamingnode ingest data --tables tables --every-cut --json",
    ),
)
def ingest(output: Output, *, directory: Path, tables: Path, cut: bool, every_cut: bool) -> None:
    """Bring a node's cuts into Spark tables, each exactly once.

    Asks the node for a cut first; when another process has the node open, takes the cuts that are there.
    Can be interrupted and run again at any moment, also twice at once. Tables are Delta tables.
    """
    require(SPARK)
    import spark_sink
    from spark_sink.ingestion import check_place

    check_place(check_node(directory), tables)
    with Progress(output.stderr) as progress:
        progress.stage("starting Spark")
        spark = spark_sink.session()
        try:
            progress.stage("ingesting cuts")
            report = spark_sink.ingest(
                spark,
                node=directory,
                tables=tables,
                progress=lambda stage, done, total: progress.advance(done, stage, total=total),
                request_cut=cut,
                every_cut=every_cut,
            )
        finally:
            spark.stop()
    if report.node_was_running:
        output.line("a running process owns the node: took the cuts it has made")
    output.table(
        ("table", "version", "cuts taken", "rows added", "rows deleted", "path"),
        [
            (
                f"{table.table} (dropped)" if table.dropped else table.table,
                table.version,
                f"{table.first_cut}..{table.last_cut}" if table.first_cut else "none new",
                table.rows_added,
                table.rows_deleted,
                table.path,
            )
            for table in report.tables
        ],
    )
    output.line(f"at cut {report.cut}, tick {report.tick} ({format_tick(report.tick)}), in {report.seconds:.1f} s")
    output.document(report)
