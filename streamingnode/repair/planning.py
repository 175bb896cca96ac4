"""From what a verification found to what a repair would do. Reads; blocks; changes nothing.

In: a node directory nobody owns, the report of a full verification, perhaps a backup. Out: a plan, and of each log what
can be kept. Each finding ends in an action or among what is left, so that nothing is passed over.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rocksdict import Rdict

from flusher.checkpoint import NO_CHECKPOINT, Checkpoint, decode_checkpoint
from flusher.cuts.cut_log import CUTS, cut_numbers
from flusher.manifest import decode_manifest, manifest_name
from flusher.removal.kept_cuts import FIRST_CUT, decode_first_kept, kept_cuts_key
from streamingnode.inspection.read_only import open_past_damage
from streamingnode.repair.backup_files import KnownCut, KnownFile, known_cuts
from streamingnode.repair.log_salvage import LogSalvage, salvage_log
from streamingnode.repair.plan import ActionKind, RepairPlan
from streamingnode.repair.reader_loss import taken_from_readers
from streamingnode.verification.database_walk import readable_survey
from streamingnode.verification.finding import Finding, Kind, Report, Severity
from streamingnode.verification.stray_check import LEASES
from streamingnode.verification.walk import PCHANNEL
from wal.errors import StreamingNodeError
from wal.rocks.floor import FLOOR_NAME, Floor, read_floor
from wal.rocks.layout import DATABASE_NAME, ENTRY_FAMILY, decode_number, first_position_key, meta_key
from wal.rocks.recovery import Survey, scan_prefix
from wal.rocks.replacement import database_path

_RESTORE = "restore the node from a backup: streamingnode restore"
_BACKUP = "give a backup that has it: streamingnode repair --backup"


@dataclass(slots=True)
class Salvage:
    """What the database says and what of its logs can be kept; `logs` is empty when they need nothing."""

    found: Survey | None = None
    checkpoint: Checkpoint = NO_CHECKPOINT
    logs: list[LogSalvage] = field(default_factory=list)


@dataclass(slots=True)
class _Planning:
    directory: Path
    backup: Path | None
    plan: RepairPlan
    salvage: Salvage
    floor: Floor | None
    stranger: Floor | None = None
    first_kept: int = FIRST_CUT
    known: set[str] = field(default_factory=set)
    planned: set[str] = field(default_factory=set)
    log_planned: bool = False
    """The log as a whole goes to quarantine, or stays: then so does each file of it."""


def plan_repair(directory: Path, report: Report, *, backup: Path | None) -> tuple[RepairPlan, Salvage]:
    """Return what a repair would do about a report, and what can be kept of the logs."""
    planning = _Planning(directory, backup, RepairPlan(), Salvage(), _floor(directory))
    _read_database(planning, report)
    for cut in known_cuts(directory, planning.salvage.checkpoint, backup, first_kept=planning.first_kept):
        planning.known.update(file.path for file in (cut.manifest, *cut.files))
        _plan_cut(planning, cut, {finding.place for finding in report.findings})
    for finding in report.findings:
        _plan_finding(planning, finding)
    _plan_cut_ahead(planning)
    planning.plan.actions.sort(key=lambda action: action.kind is ActionKind.NEW_LOG)  # the last step lets the node open
    return planning.plan, planning.salvage


def _read_database(planning: _Planning, report: Report) -> None:
    """Look at the database, and plan a new log when the report has damage of it."""
    path = database_path(planning.directory)
    try:
        database = open_past_damage(path)
    except StreamingNodeError:
        return
    try:
        records = scan_prefix(database, b"")
        planning.salvage.found = readable_survey(database)
        planning.stranger = planning.floor
        if planning.floor is not None and planning.floor.node_id != planning.salvage.found.node_id:
            planning.floor = None  # another node's floor says nothing about this log
        planning.salvage.checkpoint = decode_checkpoint(records.get(meta_key(f"checkpoint/{PCHANNEL}")))
        planning.first_kept = decode_first_kept(records.get(meta_key(kept_cuts_key(PCHANNEL))))
        if any(_is_log_damage(finding) for finding in report.findings):
            _plan_log(planning, database, records)
    except Exception as error:  # noqa: BLE001 - whatever it was, the log stays as it is, and is named as left
        planning.salvage.found = None
        planning.salvage.logs.clear()
        planning.plan.leave(DATABASE_NAME, f"its small records cannot be read: {error}", _RESTORE)
        planning.planned.add(DATABASE_NAME)
        planning.log_planned = True
    finally:
        database.close()


def _is_log_damage(finding: Finding) -> bool:
    return finding.severity is Severity.DAMAGE and (
        finding.place.startswith(f"{DATABASE_NAME} ") or (finding.place == DATABASE_NAME and finding.kind is Kind.SHORT)
    )


def _is_of_log(finding: Finding) -> bool:
    return _is_log_damage(finding) or finding.place.startswith(f"{DATABASE_NAME}/")


def _plan_log(planning: _Planning, database: Rdict, records: Mapping[bytes, bytes]) -> None:
    found, checkpoint = planning.salvage.found, planning.salvage.checkpoint
    assert found is not None
    entries = database.get_column_family(ENTRY_FAMILY)
    for name, log_id in found.log_ids.items():
        planning.salvage.logs.append(
            salvage_log(
                entries,
                name=name,
                log_id=log_id,
                first_position=_first_position(records, log_id),
                checkpoint_position=checkpoint.position if name == PCHANNEL else 0,
                floor_position=0 if planning.floor is None else planning.floor.positions.get(log_id, 0),
            )
        )
    planning.planned.add(DATABASE_NAME)
    planning.log_planned = True
    if hopeless := _why_hopeless(planning, found):
        planning.salvage.logs.clear()
        planning.plan.leave(DATABASE_NAME, hopeless, _RESTORE)
        return
    gives_up = tuple(_given_up(planning, entries, records))
    kept = "; ".join(f"{log.name!r}: {log.kept or 'nothing, the cuts have it'}" for log in planning.salvage.logs)
    planning.plan.act(ActionKind.NEW_LOG, DATABASE_NAME, f"it is damaged; kept of {kept}", gives_up=gives_up)


def _first_position(records: Mapping[bytes, bytes], log_id: int) -> int:
    recorded = records.get(first_position_key(log_id))
    return 1 if recorded is None else decode_number(recorded)


def _given_up(planning: _Planning, entries: Rdict, records: Mapping[bytes, bytes]) -> Iterator[str]:
    """Yield what a new log gives up: ends of logs, places readers were at, changes of the state map."""
    salvage, floor = planning.salvage, planning.floor
    for log in salvage.logs:
        yield from log.gives_up
        first = _first_position(records, log.log_id)
        yield from taken_from_readers(log, entries, records, checkpoint=salvage.checkpoint, first_position=first)
    assert salvage.found is not None
    if floor is not None and salvage.found.meta_version < floor.meta_version:
        changes = floor.meta_version - salvage.found.meta_version
        yield f"the last {changes} changes of the state map: places of named readers, or the checkpoint"


def _why_hopeless(planning: _Planning, found: Survey) -> str:
    """Return why no log that fits the rest can be made of what is readable; nothing when one can."""
    checkpoint = planning.salvage.checkpoint
    if any(log.kept is None for log in planning.salvage.logs) and not checkpoint.cut_number:
        return "its beginning cannot be read, and no cut has its rows in files"
    newest = max(cut_numbers(planning.directory), default=0)
    if newest > checkpoint.cut_number + 1:
        return f"what is readable of it knows {checkpoint.cut_number} cuts, and {newest} were made"
    if planning.floor is not None and planning.floor.positions.keys() - found.log_ids.values():
        return "what is readable of it does not even know the names of all logs"
    return ""


def _plan_cut(planning: _Planning, cut: KnownCut, suspects: set[str]) -> None:
    """Plan the files of a cut before its manifest: one that is there never names what an interrupted repair did not bring.

    A missing manifest comes back with all of its files or not at all: with less it would be damage where there was none.
    """
    if (planning.directory / cut.manifest.path).exists():
        files = [file for file in (*cut.files, cut.manifest) if _is_suspect(planning, file, suspects)]
    elif lost := next((file for file in cut.files if not _is_somewhere(planning, file)), None):
        planning.planned.add(cut.manifest.path)
        reason = f"it is missing, and {lost.path}, which it names, is sound neither here nor in the backup"
        planning.plan.leave(cut.manifest.path, reason, _BACKUP)
        return
    else:
        files = [*cut.files, cut.manifest]  # nothing named these files, so the verification has not read them
    for file in files:
        _plan_file(planning, file)


def _is_suspect(planning: _Planning, file: KnownFile, suspects: set[str]) -> bool:
    return file.path in suspects or not (planning.directory / file.path).exists()


def _is_somewhere(planning: _Planning, file: KnownFile) -> bool:
    return any(place is not None and file.matches(place) for place in (planning.directory, planning.backup))


def _plan_file(planning: _Planning, file: KnownFile) -> None:
    """Replace a file that is not the one the node knows by the backup's, if that is."""
    path = file.path
    if file.matches(planning.directory):
        return
    planning.planned.add(path)
    if planning.backup is not None and file.matches(planning.backup):
        planning.plan.act(ActionKind.REPLACE, path, "it is damaged or missing, and the backup has it as it was written")
    else:
        reason = "it is damaged or missing" + ("" if planning.backup is None else ", and so it is in the backup")
        planning.plan.leave(path, reason, _BACKUP)


def _plan_finding(planning: _Planning, finding: Finding) -> None:
    place, plan = finding.place, planning.plan
    if place in planning.planned or (planning.log_planned and _is_of_log(finding)):
        return
    planning.planned.add(place)
    if place == FLOOR_NAME and finding.severity is Severity.DAMAGE:
        _plan_floor(planning, finding.detail)
    elif place == DATABASE_NAME and finding.kind is Kind.FOREIGN:
        _plan_strangers(planning)
    elif finding.kind is Kind.FOREIGN and place.startswith(f"{CUTS}/") and place not in planning.known:
        plan.act(ActionKind.MOVE, place, finding.detail)
        _plan_lost_cut(planning, place)
    elif finding.severity is Severity.DAMAGE:
        if not (place == CUTS and any(each.startswith(f"{CUTS}/") for each in planning.planned)):
            plan.leave(place, finding.detail, finding.next_step)
    elif (
        finding.kind in {Kind.ORPHAN, Kind.FOREIGN}
        and place not in planning.known
        and (planning.directory / place).exists()
    ):
        plan.act(ActionKind.MOVE, place, finding.detail)
    elif place.startswith(f"{LEASES}/"):
        plan.leave(place, finding.detail, finding.next_step)


def _plan_lost_cut(planning: _Planning, place: str) -> None:
    """Name the node's own cut that a stranger's manifest lay in the place of: moving that away does not bring it back."""
    last = planning.salvage.checkpoint.cut_number
    number = next(
        (each for each in range(planning.first_kept, last + 1) if place == f"{CUTS}/{manifest_name(each)}"), None
    )
    if number is not None:
        reason = (
            f"cut {number} of this node was there, and nothing else names its rows: they are lost from this directory"
        )
        planning.plan.leave(place, reason, _BACKUP)


def _plan_floor(planning: _Planning, detail: str) -> None:
    found = planning.salvage.found
    if found is None:
        planning.plan.leave(FLOOR_NAME, detail, _RESTORE)
        return
    unknown = "; ".join(f"{found.last_positions.get(number, 0)} of {name!r}" for name, number in found.log_ids.items())
    gives_up = f"what was acknowledged after position {unknown}, if there was any: nothing tells any more"
    planning.plan.act(ActionKind.NEW_FLOOR, FLOOR_NAME, detail, gives_up=(gives_up,))


def _plan_strangers(planning: _Planning) -> None:
    """Database and floor file are of two nodes: the cuts tell which of them is at home here."""
    found, floor = planning.salvage.found, planning.stranger
    owner = _cuts_owner(planning.directory)
    if found is None or floor is None or owner is None or owner == floor.node_id:
        reason = "it is not of the node that the floor file is of"
        planning.plan.leave(DATABASE_NAME, f"{reason}, and the cuts {'are' if owner else 'do not tell'}", _RESTORE)
        return
    _plan_floor(planning, f"it is of node {floor.node_id}; database and cuts are of {found.node_id}")


def _plan_cut_ahead(planning: _Planning) -> None:
    """A cut that was published when the log had not remembered it yet, and whose end is given up with the log."""
    number = planning.salvage.checkpoint.cut_number + 1
    log = next((log for log in planning.salvage.logs if log.name == PCHANNEL), None)
    path = f"{CUTS}/{manifest_name(number)}"
    if log is None or number not in cut_numbers(planning.directory):
        return
    try:
        manifest = decode_manifest((planning.directory / path).read_bytes(), name=path)
    except StreamingNodeError:
        return
    if log.kept is not None and log.kept.tick >= manifest.tick:
        return
    reason = f"the log no longer reaches the end of cut {number}; its rows up to there stay readable in this file"
    planning.plan.act(ActionKind.MOVE, path, f"the log no longer reaches the end of cut {number}")
    for file in (*manifest.segments, *manifest.deletes):
        planning.plan.act(
            ActionKind.MOVE, file.path, reason, gives_up=(f"{file.path}: {file.rows} rows of cut {number}",)
        )


def _cuts_owner(directory: Path) -> str | None:
    for number in reversed(cut_numbers(directory)):
        path = directory / CUTS / manifest_name(number)
        try:
            return decode_manifest(path.read_bytes(), name=path.name).node_id
        except StreamingNodeError:
            continue
    return None


def _floor(directory: Path) -> Floor | None:
    try:
        return read_floor(directory)
    except StreamingNodeError:
        return None
