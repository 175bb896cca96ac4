"""`streamingnode tail`: the messages of a collection as JSON lines."""

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from streamingnode.cli.command import Command, take
from streamingnode.cli.output import EXIT_OK, Output, format_tick, to_json
from wal.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from scanner.deliver_policy import DeliverPolicy
    from streamingnode.reading.read_message import ReadMessage

TYPES = ("insert", "delete", "txn", "create_collection", "drop_collection", "create_partition", "drop_partition")


@dataclass(frozen=True, slots=True)
class _Arguments:
    directory: Path
    collection: str
    start: str
    follow: bool
    limit: int | None
    types: str | None


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="the node's directory")
    parser.add_argument("collection", help="the collection to read")
    parser.add_argument(
        "--from",
        dest="start",
        default="start",
        metavar="start|end|ID|TICK",
        help="start: the earliest message kept (default); end: only what is new; a message id such as rocksmq/1a: that "
        "message and what follows; a time tick: what follows it",
    )
    until = parser.add_mutually_exclusive_group()
    until.add_argument("--until-now", action="store_false", dest="follow", help="end with what is there now (default)")
    until.add_argument("--follow", action="store_true", help="go on with new messages until interrupted")
    parser.add_argument("--limit", type=int, help="end after this many messages")
    parser.add_argument("--types", help=f"only these kinds, separated by commas: {', '.join(TYPES)}")
    parser.set_defaults(follow=False)


def _run(namespace: argparse.Namespace, output: Output) -> int:
    arguments = take(_Arguments, namespace)
    types = read_types(arguments.types)
    if arguments.limit is not None and arguments.limit < 1:
        raise InvalidArgument(f"--limit is {arguments.limit} — give 1 or more")
    from streamingnode.care.inspect import check_node
    from streamingnode.opening import run_async

    check_node(arguments.directory)
    run_async(partial(_tail, arguments, read_start(arguments.start), types, output))
    return EXIT_OK


def read_start(text: str) -> "DeliverPolicy":
    """Return where to start, as `--from` says it. Raises `InvalidArgument`."""
    from scanner.deliver_policy import DeliverPolicy
    from wal.position import parse_message_id

    match text:
        case "start":
            return DeliverPolicy.all()
        case "end":
            return DeliverPolicy.latest()
        case _ if text.isdecimal():
            return _policy(text, lambda: DeliverPolicy.start_after(int(text)))
        case _ if "/" in text:
            return _policy(text, lambda: DeliverPolicy.start_from(parse_message_id(text)))
        case _:
            raise InvalidArgument(
                f"--from {text!r} is no place in a log — give start, end, a message id or a time tick"
            )


def _policy(text: str, make: "Callable[[], DeliverPolicy]") -> "DeliverPolicy":
    try:
        return make()
    except InvalidArgument as error:
        step = "give --from start, or a message_id or tick that tail prints"
        raise InvalidArgument(f"--from {text!r}: {error.happened} — {step}") from error


def read_types(text: str | None) -> frozenset[str] | None:
    """Return the kinds of message to show, None for all. Raises `InvalidArgument`."""
    if text is None:
        return None
    types = frozenset(name.strip() for name in text.split(","))
    if unknown := sorted(types - set(TYPES)):
        raise InvalidArgument(f"--types does not know {', '.join(unknown)} — choose from {', '.join(TYPES)}")
    return types


async def _tail(arguments: _Arguments, start: "DeliverPolicy", types: frozenset[str] | None, output: Output) -> None:
    import anyio.to_thread

    from streamingnode.opening import open_node

    shown = 0
    async with open_node(arguments.directory) as node:
        until = None if arguments.follow else await node.consistent_tick()
        async with node.read(arguments.collection, start, until=until) as messages:
            async for message in messages:
                if types is not None and type_name(message) not in types:
                    continue
                # In a thread: a pipe nobody reads from must not hold up the node.
                await anyio.to_thread.run_sync(_write, message, output)
                shown += 1
                if shown == arguments.limit:
                    return


def _write(message: "ReadMessage", output: Output) -> None:
    output.write(f"{to_json(describe_message(message))}\n")
    output.flush()


def type_name(message: "ReadMessage") -> str:
    """Return the kind of a message as `--types` spells it."""
    return message.type.name.lower()


def describe_message(message: "ReadMessage") -> dict[str, object]:
    """Return a message as one JSON object: where and when it is, and its rows, keys or bodies."""
    place = {
        "type": type_name(message),
        "message_id": str(message.message_id),
        "tick": message.time_tick,
        "time": format_tick(message.time_tick),
        "num_rows": message.num_rows,
    }
    return place | _content(message)


def _content(message: "ReadMessage") -> dict[str, object]:
    if message.bodies:
        return {"bodies": [{"type": type_name(body), **_content(body)} for body in message.bodies]}
    rows = message.to_arrow()
    return {} if rows is None else {"rows": _python_rows(rows)}


def _python_rows(rows: "pa.Table") -> list[dict[str, object]]:
    """Return rows as Python has them; where it has not the year, times and dates are the integers that are stored."""
    import pyarrow as pa
    import pyarrow.types as pt

    from streamingnode.rows.schema import with_leaves

    def as_integer(kind: pa.DataType) -> pa.DataType:
        return pa.int64() if pt.is_timestamp(kind) else pa.int32() if pt.is_date32(kind) else kind

    try:
        return rows.to_pylist()
    except (OverflowError, ValueError):
        schema = [field.with_type(with_leaves(field.type, as_integer)) for field in rows.schema]
        return rows.cast(pa.schema(schema)).to_pylist()


COMMAND = Command(
    name="tail",
    summary="print the messages of a collection as JSON lines",
    details=(
        "One line for each message in tick order: an insert with its rows, a delete with its keys, a transaction (`txn`)\n"
        "with its bodies, schema changes. Ends with what is there now; --follow goes on. Opens the node, so exit code 4\n"
        "while another process has it open."
    ),
    examples=(
        "streamingnode tail data orders",
        "streamingnode tail data orders --limit 10 --types insert,txn",
        "streamingnode tail data orders --from rocksmq/1a",
        "streamingnode tail data orders --from end --follow",
        "streamingnode tail data orders --json | head -1",
    ),
    add_arguments=_add_arguments,
    run=_run,
)
