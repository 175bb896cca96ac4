"""The interface between `Node` and the parts of a node: those in its own process, or a connection
to another one.
"""

from pathlib import Path
from typing import NamedTuple, Protocol

import pyarrow as pa

from interceptors.idempotency import ProducerRecord
from interceptors.shard.catalog import Catalog, CollectionInfo
from scanner.deliver_policy import DeliverPolicy, PlainPlace, StartingPoint
from scanner.scanner import ScanBatch
from streamingnode.care.findings import Report
from streamingnode.care.inspect import BackupRecord
from streamingnode.channel import FlushResult
from streamingnode.collections import Definition
from streamingnode.config import NodeConfig
from streamingnode.holders import ReaderInfo, TransactionInfo
from streamingnode.statistics import NodeStatistics, SpoolStatistics
from streamingnode.streams.channels import ChannelService
from wal.append import Append
from wal.headers import MessageType
from wal.queue import PendingBytes
from wal.rocksmq.contract import MessageQueue


class ReadRequest(NamedTuple):
    """The request of a reader. A batch has all of a tick, and may go above `until`."""

    infos: tuple[CollectionInfo, ...]
    policy: DeliverPolicy
    until: int | None
    name: str | None
    types: frozenset[MessageType]
    resume: StartingPoint | None = None
    """The place that an earlier reading of this request reached, whatever was acknowledged."""


class Reading(Protocol):
    """One reader's scan of the log, from which `CollectionReader` makes messages. Call `close` in
    any case.
    """

    async def open(self) -> int:
        """Find the place to start; return the position that a named reader holds.

        Raises as `CollectionReader.__aenter__` does.
        """

    async def next_batch(self) -> ScanBatch:
        """Return the next batch; cancelling loses nothing. Raises as `Scanner.next_batch` does."""

    async def ack(self, position: int, tick: int) -> None:
        """Move a named reader's place; durable when this returns."""

    async def close(self) -> None:
        """End the reading; idempotent."""


class Parts(Protocol):
    """The part of a `Backend` that runs in the caller's process; for a node of another process,
    only the other calls go there.
    """

    path: str | None
    node_id: str
    config: NodeConfig
    """The settings of the node that has the data."""
    wal_name: str
    """The kind of the node's log, which its message ids name."""
    pending: PendingBytes

    @property
    def mq(self) -> MessageQueue | None:
        """The node's topics; None if it has none."""

    @property
    def channels(self) -> ChannelService:
        """As `Node.channels`."""

    @property
    def spool(self) -> SpoolStatistics | None:
        """As `Node.spool`."""

    @property
    def append(self) -> Append:
        """Append a group, as `Wal.append` does."""

    @property
    def catalog(self) -> Catalog:
        """The collections as this process has them now."""

    def read(self, request: ReadRequest) -> Reading:
        """Return a reading of some collections."""

    def last_sequence(self, producer_id: int) -> int:
        """Return the highest sequence of a producer in the log, 0 for none."""

    def reach(self, producer_id: int, sequence: int) -> None:
        """Make later automatic sequences of a producer higher than `sequence`, which a caller
        chose.
        """

    async def drain(self) -> None:
        """Return when all writes under way have ended; no new ones come. The parts are closed after
        it.
        """

    async def open_producer(self, name: str) -> tuple[ProducerRecord, int]:
        """Open a producer, or create it, and fence its previous opening; return it with its last
        sequence.
        """


class Backend(Parts, Protocol):
    """All calls that `Node` needs. Calls of the same name raise the same errors; the caller applies
    timeouts.
    """

    async def consistent_tick(self, collections: tuple[str, ...] = ()) -> int:
        """As `Node.consistent_tick`."""

    async def create_collection(
        self, definition: Definition, *, if_not_exists: bool
    ) -> CollectionInfo:
        """As `Node.create_collection`."""

    async def drop_collection(self, name: str, *, if_exists: bool) -> None:
        """As `Node.drop_collection`."""

    async def create_partition(
        self, collection: str, partition: str, *, if_not_exists: bool
    ) -> None:
        """As `Node.create_partition`."""

    async def drop_partition(self, collection: str, partition: str, *, if_exists: bool) -> None:
        """As `Node.drop_partition`."""

    async def put_note(self, name: str, epoch: int, note: bytes) -> None:
        """As `Producer.put_note`."""

    async def delete_producer(self, name: str) -> bool:
        """As `Node.delete_producer`."""

    async def delete_reader(self, collection: str, name: str) -> bool:
        """As `Node.delete_reader`."""

    async def named_readers(self) -> tuple[ReaderInfo, ...]:
        """As `Node.readers`."""

    async def seek_reader(
        self, collection: str, name: str, start: str, at: PlainPlace, *, dry_run: bool
    ) -> ReaderInfo:
        """As `Node.seek_reader`, with the policy as plain data."""

    async def open_transactions(self) -> tuple[TransactionInfo, ...]:
        """As `Node.transactions`."""

    async def abort_transaction(self, txn_id: int) -> None:
        """As `Node.abort_transaction`."""

    async def snapshot(
        self,
        collection: str,
        as_of: int | None,
        columns: tuple[str, ...] | None = None,
        keys: bytes | None = None,
    ) -> pa.Table:
        """As `Node.snapshot`; `keys` are those of a delete, an Arrow IPC message without its
        schema.
        """

    async def flush(self) -> FlushResult:
        """As `Node.flush`."""

    async def back_up(self, path: Path) -> BackupRecord:
        """As `Node.backup`."""

    async def verify(self) -> Report:
        """As `Node.verify`."""

    async def statistics(self) -> NodeStatistics:
        """As `Node.statistics`."""

    async def hand_over(self) -> None:
        """Release the directory to a process that requests it, if this is a command's node."""
