"""A log with a live tail, written the way a node writes it, and what readers of it should see.

`Journal` stamps ticks and last-confirmed positions and publishes to the tail; `visible` is the model: for each tick, the
payloads a reader gets, written down at append time without any of the code under test.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

from scanner.deliver_policy import DeliverPolicy
from scanner.scanner import ScanBatch, Scanner
from tests.wal.entries import into_entry
from wal.append import AppendGroup, AppendTicket
from wal.entry import LogEntry
from wal.headers import (
    BeginTxnHeader,
    BodyAssignment,
    CommitTxnHeader,
    DropCollectionHeader,
    InsertHeader,
    MessageType,
    RollbackTxnHeader,
    TimeTickHeader,
)
from wal.live_tail import LiveTail
from wal.log import Log, LogStore
from wal.memory_store import MemoryLogStore
from wal.message import AnyMessage, Message, MutableMessage

V0, V1 = "p0_1v0", "p0_1v1"


class Bounds(TypedDict, total=False):
    """Bounds of a scanner's batches."""

    batch_bytes: int
    batch_messages: int


SMALL = Bounds(batch_bytes=300, batch_messages=3)


class Seen(NamedTuple):
    """What a reader sees at one tick."""

    tick: int
    payloads: tuple[bytes, ...]


def insert(payload: bytes = b"row", vchannel: str = V0, txn_id: int = 0) -> MutableMessage:
    return MutableMessage(MessageType.INSERT, InsertHeader(1, 2, 1, 1), vchannel, payload, txn_id)


def drop(vchannel: str = V0) -> MutableMessage:
    return MutableMessage(MessageType.DROP_COLLECTION, DropCollectionHeader(1), vchannel, b"drop")


def begin(txn_id: int) -> MutableMessage:
    return MutableMessage(MessageType.BEGIN_TXN, BeginTxnHeader(1000), txn_id=txn_id)


def commit(txn_id: int, bodies: Sequence[MutableMessage | Message]) -> MutableMessage:
    header = CommitTxnHeader(
        vchannels=tuple(sorted({body.vchannel for body in bodies})),
        assignments=tuple(BodyAssignment(7, 10 + at) for at in range(len(bodies))),
    )
    return MutableMessage(MessageType.COMMIT_TXN, header, txn_id=txn_id)


def rollback(txn_id: int) -> MutableMessage:
    return MutableMessage(MessageType.ROLLBACK_TXN, RollbackTxnHeader("test"), txn_id=txn_id)


def frozen(messages: list[MutableMessage], tick: int, position: int, *, size_bytes: int = 100) -> LogEntry:
    """Return messages as an entry that is in no log."""
    group = AppendGroup(messages)
    group.stamp_time_tick(tick, None)
    group.stamp_wal_term(1)
    return into_entry(messages, wal_name="memory", first_position=position, crc32c=0, size_bytes=size_bytes)


class Journal:
    """Appends to a log as a node does: durable first, then published, ticks in position order."""

    def __init__(self, log: Log, tail: LiveTail | None) -> None:
        self.log = log
        self.tail = tail
        self.tick = 0
        self.visible: list[Seen] = []
        self.entries: list[LogEntry] = []
        self._unpublished: list[LogEntry] = []
        self._last_ticket: AppendTicket | None = None
        self._open: dict[int, tuple[int, list[MutableMessage]]] = {}

    @classmethod
    async def create(cls, *, tail: LiveTail | None = None, store: LogStore | None = None) -> "Journal":
        log = await (store or MemoryLogStore()).open_log("p0")
        if tail is not None:
            tail.start(next_position=log.next_position, confirmed_tick=log.last_tick)
        return cls(log, tail)

    @property
    def open_transactions(self) -> list[int]:
        return list(self._open)

    def insert(self, *payloads: bytes, vchannel: str = V0) -> LogEntry:
        self._show(payloads)
        return self._append([insert(payload, vchannel) for payload in payloads])

    def time_tick(self) -> LogEntry:
        return self._append([MutableMessage(MessageType.TIME_TICK, TimeTickHeader("node"))])

    def transaction(self, *payloads: bytes, vchannel: str = V0) -> LogEntry:
        """Append begin, bodies and commit as one group."""
        txn_id = self.tick + 1
        self._show(payloads)
        bodies = [insert(payload, vchannel, txn_id) for payload in payloads]
        return self._append([begin(txn_id), *bodies, commit(txn_id, bodies)])

    def begin(self) -> int:
        txn_id = self.tick + 1
        self._open[txn_id] = (self.log.next_position, [])
        self._append([begin(txn_id)])
        return txn_id

    def body(self, txn_id: int, *payloads: bytes, vchannel: str = V0) -> LogEntry:
        bodies = [insert(payload, vchannel, txn_id) for payload in payloads]
        self._open[txn_id][1].extend(bodies)
        return self._append(bodies)

    def commit(self, txn_id: int) -> LogEntry:
        _, bodies = self._open[txn_id]
        self._show(tuple(bytes(body.payload) for body in bodies))
        entry = self._append([commit(txn_id, bodies)])
        del self._open[txn_id]
        return entry

    def rollback(self, txn_id: int) -> LogEntry:
        entry = self._append([rollback(txn_id)])
        del self._open[txn_id]
        return entry

    def idle(self) -> int:
        """Publish everything, then a tick without an entry."""
        self.publish()
        self.tick += 1
        if self.tail is not None:
            self.tail.advance(self.tick)
        return self.tick

    def publish(self) -> None:
        """Hand what is appended to the tail."""
        for entry in self._unpublished:
            if self.tail is not None:
                self.tail.append(entry)
        self._unpublished.clear()

    async def synced(self) -> None:
        """Wait until everything appended is on disk."""
        if self._last_ticket is not None:
            await self._last_ticket.durable

    def append_unpublished(self, *payloads: bytes) -> None:
        """Append and leave it to a later `publish`."""
        self._show(payloads)
        self._append([insert(payload) for payload in payloads], publish=False)

    def _show(self, payloads: Sequence[bytes]) -> None:
        self.visible.append(Seen(self.tick + 1, tuple(payloads)))

    def _append(self, messages: list[MutableMessage], *, publish: bool = True) -> LogEntry:
        self.tick += 1
        oldest_begin = min((position for position, _ in self._open.values()), default=None)
        group = AppendGroup(messages)
        group.stamp_time_tick(self.tick, oldest_begin)
        group.stamp_wal_term(1)
        ticket = self._last_ticket = self.log.append(group)
        entry = into_entry(
            messages,
            wal_name=self.log.wal_name,
            first_position=ticket.first_position,
            crc32c=ticket.crc32c,
            size_bytes=ticket.size_bytes,
        )
        self.entries.append(entry)
        self._unpublished.append(entry)
        if publish:
            self.publish()
        return entry


def seen(messages: Sequence[AnyMessage]) -> list[Seen]:
    """Return what messages show, parts of one tick put together."""
    shown: list[Seen] = []
    for message in messages:
        parts = message.bodies
        payloads = tuple(bytes(part.payload) for part in parts)
        if shown and shown[-1].tick == message.time_tick:
            payloads = shown.pop().payloads + payloads
        shown.append(Seen(message.time_tick, payloads))
    return shown


async def read_until(scanner: Scanner, tick: int) -> list[AnyMessage]:
    """Return what a scanner delivers until it confirms `tick`."""
    return [message for batch in await batches_until(scanner, tick) for message in batch.messages]


async def batches_until(scanner: Scanner, tick: int) -> list[ScanBatch]:
    """Return the batches a scanner delivers until it confirms `tick`."""
    batches: list[ScanBatch] = []
    while not batches or batches[-1].confirmed_tick < tick:
        batches.append(await scanner.next_batch())
    return batches


async def tailed_journal(capacity_bytes: int = 1 << 20) -> Journal:
    return await Journal.create(tail=LiveTail(capacity_bytes=capacity_bytes))


def scan(journal: Journal, policy: DeliverPolicy, **options: int) -> Scanner:
    return Scanner(journal.log, journal.tail, policy, **options)  # type: ignore[arg-type]
