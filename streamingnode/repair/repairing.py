"""Carrying a plan out: what is replaced or moved is in `quarantine/<time>/` afterwards, with a record of why. Blocks.

The record is on disk before anything is moved, and says at the end that it was done, so that a crash in the middle is
seen. A new log comes last, when everything else is as the plan wants it: until then nothing opens, and another repair
plans anew from what is there.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rocksdict import DBRecoveryMode, Rdict

from streamingnode.backup.restoring import RESTORE_TERM_STEP
from streamingnode.inspection.node_files import check_node
from streamingnode.inspection.read_only import open_past_damage, open_read_only
from streamingnode.repair.log_salvage import fill_ticks, salvaged_entries
from streamingnode.repair.plan import Action, ActionKind, RepairPlan
from streamingnode.repair.planning import Salvage, plan_repair
from streamingnode.verification.creation_check import is_unfinished_creation
from streamingnode.verification.database_walk import readable_survey
from streamingnode.verification.finding import Report
from streamingnode.verification.stray_check import QUARANTINE
from streamingnode.verification.walk import OnStep, verify_unlocked
from wal.errors import Corrupt, InvalidArgument, StorageFailed, StreamingNodeError
from wal.files import sync_directory, sync_file, write_durably
from wal.rocks.floor import FLOOR_NAME, Floor, read_floor, write_floor
from wal.rocks.layout import DATABASE_NAME, ENTRY_FAMILY, META_VERSION_KEY, TERM_KEY, encode_number, first_position_key
from wal.rocks.opening import BACKUP_RECORD_NAME
from wal.rocks.ownership import DirectoryLock
from wal.rocks.rebuild import build_database
from wal.rocks.replacement import REPLACEMENT_NAME, finish_replacement

REBUILT = "log.repaired.tmp"
RECORD = "repair.json"


class RepairRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a repair did, or was about to do when `done` is false; beside what it moved."""

    made_ms: int
    done: bool
    actions: tuple[Action, ...]
    left: tuple[str, ...]


class RepairResult(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, whether it was carried out, and the directory's state after it; `quarantine` is empty when nothing moved."""

    plan: RepairPlan
    done: bool
    quarantine: str
    after: Report


def repair_directory(
    directory: Path,
    *,
    dry_run: bool,
    accept_loss: bool,
    backup: Path | None,
    now_ms: Callable[[], int],
    on_step: OnStep | None = None,
) -> RepairResult:
    """Verify a node that no process has open, plan, and unless `dry_run` carry the plan out and verify again.

    A plan that gives up acknowledged rows is carried out only with `accept_loss`; without it nothing is changed at all.
    Raises `InvalidArgument` when it is no node or a backup, `AlreadyOwned` while it runs, `StorageFailed`.
    """
    if not is_unfinished_creation(directory) and (check_node(directory) / BACKUP_RECORD_NAME).exists():
        raise InvalidArgument(f"{directory} is a backup — restore it, then repair the node that comes of it")
    lock = DirectoryLock(directory)
    try:
        if not dry_run:
            with _disk_errors_typed(directory):
                finish_replacement(directory)
        report = verify_unlocked(directory, on_step=on_step)
        plan, salvage = plan_repair(directory, report, backup=backup)
        loses = any(action.gives_up for action in plan.actions)
        if dry_run or not plan.actions or (loses and not accept_loss):
            return RepairResult(plan=plan, done=False, quarantine="", after=report)
        with _disk_errors_typed(directory):
            place = _carry_out(directory, plan, salvage, backup, now_ms())
        after = verify_unlocked(directory, on_step=on_step)
        return RepairResult(plan=plan, done=True, quarantine=str(place), after=after)
    finally:
        lock.release()


@contextmanager
def _disk_errors_typed(directory: Path) -> Iterator[None]:
    """Raise `StorageFailed` for what the disk raises, with the way on: a repair may be cut off anywhere."""
    try:
        yield
    except OSError as error:
        happened = f"{error.filename or directory}: {error.strerror or error}"
        raise StorageFailed(f"{happened} — free space or check the disk, then repair again") from error


def _carry_out(directory: Path, plan: RepairPlan, salvage: Salvage, backup: Path | None, now_ms: int) -> Path:
    place = _quarantine(directory, now_ms)
    left = tuple(f"{each.place}: {each.reason}" for each in plan.left)
    _write_record(place, RepairRecord(made_ms=now_ms, done=False, actions=tuple(plan.actions), left=left))
    floor = _read_floor(directory)
    for action in plan.actions:
        match action.kind:
            case ActionKind.MOVE:
                _move(directory, place, action.place)
            case ActionKind.REPLACE:
                assert backup is not None, "only a backup makes such an action"
                _replace(directory, place, action.place, backup)
            case ActionKind.NEW_LOG:
                _new_log(directory, place, salvage, floor)
            case ActionKind.NEW_FLOOR:
                if not salvage.logs:  # a new log has brought its floor file with it
                    _new_floor(directory, place, salvage)
    sync_directory(directory)
    _write_record(place, RepairRecord(made_ms=now_ms, done=True, actions=tuple(plan.actions), left=left))
    return place


def _quarantine(directory: Path, now_ms: int) -> Path:
    name = datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%Y-%m-%dT%H-%M-%S.") + f"{now_ms % 1000:03d}Z"
    place = directory / QUARANTINE / name
    place.mkdir(parents=True)
    for each in (place.parent, directory):
        sync_directory(each)
    return place


def _write_record(place: Path, record: RepairRecord) -> None:
    write_durably(place / RECORD, msgspec.json.format(msgspec.json.encode(record)) + b"\n")


def _move(directory: Path, place: Path, path: str) -> None:
    source, target = directory / path, place / path
    if not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)
    sync_directory(target.parent)
    sync_directory(source.parent)


def _replace(directory: Path, place: Path, path: str, backup: Path) -> None:
    """Bring the good file first, under a temporary name: a crash leaves the damaged one, or none, and never half of one."""
    building = directory / f"{path}.tmp"
    building.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(backup / path, building)
    sync_file(building)
    _move(directory, place, path)
    building.rename(directory / path)
    sync_directory(building.parent)


def _new_log(directory: Path, place: Path, salvage: Salvage, floor: Floor | None) -> None:
    """Build the new database beside the old one, check it, write its floor file, then let it take the old one's place.

    A crash before the old one is moved away leaves it there, damaged, with a floor file that asks for as much. One after
    that leaves the replacement, which the next opening or repair puts in place.
    """
    found = salvage.found
    assert found is not None
    building, replacement = directory / REBUILT, directory / REPLACEMENT_NAME
    for left_over in (building, replacement):
        shutil.rmtree(left_over, ignore_errors=True)
    term = _next_term(max(found.term, 0 if floor is None else floor.term))
    meta_version = max(found.meta_version, 0 if floor is None else floor.meta_version)
    above = max([0 if floor is None else floor.tick, *(each.tick for log in salvage.logs for each in log.stretches)])
    database = open_past_damage(directory / DATABASE_NAME)
    try:
        records = _records(database, salvage, meta_version, term)
        entries = _entries(database, salvage, above_tick=above, term=term, source_id=found.node_id)
        build_database(building, records, entries)
    finally:
        database.close()
    _require_whole(building, salvage)
    building.rename(replacement)
    if (directory / FLOOR_NAME).exists():
        shutil.copyfile(directory / FLOOR_NAME, place / FLOOR_NAME)
        sync_file(place / FLOOR_NAME)
    write_floor(
        directory,
        Floor(
            node_id=found.node_id,
            term=term,
            tick=above + sum(map(fill_ticks, salvage.logs)),
            meta_version=meta_version,
            positions={log.log_id: log.end for log in salvage.logs},
        ),
    )
    _move(directory, place, DATABASE_NAME)
    finish_replacement(directory)


def _require_whole(building: Path, salvage: Salvage) -> None:
    """Return if the new database ends where it shall; nothing was moved yet when it does not. Raises `Corrupt`."""
    database = open_read_only(building, DBRecoveryMode.point_in_time())
    try:
        found = readable_survey(database)
    finally:
        database.close()
    wrong = [log.name for log in salvage.logs if found.last_positions.get(log.log_id, 0) != log.end]
    if wrong:
        raise Corrupt(f"{building}: log {', '.join(wrong)} was not written whole — check the disk, then try again")


def _records(database: Rdict, salvage: Salvage, meta_version: int, term: int) -> Iterator[tuple[bytes, bytes]]:
    changed = {first_position_key(log.log_id): encode_number(log.first_position) for log in salvage.logs}
    changed |= {META_VERSION_KEY: encode_number(meta_version), TERM_KEY: encode_number(term)}
    iterator = database.iter()
    iterator.seek_to_first()
    while iterator.valid():
        if iterator.key() not in changed:
            yield iterator.key(), iterator.value()
        iterator.next()
    iterator.status()
    yield from changed.items()


def _entries(
    database: Rdict, salvage: Salvage, *, above_tick: int, term: int, source_id: str
) -> Iterator[tuple[bytes, bytes]]:
    family = database.get_column_family(ENTRY_FAMILY)
    for log in salvage.logs:
        yield from salvaged_entries(family, log, above_tick=above_tick, term=term, source_id=source_id)


def _new_floor(directory: Path, place: Path, salvage: Salvage) -> None:
    found = salvage.found
    assert found is not None
    _move(directory, place, FLOOR_NAME)
    write_floor(
        directory,
        Floor(
            node_id=found.node_id,
            term=_next_term(found.term),
            tick=salvage.checkpoint.tick,
            meta_version=found.meta_version,
            positions=dict(found.last_positions),
        ),
    )


def _next_term(term: int) -> int:
    """Begin a new row of terms, as after a restore: what follows is another history than what readers may have seen."""
    return (term // RESTORE_TERM_STEP + 1) * RESTORE_TERM_STEP


def _read_floor(directory: Path) -> Floor | None:
    try:
        return read_floor(directory)
    except StreamingNodeError:
        return None
