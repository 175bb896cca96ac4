"""The small records a node keeps beside its logs, read without owning the node: checkpoints and named readers.

The database is opened read-only, which changes nothing; beside a running owner it may be a moment old, or not open at all
when files go away meanwhile. Blocks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rocksdict import DBRecoveryMode, Rdict

from flusher.checkpoint import Checkpoint, decode_checkpoint
from flusher.cuts import CUTS_RECORD, decode_first_kept
from scanner.named_reader import ReaderPosition
from streamingnode.inspection.read_only import open_read_only
from wal.errors import Corrupt, StreamingNodeError
from wal.rocks.database import classify_failure
from wal.rocks.layout import DATABASE_NAME, meta_key
from wal.rocks.recovery import Survey, scan_prefix, survey

_CHECKPOINT, _READER = "checkpoint/", "reader/"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecords:
    """Checkpoints and the earliest cuts kept by pchannel, named readers by `<collection id>/<name>`, the end of each log."""

    survey: Survey
    checkpoints: Mapping[str, Checkpoint]
    readers: Mapping[str, ReaderPosition]
    first_kept: Mapping[str, int]


def read_node_records(directory: Path) -> NodeRecords:
    """Return the records of a node. Raises `Corrupt`, `StorageFailed` or `UnsupportedFormat`."""
    with _open(directory / DATABASE_NAME) as database:
        return NodeRecords(
            survey=survey(database),
            checkpoints={name: decode_checkpoint(value) for name, value in _records(database, _CHECKPOINT).items()},
            readers={name: _decode_reader(name, value) for name, value in _records(database, _READER).items()},
            first_kept={name: decode_first_kept(value) for name, value in _records(database, CUTS_RECORD).items()},
        )


@contextmanager
def _open(path: Path) -> Iterator[Rdict]:
    database = open_read_only(path, DBRecoveryMode.point_in_time())
    try:
        try:
            yield database
        finally:
            database.close()
    except StreamingNodeError:
        raise
    except Exception as error:
        raise classify_failure(error, path) from error


def _records(database: Rdict, prefix: str) -> dict[str, bytes]:
    key = meta_key(prefix)
    return {found[len(key) :].decode(): value for found, value in scan_prefix(database, key).items()}


def _decode_reader(name: str, value: bytes) -> ReaderPosition:
    try:
        return msgspec.msgpack.decode(value, type=ReaderPosition)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the position of reader {name} does not decode: {error}") from error
