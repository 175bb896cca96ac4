"""`streamingnode info`: what a node directory holds and who has it open. Changes nothing, also beside a running node."""

import argparse
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from streamingnode.cli.command import Command, take
from streamingnode.cli.output import EXIT_OK, Output, format_bytes, format_fields, format_tick
from streamingnode.cli.statistics_lines import statistics_fields
from wal.errors import StorageFailed, StreamingNodeError
from wal.timetick import AHEAD_MS_MAX, physical_ms

if TYPE_CHECKING:
    from streamingnode.inspection.node_files import NodeFiles
    from streamingnode.inspection.node_records import NodeRecords


@dataclass(frozen=True, slots=True)
class _Arguments:
    directory: Path


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="the node's directory")


def _run(namespace: argparse.Namespace, output: Output) -> int:
    arguments = take(_Arguments, namespace)
    from streamingnode.inspection.node_files import read_node_files
    from streamingnode.inspection.node_records import read_node_records
    from streamingnode.statistics import read_statistics

    files = read_node_files(arguments.directory)
    try:
        records, unread = read_node_records(arguments.directory), ""
    except StreamingNodeError as error:
        if files.holder is None and not isinstance(error, StorageFailed):
            raise
        # Beside a running owner files go away between two looks, and a disk may be read-only; the rest is worth showing.
        records, unread = None, str(error)
    import msgspec

    statistics = read_statistics(arguments.directory, pid=files.holder.pid) if files.holder else None
    document = describe(files, records) | {"statistics": msgspec.to_builtins(statistics)}
    _print(document, files, records, unread, output)
    if statistics is not None:
        output.line()
        for line in format_fields(statistics_fields(statistics)):
            output.line(line)
    output.document(document)
    return EXIT_OK


def describe(files: "NodeFiles", records: "NodeRecords | None") -> dict[str, object]:
    """Return everything `info` knows, as machines read it."""
    import msgspec

    from streamingnode.inspection.collection_summary import held_files

    newest = files.cuts.read(files.cuts.newest) if files.cuts.numbers else None
    names = {number: name for name, number in records.survey.log_ids.items()} if records else {}
    return {
        "directory": str(files.directory),
        "node_id": files.node_id,
        "open": files.holder is not None,
        "pid": files.holder.pid if files.holder else None,
        "term": files.term,
        "tick": files.tick,
        "time": format_tick(files.tick),
        "ahead_s": _ahead_s(files.tick),
        "positions": {names.get(log_id, str(log_id)): position for log_id, position in files.positions.items()},
        "cuts": {
            "first": files.cuts.first,
            "newest": files.cuts.newest,
            "tick": newest.tick if newest else 0,
            "time": format_tick(newest.tick if newest else 0),
        },
        "checkpoints": [
            {"pchannel": name, "cut": mark.cut_number, "tick": mark.tick, "position": mark.position}
            for name, mark in (records.checkpoints if records else {}).items()
        ],
        "readers": [
            {"reader": name, "pchannel": at.pchannel, "position": at.position, "tick": at.tick}
            for name, at in (records.readers if records else {}).items()
        ],
        "leases": [
            {"table": lease.table, "collection_id": lease.collection_id, "cut": lease.cut, "tick": lease.tick}
            for lease in files.leases
        ],
        "files": [msgspec.to_builtins(held) for held in held_files(files.cuts)],
        "disk_bytes": files.disk_bytes,
    }


def _print(
    document: dict[str, object], files: "NodeFiles", records: "NodeRecords | None", unread: str, output: Output
) -> None:
    holder = "nobody" if files.holder is None else f"process {files.holder.pid or '?'}"
    positions = document["positions"]
    assert isinstance(positions, dict)
    fields = {
        "directory": files.directory,
        "node id": files.node_id,
        "open in": holder,
        "term": files.term,
        "last tick": f"{files.tick} ({format_tick(files.tick)})",
        **_clock(files.tick),
        "last positions": ", ".join(f"{name} {position}" for name, position in positions.items()) or "none",
        "cuts": _cuts(files),
        "disk": ", ".join(f"{part} {format_bytes(size)}" for part, size in files.disk_bytes.items() if size),
    }
    for line in format_fields(fields):
        output.line(line)
    _print_held(files, output)
    if records is None:
        output.note(f"checkpoints and readers cannot be read: {unread}")
        return
    _print_marks(files, records, output)


def _ahead_s(tick: int) -> int:
    """Return how far a tick is ahead of this machine's clock, 0 for as little as clocks are corrected by."""
    ahead_ms = physical_ms(tick) - time.time_ns() // 1_000_000
    return ahead_ms // 1000 if ahead_ms > AHEAD_MS_MAX else 0


def _clock(tick: int) -> dict[str, object]:
    ahead_s = _ahead_s(tick)
    if not ahead_s:
        return {}
    ahead = timedelta(seconds=ahead_s)
    return {"clock": f"ticks are {ahead} ahead of it until {format_tick(tick)}; ages of cuts do not go by them"}


def _cuts(files: "NodeFiles") -> str:
    if not files.cuts.numbers:
        return "none"
    tick = files.cuts.read(files.cuts.newest).tick
    return f"{files.cuts.first} to {files.cuts.newest}, the newest at {tick} ({format_tick(tick)})"


def _print_marks(files: "NodeFiles", records: "NodeRecords", output: Output) -> None:
    rows: list[tuple[object, ...]] = [
        ("checkpoint", name, f"cut {mark.cut_number}", mark.position, format_tick(mark.tick))
        for name, mark in records.checkpoints.items()
    ]
    rows += [("reader", name, at.pchannel, at.position, format_tick(at.tick)) for name, at in records.readers.items()]
    rows += [("lease", lease.table, f"cut {lease.cut}", "", format_tick(lease.tick)) for lease in files.leases]
    if rows:
        output.line()
        output.table(("holds", "name", "at", "position", "time"), rows)


def _print_held(files: "NodeFiles", output: Output) -> None:
    from streamingnode.inspection.collection_summary import held_files

    held = held_files(files.cuts)
    if held:
        output.line()
        output.table(
            ("collection", "files", "size", "held by"),
            [
                (each.name or f"{each.id} (dropped)", each.files, format_bytes(each.bytes), "; ".join(each.held_by))
                for each in held
            ],
        )


COMMAND = Command(
    name="info",
    summary="show a node's identity, owner, ticks, cuts, readers and disk use",
    details=(
        "Reads files and changes nothing, so it also works beside a running node; then it shows too what the node\n"
        "counted and measured until a few seconds ago. Times are UTC."
    ),
    examples=("streamingnode info data", "streamingnode info data --json"),
    add_arguments=_add_arguments,
    run=_run,
)
