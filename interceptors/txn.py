"""Transactions on the append path: their ids, the open sessions of one log, and the rollback of
sessions that can no longer commit.

A buffered transaction is one group of rows. It takes effect at its tick, which is its id, and needs
no session. Bodies, commit and rollback of a streamed transaction move its session. Nothing here
suspends before the log has them.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter

import msgspec

from interceptors.chain import Interceptor, Redo, repeat
from interceptors.errors import InvalidTransactionState, TransactionExpired
from interceptors.txn_session import (
    OPEN,
    Failure,
    Session,
    SessionEvent,
    SessionState,
    TxnLimits,
    size_of_bodies,
)
from wal.append import Append, AppendGroup, AppendPack, Pack
from wal.entry import OpenTransaction
from wal.errors import Ends, Overloaded, StreamingNodeError
from wal.failpoint import failpoint
from wal.headers import DDL, DML, BeginTxnHeader, MessageType, RollbackTxnHeader
from wal.message import ALL_VCHANNELS, Change, Message, MutableMessage
from wal.queue import Budget
from wal.timetick import physical_ms

COMMITS_MAX = 4096
"""More commits than a client may have in doubt; an id takes some 100 bytes."""
EXPIRY_INTERVAL_S = 0.2
"""How long after its keepalive an idle transaction may still delay readers and truncation; also the
pause after a refused rollback.
"""

_CONTROL = frozenset({MessageType.BEGIN_TXN, MessageType.COMMIT_TXN, MessageType.ROLLBACK_TXN})
_IS_TRANSACTION = attrgetter("is_transaction")


class Commits:
    """The ids of the latest commits, so that a repeated commit gets the result of the first.

    For any other id at or below `known_after` it is unknown whether the transaction committed.
    """

    def __init__(self, *, known_after: int = 0) -> None:
        self.known_after = known_after
        self._ids: OrderedDict[int, None] = OrderedDict()

    def add(self, txn_id: int) -> None:
        """Remember a commit, and remove the oldest one when there are more than `COMMITS_MAX`."""
        self._ids[txn_id] = None
        if len(self._ids) > COMMITS_MAX:
            forgotten, _ = self._ids.popitem(last=False)
            self.known_after = max(self.known_after, forgotten)

    def __contains__(self, txn_id: int) -> bool:
        return txn_id in self._ids


def steady_ms() -> int:
    """Return milliseconds of the monotonic clock."""
    return time.monotonic_ns() // 1_000_000


class TxnInterceptor(Interceptor):
    """The sessions of one log, oldest first, on its append path. Lives on the event loop; `now_ms`
    is a monotonic clock.

    It starts with the transactions that the log leaves open at `at_tick`; `fences` maps vchannels
    to the tick of their last exclusive message. All bodies count against the node's `memory`, until
    their transactions or the term end. Transactions that are open at the end of the term stay open
    in the log, and the next term continues them (`go_on_from`).
    """

    name = "txn"

    def __init__(
        self,
        limits: TxnLimits,
        memory: Budget,
        *,
        at_tick: int,
        open_transactions: Iterable[OpenTransaction] = (),
        fences: Mapping[str, int] | None = None,
        commits: Commits | None = None,
        now_ms: Callable[[], int] = steady_ms,
        asked_ms: Callable[[int], int | None] = lambda _: None,
    ) -> None:
        self._failed = asyncio.Event()
        """Set when a session needs a rollback in the log."""
        self._limits = limits
        self._memory = memory
        self.now_ms = now_ms
        self._asked_ms = asked_ms
        self._commits = Commits() if commits is None else commits
        self._sessions: dict[int, Session] = {}
        self._begins: dict[int, Pack | int] = {}
        """By id: the position of the begin, or its pack, whose ticket has the position once it is
        in the log's queue.
        """
        self._drained: dict[int, asyncio.Future[None]] = {}
        """By id: the future that a commit waits for while bodies are in flight."""
        for begin, bodies in open_transactions:
            self._recover(begin, bodies, at_tick)
        self._fences: Mapping[str, int] = fences or {}
        """By vchannel: the tick of its last exclusive message, while an open session may be older
        than that.
        """

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The open sessions, oldest first; read-only."""
        return tuple(self._sessions.values())

    @property
    def size_bytes(self) -> int:
        """The total size of all open transactions."""
        return sum(session.size_bytes for session in self._sessions.values())

    def oldest_open_begin(self) -> int | None:
        """Return the position of the oldest open transaction's begin, None when none is open."""
        for begin in self._begins.values():
            if isinstance(begin, int):
                return begin
            assert begin.ticket is not None, "a begin is queued in the step that makes its session"
            return begin.ticket.first_position
        return None

    def bodies_of(self, txn_id: int) -> Sequence[Change]:
        """Return the bodies of an open transaction in log order."""
        return self._sessions[txn_id].bodies

    def scope_of(self, pack: Pack) -> list[str]:
        """Return the vchannels a pack concerns: those of its rows or messages, and those of the
        transaction it commits.
        """
        if pack.first_type is None:
            scopes = {piece.target.vchannels for group in pack.groups for piece in group.pieces}
            return [vchannel for scope in scopes for vchannel in scope]
        vchannels = [each.vchannel for each in pack.messages]
        if pack.first_type is MessageType.COMMIT_TXN and (
            session := self._sessions.get(pack.messages[0].txn_id)
        ):
            vchannels += session.vchannels
        return vchannels

    # --- on the append path -----------------------------------------------------------------------

    def do_append(self, pack: Pack, append: AppendPack) -> Coroutine[object, None, None]:
        """Stamp the transaction id and update the session."""
        kind = pack.first_type
        if kind is None:  # packed rows have no session
            return (
                self._buffered(pack, append)
                if any(map(_IS_TRANSACTION, pack.groups))
                else append(pack)
            )
        if kind in _CONTROL:
            assert [message.vchannel for message in pack.messages] == [ALL_VCHANNELS], (
                "a begin, commit or rollback is one message to all vchannels"
            )
            if kind is MessageType.BEGIN_TXN:
                return self._begin(pack, append)
            return (
                self._commit(pack, append)
                if kind is MessageType.COMMIT_TXN
                else self._rollback(pack, append)
            )
        if kind in DML:
            return self._bodies(pack, append)
        return self._exclusive(pack, append) if kind in DDL else append(pack)

    async def _exclusive(self, pack: Pack, append: AppendPack) -> None:
        failpoint("txn.fencing")
        await append(pack)
        failpoint("txn.fenced")

    async def _buffered(self, pack: Pack, append: AppendPack) -> None:
        failpoint("txn.group_stamped")
        await append(pack)
        failpoint("txn.group_durable")

    async def _begin(self, pack: Pack, append: AppendPack) -> None:
        begin = pack.messages[0]
        limits = self._limits
        now_ms = self.now_ms()
        assert isinstance(begin.header, BeginTxnHeader), "a begin has its own header"
        keepalive_ms = min(
            begin.header.keepalive_ms or limits.keepalive_ms_default, int(limits.age_s_max * 1000)
        )
        if len(self._sessions) >= limits.sessions_max:
            raise Overloaded(
                f"{len(self._sessions)} transactions are open, the limit — end some of them first"
            )
        txn_id = begin.txn_id = pack.time_tick
        begin.header = msgspec.structs.replace(begin.header, keepalive_ms=keepalive_ms)
        session = Session(txn_id, keepalive_ms, limits, begun_ms=now_ms, active_ms=now_ms)
        self._sessions[txn_id] = session
        self._begins[txn_id] = pack
        try:
            failpoint("txn.beginning")
            await append(pack)
            failpoint("txn.begun")
        except BaseException:
            if pack.ticket is None:
                self._forget(session)
            raise

    async def _bodies(self, pack: Pack, append: AppendPack) -> None:
        txn_id = pack.messages[0].txn_id
        assert all(message.txn_id == txn_id and message.type in DML for message in pack.messages), (
            "a group of bodies is of one transaction"
        )
        session = self._session(txn_id)
        bodies = [Change.of(message) for message in pack.messages]
        size_bytes = size_of_bodies(bodies)
        self._judge(session, {body.vchannel for body in bodies})
        if session.state is SessionState.IN_FLIGHT and session.overflows(bodies):
            self._fail(session, Failure.TOO_LARGE)
        if session.state is SessionState.IN_FLIGHT and not self._memory.has_room(size_bytes):
            # Refuse instead of waiting: only other transactions free room, and their callers might
            # wait for room too, which would be a deadlock.
            raise Overloaded(
                f"open transactions hold {self._memory.held_bytes} bytes, {size_bytes} more do not "
                "fit — "
                "end some of them first, or raise writes.pending_bytes_max"
            )
        session.add_bodies(bodies)
        self._memory.keep(size_bytes)
        acknowledged_ms: int | None = None
        try:
            failpoint("txn.body_joined")
            await append(pack)
            failpoint("txn.body_durable")
            acknowledged_ms = self.now_ms()
        finally:
            if pack.ticket is None:
                session.drop_bodies(bodies)
                self._memory.give_back(size_bytes)
            if session.bodies_ended(acknowledged_ms):
                self._let_commit_come_again(session)

    async def _commit(self, pack: Pack, append: AppendPack) -> None:
        txn_id = pack.messages[0].txn_id
        session = self._session(txn_id)
        self._judge(session, session.vchannels)
        if not session.request_commit():
            drained = self._drained.setdefault(txn_id, asyncio.get_running_loop().create_future())
            raise Redo(drained, waiting_for=f"the bodies of transaction {txn_id}")
        try:
            failpoint("txn.committing")
            await append(pack)
            failpoint("txn.commit_durable")
        except Redo:
            session.apply(SessionEvent.SENT_BACK)
            raise
        except BaseException:  # a commit cancelled before the log's queue counts as refused
            # A commit that the log had and could not write stays open: the log is opened again,
            # which starts with new sessions.
            if pack.ticket is None:
                session.fail(Failure.COMMIT_FAILED)
                self._failed.set()
            raise
        self._commits.add(txn_id)
        self._forget(session)

    async def _rollback(self, pack: Pack, append: AppendPack) -> None:
        session = self._session(pack.messages[0].txn_id)
        # bodies in flight come before it in the log, so the rollback need not wait
        session.apply(SessionEvent.ROLLBACK)
        try:
            failpoint("txn.rolling_back")
            await append(pack)
            failpoint("txn.rollback_durable")
        except BaseException:
            if pack.ticket is None:
                session.fail(Failure.ROLLBACK_FAILED)
            raise
        self._forget(session)

    # --- what ends a session without its client ---------------------------------------------------

    def overtake(self, vchannels: Iterable[str], tick: int) -> None:
        """Fail sessions that began before the exclusive message at `tick` and write to its
        vchannels.
        """
        oldest = next(iter(self._sessions), tick)
        self._fences = {
            name: at for name, at in self._fences.items() if at > oldest
        } | dict.fromkeys(vchannels, tick)
        for session in self._sessions.values():
            self._judge(session, session.vchannels)

    async def run(self, append: Append) -> None:
        """Expire sessions and roll back failed ones, until cancelled or until the log takes no more
        appends.

        A refused rollback is tried again: only a rollback lets readers drop a transaction, and the
        log be truncated past its begin.
        """
        await repeat(partial(self.roll_back_due, append), self._failed, EXPIRY_INTERVAL_S)

    async def roll_back_due(self, append: Append) -> int:
        """Expire the sessions that are due and roll back the failed ones; return the number of
        rollbacks in the log.

        Raises errors that end more than their call.
        """
        self.expire()
        self._failed.clear()
        rolled_back = 0
        for session in list(self._sessions.values()):
            if session.state is not SessionState.FAILED:
                continue
            assert session.failure is not None, "a failed session has a reason"
            failpoint("txn.expired")
            header = RollbackTxnHeader(session.failure.value)
            try:
                await append(
                    AppendGroup(
                        [MutableMessage(MessageType.ROLLBACK_TXN, header, txn_id=session.txn_id)]
                    )
                )
                rolled_back += 1
            except StreamingNodeError as error:
                if error.ends is not Ends.CALL:  # otherwise the next run tries again
                    raise
        return rolled_back

    def expire(self) -> None:
        """Fail every session that is idle for too long or too old."""
        for session in self._sessions.values():
            self._judge(session, ())

    def end(self) -> None:
        """Release all memory at the end of the term: the next term counts the bodies it finds in
        the log. Idempotent.
        """
        if self._begins:
            self._memory.give_back(self.size_bytes)
            self._begins.clear()

    def go_on_from(self, earlier: "TxnInterceptor") -> None:
        """Take the age and idle time of transactions from the previous term in this process, which
        used the same clock.
        """
        for known in earlier.sessions:
            if (session := self._sessions.get(known.txn_id)) is not None:
                session.begun_ms = known.begun_ms
                session.active_ms = known.active_ms
                # It lacks rows in the log, so this failure would be lost; all others recur.
                if known.failure is Failure.TOO_LARGE:
                    self._fail(session, Failure.TOO_LARGE)

    # --- inside -----------------------------------------------------------------------------------

    def _session(self, txn_id: int) -> Session:
        session = self._sessions.get(txn_id)
        if session is not None:
            return session
        if txn_id in self._commits:
            raise InvalidTransactionState(
                f"transaction {txn_id} is committed already — begin a new one"
            )
        if txn_id <= self._commits.known_after:
            raise InvalidTransactionState(
                f"transaction {txn_id} ended too long ago to say whether it committed — read back "
                "whether its rows are there"
            )
        raise TransactionExpired(
            f"transaction {txn_id} is not open: rolled back, expired or unknown — begin a new one"
        )

    def _judge(self, session: Session, vchannels: Iterable[str]) -> None:
        """Fail the session if it is expired or a fence is above its begin; the caller's transition
        then raises.
        """
        if session.state not in OPEN:
            return
        failure = session.due(self.now_ms())
        if failure is Failure.EXPIRED and (asked_ms := self._asked_ms(session.txn_id)) is not None:
            # a client that waits for room or a segment is not idle, even on a slow disk
            failure = session.due(asked_ms)
        if failure is not None:
            self._fail(session, failure)
        elif any(self._fences.get(vchannel, 0) > session.txn_id for vchannel in vchannels):
            self._fail(session, Failure.OVERTAKEN)

    def _fail(self, session: Session, failure: Failure) -> None:
        session.fail(failure)
        self._failed.set()
        self._let_commit_come_again(session)  # the waiting commit then raises the failure

    def _let_commit_come_again(self, session: Session) -> None:
        drained = self._drained.pop(session.txn_id, None)
        if drained is not None:
            drained.set_result(None)

    def _forget(self, session: Session) -> None:
        del self._sessions[session.txn_id], self._begins[session.txn_id]
        self._memory.give_back(session.size_bytes)

    def _recover(self, begin: Message, bodies: Sequence[Message], at_tick: int) -> None:
        assert isinstance(begin.header, BeginTxnHeader)
        now_ms = self.now_ms()
        at_ms = physical_ms(at_tick)
        ends = (begin, bodies[-1] if bodies else begin)
        # Over a restart only ticks give the time; a client may go on if its keepalive has not
        # passed meanwhile.
        begun_ms, active_ms = (
            now_ms - max(0, at_ms - physical_ms(each.time_tick)) for each in ends
        )
        session = Session(
            begin.txn_id, begin.header.keepalive_ms, self._limits, begun_ms, active_ms
        )
        if bodies:
            session.add_bodies([Change.of(body) for body in bodies])
            session.bodies_ended(None)
            self._memory.keep(session.size_bytes)
        self._sessions[session.txn_id] = session
        self._begins[session.txn_id] = begin.position
