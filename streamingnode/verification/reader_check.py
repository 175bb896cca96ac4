"""Named readers whose place lies before the first position of their log: what they would read next is gone. Blocks.

In: the places of named readers, the checkpoint, the log from there on. Out: the readers that are behind. Those of dropped
collections are not among them: nobody can open them again, they hold nothing, and the node forgets them when it starts.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from rocksdict import Rdict

from flusher.checkpoint import Checkpoint
from interceptors.shard.state import ShardSnapshot, decode_snapshot
from scanner.named_reader import ReaderPosition
from streamingnode.verification.entry_scan import Unreadable, scan_entries
from streamingnode.verification.finding import Kind, Report
from wal.codec import decode_entry
from wal.errors import StreamingNodeError
from wal.headers import DropCollectionHeader
from wal.message import LogEntry
from wal.position import RocksMessageId

READER = "reader/"
"""What the keys of named readers begin with; `<collection id>/<name>` follows."""


@dataclass(frozen=True, slots=True)
class ReaderBehind:
    """A named reader that cannot go on, and the position it would go on from; `collection` is as it was last called."""

    name: str
    collection_id: int
    collection: str
    position: int

    def __str__(self) -> str:
        return f"named reader {self.name!r} of collection {self.collection!r}"


def decode_readers(records: Mapping[str, bytes]) -> dict[str, ReaderPosition]:
    """Return the places among records of the state map, by key; those that do not decode are found elsewhere."""
    readers = {}
    for key, value in records.items():
        if key.startswith(READER):
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                readers[key] = msgspec.msgpack.decode(value, type=ReaderPosition)
    return readers


def readers_behind(
    readers: Mapping[str, ReaderPosition], *, pchannel: str, first_position: int, checkpoint: Checkpoint
) -> list[ReaderBehind]:
    """Return the readers before `first_position`, of collections that were not dropped when the checkpoint was made."""
    snapshot = _snapshot(checkpoint)
    names = {} if snapshot is None else {info.id: info.name for info in snapshot.collections if not info.dropped_tick}
    created_before = 0 if snapshot is None else snapshot.next_id
    behind = []
    for key, at in readers.items():
        collection_id, name = _split(key)
        if at.pchannel != pchannel or at.position >= first_position:
            continue
        if collection_id in names or collection_id >= created_before:
            behind.append(ReaderBehind(name, collection_id, names.get(collection_id, str(collection_id)), at.position))
    return behind


def still_live(
    behind: list[ReaderBehind], entries: Rdict, log_id: int, *, position: int, last: int
) -> list[ReaderBehind]:
    """Return those whose collections the log from `position` to `last` does not drop; it is read only for some."""
    return without_dropped(behind, _readable_entries(entries, log_id, position, last)) if behind else []


def without_dropped(behind: list[ReaderBehind], entries: Iterable[LogEntry]) -> list[ReaderBehind]:
    """Return the readers whose collections none of the entries drops."""
    headers = (message.header for entry in entries for message in entry.messages)
    dropped = {header.collection_id for header in headers if isinstance(header, DropCollectionHeader)}
    return [reader for reader in behind if reader.collection_id not in dropped]


def warn_of_readers(behind: list[ReaderBehind], first_position: int, report: Report) -> None:
    """Add a finding for each reader that is behind."""
    for reader in behind:
        detail = (
            f"would go on at position {reader.position}, and the log begins at {first_position}: it cannot be opened, "
            "and the log is kept for it all the same"
        )
        step = "take the rows it missed from a snapshot or a table, delete the reader, and open it anew"
        report.warn(Kind.BEHIND, f"log, {reader}", detail, step)


def _snapshot(checkpoint: Checkpoint) -> ShardSnapshot | None:
    try:
        return None if checkpoint.shard_state is None else decode_snapshot(checkpoint.shard_state)
    except StreamingNodeError:  # then nobody knows which collections are dropped
        return None


def _split(key: str) -> tuple[int, str]:
    """Return collection id and name; an id that is none is taken for that of a collection dropped long ago."""
    number, _, name = key.removeprefix(READER).partition("/")
    return int(number) if number.isdecimal() else -1, name


def _readable_entries(entries: Rdict, log_id: int, position: int, last: int) -> Iterator[LogEntry]:
    for found in scan_entries(entries, log_id, start_position=position, end_position=last):
        if isinstance(found, Unreadable):
            continue
        if found[0] > last:
            return
        with suppress(StreamingNodeError):
            yield decode_entry(found[1], wal_name=RocksMessageId.wal_name, previous_crc32c=None)
