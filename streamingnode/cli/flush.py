"""`streamingnode flush`: a cut, so that everything acknowledged is in files. Ingest jobs call it for the same."""

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from streamingnode.cli.command import Command, take
from streamingnode.cli.output import EXIT_OK, Output, format_bytes, format_count, format_tick
from wal.errors import AlreadyOwned

if TYPE_CHECKING:
    from streamingnode.flush import FlushResult


@dataclass(frozen=True, slots=True)
class _Arguments:
    directory: Path


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="the node's directory")


def _run(namespace: argparse.Namespace, output: Output) -> int:
    arguments = take(_Arguments, namespace)
    from flusher.cut_log import CutLog
    from streamingnode.care.inspect import check_node
    from streamingnode.opening import run_async

    before = CutLog(check_node(arguments.directory)).newest
    try:
        cut = run_async(partial(_flush, arguments.directory))
    except AlreadyOwned as owned:
        owned.newest_cut = _newest_cut(arguments.directory, owned.pid)
        raise
    _print(cut, output, made=cut.number > before)
    output.document(
        {
            "made": cut.number > before,
            "number": cut.number,
            "tick": cut.tick,
            "crc32c": cut.crc32c,
            "segments": cut.segments,
        }
    )
    return EXIT_OK


async def _flush(directory: Path) -> "FlushResult":
    from streamingnode.opening import open_node

    async with open_node(directory) as node:
        return await node.flush()


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


def _print(cut: "FlushResult", output: Output, *, made: bool) -> None:
    if not made:
        newest = f"the newest cut is {cut.number}, at tick {cut.tick} ({format_tick(cut.tick)})"
        output.line(f"nothing new since the last cut: {newest if cut.number else 'the node has made none'}")
        return
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


COMMAND = Command(
    name="flush",
    summary="make a cut: everything acknowledged goes to files",
    details=(
        "Prints the cut's number, its tick and the segments it sealed; says so when there is nothing new.\n"
        "Exit code 4 when another process has the node open: it makes cuts by itself."
    ),
    examples=("streamingnode flush data", "streamingnode flush data --json"),
    add_arguments=_add_arguments,
    run=_run,
)
