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
    """Return what tells `progress` how many bytes of each part of a node are read, and sleeps so
    that no more are.
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
@click.option("--pace", type=float, metavar="MIB", help="Read at most so many MiB each second.")
def verify(output: Output, *, place: Place, tables: Path | None, pace: float | None) -> int:
    """Read everything a node has and check it against every checksum, count and order.

    Looks at the floor file, every entry of the log, the state map, every cut and file, leases and
    left-overs; with --tables also at the tables: each cut taken once, none the node never made, as
    many rows as the cuts brought. Changes nothing, and takes a backup as well as a node. A running
    node checks its own log, cuts, files and leases, without --tables and --pace. With --pace other
    programs keep most of the disk, as for cron. Exit code 0 when all is sound, 1 for warnings by
    which nothing is lost, 3 for damage.
    """
    if tables is not None:
        require(SPARK)
    if pace is not None and not pace > 0:
        raise InvalidArgument(
            f"at --pace {pace:g} nothing is read — give a number of MiB for each second"
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
    told = {"verdict": report.worst or "sound", "bytes": report.bytes, "checked": report.counts}
    warnings = format_count(len(report.findings) - damage, "warning")
    output.result(f"{verdict}, {warnings}", told | {"findings": report.findings})
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

    The copy is read back and checked as `verify` does before it gets its name. A running node makes
    its backup itself, on the machine where it runs. A backup is not opened as a node: `restore`
    makes one of it. Exit code 3 when the node is damaged, 4 when a process has it open and takes no
    clients.
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
@click.option("--file", metavar="PATH", help="Put back this segment, delete file or manifest only.")
def restore(output: Output, *, backup: Path, target: Path, file: str | None) -> None:
    """Make a node directory out of a backup and verify it.

    Every file is compared with what the backup says, and the node is read to its end, before it
    gets its name. It keeps the node's id and begins a new row of terms. A table that took cuts made
    after the backup is refused by `ingest` (TABLE_AHEAD) and named by `verify --tables`. Exit code
    3 when the backup is damaged. With --file one file of a cut comes back into a node, also while
    it runs, when its checksum is the one that the node knows: from the manifest, or for a manifest
    from the one after it or the log. Of several manifests the newest first.
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
@click.option("--salvage", is_flag=True, help="Go on past damage, and name what is missing.")
def export(output: Output, *, place: Place, out: Path, salvage: bool) -> int:
    """Write the rows of each collection as Parquet, of a damaged node what can be read.

    The state at the newest tick there is: the files of the cuts, then the log behind the newest,
    deletes applied. Dropped collections are left out. Takes a backup, too. A node's directory stays
    as it is; a running node is asked for its rows, without --salvage. Otherwise the first damage is
    the error and nothing is written; with it, the rest is written and what is missing is named, by
    file or positions of the log: rows whose delete is missing come back. Exit code 1 when something
    is missing.
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
