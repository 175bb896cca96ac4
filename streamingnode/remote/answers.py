"""The writes and transactions of one client: turns frames into groups for the log, and outcomes
into frames of results.
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
from streamingnode.holders import ReaderInfo, TransactionInfo
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
from streamingnode.statistics import NodeStatistics
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
"""The log stores an epoch in 4 bytes."""
WRITE_BYTES_MAX = 8 << 20
"""Limit for the unanswered frames of writes of one connection; a single frame may exceed it."""

EVERYTHING = "*"
"""The right to everything that does not belong to one collection."""
ALL = frozenset({EVERYTHING})


class Rights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rights of a client: the collections that it may read, write to and change. The default is
    everything, for clients that may open the node's directory anyway.
    """

    name: str
    consume: frozenset[str] = ALL
    produce: frozenset[str] = ALL
    admin: frozenset[str] = ALL
    expires: datetime | None = None

    def check(self, access: Access, collection: str | None) -> None:
        """Raise `AccessDenied` unless the client has this access to a collection; None asks for any
        collection.
        """
        names: frozenset[str] = getattr(self, access.value)
        if not names or not (collection is None or EVERYTHING in names or collection in names):
            raise AccessDenied(f"{self.name!r} may not {access.value} {collection or 'here'}")

    def check_time(self) -> None:
        """Raise `Unauthenticated` once the rights have expired."""
        if self.expires is not None and self.expires.timestamp() <= time.time():
            raise Unauthenticated(f"the token of {self.name!r} has expired")

    def visible(self, reply: Any) -> Any:
        """Return a reply without the parts about collections and topics that these rights do not
        cover.
        """
        own = self.consume | self.produce | self.admin
        if EVERYTHING in own:
            return reply
        match reply:
            case NodeStatistics():
                return msgspec.structs.replace(reply, topics=self.visible(reply.topics))
            case dict():  # keyed by topic
                return {name: each for name, each in reply.items() if name in own}
            case [ReaderInfo() | TransactionInfo(), *_]:
                return tuple([each for each in reply if own.issuperset(each.collections)])
            case _:
                return reply


class Shared:
    """The state that all clients of one node share."""

    def __init__(self, backend: EmbeddedBackend) -> None:
        self.backend = backend
        self.targets = Targets(lambda: backend.catalog)
        self.transactions: dict[int, ClientWrites] = {}
        """Transactions of clients, by transaction id, with their owners; some may have ended."""
        self.tasks: set[asyncio.Task[Any]] = set()

    def open_transactions(self) -> set[int]:
        """Return the ids of the open transactions, of clients and of this process."""
        return {session.txn_id for session in self.backend.channel.term.transactions.sessions}

    def forget_ended(self) -> None:
        """Drop transactions that are no longer open: an expired one sends no notice."""
        kept = self.transactions.keys() & self.open_transactions()
        self.transactions = {txn_id: self.transactions[txn_id] for txn_id in kept}

    def work(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run a coroutine as a task that outlives its connection."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(mark_heard)  # its connection may be lost meanwhile
        return task


class _Unanswered(msgspec.Struct, eq=False):
    """A frame of writes that still lacks `left` results."""

    writes: "ClientWrites | None"
    """None when no client waits for the results. The log keeps a reference to its last pack, which
    refers to this.
    """
    number: int
    size_bytes: int
    left: int
    is_cancelled: bool = False


class Told(msgspec.Struct, eq=False):
    """Passes the outcome of one write on to its client; it is the `AppendGroup.waiter` of the
    write.
    """

    frame: _Unanswered
    group: int
    is_done: bool = False

    def done(self) -> bool:
        """Whether it has an outcome or is cancelled."""
        return self.is_done or self.frame.is_cancelled

    def set_result(self, outcome: AppendResult | Exception, /) -> None:
        """Pass the outcome on to the client."""
        self.is_done = True
        if (writes := self.frame.writes) is not None:
            writes.answer(self.frame, self.group, outcome)

    set_exception = set_result


class ClientWrites:
    """The unanswered writes of one client, and those of its transactions whose rows are sent before
    the commit.
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
        """The results to send at the end of this turn of the event loop."""
        self._unanswered: dict[int, _Unanswered] = {}
        """Unanswered frames of writes, by number."""
        self._without_room: dict[int, list[AppendGroup]] = {}
        """Groups that wait for memory, by number of their frame. `WRITE_BYTES_MAX` bounds them."""
        self._joining: asyncio.Task[None] | None = None
        self._is_sending = False

    @property
    def is_busy(self) -> bool:
        """Whether results are still to come or to be sent."""
        return bool(self._unanswered) or self._is_sending

    def take(self, frame: Frame) -> None:
        """Queue the writes of a frame for the log. Raises `ProtocolError`."""
        writes: WireWrites = frame.value(WireWrites)
        size_bytes = len(frame.meta) + len(frame.payload)
        share = self._connection.share
        if self._unanswered and share.writes_bytes + size_bytes > WRITE_BYTES_MAX:
            raise ProtocolError(f"over {WRITE_BYTES_MAX} bytes of unanswered writes")
        if frame.number in self._unanswered:
            raise ProtocolError(f"frame of writes {frame.number} is already unanswered")
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
        """Queue the groups that wait for memory, in order, as memory becomes free."""
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
        """Return the target of rows. Raises `AccessDenied` and the errors of `Targets.find`."""
        target = self._shared.targets.find(wire)
        self.rights.check(Access.PRODUCE, self._backend.catalog.live(wire.collection_id).name)
        return target

    def stamp(self, given: ProducerStamp | WireGroup | TransactionCall) -> ProducerStamp:
        """Return the stamp for a write of this client, whose producer id is 0, or of an open named
        producer.

        Raises `ProducerFenced`, and `ProtocolError` for the id of another client or numbers out of
        range.
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
        """Send a result or an error; all outcomes of one turn of the event loop share a frame."""
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
        """Remove a frame and release its memory; return it, or None if there was none."""
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
        """Cancel the writes of a frame that are not in the log yet, and send no further results for
        it.
        """
        self._without_room.pop(number, None)
        if (frame := self._forget(number)) is not None:
            frame.is_cancelled = True

    # --- transactions that are sent before their commit -------------------------------------------

    async def transaction(self, call: TransactionCall) -> AppendResult:
        """Execute one step of a transaction; it belongs to the client that began it."""
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
        if not self._connection.is_open:  # the client cannot learn of it
            self.lost()
        return begun

    async def _commit(self, call: TransactionCall) -> AppendResult:
        """Commit once: a repeated commit returns the outcome of the first, even over another
        connection.
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
        """Raise `TransactionExpired` for an open transaction of another client. For an ended one
        the log raises how it ended.
        """
        owner = self._shared.transactions.get(txn_id)
        if (
            owner is None or owner.client_id != self.client_id
        ) and txn_id in self._shared.open_transactions():
            raise TransactionExpired(
                f"transaction {txn_id} belongs to another client — begin a new one"
            )

    def _body(
        self, txn_id: int, kind: MessageType, vchannel: str, header: bytes, payload: bytes
    ) -> MutableMessage:
        """Return a checked body: its rows fit the collection and their keys belong on this
        vchannel. Raises `ProtocolError`.
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
            raise ProtocolError("a body whose vchannel or number of rows is wrong")
        if (target.shards(batch) != target.vchannels.index(vchannel)).any():
            raise ProtocolError("a body with rows of another shard")
        return MutableMessage(kind, unstamped, vchannel, payload, txn_id)

    def take_over(self, before: "ClientWrites") -> None:
        """Take over the transactions of the connection that this one replaces."""
        transactions = self._shared.transactions
        for txn_id in [txn_id for txn_id, client in transactions.items() if client is before]:
            transactions[txn_id] = self

    def lost(self) -> None:
        """Roll back the open transactions, as the client is gone. Queued writes go on; writes that
        still wait for memory are dropped.
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
        with suppress(StreamingNodeError):  # if the rollback fails, the transaction expires
            await self._backend.append(rollback_group(txn_id, "its client is gone"))
