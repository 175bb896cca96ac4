"""The writes and transactions of one client: from frames to groups for the log, and from outcomes
to frames of results.
"""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from interceptors.errors import TransactionExpired
from streamingnode.embedded import EmbeddedBackend
from streamingnode.errors import AccessDenied, Unauthenticated
from streamingnode.remote.calls import Access, TransactionCall, WireResults
from streamingnode.remote.connection import Connection
from streamingnode.remote.writes import (
    FIRST_EPOCH,
    Targets,
    WireGroup,
    WireTarget,
    WireWrites,
    checked_rows,
    groups_of,
)
from streamingnode.writing.target import BatchTarget
from streamingnode.writing.transaction import begin_group, commit_group, rollback_group
from wal.append import AppendGroup, AppendResult
from wal.errors import ProtocolError, StreamingNodeError
from wal.frames import Frame, FrameKind
from wal.headers import (
    DML,
    HEADERS,
    MESSAGE_VERSION,
    BeginTxnHeader,
    DeleteHeader,
    InsertHeader,
    MessageType,
    RollbackTxnHeader,
)
from wal.message import MutableMessage
from wal.position import CLIENT_PRODUCER_IDS, SEQUENCE_MAX, ProducerStamp
from wal.runtime import mark_heard
from wal.wire_types import WireError, decode, encode

T = TypeVar("T")

EPOCH_END = 1 << 32
"""The log has 4 bytes for an epoch."""
WRITE_BYTES_MAX = 8 << 20
"""Frames of writes that one connection may have unanswered, besides the first."""

ALL = frozenset({"*"})


class Rights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client may do, and with which collections: everything, as who may open the node's
    directory anyway.
    """

    name: str
    consume: frozenset[str] = ALL
    produce: frozenset[str] = ALL
    admin: frozenset[str] = ALL
    expires: datetime | None = None

    def check(self, access: Access, collection: str | None) -> None:
        """Raise `AccessDenied` unless the client may do this with a collection, or with something
        for None.
        """
        names: frozenset[str] = getattr(self, access.value)
        if not names or not (collection is None or "*" in names or collection in names):
            raise AccessDenied(f"{self.name!r} may not {access.value} {collection or 'here'}")

    def check_time(self) -> None:
        """Raise `Unauthenticated` once they have ended."""
        if self.expires is not None and self.expires.timestamp() <= time.time():
            raise Unauthenticated(f"the token of {self.name!r} has expired")


class Shared:
    """What the clients of one node share."""

    def __init__(self, backend: EmbeddedBackend) -> None:
        self.backend = backend
        self.targets = Targets(lambda: backend.catalog)
        self.transactions: dict[int, ClientWrites] = {}
        """Those of clients, and whose they are; some may have ended."""
        self.tasks: set[asyncio.Task[Any]] = set()

    def open_transactions(self) -> set[int]:
        """Return which are open, of clients and of this process."""
        return {session.txn_id for session in self.backend.channel.term.transactions.sessions}

    def forget_ended(self) -> None:
        """Keep those that are open: others may have expired, and nobody told."""
        kept = self.transactions.keys() & self.open_transactions()
        self.transactions = {txn_id: self.transactions[txn_id] for txn_id in kept}

    def work(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Do something that the end of a connection does not cut off."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(mark_heard)  # a connection that was lost meanwhile
        return task


class _Unanswered(msgspec.Struct, eq=False):
    """A frame of writes, and how many of its results are still to come."""

    writes: "ClientWrites | None"
    """None when nobody waits for them: the log keeps its last pack, which refers to this."""
    number: int
    size_bytes: int
    left: int
    is_cancelled: bool = False


class Told(msgspec.Struct, eq=False):
    """Passes on to its client what becomes of one write; the other side of `AppendGroup.waiter`."""

    frame: _Unanswered
    group: int
    is_done: bool = False

    def done(self) -> bool:
        """Whether it was told, or cancelled."""
        return self.is_done or self.frame.is_cancelled

    def set_result(self, outcome: AppendResult | Exception, /) -> None:
        """Pass the outcome on."""
        self.is_done = True
        if (writes := self.frame.writes) is not None:
            writes.answer(self.frame, self.group, outcome)

    set_exception = set_result


class ClientWrites:
    """What one client has written and was not told of, and its transactions that are sent before
    their commit.
    """

    def __init__(
        self, shared: Shared, connection: Connection, client_id: int, rights: Rights
    ) -> None:
        self._shared = shared
        self._backend = shared.backend
        self._connection = connection
        self.client_id = client_id
        self.rights = rights
        self._loop = asyncio.get_running_loop()
        self._results: WireResults = ([], [])
        """What is sent at the end of this turn of the event loop."""
        self._unanswered: dict[int, _Unanswered] = {}
        """Frames of writes, by number."""
        self._without_room: dict[int, list[AppendGroup]] = {}
        """Those of each frame that wait for room in the node's memory; bounded by what may be
        unanswered.
        """
        self._joining: asyncio.Task[None] | None = None
        self._is_sending = False

    @property
    def is_busy(self) -> bool:
        """Whether the client is to hear of some."""
        return bool(self._unanswered) or self._is_sending

    def take(self, frame: Frame) -> None:
        """Have the writes of a frame wait for the log. Raises `ProtocolError`."""
        writes: WireWrites = frame.value(WireWrites)
        size_bytes = len(frame.meta) + len(frame.payload)
        share = self._connection.share
        if self._unanswered and share.writes_bytes + size_bytes > WRITE_BYTES_MAX:
            raise ProtocolError(f"over {WRITE_BYTES_MAX} bytes of writes without an answer")
        if frame.number in self._unanswered:
            raise ProtocolError(f"a second frame of writes {frame.number}")
        self._backend.channel.settle_client(self.client_id, writes.settled)
        limits = self._backend.config.wal
        taken = groups_of(writes, memoryview(frame.payload), self.target, self.stamp, limits)
        unanswered = self._unanswered[frame.number] = _Unanswered(
            self, frame.number, size_bytes, len(taken)
        )
        share.hold_writes(size_bytes)
        groups: list[AppendGroup] = []
        for index, group in enumerate(taken):
            if not isinstance(group, AppendGroup):
                self.answer(unanswered, index, group)
                continue
            group.waiter = Told(unanswered, index)
            groups.append(group)
        if self._joining is not None or not self._backend.channel.wal.packer.try_join(groups):
            self._without_room[frame.number] = groups
            self._joining = self._joining or self._shared.work(self._join())

    async def _join(self) -> None:
        """Have those wait for the log for which there was no room in memory, in order."""
        try:
            while self._without_room:
                for group in self._without_room.pop(next(iter(self._without_room))):
                    try:
                        if not group.cancelled:
                            await self._backend.channel.wal.packer.join(group)
                    except StreamingNodeError as error:
                        group.settle(error)
        finally:
            self._joining = None

    def target(self, wire: WireTarget) -> BatchTarget:
        """Return where rows go. Raises as `Targets.find` does, and `AccessDenied`."""
        target = self._shared.targets.find(wire)
        self.rights.check(Access.PRODUCE, self._backend.catalog.live(wire.collection_id).name)
        return target

    def stamp(self, given: ProducerStamp | WireGroup | TransactionCall) -> ProducerStamp:
        """Return the stamp of a write of this client, producer id 0, or of a named producer that is
        open.

        Raises `ProducerFenced`, and `ProtocolError` for another client, and numbers that are
        none.
        """
        producer_id = given.producer_id
        epoch = given.epoch
        sequence = given.sequence
        is_own = producer_id == 0 and epoch == FIRST_EPOCH
        is_named = 0 < producer_id < CLIENT_PRODUCER_IDS and 0 < epoch < EPOCH_END
        if not 1 <= sequence <= SEQUENCE_MAX or not (is_own or is_named):
            raise ProtocolError(f"sequence {sequence} of producer {producer_id}, epoch {epoch}")
        if is_named:
            self._backend.channel.check_producer(producer_id, epoch)
        return ProducerStamp(producer_id or self.client_id, epoch, sequence)

    def answer(self, frame: _Unanswered, group: int, outcome: AppendResult | Exception) -> None:
        """Send a result or an error: all of a turn of the event loop together."""
        results, failures = self._results
        if isinstance(outcome, AppendResult):
            results.append((frame.number, group, outcome))
        else:
            failures.append((frame.number, group, WireError.of(outcome)))
        if not self._is_sending:
            self._is_sending = True
            self._loop.call_soon(self._send_results)
        frame.left -= 1
        if not frame.left:
            self._forget(frame.number)

    def _forget(self, number: int) -> _Unanswered | None:
        """Keep nothing of a frame any more; return what was kept."""
        if (frame := self._unanswered.pop(number, None)) is not None:
            self._connection.share.hold_writes(-frame.size_bytes)
            frame.writes = None
        return frame

    def _send_results(self) -> None:
        self._is_sending = False
        results = self._results
        self._results = ([], [])
        self._connection.send(FrameKind.RESULTS, 0, None, encode(results))

    def cancel(self, number: int) -> None:
        """Leave out of the log what of a frame is not in it, and answer none of it."""
        self._without_room.pop(number, None)
        if (frame := self._forget(number)) is not None:
            frame.is_cancelled = True

    # --- transactions that are sent before their commit -------------------------------------------

    async def transaction(self, call: TransactionCall) -> AppendResult:
        """Take one step; a transaction belongs to the connection that began it."""
        kind, _, header, _ = call.messages[0]
        if kind is MessageType.BEGIN_TXN:
            begin: BeginTxnHeader = decode(header, BeginTxnHeader)
            return await asyncio.shield(self._shared.work(self._begin(begin.keepalive_ms)))
        if kind is MessageType.COMMIT_TXN:
            return await self._commit(call)
        self._check_own(call.txn_id)
        if kind is MessageType.ROLLBACK_TXN:
            rollback: RollbackTxnHeader = decode(header, RollbackTxnHeader)
            return await self._backend.append(rollback_group(call.txn_id, rollback.reason[:200]))
        return await self._backend.append(
            AppendGroup([self._body(call.txn_id, *body) for body in call.messages])
        )

    async def _begin(self, keepalive_ms: int) -> AppendResult:
        begun = await self._backend.append(begin_group(keepalive_ms))
        self._shared.forget_ended()
        self._shared.transactions[begun.txn_id] = self
        if not self._connection.is_open:  # nobody hears of it
            self.lost()
        return begun

    async def _commit(self, call: TransactionCall) -> AppendResult:
        """Commit once: one that comes again is told what became of the first, over whatever
        connection that came.
        """
        stamp = self.stamp(msgspec.structs.replace(call, epoch=call.epoch or FIRST_EPOCH))
        if (known := await self._backend.channel.outcome(stamp)) is not None:
            return known
        self._check_own(call.txn_id)
        group = commit_group(call.txn_id)
        group.producer = stamp
        group.settled = call.settled
        return await self._backend.append(group)

    def _check_own(self, txn_id: int) -> None:
        """Raise `TransactionExpired` for an open transaction of others; of one that has ended the
        log says how.
        """
        owner = self._shared.transactions.get(txn_id)
        if (
            owner is None or owner.client_id != self.client_id
        ) and txn_id in self._shared.open_transactions():
            raise TransactionExpired(
                f"transaction {txn_id} is not of this connection — begin a new one"
            )

    def _body(
        self, txn_id: int, kind: MessageType, vchannel: str, header: bytes, payload: bytes
    ) -> MutableMessage:
        """Return a body of which nothing is taken for granted: rows that fit, of keys that belong
        on this vchannel.
        """
        if kind not in DML:
            raise ProtocolError(f"a body of type {kind}")
        given: InsertHeader | DeleteHeader = decode(header, HEADERS[kind, MESSAGE_VERSION])
        unstamped: InsertHeader | DeleteHeader
        if isinstance(given, InsertHeader):
            place = given.partition_id, given.schema_version
            unstamped = InsertHeader(given.collection_id, *place, given.rows, part=given.part)
        else:
            place = 0, self._backend.catalog.live(given.collection_id).schema_version
            unstamped = DeleteHeader(given.collection_id, given.rows, part=given.part)
        target = self.target(WireTarget(kind, given.collection_id, *place, len(payload)))
        batch = checked_rows(payload, target)
        if vchannel not in target.vchannels or batch.num_rows != given.rows or not given.rows:
            raise ProtocolError("a body that does not say what is in it")
        if (target.shards(batch) != target.vchannels.index(vchannel)).any():
            raise ProtocolError("a body with rows of another shard")
        return MutableMessage(kind, unstamped, vchannel, payload, txn_id)

    def take_over(self, before: "ClientWrites") -> None:
        """Go on with the transactions of the connection that this one replaces."""
        transactions = self._shared.transactions
        for txn_id in [txn_id for txn_id, client in transactions.items() if client is before]:
            transactions[txn_id] = self

    def lost(self) -> None:
        """Roll back the transactions that are open: the client is gone. Its writes go on, but for
        those without room.
        """
        if self._joining is not None:
            self._joining.cancel()
        self._without_room.clear()
        for number in list(self._unanswered):
            self._forget(number)
        self._shared.forget_ended()
        transactions = self._shared.transactions
        for txn_id in [txn_id for txn_id, client in transactions.items() if client is self]:
            del transactions[txn_id]
            self._shared.work(self._roll_back(txn_id))

    async def _roll_back(self, txn_id: int) -> None:
        with suppress(StreamingNodeError):  # else it expires by itself
            await self._backend.append(rollback_group(txn_id, "its client is gone"))
