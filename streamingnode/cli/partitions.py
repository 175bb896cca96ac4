"""`streamingnode partitions`: the partitions of a collection, and making and dropping them."""

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from interceptors.errors import CollectionNotFound
from streamingnode.cli.command import Command, take
from streamingnode.cli.output import EXIT_OK, Output
from wal.errors import AlreadyOwned, InvalidArgument

Action = Literal["list", "create", "drop"]


@dataclass(frozen=True, slots=True)
class _Arguments:
    action: Action
    directory: Path
    collection: str
    partition: str | None


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["list", "create", "drop"], help="what to do")
    parser.add_argument("directory", type=Path, help="the node's directory")
    parser.add_argument("collection", help="the collection")
    parser.add_argument("partition", nargs="?", help="the partition to create or drop, with all its rows")


def _run(namespace: argparse.Namespace, output: Output) -> int:
    arguments = take(_Arguments, namespace)
    if (arguments.partition is None) != (arguments.action == "list"):
        why = _NAMES[arguments.action]
        raise InvalidArgument(f"{arguments.action}: {why}")
    from streamingnode.care.inspect import check_node
    from streamingnode.opening import run_async

    check_node(arguments.directory)
    as_of_cut = 0
    try:
        names = run_async(partial(_apply, arguments))
    except AlreadyOwned as error:
        if arguments.action != "list":
            raise
        names, as_of_cut = _at_newest_cut(arguments)
        output.note(f"process {error.pid or '?'} has the node open: this is its state at cut {as_of_cut}")
    for name in names:
        output.line(name)
    output.document({"collection": arguments.collection, "partitions": names, "as_of_cut": as_of_cut})
    return EXIT_OK


_NAMES: dict[Action, str] = {
    "list": "all partitions are listed — leave out the last name",
    "create": "which partition? — add its name",
    "drop": "which partition? — add its name",
}


async def _apply(arguments: _Arguments) -> tuple[str, ...]:
    """Do what is asked for and return the partitions there are then."""
    from streamingnode.opening import open_node

    async with open_node(arguments.directory) as node:
        if arguments.action == "create" and arguments.partition is not None:
            await node.create_partition(arguments.collection, arguments.partition)
        elif arguments.action == "drop" and arguments.partition is not None:
            await node.drop_partition(arguments.collection, arguments.partition)
        return node.collection(arguments.collection).partitions


def _at_newest_cut(arguments: _Arguments) -> tuple[tuple[str, ...], int]:
    from flusher.cut_log import CutLog
    from streamingnode.care.inspect import summaries_at_newest

    cuts = CutLog(arguments.directory)
    for summary in summaries_at_newest(cuts).values():
        if summary.name == arguments.collection:
            return summary.partitions, cuts.newest
    raise CollectionNotFound(
        f"no collection is named {arguments.collection!r} at cut {cuts.newest} — wait for the next cut, or run ls"
    )


COMMAND = Command(
    name="partitions",
    summary="list, create or drop the partitions of a collection",
    details=(
        "Prints the partitions there are afterwards. Dropping one drops its rows, at once and for good, and ends open\n"
        "transactions on the collection; `_default` cannot be dropped. When another process has the node open, `list`\n"
        "shows the state at its newest cut, and the others end with exit code 4."
    ),
    examples=(
        "streamingnode partitions list data orders",
        "streamingnode partitions create data orders eu",
        "streamingnode partitions drop data orders eu --json",
    ),
    add_arguments=_add_arguments,
    run=_run,
)
