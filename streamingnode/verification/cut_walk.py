"""The cuts of a node and every file they name: lengths, checksums, order, counts. Blocks.

In: a node directory, and what database and floor say about it. Out: findings, and bytes read step by step. A cut must follow
the one before it, its files must be those it names, and the newest one must be the one the checkpoint knows, or the next.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from flusher.checkpoint import Checkpoint
from flusher.cut_log import CUTS, cut_numbers, file_paths, living, manifest_path, read_cut
from flusher.directory import NodeDirectory
from flusher.manifest import CutManifest, DataFile, decode_manifest, manifest_crc32c
from streamingnode.verification.file_check import walk_data_file
from streamingnode.verification.finding import RESTORE, Kind, Report
from wal.errors import Corrupt, StreamingNodeError, UnsupportedFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class CutExpectation:
    """What the cuts must fit: the node they are of, the checkpoint, the log's last tick; None when nobody could be asked.

    Cuts below `first_kept` may be gone. `running` is for a node that goes on meanwhile: cuts may come and, by retention, go.
    """

    node_id: str
    checkpoint: Checkpoint | None
    last_tick: int | None = None
    first_kept: int | None = None
    running: bool = False


@dataclass(slots=True)
class _Walk:
    directory: Path
    expected: CutExpectation
    report: Report
    before: "tuple[CutManifest, int] | None" = None
    named: dict[str, int] = field(default_factory=dict)
    living: frozenset[int] | None = None
    """Collections that live at the newest cut, None when it does not tell."""


def walk_cuts(directory: Path, expected: CutExpectation, report: Report) -> Iterator[int]:
    """Check every cut, oldest first, and yield the bytes read after each step."""
    walk = _Walk(directory, expected, report)
    numbers = cut_numbers(directory)
    check_oldest(numbers, expected.first_kept, report)
    with suppress(OSError, StreamingNodeError):  # what is wrong with it is found in its turn
        walk.living = living(read_cut(NodeDirectory(directory), numbers[-1]).manifest) if numbers else None
    for number in numbers:
        yield from _walk_cut(walk, number)
    _check_newest(walk, numbers[-1] if numbers else 0)


def check_oldest(numbers: Sequence[int], first_kept: int | None, report: Report) -> None:
    """Report cuts that are missing before the earliest one that is there, None: nobody knows."""
    if first_kept is not None and numbers and numbers[0] > first_kept:
        detail = f"the cuts from {first_kept} on, before {numbers[0]}, are missing, and retention did not take them"
        report.damage(Kind.MISSING, CUTS, detail, RESTORE)


def named_paths(directory: Path) -> set[str] | None:
    """Return the paths of all files the cuts name, None when a cut cannot be read or is missing: then nobody knows."""
    numbers = cut_numbers(directory)
    if numbers and numbers[-1] - numbers[0] + 1 != len(numbers):
        return None
    paths: set[str] = set()
    for number in numbers:
        try:
            paths.update(file_paths(read_cut(NodeDirectory(directory), number).manifest))
        except (OSError, StreamingNodeError):
            return None
    return paths


def _walk_cut(walk: _Walk, number: int) -> Iterator[int]:
    place = manifest_path(number)
    try:
        content = NodeDirectory(walk.directory).read(place)
    except FileNotFoundError:
        walk.before = None  # retention took it since it was listed, and those before it
        return
    except Corrupt as error:
        walk.report.damage(Kind.UNREADABLE, place, error.happened, RESTORE)
        walk.before = None
        return
    manifest = _decode(walk, number, place, content)
    yield len(content)
    if manifest is None:
        walk.before = None
        return
    walk.report.count("cuts")
    if walk.expected.node_id and manifest.node_id != walk.expected.node_id:
        detail = f"is of node {manifest.node_id}, not of {walk.expected.node_id}"
        walk.report.damage(Kind.FOREIGN, place, detail, RESTORE)
        walk.before = None
        return
    _check_place(walk, manifest, place)
    _check_offsets(walk, manifest, place)
    walk.before = (manifest, manifest_crc32c(content))
    for file in (*manifest.segments, *manifest.deletes):
        yield from _walk_file(walk, manifest, file, place)


def _decode(walk: _Walk, number: int, place: str, content: bytes) -> CutManifest | None:
    before = walk.before
    if before is not None and number != before[0].number + 1:
        gone = f"cuts {before[0].number + 1} to {number - 1}"
        walk.report.damage(Kind.MISSING, CUTS, f"{gone} are missing between others", RESTORE)
    try:
        manifest = decode_manifest(content, name=place)
    except UnsupportedFormat as error:
        walk.report.damage(Kind.UNREADABLE, place, str(error), "use the release that wrote it, or a newer one")
        return None
    except StreamingNodeError as error:
        walk.report.damage(Kind.CHECKSUM, place, error.happened, RESTORE)
        return None
    if manifest.number != number:
        walk.report.damage(Kind.MIXED, place, f"holds cut {manifest.number}: it was copied over, or swapped", RESTORE)
        return None
    return manifest


def _check_place(walk: _Walk, manifest: CutManifest, place: str) -> None:
    report = walk.report
    if walk.before is None:
        if manifest.number == 1 and (manifest.previous_tick or manifest.previous_crc32c):
            report.damage(Kind.CONTENT, place, "is the first cut and names one before it", RESTORE)
        return
    previous, crc32c = walk.before
    if previous.number + 1 == manifest.number and (
        manifest.previous_crc32c != crc32c or manifest.previous_tick != previous.tick
    ):
        detail = f"does not follow the cut {previous.number} that is here: one of them is of another history"
        report.damage(Kind.MIXED, place, detail, RESTORE)
    elif manifest.tick <= previous.tick:
        report.damage(Kind.CONTENT, place, f"has tick {manifest.tick}, the cut before it {previous.tick}", RESTORE)


def _check_offsets(walk: _Walk, manifest: CutManifest, place: str) -> None:
    """Rows of a cut lie between the next offset of the cut before it and its own, and no more than fit there."""
    ends = {each.name: each.next_offset for each in manifest.vchannels}
    starts = _starts(walk, manifest)
    rows: dict[str, int] = {}
    for segment in manifest.segments:
        rows[segment.vchannel] = rows.get(segment.vchannel, 0) + segment.rows
        end, start = ends.get(segment.vchannel), starts.get(segment.vchannel)
        if (end is not None and segment.offset_max >= end) or (start is not None and segment.offset_min < start):
            detail = (
                f"says {segment.path} has offsets {segment.offset_min} to {segment.offset_max}, not {start} to {end}"
            )
            walk.report.damage(Kind.CONTENT, place, detail, RESTORE)
    for vchannel, count in rows.items():
        if vchannel in ends and vchannel in starts and count > ends[vchannel] - starts[vchannel]:
            detail = f"names {count} rows of {vchannel}, which got {ends[vchannel] - starts[vchannel]} offsets"
            walk.report.damage(Kind.CONTENT, place, detail, RESTORE)


def _starts(walk: _Walk, manifest: CutManifest) -> Mapping[str, int]:
    """Return the next offset of each vchannel at the cut before, where that cut is known."""
    if walk.before is None or walk.before[0].number + 1 != manifest.number:
        return {}
    return {each.name: each.next_offset for each in walk.before[0].vchannels}


def _walk_file(walk: _Walk, manifest: CutManifest, file: DataFile, place: str) -> Iterator[int]:
    if file.path in walk.named:
        detail = f"names {file.path}, which cut {walk.named[file.path]} names too"
        walk.report.damage(Kind.DUPLICATE, place, detail, RESTORE)
        return
    walk.named[file.path] = manifest.number
    missing = yield from walk_data_file(walk.directory, file, manifest, walk.report)
    if walk.living is not None and file.collection_id not in walk.living:
        return  # retention removes files of a dropped collection before their cut
    if missing and not (walk.expected.running and not (walk.directory / place).exists()):
        detail = f"cut {manifest.number} names it ({file.rows} rows) and it is not there"
        walk.report.damage(Kind.MISSING, file.path, detail, RESTORE)


def _beyond(walk: _Walk, newest: int) -> bool:
    """Whether the newest cut is one that the log has not heard of."""
    last_tick, before = walk.expected.last_tick, walk.before
    return last_tick is not None and before is not None and before[0].number == newest and before[0].tick > last_tick


def _check_newest(walk: _Walk, newest: int) -> None:
    checkpoint = walk.expected.checkpoint
    if checkpoint is None:
        return
    known = checkpoint.cut_number
    if newest < known:
        detail = f"the newest cut is {newest}, the log's checkpoint is at {known}: newer cuts are missing"
        walk.report.damage(Kind.MISSING, CUTS, detail, RESTORE)
    elif not walk.expected.running and (newest > known + 1 or _beyond(walk, newest)):
        detail = (
            f"the newest cut is {newest}, the log's checkpoint is at {known}: the log is older than the cuts beside it"
        )
        walk.report.damage(Kind.MIXED, CUTS, detail, "put log, floor and cuts of one backup together")
    elif newest == known and walk.before is not None and walk.before[1] != checkpoint.manifest_crc32c:
        detail = f"cut {newest} is not the one the log's checkpoint knows"
        walk.report.damage(Kind.MIXED, manifest_path(newest), detail, RESTORE)
