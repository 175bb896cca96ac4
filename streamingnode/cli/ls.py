"""`streamingnode ls`: the collections of a node and how far each is."""

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from streamingnode.cli.command import Command, take
from streamingnode.cli.output import EXIT_OK, Output, format_tick
from wal.errors import AlreadyOwned

if TYPE_CHECKING:
    from streamingnode.care.inspect import CollectionSummary
    from streamingnode.node import Node
    from streamingnode.reading.read_message import ReadMessage


@dataclass(frozen=True, slots=True)
class _Arguments:
    directory: Path
    count: bool


@dataclass(frozen=True, slots=True)
class _Listing:
    """Collections by name; `as_of_cut` is 0 when they are as of now. `rows` are current rows by name, if counted."""

    collections: Sequence["CollectionSummary"]
    as_of_cut: int
    rows: dict[str, int]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="the node's directory")
    parser.add_argument("--count", action="store_true", help="count the current rows too, which reads all of them")


def _run(namespace: argparse.Namespace, output: Output) -> int:
    arguments = take(_Arguments, namespace)
    from streamingnode.care.inspect import check_node
    from streamingnode.opening import run_async

    check_node(arguments.directory)
    try:
        listing = run_async(partial(_list_now, arguments))
    except AlreadyOwned as error:
        if arguments.count:
            raise
        listing = _list_at_cut(arguments.directory)
        output.note(f"process {error.pid or '?'} has the node open: this is its state at cut {listing.as_of_cut}")
    _print(listing, output)
    output.document(
        {
            "directory": str(arguments.directory),
            "as_of_cut": listing.as_of_cut,
            "collections": [describe(summary, listing.rows) for summary in listing.collections],
        }
    )
    return EXIT_OK


def _list_at_cut(directory: Path) -> _Listing:
    from flusher.cut_log import CutLog
    from streamingnode.care.inspect import summaries_at_newest

    cuts = CutLog(directory)
    return _Listing(_by_name(summaries_at_newest(cuts).values()), cuts.newest, {})


async def _list_now(arguments: _Arguments) -> _Listing:
    import anyio.to_thread

    from flusher.cut_log import CutLog
    from streamingnode.care.inspect import summaries_at_newest
    from streamingnode.opening import open_node

    async with open_node(arguments.directory) as node:
        cuts = await anyio.to_thread.run_sync(CutLog, arguments.directory)
        at_cut = await anyio.to_thread.run_sync(summaries_at_newest, cuts)
        after = cuts.read(cuts.newest).tick if cuts.numbers else 0
        summaries = [await _bring_up_to_date(node, name, at_cut, after) for name in _names(node)]
        rows = {s.name: (await node.snapshot(s.name)).num_rows for s in summaries} if arguments.count else {}
    return _Listing(_by_name(summaries), 0, rows)


def _names(node: "Node") -> list[str]:
    return [collection.name for collection in node.collections()]


async def _bring_up_to_date(
    node: "Node", name: str, at_cut: "dict[int, CollectionSummary]", after: int
) -> "CollectionSummary":
    """Return a collection's summary now: that of the newest cut, and what the log has after it."""
    from scanner.deliver_policy import DeliverPolicy
    from streamingnode.care.inspect import CollectionSummary

    collection = node.collection(name)
    summary = at_cut.get(collection.id) or CollectionSummary(
        id=collection.id,
        name=name,
        primary_key=collection.primary_key,
        columns={field.name: str(field.type) for field in collection.schema},
        partitions=collection.partitions,
        next_offsets=dict.fromkeys(collection.vchannels, 0),
        last_tick=0,
    )
    summary = replace(summary, partitions=collection.partitions)  # the cut may be older than some of them
    rows: Counter[str] = Counter()
    tick = 0
    policy = DeliverPolicy.start_after(after) if after else DeliverPolicy.all()
    async with node.read(name, policy, until=await node.consistent_tick()) as messages:
        async for message in messages:
            rows.update(_inserted(message))
            tick = message.time_tick if message.num_rows else tick
    return summary.counted(rows, tick)


def _inserted(message: "ReadMessage") -> dict[str, int]:
    """Return how many rows a message inserted on each vchannel."""
    counts: Counter[str] = Counter()
    for part in message.bodies or (message,):
        counts.update({vchannel: count for vchannel, (_, count) in part.row_offsets.items()})
    return counts


def _by_name(summaries: "Iterable[CollectionSummary]") -> "list[CollectionSummary]":
    return sorted(summaries, key=lambda summary: summary.name)


def describe(summary: "CollectionSummary", rows: dict[str, int]) -> dict[str, object]:
    """Return one collection as machines read it; `rows` only when they were counted."""
    counted = {"rows": rows[summary.name]} if summary.name in rows else {}
    return {
        "name": summary.name,
        "id": summary.id,
        "primary_key": summary.primary_key,
        "columns": summary.columns,
        "inserted": summary.inserted,
        **counted,
        "shards": [{"vchannel": name, "next_offset": offset} for name, offset in summary.next_offsets.items()],
        "partitions": summary.partitions,
        "last_tick": summary.last_tick,
        "last_time": format_tick(summary.last_tick),
    }


def _print(listing: _Listing, output: Output) -> None:
    if not listing.collections:
        output.line("no collections")
        return
    counted = ("rows",) if listing.rows else ()
    output.table(
        (
            "collection",
            "key",
            *counted,
            "ever inserted",
            "shards",
            "next offsets",
            "partitions",
            "last tick",
            "last time",
        ),
        [
            (
                s.name,
                s.primary_key,
                *((listing.rows[s.name],) if listing.rows else ()),
                s.inserted,
                len(s.next_offsets),
                ",".join(str(offset) for offset in s.next_offsets.values()),
                ",".join(s.partitions),
                s.last_tick or "-",
                format_tick(s.last_tick),
            )
            for s in listing.collections
        ],
    )


COMMAND = Command(
    name="ls",
    summary="list a node's collections: rows ever inserted, shards, offsets, last tick",
    details=(
        "Every upsert is one more row ever inserted, and a delete takes none away; --count adds the rows there are now,\n"
        "which reads all of them. When another process has the node open, shows the state at its newest cut, and --count\n"
        "ends with exit code 4. Times are UTC."
    ),
    examples=("streamingnode ls data", "streamingnode ls data --count", "streamingnode ls data --json"),
    add_arguments=_add_arguments,
    run=_run,
)
