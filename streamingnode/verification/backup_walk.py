"""A backup against its own record: every file there, as long as it was, with the checksum it had. Blocks."""

from collections.abc import Iterator
from pathlib import Path

from streamingnode.inspection.backup_record import decode_record
from streamingnode.verification.file_check import measure_file
from streamingnode.verification.finding import Kind, Report
from wal.errors import Corrupt, StreamingNodeError
from wal.files import read_regular
from wal.rocks.opening import BACKUP_RECORD_NAME

_OTHER = "use another backup"


def walk_backup(directory: Path, report: Report) -> Iterator[int]:
    """Check the files of a backup and yield the bytes read after each step; nothing for a directory that is none."""
    try:
        content = read_regular(directory / BACKUP_RECORD_NAME)
        record = decode_record(content, name=BACKUP_RECORD_NAME)
    except FileNotFoundError:
        return
    except StreamingNodeError as error:
        report.damage(Kind.CHECKSUM, BACKUP_RECORD_NAME, error.happened, _OTHER)
        return
    yield len(content)
    for file in record.files:
        try:
            length, checksum = yield from measure_file(directory / file.path, expected_bytes=file.bytes)
        except FileNotFoundError:
            report.damage(Kind.MISSING, file.path, "the backup had it and it is not there", _OTHER)
            continue
        except Corrupt as error:
            report.damage(Kind.UNREADABLE, file.path, error.happened, _OTHER)
            continue
        report.count("files of the backup")
        if length != file.bytes:
            report.damage(Kind.LENGTH, file.path, f"has {length} bytes, the backup had {file.bytes}", _OTHER)
        elif checksum != file.crc32c:
            report.damage(Kind.CHECKSUM, file.path, "is not what the backup had", _OTHER)
