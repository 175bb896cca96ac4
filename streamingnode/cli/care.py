"""The verbs for a node's directory: `info`, `verify`, `backup`, `restore`, `export` and `doctor`."""

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from streamingnode.cli.command import SPARK, NodeUrl, Place, command, operand, option, require, with_node
from streamingnode.cli.output import EXIT_FAILED, EXIT_OK, Output, format_bytes, format_count, format_tick
from streamingnode.progress import Progress
from wal.errors import Corrupt, InvalidArgument, StorageFailed, StreamingNodeError
from wal.timetick import AHEAD_MS_MAX, physical_ms

if TYPE_CHECKING:
    from streamingnode.care.findings import OnStep, Report
    from streamingnode.care.inspect import BackupRecord
    from streamingnode.node import Node
    from wal.rocksmq.topic import Topic


def show_steps(progress: Progress, *, bytes_per_s: float = math.inf) -> "OnStep":
    """Return what tells `progress` how many bytes of each part of a node are read, and sleeps so that no more are."""
    reached: dict[str, int] = {}

    def on_step(part: str, read_bytes: int) -> None:
        if part not in reached:
            reached[part] = 0
            progress.stage(part)
        reached[part] += read_bytes
        progress.advance(reached[part], format_bytes(reached[part]))
        time.sleep(read_bytes / bytes_per_s)

    return on_step


NODE_OR_BACKUP = operand("the node's directory, or a backup of one")
EMPTY_TARGET = "a new directory, or an empty one"


@command(
    "streamingnode verify data",
    "streamingnode verify data --tables tables",
    "streamingnode verify data --pace 10",
    "streamingnode verify backup --json",
)
def verify(
    output: Output,
    *,
    directory: Path = NODE_OR_BACKUP,
    tables: Path | None = option("also check the tables in this directory against the node's cuts"),
    pace: float | None = option("read at most so many MiB each second", metavar="MIB"),
) -> int:
    """Read everything a node has and check it against every checksum, count and order.

    Looks at the floor file, every entry of the log, the state map, every cut and file, leases and left-overs; with
    --tables also at the tables: each cut taken once, none the node never made, as many rows as the cuts brought.
    Changes nothing. A running node checks itself: `await node.verify()`. With --pace other programs keep most of the
    disk, as for cron.
    Exit code 0 when all is sound, 1 for warnings by which nothing is lost, 3 for damage.
    """
    if tables is not None:
        require(SPARK)
    if pace is not None and not pace > 0:
        raise InvalidArgument(f"at --pace {pace:g} nothing is read — give a number of MiB for each second")
    from streamingnode.care.findings import Severity
    from streamingnode.care.verify import verify_directory

    with Progress(output.stderr) as progress:
        on_step = show_steps(progress, bytes_per_s=math.inf if pace is None else pace * (1 << 20))
        report = verify_directory(directory, tables=tables, on_step=on_step)
    _print_findings(report, output)
    checked = ", ".join(f"{number} {what}" for what, number in report.counts.items())
    output.line(f"checked {format_bytes(report.bytes)}: {checked or 'nothing'}")
    damage = len(report.damages)
    verdict = "all is as it was written" if not damage else f"{format_count(damage, 'place')} damaged"
    output.result(
        f"{verdict}, {format_count(len(report.findings) - damage, 'warning')}",
        {
            "verdict": report.worst or "sound",
            "bytes": report.bytes,
            "checked": report.counts,
            "findings": report.findings,
        },
    )
    return {None: EXIT_OK, Severity.WARNING: EXIT_FAILED, Severity.DAMAGE: Corrupt.exit_code}[report.worst]


def _print_findings(report: "Report", output: Output) -> None:
    """Print what was found for people, the worst of it last, where eyes rest."""
    for finding in sorted(report.findings, key=lambda finding: finding.severity.value, reverse=True):
        output.line(f"{finding.severity.value}: {finding.place}: {finding.detail}")
        output.line(f"        {finding.next_step}")


@command("streamingnode backup data backups/monday", "streamingnode backup data backups/monday --json")
def backup(output: Output, *, place: Place, target: Path = operand(EMPTY_TARGET)) -> None:
    """Copy a node into a new directory and verify the copy.

    The copy is read back and checked as `verify` does before it gets its name. A running node makes its backup itself,
    on the machine where it runs. A backup is not opened as a node: `restore` makes one of it. Exit code 3 when the node
    is damaged, 4 when a process has it open and takes no clients.
    """
    from streamingnode.care.backup import backup_directory
    from streamingnode.care.inspect import check_node, holder

    if isinstance(place, Path) and holder(check_node(place)) is None:
        with Progress(output.stderr) as progress:
            record = backup_directory(place, target, on_step=show_steps(progress))
    else:
        record = with_node(place, lambda node: node.backup(target))
    _print_made("backup of", record, target, output)


def _print_made(what: str, record: "BackupRecord", path: Path, output: Output) -> None:
    size = format_bytes(sum(file.bytes for file in record.files))
    output.result(
        f"{what} node {record.node_id} up to tick {record.tick} ({format_tick(record.tick)}), cut {record.cut}: "
        f"{format_count(len(record.files), 'file')}, {size}, verified, in {path}",
        record,
    )


@command(
    "streamingnode restore backups/monday data",
    "streamingnode restore backups/monday data --json",
    "streamingnode restore backups/monday data --file segments/1/3.parquet",
)
def restore(
    output: Output,
    *,
    backup: Path = operand("a directory that `backup` made"),
    target: Path = operand(f"{EMPTY_TARGET}; with --file the node's"),
    file: str | None = option("put back this segment, delete file or manifest only", metavar="PATH"),
) -> None:
    """Make a node directory out of a backup and verify it.

    Every file is compared with what the backup says, and the node is read to its end, before it gets its name.
    It keeps the node's id and begins a new row of terms. A table that took cuts made after the backup is refused
    by `ingest` (TABLE_AHEAD) and named by `verify --tables`. Exit code 3 when the backup is damaged.
    With --file one file of a cut comes back into a closed node, when its checksum is the one that the node knows:
    from the manifest, or for a manifest from the one after it or the log. Of several manifests the newest first.
    """
    from streamingnode.care.backup import restore_directory, restore_file

    if file is not None:
        put_back = restore_file(backup, target, file)
        output.result(f"{put_back.path}: {format_bytes(put_back.bytes)}, as the node wrote it", put_back)
        return
    with Progress(output.stderr) as progress:
        record = restore_directory(backup, target, on_step=show_steps(progress))
    _print_made("restored", record, target, output)


@command(
    "streamingnode export data rows",
    "streamingnode export data rows --salvage",
    "streamingnode export backups/monday rows --json",
)
def export(
    output: Output,
    *,
    directory: Path = NODE_OR_BACKUP,
    out: Path = operand(EMPTY_TARGET),
    salvage: bool = option("go on past damage, and name what is missing"),
) -> int:
    """Write the rows of each collection as Parquet, of a damaged node what can be read.

    The state at the newest tick there is: the files of the cuts, then the log behind the newest, deletes applied.
    Dropped collections are left out. The node must be closed, and its directory stays as it is. Without --salvage
    the first damage is the error and nothing is written; with it, the rest is written and what is missing is named,
    by file or positions of the log: rows whose delete is missing come back. Exit code 1 when something is missing.
    """
    from streamingnode.care.export import export_directory

    with Progress(output.stderr) as progress:
        result = export_directory(
            directory, out, salvage=salvage, on_collection=lambda name: progress.stage(f"collection {name}")
        )
    output.table(["collection", "rows", "file"], [[file.collection, file.rows, file.path] for file in result.files])
    for each in result.missing:
        rows = "" if each.rows is None else f", {format_count(each.rows, 'row')}"
        of = f" of collection {each.collection}" if each.collection else ""
        output.line(f"missing: {each.place}{of}{rows}: {each.reason}")
    output.result(f"node {result.node_id} as of tick {result.tick} ({format_tick(result.tick)})", result)
    return EXIT_FAILED if result.missing else EXIT_OK


@command("streamingnode doctor", "streamingnode doctor data", "streamingnode doctor data --json")
def doctor(
    output: Output,
    *,
    directory: Path | None = operand("a node's directory, or where one shall be (default: only the machine)"),
) -> int:
    """Check machine, installation and directory; say what to do.

    Looks at Python, packages, Java, disk space, the time an fsync takes (measured), and file limits,
    and at the directory if one is given. Writes one temporary file and removes it.
    Exit code 1 when a node cannot be opened; a warning is no failure.
    """
    from streamingnode.care.findings import Report
    from streamingnode.care.health import examine

    report = Report()
    facts = examine(directory, report)
    output.fields(facts)
    _print_findings(report, output)
    output.document({"healthy": not report.damages, "facts": facts, "findings": report.findings})
    return EXIT_FAILED if report.damages else EXIT_OK


@command("streamingnode info data", "streamingnode info data --json")
def info(output: Output, *, place: Place) -> None:
    """Show a node's identity, owner, ticks, cuts, readers, leases and topics.

    Reads files and changes nothing, so it also works beside a running node; then it shows too what the node
    counted and measured until a few seconds ago. At an address it asks for that alone. Times are UTC.
    """
    if isinstance(place, NodeUrl):
        output.show(with_node(place, _asked))
        return
    from streamingnode.care.inspect import check_node, holder
    from streamingnode.statistics import read_statistics
    from wal.files import disk_errors_typed

    with disk_errors_typed(place):
        pid = holder(check_node(place))
        document = _describe(place, pid, output)
        statistics = None if pid is None else read_statistics(place, pid=pid or None)
    output.show(document | {"statistics": statistics})


async def _asked(node: "Node") -> dict[str, object]:
    return {"directory": node.path, "node_id": node.node_id, "statistics": await node.statistics()}


def _describe(directory: Path, pid: int | None, output: Output) -> dict[str, object]:
    """Return what the files of a node tell, and note why there are no checkpoints and readers."""
    from flusher.cuts import Lease, lease_files
    from flusher.directory import CutLog
    from streamingnode.care.database import PCHANNEL, NodeRecords, read_node_records
    from streamingnode.care.inspect import cut_holders, floor_of
    from wal.runtime import unix_ms

    def when(tick: int) -> dict[str, object]:
        return {"tick": tick, "time": format_tick(tick)}

    floor, cuts, records = floor_of(directory), CutLog(directory), NodeRecords()
    try:
        records = read_node_records(directory)[1]
    except StreamingNodeError as error:
        if pid is None and not isinstance(error, StorageFailed):
            raise
        # Beside a running owner files go away between two looks, and a disk may be read-only; the rest is worth showing.
        output.note(f"checkpoints and readers cannot be read: {error}")
    mark = records.checkpoint
    checkpoint = {"pchannel": PCHANNEL, "cut": mark.cut_number, "position": mark.position, **when(mark.tick)}
    newest_tick = cuts.read(cuts.newest).tick if cuts.numbers else 0
    ahead_ms = physical_ms(floor.tick) - unix_ms()
    return {
        "directory": str(directory),
        "node_id": floor.node_id,
        "open": pid is not None,
        "pid": pid or None,
        "term": floor.term,
        **when(floor.tick),
        "ahead_s": ahead_ms // 1000 if ahead_ms > AHEAD_MS_MAX else 0,  # clocks are corrected by as little as that
        "position": max(floor.positions.values(), default=0),
        "cuts": {"first": cuts.first, "newest": cuts.newest, **when(newest_tick), "held_by": cut_holders(cuts)},
        "checkpoints": [checkpoint] if mark.cut_number else [],
        "readers": [
            {"reader": name, "pchannel": at.pchannel, "position": at.position, **when(at.tick)}
            for name, at in records.readers.items()
        ],
        "topics": [_topic(name, topic) for name, topic in records.topics.items()],
        "leases": [
            {"table": lease.table, "collection_id": lease.collection_id, "cut": lease.cut, **when(lease.tick)}
            for _, lease in lease_files(cuts.directory)
            if isinstance(lease, Lease)
        ],
    }


def _topic(name: str, topic: "Topic") -> dict[str, object]:
    lag = {group: state.lag(topic.end_id) for group, state in topic.groups.items()}
    return {"topic": name, "begin_id": topic.begin_id, "end_id": topic.end_id, "bytes": topic.info.bytes, "lag": lag}
