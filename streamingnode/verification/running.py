"""The walk over a node that is running: the same files, the log through the open store. Reads are in threads.

In: the parts of the node. Out: findings, and bytes read step by step, so that the caller sets the pace. Appends, cuts and
retention go on meanwhile; what retention takes is not missed. Where the log is damaged the walk over it ends: what is
readable behind that is for `streamingnode verify`, when the node is closed.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from anyio import to_thread

from flusher.checkpoint import Checkpoint
from flusher.cut_log import cut_numbers
from flusher.cuts import decode_first_kept, kept_cuts_key
from streamingnode.verification.cut_walk import CutExpectation, check_oldest, walk_cuts
from streamingnode.verification.database_walk import STEP_BYTES
from streamingnode.verification.finding import RESTORE, Kind, Report
from streamingnode.verification.floor_check import check_floor
from streamingnode.verification.reader_check import (
    READER,
    decode_readers,
    readers_behind,
    warn_of_readers,
    without_dropped,
)
from streamingnode.verification.stray_check import check_leases, check_strays
from wal.errors import Corrupt, Truncated
from wal.log import Log, LogStore

FLOOR_READS_MAX = 3
"""The owner writes the floor file while it is read; what looks torn three times in a row is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningParts:
    """What a walk needs of a running node; `directory` has its files. `log` and `checkpoint` are asked when needed."""

    directory: Path
    store: LogStore
    log: Callable[[], Log]
    checkpoint: Callable[[], Checkpoint]


async def walk_running(parts: RunningParts, report: Report) -> AsyncIterator[int]:
    """Check everything a running node has and yield the bytes read after each step.

    Raises what the store raises while its log is being reopened or the node closes.
    """
    await _check_floor(parts.directory, report)
    first_position = parts.log().first_position
    async for step in _walk_log(parts.log(), report):
        yield step
    yield await _read_records(parts.store, report)
    await _check_readers(parts, first_position, report)
    await _check_oldest_cut(parts, report)
    expected = CutExpectation(node_id=parts.store.node_id, checkpoint=parts.checkpoint(), running=True)
    steps = walk_cuts(parts.directory, expected, report)
    while (read_bytes := await to_thread.run_sync(_step, steps)) is not None:
        yield read_bytes
    await to_thread.run_sync(check_leases, parts.directory, parts.store.node_id, report)
    await to_thread.run_sync(partial(check_strays, parts.directory, report, running=True))


async def _check_readers(parts: RunningParts, first_position: int, report: Report) -> None:
    """Look for named readers that were behind already when the log began at `first_position`: places only go forward."""
    log, checkpoint = parts.log(), parts.checkpoint()
    # Damage is found by who reads everything, and what a newer checkpoint says in the next round.
    with suppress(Corrupt, Truncated):
        readers = decode_readers(await parts.store.scan_meta(READER))
        behind = readers_behind(readers, pchannel=log.name, first_position=first_position, checkpoint=checkpoint)
        position = checkpoint.start_position
        while behind and (entries := await log.read(position, bytes_max=STEP_BYTES)):
            behind = without_dropped(behind, entries)
            position = entries[-1].last_position + 1
        warn_of_readers(behind, first_position, report)


async def _check_oldest_cut(parts: RunningParts, report: Report) -> None:
    numbers = await to_thread.run_sync(cut_numbers, parts.directory)
    # Asked for after the cuts were listed: it goes up before a cut goes.
    first_kept = decode_first_kept(await parts.store.get_meta(kept_cuts_key(parts.log().name)))
    check_oldest(numbers, first_kept, report)


def _step(steps: Iterator[int]) -> int | None:
    """Go on by about as much as one read of the log, None at the end."""
    total = 0
    for read_bytes in steps:
        total += read_bytes
        if total >= STEP_BYTES:
            return total
    return total or None


async def _check_floor(directory: Path, report: Report) -> None:
    found = Report()
    for _ in range(FLOOR_READS_MAX):
        found = Report()
        await to_thread.run_sync(check_floor, directory, found)
        if not found.findings:
            break
    report.findings += found.findings
    report.count("floor files")
    report.bytes += found.bytes


async def _walk_log(log: Log, report: Report) -> AsyncIterator[int]:
    """Read from the first entry kept to the last one synced now; `Log.read` checks each entry and its place."""
    position, end = log.first_position, log.durable_position
    while position <= end:
        try:
            entries = await log.read(position, bytes_max=STEP_BYTES)
        except Truncated:
            position = log.first_position
            continue
        except Corrupt as error:
            report.damage(Kind.GAP, f"log {log.name!r}, from position {position}", str(error), RESTORE)
            return
        position = entries[-1].last_position + 1
        report.count("log entries", len(entries))
        report.count("log positions", sum(len(entry.messages) for entry in entries))
        yield sum(entry.size_bytes for entry in entries)
    report.count("logs")


async def _read_records(store: LogStore, report: Report) -> int:
    try:
        records = await store.scan_meta("")
    except Corrupt as error:
        report.damage(Kind.CHECKSUM, "log, state map", str(error), RESTORE)
        return 0
    report.count("records", len(records))
    return sum(len(key) + len(value) for key, value in records.items())
