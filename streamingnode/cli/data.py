"""The commands for a node's data: `collection ls`, `tail` and `flush`."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

import streamingnode as sn
from streamingnode.cli.command import PROGRAM, Place, at_place, group, with_node
from streamingnode.cli.output import Output, format_count, format_tick, to_json
from wal.errors import InvalidArgument, Truncated
from wal.files import disk_errors_typed
from wal.timetick import add_ms, tick_given, time_to_tick

if TYPE_CHECKING:
    import pyarrow as pa

    from streamingnode.schema import AnyField


COLLECTION = group("collection", "List, create or drop the collections of a node.")


@COLLECTION.verb(
    "ls",
    "streamingnode collection ls data",
    "streamingnode collection ls data --count",
    "streamingnode collection ls data --json",
)
@at_place()
@click.option("--count", is_flag=True, help="Count the rows too, which reads all of them.")
def list_collections(output: Output, *, place: Place, count: bool) -> None:
    """List a node's collections: primary key, shards, partitions, columns.

    Works beside a process that has the node open. The rows of all collections are counted at one
    tick.
    """

    async def look(node: "sn.Node") -> "tuple[list[dict[str, object]], dict[str, int]]":
        if count:
            return await _counted(node)
        return list(map(describe_collection, _by_name(node))), {}

    described, at = with_node(place, look)
    output.listing("collections", described, directory=str(place), **at)


COUNT_TRIES = 3
"""Attempts at counting: when a partition is dropped meanwhile, its rows at the tick are gone, and
counting starts again at another tick.
"""


def _by_name(node: "sn.Node") -> "list[sn.Collection]":
    return sorted(node.collections(), key=lambda each: each.name)


async def _counted(node: "sn.Node") -> tuple[list[dict[str, object]], dict[str, int]]:
    """Return descriptions of the collections with their numbers of rows at one tick, and that
    tick.
    """
    tries = COUNT_TRIES
    while True:
        tries -= 1
        try:
            return await _counted_once(node)
        except Truncated:
            if not tries:
                raise


async def _counted_once(node: "sn.Node") -> tuple[list[dict[str, object]], dict[str, int]]:
    from interceptors.errors import CollectionNotFound

    collections = _by_name(node)
    tick = await node.consistent_tick()
    described: list[dict[str, object]] = []
    for each in collections:
        with suppress(CollectionNotFound):  # dropped meanwhile
            keys = await node.snapshot(each.name, columns=[each.primary_key], as_of=tick)
            described.append(describe_collection(each) | {"rows": keys.num_rows})
    return described, {"tick": tick}


def describe_collection(collection: "sn.Collection") -> dict[str, object]:
    """Return the description of a collection, for people and machines."""
    return {
        "name": collection.name,
        "id": collection.id,
        "primary_key": collection.primary_key,
        "shards": len(collection.vchannels),
        "partitions": collection.partitions,
        "columns": {field.name: str(field.type) for field in collection.schema},
    }


TYPES = (
    "insert",
    "delete",
    "txn",
    "create_collection",
    "drop_collection",
    "create_partition",
    "drop_partition",
)


@PROGRAM.verb(
    "tail",
    "streamingnode tail data orders",
    "streamingnode tail data orders --limit 10 --types insert,txn",
    "streamingnode tail data orders --from -5 -o table --follow",
    "streamingnode tail data orders --from @1h --until @30m -o arrow | cat > orders.arrows",
    "streamingnode tail --node tcp://127.0.0.1:7070 orders --from id:rocks/1a",
    "streamingnode tail data orders --json | head -1",
)
@at_place()
@click.argument("collection", help="The collection to read.")
@click.option(
    "--from",
    "start",
    default="earliest",
    metavar="POSITION",
    help="earliest: the first message kept (default); latest: only new messages; -N: the last N "
    "messages; @1h: an age (s, m, h or d); a time such as 2026-11-24T10:00:00Z; id:rocks/1a: "
    "from that message on; tick:123: after that tick.",
)
@click.option("--until", metavar="POSITION", help="End after a time, a tick or an age, as above.")
@click.option("--follow", is_flag=True, help="Continue with new messages until interrupted.")
@click.option("-n", "--limit", type=int, metavar="N", help="End after this many messages.")
@click.option(
    "-o",
    "--output",
    "form",
    type=click.Choice(["json", "table", "arrow"]),
    default="json",
    help="JSON lines (default), one line for each row, or an Arrow IPC stream of rows with _tick "
    "and _type.",
)
@click.option("--types", help=f"Only these kinds, separated by commas: {', '.join(TYPES)}.")
def tail(
    output: Output,
    *,
    place: Place,
    collection: str,
    start: str,
    until: str | None,
    follow: bool,
    limit: int | None,
    form: str,
    types: str | None,
) -> None:
    """Print the messages of a collection.

    One line of JSON for each message in tick order: an insert with its rows, a delete with its
    keys, a transaction (`txn`) with its bodies, schema changes. Ends with the newest message at the
    start; --follow continues, --until ends earlier.
    """
    kinds = set(TYPES if types is None else map(str.strip, types.split(",")))
    if unknown := sorted(kinds - set(TYPES)):
        raise InvalidArgument(
            f"--types does not know {', '.join(unknown)} — choose from {', '.join(TYPES)}"
        )
    if limit is not None and limit < 1:
        raise InvalidArgument(f"--limit is {limit} — give 1 or more")
    if output.as_json and form != "json":
        raise InvalidArgument(f"--json and -o {form} are two forms — leave one out")
    last = int(start[1:]) if start[:1] == "-" and start[1:].isdecimal() else 0
    policy = None if last else start_policy(start)
    with _position_in(until or "", "--until"):
        end = None if until is None else _tick_at(until)
    import anyio.to_thread

    async def print_messages(node: "sn.Node") -> None:
        printed = 0
        upto = await node.consistent_tick() if end is None else end
        begin = (
            await _before_last(node, collection, last, upto, kinds) if policy is None else policy
        )
        reader = node.read(collection, begin, until=None if follow and end is None else upto)
        with _writing(form, output, node.collection(collection).schema) as write:
            async with reader as messages:
                async for message in messages:
                    if _kind(message) in kinds:
                        # In a thread: a pipe without a reader must not block the node.
                        await anyio.to_thread.run_sync(write, message, abandon_on_cancel=True)
                        printed += 1
                    if printed == limit:
                        return

    # lasting: the reader of the output may be slow or never read
    with_node(place, print_messages, lasting=True)


def start_policy(text: str, option: str = "--from") -> "sn.DeliverPolicy":
    """Return the deliver policy of a `--from` value. Raises `InvalidArgument`."""
    from wal.position import parse_message_id

    if text in {"earliest", "start"}:
        return sn.DeliverPolicy.all()
    if text in {"latest", "end"}:
        return sn.DeliverPolicy.latest()
    with _position_in(text, option):
        if "/" in text:
            return sn.DeliverPolicy.start_from(parse_message_id(text.removeprefix("id:")))
        is_tick = text.removeprefix("tick:").isdecimal()
        return sn.DeliverPolicy.start_after(max(0, _tick_at(text) - (not is_tick)))


@contextmanager
def _position_in(text: str, option: str) -> Iterator[None]:
    """Convert errors about a position to `InvalidArgument` with the valid forms as the next
    step.
    """
    begins, ids = ("", "") if option == "--until" else ("earliest, latest, ", "message_id or ")
    step = f"give {begins}@1h, a time such as 2026-11-24T10:00:00Z, or a {ids}tick that tail prints"
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(f"{option} {text!r}: {error.happened} — {step}") from error
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(f"{option} {text!r}: it is not a position — {step}") from error


_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def _tick_at(text: str) -> int:
    """Return a tick, or the first tick of a time or an age. Raises `InvalidArgument`, `ValueError`,
    `OverflowError`.
    """
    if (number := text.removeprefix("tick:")).isdecimal():
        return tick_given("the tick", int(number))
    if text[:1] == "@" and text[1:-1].isdecimal() and text[-1] in _UNITS_S:
        return time_to_tick(
            datetime.now(UTC) - timedelta(seconds=int(text[1:-1]) * _UNITS_S[text[-1]])
        )
    moment = datetime.fromisoformat(text.removeprefix("@"))
    if moment.tzinfo is None:
        raise InvalidArgument(
            "the time has no zone: add Z for UTC, or an offset as +01:00 — give a time with a zone"
        )
    return time_to_tick(moment)


BACK_MS = 1_000
BACK_FACTOR = 8
"""The last messages are searched from this far back, and from this factor further back each time
that too few are found.
"""


async def _before_last(
    node: "sn.Node", collection: str, count: int, upto: int, kinds: set[str]
) -> "sn.DeliverPolicy":
    """Return where the last `count` messages up to a tick begin. The log is read forward only, so
    each attempt starts further back.
    """
    back_ms = BACK_MS
    while True:
        start = max(0, add_ms(upto, -back_ms))
        found = deque["sn.MessageId"](maxlen=count)
        try:
            policy = sn.DeliverPolicy.start_after(start) if start else sn.DeliverPolicy.all()
            async with node.read(collection, policy, until=upto) as messages:
                async for message in messages:
                    if _kind(message) in kinds:
                        found.append(message.message_id)
        except Truncated:
            if not start:
                raise
            back_ms = upto  # before the beginning of the log
            continue
        if len(found) == count or not start:
            return (
                sn.DeliverPolicy.start_from(found[0])
                if found
                else sn.DeliverPolicy.start_after(upto)
            )
        back_ms *= BACK_FACTOR


@contextmanager
def _writing(
    form: str, output: Output, columns: "pa.Schema"
) -> "Iterator[Callable[[sn.ReadMessage], None]]":
    """Yield a function that prints one message and blocks. Arrow output has rows and keys; columns
    that are not in a key are null.
    """

    def write_text(message: "sn.ReadMessage") -> None:
        time = format_tick(message.time_tick)
        if form == "json":
            document = {
                "type": _kind(message),
                "message_id": str(message.message_id),
                "tick": message.time_tick,
                "time": time,
                "num_rows": message.num_rows,
                **_content(message),
            }
            output.write(f"{to_json(document)}\n")
        else:
            at = f"{time}  {message.message_id!s:<12}"
            for part in message.bodies or (message,):
                for row in _content(part).get("rows") or [None]:
                    output.line(
                        f"{at}  {_kind(part):<17}  {'' if row is None else to_json(row)}".rstrip()
                    )
        output.flush()

    if form != "arrow":
        yield write_text
        return
    import pyarrow as pa

    system: list[AnyField] = [pa.field("_tick", pa.int64()), pa.field("_type", pa.string())]
    schema = pa.schema([*system, *(column.with_nullable(True) for column in columns)])

    def write(message: "sn.ReadMessage") -> None:
        for part in message.bodies or (message,):
            rows = part.to_arrow()
            if rows is not None:
                count = rows.num_rows
                there = dict(zip(rows.column_names, rows.columns, strict=True))
                own = pa.table(
                    {"_tick": [message.time_tick] * count, "_type": [_kind(part)] * count, **there}
                )
                shaped = pa.concat_tables([schema.empty_table(), own], promote_options="default")
                # otherwise the empty table would be a batch too
                stream.write_table(shaped.combine_chunks())
        output.flush()

    with disk_errors_typed("the output"):
        stream = pa.ipc.new_stream(output.binary(), schema)
        yield write
        stream.close()  # not when interrupted: a thread may hold the output


def _kind(message: "sn.ReadMessage") -> str:
    return message.type.name.lower()


def _content(message: "sn.ReadMessage") -> dict[str, Any]:
    if message.bodies:
        return {"bodies": [{"type": _kind(body), **_content(body)} for body in message.bodies]}
    rows = message.to_arrow()
    return {} if rows is None else {"rows": _python_rows(rows)}


def _python_rows(rows: "pa.Table") -> list[dict[str, object]]:
    """Return rows as Python values. If a year is beyond Python's range, all times and dates are
    returned as the stored integers.
    """
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


@PROGRAM.verb("flush", "streamingnode flush data", "streamingnode flush data --json")
@at_place()
def flush(output: Output, *, place: Place) -> None:
    """Make a cut: everything acknowledged goes to files.

    Prints the cut's number, its tick and the segments it sealed, or that there is nothing new. Exit
    code 4 when another process has the node open and takes no clients: it makes cuts by itself.
    """

    async def cut_it(node: "sn.Node") -> "tuple[int, sn.FlushResult]":
        return (await node.statistics()).flusher.cut_number, await node.flush()

    before, cut = with_node(place, cut_it)
    made = cut.number > before
    if not cut.number:
        output.line("nothing to cut: the node has no rows yet")
    else:
        rows = format_count(sum(segment.rows for segment in cut.segments), "row")
        news = (
            f"{format_count(len(cut.segments), 'segment')}, {rows}" if made else "nothing new since"
        )
        output.line(f"cut {cut.number} at tick {cut.tick} ({format_tick(cut.tick)}): {news}")
    # `spark_sink.cut_request` reads the document: an ingest asks for its cut by this command.
    output.document(
        {
            "made": made,
            "number": cut.number,
            "tick": cut.tick,
            "crc32c": cut.crc32c,
            "segments": cut.segments,
        }
    )
