"""A log with a live tail, written the way a node writes it, and what readers of it should see.

`Journal` stamps ticks and last-confirmed positions and publishes to the tail; `visible` is the
model: for each tick, the payloads a reader gets, written down at append time without any of the
code under test.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

from msgspec.structs import replace

from scanner.deliver_policy import DeliverPolicy, StartingPoint
from scanner.scanner import ScanBatch, Scanner
from tests.wal.entries import entry_of
from tests.wal.packed import FakeTarget, Row, pack_of, piece, rows_group
from wal.append import AppendGroup, AppendTicket, Pack
from wal.entry import LogEntry, messages_of
from wal.headers import (
    BeginTxnHeader,
    BodyAssignment,
    CommitTxnHeader,
    DeleteHeader,
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
from wal.position import MessageId, message_id_kind
from wal.rows import encode_pieces, lay_out

V0, V1 = VCHANNELS = "p0_1v0", "p0_1v1"
ROW_END = b"\n"
"""Behind each packed row, so that the rows of a message can be told from those of others in its
payload.
"""


class Bounds(TypedDict, total=False):
    """Bounds of a scanner's batches."""

    batch_bytes: int
    batch_messages: int


SMALL = Bounds(batch_bytes=500, batch_messages=3)


class Seen(NamedTuple):
    """What a reader sees at one tick."""

    tick: int
    payloads: tuple[bytes, ...]


class Part(NamedTuple):
    """What a write has on one vchannel, in one message."""

    kind: MessageType
    vchannel: str
    payload: bytes


class PutPiece(NamedTuple):
    """Rows, each with its shard: a message for each shard that they have."""

    rows: tuple[Row, ...]
    kind: MessageType = MessageType.INSERT


class Put(NamedTuple):
    """One write of a pack."""

    pieces: tuple[PutPiece, ...]
    is_transaction: bool = False

    @property
    def parts(self) -> list[Part]:
        """Its messages, in order."""
        return [
            Part(kind, VCHANNELS[shard], b"".join(data for at, data in rows if at == shard))
            for rows, kind in self.pieces
            for shard in sorted({at for at, _ in rows})
        ]


def put(*payloads: bytes, vchannel: str = V0, is_transaction: bool = False) -> Put:
    """Return a write of a message for each payload, all on one vchannel."""
    shard = VCHANNELS.index(vchannel)
    return Put(tuple(PutPiece(((shard, payload),)) for payload in payloads), is_transaction)


def assorted(payload: bytes, number: int) -> list[Put]:
    """Return one to five writes for a pack: plain ones and transactions, on one vchannel or
    both.
    """
    both = Put(
        (
            PutPiece(((0, payload), (1, payload + b"1"))),
            PutPiece(((1, payload),), MessageType.DELETE),
        ),
        True,
    )
    kinds = (
        put(payload),
        put(payload, payload + b"'", is_transaction=True),
        put(payload, payload + b"'", vchannel=V1),
        both,
        put(payload, vchannel=V1, is_transaction=True),
    )
    return [kinds[(number + at) % len(kinds)] for at in range(1 + number // 5 % 5)]


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


def frozen(
    messages: list[MutableMessage], tick: int, position: int, *, size_bytes: int = 100
) -> LogEntry:
    """Return messages as an entry that is in no log."""
    pack = pack_of(AppendGroup(messages))
    pack.stamp(tick, None)
    pack.stamp_wal_term(1)
    return replace(entry_of(pack, position), size_bytes=size_bytes)


def id_of(entry: LogEntry) -> MessageId:
    """Return the id of an entry's first message."""
    return message_id_kind("memory")(entry.first_position)


class Journal:
    """Appends to a log as a node does: durable first, then published, ticks in position order."""

    def __init__(self, log: Log, tail: LiveTail | None) -> None:
        self.log = log
        self.tail = tail
        self.tick = 0
        self.visible: list[Seen] = []
        self.puts: dict[int, Put] = {}
        """Packed writes, by tick."""
        self.entries: list[LogEntry] = []
        self._unpublished: list[LogEntry] = []
        self._last_ticket: AppendTicket | None = None
        self._open: dict[int, tuple[int, list[MutableMessage]]] = {}
        self._targets = {
            kind: FakeTarget(kind, vchannels=VCHANNELS)
            for kind in (MessageType.INSERT, MessageType.DELETE)
        }
        self._next_offsets = dict.fromkeys(VCHANNELS, 0)

    @classmethod
    async def create(
        cls, *, tail: LiveTail | None = None, store: LogStore | None = None
    ) -> "Journal":
        log = await (store or MemoryLogStore()).open_log("p0")
        if tail is not None:
            tail.start(next_position=log.next_position, confirmed_tick=log.last_tick)
        return cls(log, tail)

    @property
    def open_transactions(self) -> list[int]:
        return list(self._open)

    def insert(self, *payloads: bytes, vchannel: str = V0) -> LogEntry:
        """Append one write that is alone in its entry."""
        return self.pack(put(*payloads, vchannel=vchannel))

    def transaction(self, *payloads: bytes, vchannel: str = V0) -> LogEntry:
        """Append begin, bodies and commit as one group."""
        return self.pack(put(*payloads, vchannel=vchannel, is_transaction=True))

    def pack(self, *puts: Put, publish: bool = True) -> LogEntry:
        """Append writes as one entry."""
        groups = []
        for tick, each in enumerate(puts, self.tick + 1):
            self.visible.append(Seen(tick, tuple(part.payload for part in each.parts)))
            self.puts[tick] = each
            pieces = [
                piece(self._targets[kind], *((shard, data + ROW_END) for shard, data in rows))
                for rows, kind in each.pieces
            ]
            groups.append(rows_group(*pieces, is_transaction=each.is_transaction))
        return self._append(*groups, publish=publish)

    def drop(self) -> LogEntry:
        self._show([b"drop"])
        return self._append(AppendGroup([drop()]))

    def time_tick(self) -> LogEntry:
        return self._append(
            AppendGroup([MutableMessage(MessageType.TIME_TICK, TimeTickHeader("node"))])
        )

    def begin(self) -> int:
        txn_id = self.tick + 1
        self._open[txn_id] = (self.log.next_position, [])
        self._append(AppendGroup([begin(txn_id)]))
        return txn_id

    def body(self, txn_id: int, *payloads: bytes, vchannel: str = V0) -> LogEntry:
        bodies = [insert(payload, vchannel, txn_id) for payload in payloads]
        self._open[txn_id][1].extend(bodies)
        return self._append(AppendGroup(bodies))

    def commit(self, txn_id: int) -> LogEntry:
        _, bodies = self._open[txn_id]
        self._show(tuple(bytes(body.payload) for body in bodies))
        entry = self._append(AppendGroup([commit(txn_id, bodies)]))
        del self._open[txn_id]
        return entry

    def rollback(self, txn_id: int) -> LogEntry:
        entry = self._append(AppendGroup([rollback(txn_id)]))
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
        self.pack(put(*payloads), publish=False)

    def _show(self, payloads: Sequence[bytes]) -> None:
        self.visible.append(Seen(self.tick + 1, tuple(payloads)))

    def _append(self, *groups: AppendGroup, publish: bool = True) -> LogEntry:
        self.tick += len(groups)
        oldest_begin = min((position for position, _ in self._open.values()), default=None)
        pack = pack_of(*groups)
        pack.stamp(self.tick, oldest_begin)
        pack.stamp_wal_term(1)
        if not pack.messages:
            self._lay_out(pack)
        pack.ticket = self._last_ticket = self.log.append(pack)
        entry = pack.entry
        assert entry is not None
        self.entries.append(entry)
        self._unpublished.append(entry)
        if publish:
            self.publish()
        return entry

    def _lay_out(self, pack: Pack) -> None:
        pieces = [group.pieces for group in pack.groups]
        transactions = [group.is_transaction for group in pack.groups]
        laid_out = lay_out(
            pieces, transactions, encode_pieces(pieces), next_offsets=self._next_offsets
        )
        pack.take_rows(laid_out)
        for of_group in laid_out.row_offsets:
            self._next_offsets |= {
                vchannel: first + count for vchannel, (first, count) in of_group.items()
            }


def payload_of(message: Message) -> bytes:
    """Return the rows of a message, put together; of one without rows its payload."""
    header = message.header
    if not isinstance(header, InsertHeader | DeleteHeader):
        return bytes(message.payload)
    rows = bytes(message.payload).split(ROW_END)
    return b"".join(rows[message.first_row : message.first_row + header.rows])


def later_than(journal: Journal, tick: int) -> list[Seen]:
    """Return what a reader is shown above a tick."""
    return [each for each in journal.visible if each.tick > tick]


def seen(messages: Sequence[AnyMessage]) -> list[Seen]:
    """Return what messages show, parts of one tick put together."""
    shown: list[Seen] = []
    for message in messages:
        payloads = tuple(payload_of(part) for part in message.bodies)
        if shown and shown[-1].tick == message.time_tick:
            payloads = shown.pop().payloads + payloads
        shown.append(Seen(message.time_tick, payloads))
    return shown


def messages_in(batch: ScanBatch) -> list[AnyMessage]:
    """Return the messages of a batch as objects, those of packed rows too."""
    return list(messages_of(batch.visible))


async def read_until(scanner: Scanner, tick: int) -> list[AnyMessage]:
    """Return what a scanner delivers until it confirms `tick`."""
    return [
        message for batch in await batches_until(scanner, tick) for message in messages_in(batch)
    ]


async def batches_until(scanner: Scanner, tick: int) -> list[ScanBatch]:
    """Return the batches a scanner delivers until it confirms `tick`."""
    batches: list[ScanBatch] = []
    while not batches or batches[-1].confirmed_tick < tick:
        batches.append(await scanner.next_batch())
    return batches


async def tailed_journal(capacity_bytes: int = 1 << 20) -> Journal:
    return await Journal.create(tail=LiveTail(capacity_bytes=capacity_bytes))


def scan(journal: Journal, start: DeliverPolicy | StartingPoint) -> Scanner:
    return Scanner(journal.log, journal.tail, start)
