"""The records that a node keeps beside its log, and reading a node without owning it. Blocks."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from flusher.cuts import CUTS_RECORD, FIRST_CUT, decode_first_kept
from flusher.manifest import NO_CHECKPOINT, Checkpoint, decode_checkpoint
from interceptors.idempotency import ProducerRecord
from interceptors.window import decode_window
from scanner.named_reader import ReaderPosition
from streamingnode.care.findings import Report
from streamingnode.streams.channels import CHANNEL_KEY, OwnerDescription
from wal.errors import Corrupt
from wal.position import RocksMessageId
from wal.rocks.floor import Floor
from wal.rocks.layout import DATABASE_NAME
from wal.rocks.recovery import Survey
from wal.rocks.store import RocksReader
from wal.rocksmq.topic import PREFIX as TOPICS
from wal.rocksmq.topic import Topic, decode_records

PCHANNEL = "p0"
STATE_MAP = f"{DATABASE_NAME}, state map"
CHECKPOINT = "checkpoint/"
READER = "reader/"
PRODUCER = "producer/"

LOOKS_AGAIN = 4
"""How often a database that looks damaged is opened again: its owner may just have removed a
needless file.
"""


@dataclass(slots=True)
class NodeRecords:
    """The records beside a node's log; named readers have the key `<collection id>/<name>`."""

    checkpoint: Checkpoint = NO_CHECKPOINT
    readers: dict[str, ReaderPosition] = field(default_factory=dict)
    first_kept: int = FIRST_CUT
    """The number of the first kept cut."""
    topics: dict[str, Topic] = field(default_factory=dict)
    last_tick: int | None = None
    """The tick of the log's last entry; None unless the log was read to its end."""


def check_records(state_map: Mapping[str, bytes], report: Report) -> NodeRecords:
    """Decode every record of a known kind and return those of use; records that do not decode are
    damage.
    """
    records = NodeRecords()
    for key, value in state_map.items():
        report.read("log", len(key) + len(value))
        try:
            if key.startswith(CHECKPOINT):
                records.checkpoint = decode_checkpoint(value)
                if records.checkpoint.producers is not None:
                    decode_window(records.checkpoint.producers, RocksMessageId)
            elif key.startswith(READER):
                records.readers[key.removeprefix(READER)] = msgspec.msgpack.decode(
                    value, type=ReaderPosition
                )
            elif key.startswith(CUTS_RECORD):
                records.first_kept = decode_first_kept(value)
            elif key.startswith(PRODUCER):
                msgspec.msgpack.decode(value, type=ProducerRecord)
            elif key.startswith(CHANNEL_KEY):
                msgspec.msgpack.decode(value, type=OwnerDescription)
        except Exception as error:  # noqa: BLE001 - decoding may raise anything
            report.damage(f"{DATABASE_NAME}, record {key!r}", f"does not decode: {error}")
    try:
        _, records.topics = decode_records(
            {key: value for key, value in state_map.items() if key.startswith(TOPICS)}
        )
    except Exception as error:  # noqa: BLE001 - decoding may raise anything
        report.damage(STATE_MAP, f"the records of topics do not decode: {error}")
    return records


@contextmanager
def reading(directory: Path, floor: Floor | None) -> Iterator[tuple[asyncio.Runner, RocksReader]]:
    """Open a node for reading during the block, with an event loop to read it on; see
    `RocksReader`.
    """
    with asyncio.Runner() as runner:
        store = RocksReader(directory, floor)
        try:
            yield runner, store
        finally:
            runner.run(store.close())


def read_node_records(directory: Path) -> tuple[Survey, NodeRecords]:
    """Return the survey of a node's logs, and its records.

    Beside a running owner they may be slightly stale, and reading fails when files disappear
    repeatedly. Raises `Corrupt`, `StorageFailed` or `UnsupportedFormat`.
    """
    for _ in range(LOOKS_AGAIN):
        with suppress(Corrupt):
            return _look_at_records(directory)
    return _look_at_records(directory)


def _look_at_records(directory: Path) -> tuple[Survey, NodeRecords]:
    report = Report()
    with reading(directory, None) as (runner, store):
        records = check_records(runner.run(store.state.scan("")), report)
    for damage in report.damages:
        raise Corrupt(f"{damage.place} {damage.detail} — {damage.next_step}")
    return store.found, records
