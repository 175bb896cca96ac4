"""The floor file and the database of a node that nobody has open, as a tool reads them: nothing is changed. Blocks.

RocksDB writes nothing when it opens read-only. rocksdict does: it makes the directory if there is none, and writes its own
settings file anew each time. A look must neither break what the next opening would have finished nor mend what a second
look should find.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rocksdict import AccessType, DBRecoveryMode, Rdict

from flusher.cuts import CUTS_RECORD, decode_first_kept
from flusher.directory import cut_numbers
from flusher.manifest import Checkpoint, checkpoint_key, decode_checkpoint
from interceptors.idempotency import ProducerRecord
from interceptors.window import decode_window
from scanner.named_reader import ReaderPosition
from streamingnode.care.entries import ClosedLog
from streamingnode.care.findings import RESTORE, Kind, Report
from wal.errors import Corrupt, StreamingNodeError, UnsupportedFormat
from wal.files import read_regular
from wal.position import RocksMessageId
from wal.rocks.database import classify_failure
from wal.rocks.floor import (
    FLOOR_BYTES,
    FLOOR_NAME,
    FLOOR_READ_BYTES_MAX,
    PROMISE_OFFSET,
    SLOT_BYTES,
    TOKEN_BYTES,
    TOKEN_OFFSET,
    Floor,
    decode_floor,
    decode_promise,
    decode_slot,
    decode_token_term,
    read_floor,
)
from wal.rocks.layout import (
    DATABASE_NAME,
    ENTRY_FAMILY,
    META_PREFIX,
    RocksOptions,
    database_options,
    decode_number,
    families,
    first_position_key,
    meta_key,
)
from wal.rocks.log import last_position
from wal.rocks.opening import BACKUP_RECORD_NAME, TEMPORARY_SUFFIX
from wal.rocks.recovery import (
    Survey,
    chain_end,
    check_framing,
    first_sequence,
    has_torn_end,
    judge,
    scan_prefix,
    survey,
    torn_bytes,
)

PCHANNEL = "p0"
UNFINISHED_NAME = DATABASE_NAME + TEMPORARY_SUFFIX
SETTINGS_NAME = "rocksdict-config.json"
CHECKPOINT, READER, PRODUCER = "checkpoint/", "reader/", "producer/"

AS_OWNER, BEHIND_DAMAGE = DBRecoveryMode.point_in_time(), DBRecoveryMode.skip_any_corrupted_record()

_DROPS_TAIL = "nothing to do: the node drops it when it starts"
_WRITES = "nothing to do: the next start writes it again"
_AWAY = "move it away"
_OURS = re.compile(
    r"\d+\.(sst|log|dbtmp)|MANIFEST-\d+|CURRENT|IDENTITY|LOCK|LOG(\.old\.\d+)?|OPTIONS-\d+(\.dbtmp)?|rocksdict-config\.json"
)


def is_unfinished_creation(directory: Path) -> bool:
    """Whether the next opening makes the node here anew: nothing was ever acknowledged by it."""
    if not directory.is_dir() or any((directory / name).exists() for name in (DATABASE_NAME, BACKUP_RECORD_NAME)):
        return False
    try:
        floor = read_floor(directory)
    except StreamingNodeError:
        return False
    return floor is not None and not floor.term and not cut_numbers(directory)  # with cuts it was more than begun


# --- the floor file ---------------------------------------------------------------------------------------------------


def check_floor(directory: Path, report: Report) -> Floor | None:
    """Check both slots of the floor file and return what it says; None when it says nothing."""
    try:
        data = read_regular(directory / FLOOR_NAME, bytes_max=FLOOR_READ_BYTES_MAX)
    except FileNotFoundError:
        report.damage(Kind.MISSING, FLOOR_NAME, "without it nobody knows how far the log had come")
        return None
    except Corrupt as error:
        report.damage(Kind.UNREADABLE, FLOOR_NAME, error.happened)
        return None
    report.count("floor files")
    report.bytes += len(data)
    try:
        floor = decode_floor(data)
    except UnsupportedFormat as error:
        report.damage(Kind.UNREADABLE, FLOOR_NAME, str(error), "use the release that wrote it, or a newer one")
        return None
    except Corrupt as error:
        report.damage(Kind.CHECKSUM, FLOOR_NAME, error.happened)
        return None
    if len(data) != FLOOR_BYTES:
        report.warn(Kind.LENGTH, FLOOR_NAME, f"has {len(data)} bytes, not {FLOOR_BYTES}", _WRITES)
    # A power cut may tear what was being written; the other slot, older by a sync, counts then. So looks a flipped bit.
    torn = "fails its checksum: torn by a power cut, or damaged; the other one counts"
    promise, token = data[PROMISE_OFFSET:TOKEN_OFFSET], data[TOKEN_OFFSET : TOKEN_OFFSET + TOKEN_BYTES]
    for part, is_valid, detail in (
        (data[:SLOT_BYTES], decode_slot, f"slot 0 {torn}"),
        (data[SLOT_BYTES:PROMISE_OFFSET], decode_slot, f"slot 1 {torn}"),
        (promise, decode_promise, "the promised tick fails its checksum"),
        (token, decode_token_term, "its owner's fencing token fails its checksum"),
    ):
        if any(part) and not is_valid(part):
            report.warn(Kind.CHECKSUM, FLOOR_NAME, detail, _WRITES)
    return floor


# --- the database -----------------------------------------------------------------------------------------------------


def open_read_only(path: Path, recovery: DBRecoveryMode) -> Rdict:
    """Open a database without changing it.

    Raises `Corrupt` when there is none, and what `classify_failure` makes of RocksDB's errors.
    """
    if not (path / "CURRENT").is_file():
        raise Corrupt(f"{path} holds no database — run: streamingnode verify {path.parent}")
    check_framing(path)
    options, settings = RocksOptions(), path / SETTINGS_NAME
    try:
        before = settings.read_bytes() if settings.exists() else None
        try:
            return Rdict(
                str(path),
                database_options(options, recovery=recovery),
                column_families=families(options),
                access_type=AccessType.read_only(),
            )
        finally:
            if before is None:
                settings.unlink(missing_ok=True)
            elif not settings.exists() or settings.read_bytes() != before:
                settings.write_bytes(before)
    except Exception as error:
        raise classify_failure(error, path) from error


@dataclass(slots=True)
class NodeRecords:
    """What a node keeps beside its logs, by pchannel; named readers by `<collection id>/<name>`."""

    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    readers: dict[str, ReaderPosition] = field(default_factory=dict)
    first_kept: dict[str, int] = field(default_factory=dict)
    """The number of the earliest cut that is kept."""

    def take(self, key: str, value: bytes) -> None:
        """Decode one record of the state map. Raises what its decoder raises."""
        if key.startswith(CHECKPOINT):
            checkpoint = self.checkpoints[key.removeprefix(CHECKPOINT)] = decode_checkpoint(value)
            if checkpoint.producers is not None:
                decode_window(checkpoint.producers, RocksMessageId)
        elif key.startswith(READER):
            self.readers[key.removeprefix(READER)] = msgspec.msgpack.decode(value, type=ReaderPosition)
        elif key.startswith(CUTS_RECORD):
            self.first_kept[key.removeprefix(CUTS_RECORD)] = decode_first_kept(value)
        elif key.startswith(PRODUCER):
            msgspec.msgpack.decode(value, type=ProducerRecord)


def read_node_records(directory: Path) -> tuple[Survey, NodeRecords]:
    """Return how far the logs of a node go, and its records.

    Beside a running owner they may be a moment old, or not be read at all when files go away meanwhile. Raises `Corrupt`,
    `StorageFailed` or `UnsupportedFormat`.
    """
    path, records = directory / DATABASE_NAME, NodeRecords()
    database = open_read_only(path, AS_OWNER)
    try:
        found = survey(database)
        for key, value in scan_prefix(database, META_PREFIX).items():
            try:
                records.take(key[len(META_PREFIX) :].decode(), value)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise Corrupt(f"record {key!r} does not decode: {error}") from error
        return found, records
    except StreamingNodeError:
        raise
    except Exception as error:
        raise classify_failure(error, path) from error
    finally:
        database.close()


@dataclass(frozen=True, slots=True)
class ClosedDatabase:
    """The database of a closed node, with what is behind damage too; `floor` is None when it is not this database's."""

    rows: Rdict
    found: Survey
    floor: Floor | None

    def logs(self, report: Report) -> Iterator[ClosedLog]:
        """Yield each log that is there."""
        for name, log_id in self.found.log_ids.items():
            last = self.found.last_positions[log_id]
            kept = last if self.floor is None else self._end_kept(log_id, last, self.floor, report)
            known = 0 if self.floor is None else self.floor.positions.get(log_id, 0)
            yield ClosedLog(
                name=name,
                log_id=log_id,
                entries=self.rows.get_column_family(ENTRY_FAMILY),
                first=self._first_position(log_id),
                end=max(known, kept),
                is_torn=kept < last,
            )

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint of the one log. Raises `Corrupt`."""
        try:
            found = self.rows.get(meta_key(checkpoint_key(PCHANNEL)))
            return decode_checkpoint(found if isinstance(found, bytes) else None)
        except Exception as error:
            raise Corrupt(f"it cannot be read: {error}") from error

    def _first_position(self, log_id: int) -> int:
        try:
            recorded = self.rows.get(first_position_key(log_id))
        except Exception:  # noqa: BLE001 - damage of the state map, which whoever reads all of it names
            return 0
        return decode_number(recorded) if isinstance(recorded, bytes) else 1

    def _end_kept(self, log_id: int, last: int, floor: Floor, report: Report) -> int:
        """Return where an owner will let the log end, and warn when that is before its last entry."""
        if self.found.synced_each_batch:
            return last
        try:
            kept = chain_end(self.rows, log_id, floor)
        except Exception:  # noqa: BLE001 - damage, which whoever reads the entries names
            return last
        if kept < last:
            torn = f"what is behind position {kept}, up to {last}, not acknowledged as durable"
            report.warn(Kind.TORN, DATABASE_NAME, f"torn tail, will be dropped: {torn}", _DROPS_TAIL)
        return kept


def open_closed(directory: Path, floor: Floor | None, report: Report) -> ClosedDatabase:
    """Open the database of a node with as much of its log as RocksDB reads, and compare it with the floor.

    What an owner would open is the log up to the first damaged record. What is behind that is read too, so that holes are
    named exactly, unless damage proves nothing: under durability `os` a power cut leaves some. Raises `Corrupt` and what
    else RocksDB's failure means when it cannot be opened at all.
    """
    path = directory / DATABASE_NAME
    try:
        as_owner = _open_surveyed(path, AS_OWNER)
    except Corrupt as error:
        behind = as_owner = _open_surveyed(path, BEHIND_DAMAGE)
        report.damage(Kind.UNREADABLE, DATABASE_NAME, error.happened)
    else:
        try:
            behind = _open_surveyed(path, BEHIND_DAMAGE)
        except Corrupt as error:
            # RocksDB does not always get there, and a torn tail is no damage.
            behind = as_owner
            if as_owner.found.synced_each_batch:
                report.damage(Kind.UNREADABLE, DATABASE_NAME, error.happened)
    taken, floor = _compare(as_owner, behind, floor, path, report)
    for database in (as_owner, behind):
        if database is not taken:
            database.rows.close()
    return ClosedDatabase(taken.rows, taken.found, floor)


def _open_surveyed(path: Path, recovery: DBRecoveryMode) -> ClosedDatabase:
    """Open a database and look at what it holds; a log whose end cannot be read ends at 0 then."""

    def last_readable(entries: Rdict, log_id: int) -> int:
        try:
            return last_position(entries, log_id)
        except Exception:  # noqa: BLE001 - rocksdict raises nothing more exact
            return 0

    database = open_read_only(path, recovery)
    try:
        return ClosedDatabase(database, survey(database, last_position=last_readable), None)
    except Exception as error:
        database.close()
        if isinstance(error, StreamingNodeError):
            raise
        raise Corrupt(f"the facts about the store cannot be read: {error}") from error


def _compare(
    as_owner: ClosedDatabase, behind: ClosedDatabase, floor: Floor | None, path: Path, report: Report
) -> tuple[ClosedDatabase, Floor | None]:
    """Return which of the two is to be read, and the floor if it is this database's."""
    reached = as_owner.found
    if floor is None:
        return behind, None
    if reached.node_id != floor.node_id:
        detail = f"belongs to node {reached.node_id}, the floor file beside it to node {floor.node_id}"
        report.damage(Kind.FOREIGN, DATABASE_NAME, detail)
        return behind, None
    try:
        judge(reached, behind.found, floor, place=DATABASE_NAME)
    except Corrupt as error:
        report.damage(Kind.SHORT, DATABASE_NAME, error.happened)
        return behind, floor
    if reached.term > floor.term:
        detail = f"is of term {floor.term}, the log beside it of {reached.term}: it is an older copy"
        step = "put log and floor of one backup together; opening the node trusts the log"
        report.warn(Kind.MIXED, FLOOR_NAME, detail, step)
    if reached.synced_each_batch:
        return behind, floor
    if torn := torn_bytes(path):
        detail = f"torn tail, will be dropped: {torn} bytes, not acknowledged as durable"
        report.warn(Kind.TORN, DATABASE_NAME, detail, _DROPS_TAIL)
    return as_owner, floor


def check_database_files(path: Path, database: Rdict, report: Report) -> None:
    """Look at RocksDB's own files, by their names and their framing: what is too many, and what ends too early.

    RocksDB ignores a table that its manifest does not name, replays a log file that somebody copied under a newer name as if
    it were newer, and passes over a manifest whose last record is cut short.
    """
    for name in sorted(each.name for each in path.iterdir()):
        if not _OURS.fullmatch(name):
            report.warn(Kind.FOREIGN, f"{DATABASE_NAME}/{name}", "is none of a database's", _AWAY)
    _check_settings(path / SETTINGS_NAME, report)
    live = {Path(str(each["name"])).name for each in database.live_files()}
    for table in sorted(path.glob("*.sst")):
        if table.name not in live:
            detail = "the database does not name it: a crash before it did, or a copy"
            step = "nothing to do: RocksDB removes it when the node starts"
            report.warn(Kind.ORPHAN, f"{DATABASE_NAME}/{table.name}", detail, step)
    logs = sorted(path.glob("*.log"), key=lambda each: int(each.stem))
    begins = [(each, first) for each in logs if (first := first_sequence(each)) is not None]
    for (original, earlier), (copied, later) in itertools.pairwise(begins):
        if later <= earlier:
            detail = f"begins no later than {original.name}, which is older: it is a copy of what came before"
            report.damage(Kind.DUPLICATE, f"{DATABASE_NAME}/{copied.name}", detail, f"{_AWAY}, or {RESTORE}")
    manifest = path / (path / "CURRENT").read_text("utf-8").strip()
    if has_torn_end(path):
        detail = "its last record is cut short: a crash while it was written, or bytes are lost"
        step = "nothing to do: the next start writes it anew"
        report.warn(Kind.TORN, f"{DATABASE_NAME}/{manifest.name}", detail, step)


def _check_settings(settings: Path, report: Report) -> None:
    """Look at the file of rocksdict's own, which every opening of the node writes anew."""
    place, step = f"{DATABASE_NAME}/{SETTINGS_NAME}", "nothing to do: the next opening writes it again"
    try:
        if msgspec.json.decode(settings.read_bytes()) == {"raw_mode": True, "prefix_extractors": {}}:
            return
    except FileNotFoundError:
        report.warn(Kind.MISSING, place, "is not there; it carries no rows", step)
        return
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    report.warn(Kind.CONTENT, place, "is not what was written; it carries no rows", step)
