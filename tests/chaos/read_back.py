"""Everything a reopened node says it holds: the log as a reader sees it, the current rows, and what
lies below.

In: an open node, or a closed directory for `audit`. Out: a `ReadBack` for the checker. Nothing is
judged here.
"""

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pyarrow.parquet as pq

import streamingnode as sn
from flusher.manifest import CutManifest, SegmentFile, decode_manifest, manifest_crc32c
from streamingnode.read_message import ReadMessage
from tests.chaos.operations import Row, RowWrite
from tests.chaos.rows import ADDED_ONLY, COLLECTIONS, PRIMARY_KEY, rows_of
from wal.codec import crc32c
from wal.entry import LogEntry
from wal.errors import StreamingNodeError, Truncated
from wal.headers import MessageType
from wal.rocks.store import open_rocks_store

READ_BYTES_MAX = 8 << 20
READS_MAX = 5


class Offsets(msgspec.Struct, frozen=True, array_like=True):
    """Row offsets that an insert took on one vchannel."""

    vchannel: str
    first: int
    count: int


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One message of one collection as a reader got it; an upsert reads as a delete and an
    insert.
    """

    tick: int
    position: int
    writes: tuple[RowWrite, ...]
    offsets: tuple[Offsets, ...]


class SeenCollection(msgspec.Struct, frozen=True, kw_only=True):
    """One collection: its messages in order of delivery, its rows now, the numbers of rows with
    wrong bytes.
    """

    log: tuple[Seen, ...]
    rows: tuple[Row, ...]
    wrong: tuple[int, ...]


class ReadBack(msgspec.Struct, frozen=True, kw_only=True):
    """What one open of a node found; `error` is why it could not be opened or read, empty when it
    could.
    """

    collections: dict[str, SeenCollection] = {}
    tick: int = 0
    error: str = ""
    code: str = ""
    opened_s: float = 0.0
    held_s: float = 0.0
    asked_ns: int = 0
    told_ns: int = 0


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """What lies below a closed node: the entries of its log, and the rows in its files by
    collection.
    """

    entries: tuple[tuple[int, int, int], ...]
    """First position, last position and tick of each write in the entries kept."""
    in_files: dict[str, tuple[Row, ...]]
    cut_tick: int = 0
    findings: tuple[str, ...] = ()


def refused(error: StreamingNodeError) -> ReadBack:
    """Return what is known of a node that refused to open or be read."""
    return ReadBack(error=str(error), code=error.code)


async def read_back(node: sn.Node, *, opened_s: float = 0.0) -> ReadBack:
    """Read everything; collections that do not exist yet are left out."""
    asked_ns = time.monotonic_ns()
    tick = await node.consistent_tick()
    names = [each.name for each in node.collections() if each.name in COLLECTIONS]
    collections = {name: await _collection(node, name, tick) for name in names}
    return ReadBack(
        collections=collections,
        tick=tick,
        opened_s=opened_s,
        asked_ns=asked_ns,
        told_ns=time.monotonic_ns(),
    )


async def _collection(node: sn.Node, name: str, tick: int) -> SeenCollection:
    log, wrong = await _log_of(node, name, tick, tries=READS_MAX)
    rows, bad = rows_of(await node.snapshot(name))
    return SeenCollection(
        log=tuple(log), rows=tuple(sorted(rows, key=_number)), wrong=(*wrong, *bad)
    )


async def _log_of(
    node: sn.Node, name: str, tick: int, *, tries: int
) -> tuple[list[Seen], list[int]]:
    """Read the log; once more from its new start when a node that finds its disk full gives the old
    one up meanwhile.
    """
    try:
        return await _read_log(node, name, tick)
    except Truncated:
        if tries == 1:
            raise
        return await _log_of(node, name, tick, tries=tries - 1)


async def _read_log(node: sn.Node, name: str, tick: int) -> tuple[list[Seen], list[int]]:
    log = []
    wrong = []
    async with node.read(name, until=tick) as messages:
        async for message in messages:
            if message.type in (MessageType.INSERT, MessageType.DELETE, MessageType.TXN):
                seen, bad = _seen(name, message)
                log.append(seen)
                wrong += bad
    return log, wrong


def _number(row: Row) -> int:
    return row.number


def _seen(name: str, message: ReadMessage) -> tuple[Seen, list[int]]:
    bodies = message.bodies if message.type is MessageType.TXN else (message,)
    writes = []
    wrong = []
    for body in bodies:
        table = body.to_arrow()
        assert table is not None, "only rows and keys are asked for"
        if body.type is MessageType.INSERT:
            rows, bad = rows_of(table)
            writes.append(RowWrite(collection=name, action="insert", rows=tuple(rows)))
            wrong += bad
        else:
            keys = tuple(table[PRIMARY_KEY].to_numpy().tolist())
            writes.append(RowWrite(collection=name, action="delete", keys=keys))
    offsets = [
        Offsets(vchannel, *span) for body in bodies for vchannel, span in body.row_offsets.items()
    ]
    position = message.message_id.position
    return Seen(
        tick=message.time_tick, position=position, writes=tuple(writes), offsets=tuple(offsets)
    ), wrong


async def audit(directory: Path) -> Audit:
    """Look below a closed node: every log entry, read with all checks, and every file that a
    manifest names.
    """
    store = await open_rocks_store(directory)
    try:
        entries: list[LogEntry] = []
        log = await store.open_log("p0")
        position = log.first_position
        while found := await log.read(position, bytes_max=READ_BYTES_MAX):
            entries += found
            position = found[-1].last_position + 1
    finally:
        await store.close()
    cuts = _manifests(directory)
    findings = [finding for before, after in pairwise(cuts) for finding in _follows(before, after)]
    return Audit(
        entries=tuple(write for entry in entries for write in _writes_in(entry)),
        in_files={
            name: tuple(_rows_in_files(directory, cuts, name, findings)) for name in ADDED_ONLY
        },
        cut_tick=cuts[-1][1].tick if cuts else 0,
        findings=tuple(findings),
    )


def _writes_in(entry: LogEntry) -> Iterator[tuple[int, int, int]]:
    rows = entry.rows
    if rows is None:
        yield entry.first_position, entry.last_position, entry.time_tick
        return
    for first, count, tick in zip(
        rows.positions.tolist(), rows.counts.tolist(), rows.ticks.tolist(), strict=True
    ):
        yield first, first + count - 1, tick


def _manifests(directory: Path) -> list[tuple[bytes, CutManifest]]:
    paths = sorted((directory / "cuts").glob("*.json"))
    contents = [(path.name, path.read_bytes()) for path in paths]
    return [(content, decode_manifest(content, name=name)) for name, content in contents]


def _follows(before: tuple[bytes, CutManifest], after: tuple[bytes, CutManifest]) -> list[str]:
    wanted = (before[1].number + 1, before[1].tick, manifest_crc32c(before[0]))
    found = (after[1].number, after[1].previous_tick, after[1].previous_crc32c)
    return [] if wanted == found else [f"cut {after[1].number} does not follow the one before it"]


def _rows_in_files(
    directory: Path, cuts: list[tuple[bytes, CutManifest]], name: str, findings: list[str]
) -> list[Row]:
    rows: list[Row] = []
    for _, cut in cuts:
        ids = {each.collection_id for each in cut.collections if each.name == name}
        for file in cut.segments:
            if file.collection_id in ids:
                rows += _rows_in_file(directory, cut, file, findings)
    return rows


def _rows_in_file(
    directory: Path, cut: CutManifest, file: SegmentFile, findings: list[str]
) -> list[Row]:
    path = directory / file.path
    if not path.exists():
        findings.append(f"cut {cut.number} names {file.path}, which is missing")
        return []
    content = path.read_bytes()
    if (len(content), crc32c(content)) != (file.bytes, file.crc32c):
        findings.append(f"{file.path} is not what cut {cut.number} says")
        return []
    with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
        table = parquet.read(use_threads=False)
    if table.num_rows and max(table["_tick"].to_numpy().tolist()) > cut.tick:
        findings.append(f"{file.path} holds a tick above its cut {cut.number}")
    rows, wrong = rows_of(table)
    findings += [f"row {number} in {file.path} is not what was written" for number in wrong]
    return rows
