"""The verbs that keep a node's data safe: `verify`, `backup`, `restore` and `export`."""

import math
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamingnode.cli.command import FILE, PROGRAM, SPARK, Place, at_place, require, with_node
from streamingnode.cli.output import (
    EXIT_FAILED,
    EXIT_OK,
    Output,
    format_bytes,
    format_count,
    format_tick,
)
from streamingnode.progress import Progress
from wal.errors import Corrupt, InvalidArgument

if TYPE_CHECKING:
    from streamingnode.care.findings import OnStep
    from streamingnode.care.inspect import BackupRecord


def show_steps(progress: Progress, *, bytes_per_s: float = math.inf) -> "OnStep":
    """Return a callback that shows the bytes read of each part on `progress`, and sleeps to keep
    the rate below `bytes_per_s`.
    """
    reached: dict[str, int] = {}

    def on_step(part: str, read_bytes: int) -> None:
        if part not in reached:
            reached[part] = 0
            progress.stage(part)
        reached[part] += read_bytes
        progress.advance(reached[part], format_bytes(reached[part]))
        time.sleep(read_bytes / bytes_per_s)

    return on_step


EMPTY_TARGET = "A new directory, or an empty one."


@PROGRAM.verb(
    "verify",
    "streamingnode verify data",
    "streamingnode verify data --tables tables",
    "streamingnode verify data --pace 10",
    "streamingnode verify backup --json",
)
@at_place()
@click.option(
    "--tables", type=FILE, help="Also check the tables in this directory against the node's cuts."
)
@click.option("--pace", type=float, metavar="MIB", help="Read at most this many MiB each second.")
def verify(output: Output, *, place: Place, tables: Path | None, pace: float | None) -> int:
    """Read everything a node has and check it against every checksum, count and order.

    Checks the floor file, every entry of the log, the state map, every cut and file, leases and
    left-overs. With --tables it also checks the tables: each took every cut once and only cuts of
    this node, and has their rows. Changes nothing, and also takes a backup in place of a node. A
    running node checks its own log, cuts, files and leases, without --tables and --pace. With
    --pace other programs keep most of the disk, as for cron. Exit code 0 when all is sound, 1 for
    warnings (nothing is lost), 3 for damage.
    """
    if tables is not None:
        require(SPARK)
    if pace is not None and not pace > 0:
        raise InvalidArgument(
            f"--pace {pace:g} reads nothing — give the MiB for each second, above 0"
        )
    from streamingnode.care.findings import Severity
    from streamingnode.care.inspect import holder
    from streamingnode.care.verify import verify_directory

    if isinstance(place, Path) and holder(place) is None:
        with Progress(output.stderr) as progress:
            on_step = show_steps(
                progress, bytes_per_s=math.inf if pace is None else pace * (1 << 20)
            )
            report = verify_directory(place, tables=tables, on_step=on_step)
    elif tables is not None or pace is not None:
        raise InvalidArgument(
            "a running node verifies itself without --tables and --pace — leave them out"
        )
    else:
        report = with_node(place, lambda node: node.verify())
    output.findings(report)
    checked = ", ".join(f"{number} {what}" for what, number in report.counts.items())
    output.line(f"checked {format_bytes(report.bytes)}: {checked or 'nothing'}")
    damage = len(report.damages)
    verdict = (
        "all is as it was written" if not damage else f"{format_count(damage, 'place')} damaged"
    )
    document = {"verdict": report.worst or "sound", "bytes": report.bytes, "checked": report.counts}
    warnings = format_count(len(report.findings) - damage, "warning")
    output.result(f"{verdict}, {warnings}", document | {"findings": report.findings})
    return {None: EXIT_OK, Severity.WARNING: EXIT_FAILED, Severity.DAMAGE: Corrupt.exit_code}[
        report.worst
    ]


@PROGRAM.verb(
    "backup",
    "streamingnode backup data backups/monday",
    "streamingnode backup data backups/monday --json",
)
@at_place()
@click.argument("target", type=FILE, help=EMPTY_TARGET)
def backup(output: Output, *, place: Place, target: Path) -> None:
    """Copy a node into a new directory and verify the copy.

    The copy is read back and checked as by `verify` before it gets its final name. A running node
    makes its backup itself, on the machine where it runs. A backup cannot be opened as a node:
    `restore` makes a node of it. Exit code 3 when the node is damaged, 4 when a process has it open
    and takes no clients.
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
        f"{what} node {record.node_id} up to tick {record.tick} ({format_tick(record.tick)}), cut "
        f"{record.cut}: "
        f"{format_count(len(record.files), 'file')}, {size}, verified, in {path}",
        record,
    )


@PROGRAM.verb(
    "restore",
    "streamingnode restore backups/monday data",
    "streamingnode restore backups/monday data --json",
    "streamingnode restore backups/monday data --file segments/1/3.parquet",
)
@click.argument("backup", type=FILE, help="A directory that `backup` made.")
@click.argument(
    "target", type=FILE, help="A new directory, or an empty one; with --file the node's."
)
@click.option("--file", metavar="PATH", help="Restore only this segment, delete file or manifest.")
def restore(output: Output, *, backup: Path, target: Path, file: str | None) -> None:
    """Create a node directory from a backup and verify it.

    Every file is compared with the backup's record, and the whole node is read, before the
    directory gets its final name. The node keeps its id and begins a new range of terms. `ingest`
    refuses a table that took cuts made after the backup (TABLE_AHEAD), and `verify --tables` names
    it. Exit code 3 when the backup is damaged. With --file one file of a cut is restored into a
    node, also while it runs, if the node can verify its checksum: by the cut's manifest, or for a
    manifest by the next one or the log. Restore several manifests newest first.
    """
    from streamingnode.care.backup import restore_directory, restore_file

    if file is not None:
        put_back = restore_file(backup, target, file)
        output.result(
            f"{put_back.path}: {format_bytes(put_back.bytes)}, as the node wrote it", put_back
        )
        return
    with Progress(output.stderr) as progress:
        record = restore_directory(backup, target, on_step=show_steps(progress))
    _print_made("restored", record, target, output)


@PROGRAM.verb(
    "export",
    "streamingnode export data rows",
    "streamingnode export data rows --salvage",
    "streamingnode export backups/monday rows --json",
)
@at_place()
@click.argument("out", type=FILE, help=EMPTY_TARGET)
@click.option("--salvage", is_flag=True, help="Continue past damage, and list what is missing.")
def export(output: Output, *, place: Place, out: Path, salvage: bool) -> int:
    """Write the rows of each collection as Parquet, also from a damaged node.

    Exports the state at the newest tick: the files of the cuts and the log after the newest cut,
    with deletes applied. Dropped collections are left out. Also takes a backup in place of a node.
    The node's directory is not changed; a running node is asked for its rows, without --salvage.
    Without --salvage the first damage is an error and nothing is written. With --salvage the
    readable rows are written, and missing files and positions of the log are listed; rows whose
    delete is missing reappear. Exit code 1 when something is missing.
    """
    from streamingnode.care.backup import new_directory
    from streamingnode.care.export import export_directory, export_node
    from streamingnode.care.inspect import check_node, holder

    with Progress(output.stderr) as progress:

        def on_collection(name: str) -> None:
            progress.stage(f"collection {name}")

        if isinstance(place, Path) and holder(check_node(place)) is None:
            result = export_directory(place, out, salvage=salvage, on_collection=on_collection)
        elif salvage:
            raise InvalidArgument(
                "a running node has nothing to salvage — leave --salvage out, or close the node"
            )
        else:
            with new_directory(out, place if isinstance(place, Path) else None) as building:
                asked = partial(
                    export_node, out=out.absolute(), building=building, on_collection=on_collection
                )
                result = with_node(place, asked)
    output.table(
        ["collection", "rows", "file"],
        [[file.collection, file.rows, file.path] for file in result.files],
    )
    for each in result.missing:
        rows = "" if each.rows is None else f", {format_count(each.rows, 'row')}"
        of = f" of collection {each.collection}" if each.collection else ""
        output.line(f"missing: {each.place}{of}{rows}: {each.reason}")
    output.result(
        f"node {result.node_id} as of tick {result.tick} ({format_tick(result.tick)})", result
    )
    return EXIT_FAILED if result.missing else EXIT_OK
