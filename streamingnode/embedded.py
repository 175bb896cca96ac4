"""The parts of a node in its own process, for `Node` and the server, and the reading of its log."""

import asyncio
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import anyio
import pyarrow as pa

from flusher.flusher import Flusher
from interceptors.idempotency import ProducerRecord
from interceptors.shard.catalog import Catalog
from scanner.deliver_policy import DeliverPolicy, Start, StartingPoint
from scanner.named_reader import NamedReader, NamedReaders
from scanner.scanner import ScanBatch, Scanner
from streamingnode.backend import ReadRequest
from streamingnode.care.backup import Upkeep
from streamingnode.care.findings import Report
from streamingnode.care.inspect import BackupRecord
from streamingnode.channel import Channel, flush
from streamingnode.collections import check_name
from streamingnode.ddl import CatalogChanges
from streamingnode.holders import ABORTED, list_readers, list_transactions, seek_reader
from streamingnode.snapshot import select, take_snapshot
from streamingnode.statistics import NodeStatistics, SpoolStatistics
from streamingnode.streams.channels import ChannelService
from streamingnode.writing.producer import check_note
from streamingnode.writing.transaction import rollback_group
from streamingnode.writing.write import check_txn_id
from wal.errors import InvalidArgument, Truncated
from wal.headers import MessageType
from wal.rocksmq.contract import MessageQueue

GRACE_S = 3.0
"""How long closing waits for appends under way."""


class StopsListening(Protocol):
    """Accepts the connections of clients."""

    @property
    def connections(self) -> int:
        """The number of open connections."""

    async def close(self) -> None:
        """Accept no more connections, and end the open ones."""


class EmbeddedBackend(CatalogChanges):
    """The parts of a node in this process; see `Backend`."""

    def __init__(
        self,
        path: Path | None,
        channel: Channel,
        flusher: Flusher,
        readers: NamedReaders,
        statistics: Callable[[], NodeStatistics],
        make_topics: Callable[[], MessageQueue | None],
    ) -> None:
        self.path = None if path is None else str(path)
        self.channel = channel
        self.flusher = flusher
        self.readers = readers
        self.measure = statistics
        self.append = channel.append
        self.pending = channel.pending
        self.config = channel.config
        self.node_id = channel.store.node_id
        self.wal_name = channel.log.wal_name
        self.consistent_tick = channel.consistent_tick
        self.last_sequence = channel.producers.last_sequence
        self.reach = channel.producers.sequences.reach
        self.read = partial(EmbeddedReading, channel, readers)
        self.flush = partial(flush, channel, flusher)
        self.named_readers = partial(list_readers, channel, readers)
        self.seek_reader = partial(seek_reader, channel, readers)
        self.open_transactions = partial(list_transactions, channel)
        self.listener: StopsListening | None = None
        self.http: str | None = None
        """The URL for monitors."""
        self.spool: SpoolStatistics | None = None
        self.wanted = asyncio.Event()
        """Set when another process requests the directory."""
        self._directory = path
        self._make_topics = make_topics

    @cached_property
    def mq(self) -> MessageQueue | None:
        """The node's topics, created at their first use."""
        return self._make_topics()

    @property
    def catalog(self) -> Catalog:
        """The collections as of the last group in the log's queue."""
        return self.channel.term.shards.catalog

    @cached_property
    def channels(self) -> ChannelService:
        """The node's channel service, created at its first use. Raises `InvalidArgument` for a node
        without topics.
        """
        if self.mq is None:
            raise InvalidArgument("this node has no channels — open one with a directory")
        return ChannelService(self.channel.state, self.mq)

    @cached_property
    def _upkeep(self) -> Upkeep:
        return Upkeep(self._directory, self.channel, self.flusher)

    async def drain(self) -> None:
        """Return when every insert under way has ended.

        After `GRACE_S` it waits only for inserts that the disk has; the others, which wait for a
        segment, raise `OnShutdown`.
        """
        if self.listener is not None:
            await self.listener.close()
        wal = self.channel.wal
        wal.stop_waiting()
        with anyio.move_on_after(GRACE_S) as grace:
            await wal.drain()
        if grace.cancelled_caught:
            await wal.close()
            await wal.drain()

    async def open_producer(self, name: str) -> tuple[ProducerRecord, int]:
        """Open a producer, or create it, and fence its previous opening; return it with its last
        sequence.
        """
        check_name("producer", name)
        opened = await self.channel.wal.in_term(
            partial(self.channel.producers.open, name), settled=True
        )
        return opened, self.last_sequence(opened.producer_id)

    async def put_note(self, name: str, epoch: int, note: bytes) -> None:
        """As `Producer.put_note`."""
        check_note(note)
        await self.channel.wal.in_term(partial(self.channel.producers.put_note, name, epoch, note))

    async def delete_producer(self, name: str) -> bool:
        """As `Node.delete_producer`."""
        return await self.channel.wal.in_term(partial(self.channel.producers.delete, name))

    async def delete_reader(self, collection: str, name: str) -> bool:
        """As `Node.delete_reader`."""
        return await self.readers.delete_reader(
            self.catalog.collection_by_name(collection).id, name
        )

    async def abort_transaction(self, txn_id: int) -> None:
        """As `Node.abort_transaction`."""
        await self.append(rollback_group(check_txn_id(txn_id), ABORTED))

    async def snapshot(
        self,
        collection: str,
        as_of: int | None,
        columns: tuple[str, ...] | None = None,
        keys: bytes | None = None,
    ) -> pa.Table:
        """As `Node.snapshot`."""
        info = self.catalog.collection_by_name(collection)
        return await take_snapshot(
            self.channel, self.flusher, info, as_of, select(info, columns, keys)
        )

    async def back_up(self, path: Path) -> BackupRecord:
        """As `Node.backup`."""
        return await self._upkeep.back_up(path)

    async def verify(self) -> Report:
        """As `Node.verify`."""
        return await self._upkeep.verify()

    async def statistics(self) -> NodeStatistics:
        """As `Node.statistics`."""
        return self.measure()

    async def hand_over(self) -> None:
        """Request that this process release the directory to another one."""
        self.wanted.set()


class EmbeddedReading:
    """A reader's scan of a log in this process; see `Reading`."""

    def __init__(self, channel: Channel, readers: NamedReaders, request: ReadRequest) -> None:
        self._channel = channel
        self._readers = readers
        self._request = request
        self.vchannels = frozenset(
            vchannel for info in request.infos for vchannel in info.vchannels
        )
        self._scanner: Scanner | None = None
        self._named: NamedReader | None = None

    @property
    def place(self) -> StartingPoint:
        """The durable place where a named reader resumes; position 0 for any other reader."""
        return StartingPoint(0, 0) if self._named is None else self._named.position.start

    @property
    def start(self) -> StartingPoint:
        """The place where a new reading would go on after this one, or start like it; valid once
        open.
        """
        assert self._scanner is not None, "open comes first"
        return self._scanner.place

    async def open(self) -> int:
        """Find the place to start."""
        self._channel.check_passed(
            self._request.policy.at, self._request.until, *self._request.resume or ()
        )
        await self._open()
        return self.place.position

    async def next_batch(self) -> ScanBatch:
        """Return the next batch."""
        assert self._scanner is not None, "open comes first"
        return await self._scanner.next_batch()

    async def ack(self, position: int, tick: int) -> None:
        """Move a named reader's place."""
        assert self._named is not None, "only a named reader keeps its place"
        if position > self.start.position or tick > self.start.after_tick:
            raise InvalidArgument(
                "it was not delivered yet — acknowledge a message that this reader delivered"
            )
        await self._named.ack(position, tick)

    async def close(self) -> None:
        """End the reading; idempotent."""
        scanner = self._scanner
        named = self._named
        self._scanner = None
        self._named = None
        if scanner is not None:
            await scanner.close()
        if named is not None:
            await named.close()

    async def _open(self) -> None:
        readers = self._readers
        policy = self._request.policy
        name = self._request.name
        # otherwise the message that ends the reader is still to be read, so drops do not matter
        if self._request.resume is None:
            for info in self._request.infos:
                self._channel.check_live(info)
        if name is None:
            await self._scan(policy)
            return
        ids = [info.id for info in self._request.infos]
        known = readers.find(ids, name)
        start = known or await self._channel.find_position(policy)
        named = self._named = await readers.open(ids, name, start=start)
        try:
            await self._scan(named.position.start)
        except Truncated as gone:
            if known is not None:  # the log was truncated beyond the reader's place
                next_step = (
                    f"delete_reader() deletes the place of {name!r}, which then starts "
                    "where its policy says"
                )
                raise Truncated(gone.requested, gone.earliest, next_step) from gone
            # The log was truncated between finding a place for a new reader and holding it.
            await self.close()
            await readers.delete_reader(ids[0], name)
            if policy.start is not Start.ALL or self._request.resume is not None:
                raise
            await self._open()

    async def _scan(self, start: DeliverPolicy | StartingPoint) -> None:
        request = self._request
        # the drop of the last collection ends the reader, whether that is delivered or not
        types = request.types | {MessageType.DROP_COLLECTION}
        self._scanner = self._channel.read(
            request.resume or start, vchannels=self.vchannels, types=types
        )
        await self._scanner.open()
