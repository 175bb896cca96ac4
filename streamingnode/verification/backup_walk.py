"""A backup against its own record: every file there, as long as it was, with the checksum it had. Blocks."""

from collections.abc import Iterator
from pathlib import Path

from streamingnode.inspection.backup_record import decode_record
from streamingnode.verification.file_check import measure_file
from streamingnode.verification.finding import Kind, Report
from wal.errors import StreamingNodeError
from wal.rocks.directory import BACKUP_RECORD_NAME

_OTHER = "use another backup"


def walk_backup(directory: Path, report: Report) -> Iterator[int]:
    """Check the files of a backup and yield the bytes read after each step; nothing for a directory that is none."""
    try:
        content = (directory / BACKUP_RECORD_NAME).read_bytes()
        record = decode_record(content, name=BACKUP_RECORD_NAME)
    except FileNotFoundError:
        return
    except StreamingNodeError as error:
        report.damage(Kind.CHECKSUM, BACKUP_RECORD_NAME, error.happened, _OTHER)
        return
    yield len(content)
    for file in record.files:
        try:
            length, checksum = yield from measure_file(directory / file.path)
        except FileNotFoundError:
            report.damage(Kind.MISSING, file.path, "the backup had it and it is not there", _OTHER)
            continue
        report.count("files of the backup")
        if length != file.bytes:
            report.damage(Kind.LENGTH, file.path, f"has {length} bytes, the backup had {file.bytes}", _OTHER)
        elif checksum != file.crc32c:
            report.damage(Kind.CHECKSUM, file.path, "is not what the backup had", _OTHER)
