"""Transactions on the append path: ids, the open sessions of one log, who may still commit, and what rolls back the rest.

A buffered transaction (begin, bodies and commit in one group) takes place at one tick and needs no session. Bodies, commit
and rollback of a streamed one move its session. Nothing here suspends before the log has the group.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from interceptors.chain import FINAL, Redo, repeat
from interceptors.errors import InvalidTransactionState, TransactionExpired
from interceptors.txn_session import OPEN, Failure, Session, SessionEvent, SessionState, TxnLimits, size_of_bodies
from wal.errors import Overloaded, StreamingNodeError
from wal.failpoint import failpoint
from wal.headers import DDL, DML, BeginTxnHeader, MessageType, RollbackTxnHeader
from wal.log import Append, AppendGroup, AppendResult, Interceptor
from wal.message import ALL_VCHANNELS, Change, Message, MutableMessage, OpenTransaction
from wal.queue import Budget
from wal.timetick import physical_ms

COMMITS_MAX = 4096
"""More than a client may have in doubt; an id costs some 100 bytes."""
EXPIRY_INTERVAL_S = 0.2
"""How long after its keepalive an idle transaction may still hold things back; also the pause after a refused rollback."""

_ENDS = frozenset({MessageType.COMMIT_TXN, MessageType.ROLLBACK_TXN})
_CONTROL = _ENDS | {MessageType.BEGIN_TXN}


class Commits:
    """The ids of the latest commits, so that a commit that is repeated hears what became of the first.

    At or below `known_after` nobody can say any more whether another one committed, and nobody guesses.
    """

    __slots__ = ("_ids", "known_after")

    def __init__(self, *, known_after: int = 0) -> None:
        self.known_after = known_after
        self._ids: OrderedDict[int, None] = OrderedDict()

    def add(self, txn_id: int) -> None:
        """Remember a commit, and forget the oldest one for it when there are too many."""
        self._ids[txn_id] = None
        if len(self._ids) > COMMITS_MAX:
            forgotten, _ = self._ids.popitem(last=False)
            self.known_after = max(self.known_after, forgotten)

    def __contains__(self, txn_id: int) -> bool:
        return txn_id in self._ids


def steady_ms() -> int:
    """Return milliseconds from an arbitrary start, by a clock that nobody sets."""
    return time.monotonic_ns() // 1_000_000


class TxnInterceptor(Interceptor):
    """The sessions of one log, oldest first, on its append path. Lives on the event loop; `now_ms` never leaps.

    It starts with the transactions that the log leaves open at `at_tick`; `fences` maps vchannels to the tick of their last
    exclusive message. All bodies count against `memory`, which is the node's, until their transactions or the term end. What
    is open then stays open in the log, and the next term goes on with it.
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
    ) -> None:
        self._failed = asyncio.Event()
        """Set when a session needs a rollback in the log."""
        self._limits = limits
        self._memory = memory
        self._now_ms = now_ms
        self._commits = Commits() if commits is None else commits
        self._sessions: dict[int, Session] = {}
        self._begins: dict[int, AppendGroup | int] = {}
        """By id: where the begin lies, or the group that has its place once it is in the log's queue."""
        self._drained: dict[int, asyncio.Future[None]] = {}
        """By id: what a commit waits for whose bodies are on their way."""
        for begin, bodies in open_transactions:
            self._recover(begin, bodies, at_tick)
        self._fences: dict[str, int] = dict(fences or {}) if self._sessions else {}
        """By vchannel: the tick of its last exclusive message, as far as a live session may span it."""

    @property
    def live(self) -> int:
        """How many transactions are open."""
        return len(self._sessions)

    @property
    def size_bytes(self) -> int:
        """The sizes of all open transactions added up."""
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

    def scope_of(self, group: AppendGroup) -> list[str]:
        """Return the vchannels a group concerns: those of its messages, and of the transaction that it ends."""
        vchannels = [message.vchannel for message in group.messages]
        head = group.messages[0]
        if head.type in _ENDS and (session := self._sessions.get(head.txn_id)):
            vchannels += session.vchannels
        return vchannels

    # --- on the append path ---------------------------------------------------------------------------------------------

    def do_append(self, group: AppendGroup, append: Append) -> Awaitable[AppendResult]:
        """Stamp the transaction id and keep the session's books."""
        messages = group.messages
        head = messages[0]
        if head.type in _CONTROL:
            return self._control(group, append)
        if head.txn_id:
            return self._bodies(group, append)
        assert len(messages) == 1 or not any(message.txn_id or message.type in _CONTROL for message in messages)
        if head.type not in DDL:
            return append(group)  # rows that are a whole by themselves: nothing to do afterwards
        return self._exclusive(group, append)

    def _control(self, group: AppendGroup, append: Append) -> Awaitable[AppendResult]:
        head = group.messages[0]
        if head.type is MessageType.BEGIN_TXN and len(group.messages) > 1:
            return self._buffered(group, append)
        assert [message.vchannel for message in group.messages] == [ALL_VCHANNELS], "it comes alone"
        if head.type is MessageType.BEGIN_TXN:
            return self._begin(group, append)
        if head.type is MessageType.COMMIT_TXN:
            return self._commit(group, append)
        return self._rollback(group, append)

    async def _exclusive(self, group: AppendGroup, append: Append) -> AppendResult:
        failpoint("txn.fencing")
        result = await append(group)
        failpoint("txn.fenced")
        return result

    async def _buffered(self, group: AppendGroup, append: Append) -> AppendResult:
        _, *bodies, last = group.messages
        assert last.type is MessageType.COMMIT_TXN, "a transaction in one group ends with its commit"
        assert all(body.type in DML for body in bodies), "and has only inserts and deletes in it"
        for message in group.messages:
            message.txn_id = group.time_tick
        failpoint("txn.group_stamped")
        result = await append(group)
        failpoint("txn.group_durable")
        return result

    async def _begin(self, group: AppendGroup, append: Append) -> AppendResult:
        begin, limits, now_ms = group.messages[0], self._limits, self._now_ms()
        assert isinstance(begin.header, BeginTxnHeader), "a begin has its own header"
        keepalive_ms = min(begin.header.keepalive_ms or limits.keepalive_ms_default, int(limits.age_s_max * 1000))
        if len(self._sessions) >= limits.sessions_max:
            raise Overloaded(f"{len(self._sessions)} transactions are open, the limit — end some of them first")
        txn_id = begin.txn_id = group.time_tick
        begin.header = msgspec.structs.replace(begin.header, keepalive_ms=keepalive_ms)
        session = Session(txn_id, keepalive_ms, limits, begun_ms=now_ms, active_ms=now_ms)
        self._sessions[txn_id], self._begins[txn_id] = session, group
        try:
            failpoint("txn.beginning")
            result = await append(group)
            failpoint("txn.begun")
        except BaseException:
            if group.ticket is None:
                self._forget(session)
            raise
        return result

    async def _bodies(self, group: AppendGroup, append: Append) -> AppendResult:
        txn_id = group.messages[0].txn_id
        assert all(message.txn_id == txn_id and message.type in DML for message in group.messages), "bodies come apart"
        session = self._session(txn_id)
        bodies = [Change.of(message) for message in group.messages]
        size_bytes = size_of_bodies(bodies)
        self._judge(session, {body.vchannel for body in bodies})
        if session.state is SessionState.IN_FLIGHT and session.overflows(bodies):
            self._fail(session, Failure.TOO_LARGE)
        if session.state is SessionState.IN_FLIGHT and not self._memory.has_room(size_bytes):
            # Never waited for: room comes from other transactions, whose callers may be waiting in the same way.
            raise Overloaded(
                f"open transactions hold {self._memory.held_bytes} bytes, {size_bytes} more do not fit — "
                "end some of them first, or raise writes.pending_bytes_max"
            )
        session.add_bodies(bodies)
        self._memory.keep(size_bytes)
        acknowledged_ms: int | None = None
        try:
            failpoint("txn.body_joined")
            result = await append(group)
            failpoint("txn.body_durable")
            acknowledged_ms = self._now_ms()
        finally:
            if group.ticket is None:
                session.drop_bodies(bodies)
                self._memory.give_back(size_bytes)
            if session.bodies_ended(acknowledged_ms):
                self._let_commit_come_again(session)
        return result

    async def _commit(self, group: AppendGroup, append: Append) -> AppendResult:
        txn_id = group.messages[0].txn_id
        session = self._session(txn_id)
        self._judge(session, session.vchannels)
        if not session.request_commit():
            drained = self._drained.setdefault(txn_id, asyncio.get_running_loop().create_future())
            raise Redo(drained, waiting_for=f"the bodies of transaction {txn_id}")
        try:
            failpoint("txn.committing")
            result = await append(group)
            failpoint("txn.commit_durable")
        except Redo:
            session.apply(SessionEvent.SENT_BACK)
            raise
        except BaseException:  # cancelled is refused too: what waits here is before the log's queue
            # One that the log had and could not write stays open: the log is opened again, which starts with new sessions.
            if group.ticket is None:
                session.fail(Failure.COMMIT_FAILED)
                self._failed.set()
            raise
        self._commits.add(txn_id)
        self._forget(session)
        return result

    async def _rollback(self, group: AppendGroup, append: Append) -> AppendResult:
        session = self._session(group.messages[0].txn_id)
        session.apply(SessionEvent.ROLLBACK)  # bodies on their way come before it in the log, so nothing waits
        try:
            failpoint("txn.rolling_back")
            result = await append(group)
            failpoint("txn.rollback_durable")
        except BaseException:
            if group.ticket is None:
                session.fail(Failure.ROLLBACK_FAILED)
            raise
        self._forget(session)
        return result

    # --- what ends a session without its client -------------------------------------------------------------------------

    def overtake(self, vchannels: Iterable[str], tick: int) -> None:
        """Let no session that began before the exclusive message at `tick` commit at its vchannels."""
        if self._sessions:
            self._fences.update(dict.fromkeys(vchannels, tick))
        for session in self._sessions.values():
            if session.state in OPEN and self._is_fenced(session, session.vchannels):
                self._fail(session, Failure.OVERTAKEN)

    async def run(self, append: Append) -> None:
        """Expire sessions and roll back failed ones, until cancelled or until the log takes no more.

        It does not give up before: only a rollback lets readers drop a transaction, and its log be truncated.
        """
        await repeat(partial(self.roll_back_due, append), self._failed, EXPIRY_INTERVAL_S)

    async def roll_back_due(self, append: Append) -> int:
        """Expire what is due and roll back what has failed; return how often the log took it. Raises `FINAL` errors."""
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
                await append(AppendGroup([MutableMessage(MessageType.ROLLBACK_TXN, header, txn_id=session.txn_id)]))
                rolled_back += 1
            except FINAL:
                raise
            except StreamingNodeError:  # the next look tries again
                continue
        return rolled_back

    def expire(self) -> None:
        """Fail every session whose time is over, by idleness or age."""
        now_ms = self._now_ms()
        for session in self._sessions.values():
            if failure := session.due(now_ms):
                self._fail(session, failure)

    def end(self) -> None:
        """Hold no memory any more: the term is over, and the next one counts what it finds in the log."""
        self._memory.give_back(self.size_bytes)
        self._sessions.clear()
        self._begins.clear()

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _session(self, txn_id: int) -> Session:
        session = self._sessions.get(txn_id)
        if session is not None:
            return session
        if txn_id in self._commits:
            raise InvalidTransactionState(f"transaction {txn_id} is committed already — begin a new one")
        if txn_id <= self._commits.known_after:
            raise InvalidTransactionState(
                f"transaction {txn_id} ended too long ago to say whether it committed — read back whether its rows are there"
            )
        raise TransactionExpired(f"transaction {txn_id} is not open: rolled back, expired or unknown — begin a new one")

    def _judge(self, session: Session, vchannels: Iterable[str]) -> None:
        """Fail the session if its time is over or a fence is above its begin; the transition that follows raises."""
        if session.state not in OPEN:
            return
        if failure := session.due(self._now_ms()):
            self._fail(session, failure)
        elif self._is_fenced(session, vchannels):
            self._fail(session, Failure.OVERTAKEN)

    def _is_fenced(self, session: Session, vchannels: Iterable[str]) -> bool:
        return any(self._fences.get(vchannel, 0) > session.txn_id for vchannel in vchannels)

    def _fail(self, session: Session, failure: Failure) -> None:
        session.fail(failure)
        self._failed.set()
        self._let_commit_come_again(session)  # to hear the verdict

    def _let_commit_come_again(self, session: Session) -> None:
        drained = self._drained.pop(session.txn_id, None)
        if drained is not None:
            drained.set_result(None)

    def _forget(self, session: Session) -> None:
        del self._sessions[session.txn_id], self._begins[session.txn_id]
        self._memory.give_back(session.size_bytes)
        if not self._sessions:
            self._fences.clear()

    def _recover(self, begin: Message, bodies: Sequence[Message], at_tick: int) -> None:
        assert isinstance(begin.header, BeginTxnHeader)
        now_ms, last_tick = self._now_ms(), max(message.time_tick for message in (begin, *bodies))
        # How long ago that was only ticks can tell; a client may go on if its keepalive has not passed meanwhile.
        session = Session(
            begin.txn_id,
            begin.header.keepalive_ms,
            self._limits,
            begun_ms=now_ms - max(0, physical_ms(at_tick) - physical_ms(begin.time_tick)),
            active_ms=now_ms - max(0, physical_ms(at_tick) - physical_ms(last_tick)),
        )
        if bodies:
            session.add_bodies([Change.of(body) for body in bodies])
            session.bodies_ended(None)
            self._memory.keep(session.size_bytes)
        self._sessions[session.txn_id] = session
        self._begins[session.txn_id] = begin.position
