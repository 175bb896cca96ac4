"""RocksDB's own files, by their names and their framing: what is too many, and what ends too early. Blocks.

RocksDB ignores a table that its manifest does not name and removes it, replays a log file that somebody copied under a newer
name as if it were newer, and passes over a manifest whose last record is cut short. None of it loses what was acknowledged
by itself, or floor and log would tell; it is said all the same, because somebody or some disk was there.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rocksdict import Rdict

from streamingnode.inspection.read_only import SETTINGS_NAME, read_settings
from streamingnode.verification.finding import RESTORE, Kind, Report
from wal.rocks.layout import DATABASE_NAME
from wal.rocks.recovery import first_sequence, is_cut_short

_OURS = re.compile(
    r"\d+\.(sst|log|dbtmp)|MANIFEST-\d+|CURRENT|IDENTITY|LOCK|LOG(\.old\.\d+)?|OPTIONS-\d+(\.dbtmp)?|rocksdict-config\.json"
)
_STARTS = "nothing to do: RocksDB removes it when the node starts"
_WRITTEN = "nothing to do: the next opening writes it again"
_AWAY = "move it away"


def check_database_files(path: Path, database: Rdict, report: Report) -> None:
    """Look at the files in the directory of a database that is open read-only."""
    for name in sorted(each.name for each in path.iterdir()):
        if not _OURS.fullmatch(name):
            report.warn(Kind.FOREIGN, f"{DATABASE_NAME}/{name}", "is none of a database's", _AWAY)
    _check_settings(path, report)
    live = {Path(str(each["name"])).name for each in database.live_files()}
    for table in sorted(path.glob("*.sst")):
        if table.name not in live:
            detail = "the database does not name it: a crash before it did, or a copy"
            report.warn(Kind.ORPHAN, f"{DATABASE_NAME}/{table.name}", detail, _STARTS)
    for copied, original in _copied_logs(path):
        detail = f"begins no later than {original.name}, which is older: it is a copy of what came before"
        report.damage(Kind.DUPLICATE, f"{DATABASE_NAME}/{copied.name}", detail, f"{_AWAY}, or {RESTORE}")
    manifest = path / (path / "CURRENT").read_text("utf-8").strip()
    if is_cut_short(manifest):
        detail = "its last record is cut short: a crash while it was written, or bytes are lost"
        report.warn(
            Kind.TORN, f"{DATABASE_NAME}/{manifest.name}", detail, "nothing to do: the next start writes it anew"
        )


def _check_settings(path: Path, report: Report) -> None:
    """Look at the file of rocksdict's own, which every opening of the node writes anew."""
    content, place = read_settings(path), f"{DATABASE_NAME}/{SETTINGS_NAME}"
    if content is None:
        report.warn(Kind.MISSING, place, "is not there; it carries no rows", _WRITTEN)
    elif not _is_settings(content):
        report.warn(Kind.CONTENT, place, "is not what was written; it carries no rows", _WRITTEN)


def _is_settings(content: bytes) -> bool:
    try:
        return bool(msgspec.json.decode(content) == {"raw_mode": True, "prefix_extractors": {}})
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def _copied_logs(path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield log files that do not begin behind where the one before them begins, and that one."""
    logs = sorted(path.glob("*.log"), key=lambda each: int(each.stem))
    begins = [(each, first) for each in logs if (first := first_sequence(each)) is not None]
    for (before, earlier), (after, later) in itertools.pairwise(begins):
        if later <= earlier:
            yield after, before
