"""The live transactions of one log: which there are, which are due to end, where the oldest begins.

In come the interceptor's requests, fences of exclusive messages, and a clock that never leaps; out go verdicts as typed
errors, the doomed sessions for the rollback worker, and the oldest open begin, below which no reader may resume. Nothing
here waits; only `wait_for_doomed` does.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Self

from interceptors.errors import InvalidTransactionState, TransactionExpired
from interceptors.txn_session import DOOMABLE, Doom, Session, SessionEvent, SessionState, TxnLimits, size_of_bodies
from wal.errors import InvalidArgument, Overloaded, StreamingNodeError
from wal.headers import BeginTxnHeader, MessageType
from wal.log import AppendGroup
from wal.message import Change, Message
from wal.queue import Budget
from wal.timetick import physical_ms

# --- commits ---
#
# Which transactions have committed lately, so that a commit that is repeated by its id hears what became of the first.
#
# Pure. In come ids of committed transactions, from the live append path and from the log as it is read again. An id is the
# tick of its begin. What is forgotten, or lies before what was read, raises a bound: of an id at or below it nobody can say
# any more whether it committed, and nobody guesses.


COMMITS_MAX = 4096
"""More than a client may have in doubt; an id costs some 100 bytes."""


class Commits:
    """The ids of the latest commits; nobody knows of others at or below `known_after`."""

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
        """Whether the transaction is known to have committed."""
        return txn_id in self._ids


_ENDS = frozenset({MessageType.COMMIT_TXN, MessageType.ROLLBACK_TXN})


def steady_ms() -> int:
    """Return milliseconds from an arbitrary start, by a clock that nobody sets."""
    return time.monotonic_ns() // 1_000_000


class TxnManager:
    """Holds the sessions, oldest first. Lives on the event loop; `now_ms` is a clock that never leaps.

    The bodies of all sessions count against `memory`, which is the node's, until their transactions end or `let_go`.
    """

    def __init__(
        self,
        limits: TxnLimits | None = None,
        *,
        commits: Commits | None = None,
        memory: Budget | None = None,
        now_ms: Callable[[], int] = steady_ms,
    ) -> None:
        self.limits = limits or TxnLimits()
        self._memory = Budget(self.limits.size_bytes_max * self.limits.sessions_max) if memory is None else memory
        self._now_ms = now_ms
        self._sessions: dict[int, Session] = {}
        self._begins: dict[int, AppendGroup | int] = {}
        """By id: where the begin lies, or the group that has its place once it is in the log's queue."""
        self._fences: dict[str, int] = {}
        """By vchannel: the tick of its last exclusive message, as far as a live session may span it."""
        self._drained: dict[int, asyncio.Future[None]] = {}
        self._commits = Commits() if commits is None else commits
        self._wake = asyncio.Event()

    @classmethod
    def recovered(
        cls,
        open_transactions: Iterable[tuple[Message, Sequence[Message]]],
        *,
        fences: Mapping[str, int],
        at_tick: int,
        commits: Commits | None = None,
        limits: TxnLimits | None = None,
        memory: Budget | None = None,
        now_ms: Callable[[], int] = steady_ms,
    ) -> Self:
        """Return a manager of the transactions that the log leaves open at `at_tick`, each begin with its bodies.

        `fences` maps vchannels to the tick of their last exclusive message; `commits` has what the log says of others. A
        client may go on with a transaction whose keepalive has not passed meanwhile; how long that was only ticks can tell.
        """
        manager = cls(limits, commits=commits, memory=memory, now_ms=now_ms)
        for begin, bodies in sorted(open_transactions, key=lambda each: each[0].position):
            manager._recover(begin, bodies, at_tick)
        manager._fences = dict(fences) if manager._sessions else {}
        return manager

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
        for txn_id in self._sessions:
            begin = self._begins[txn_id]
            if isinstance(begin, AppendGroup):
                assert begin.ticket is not None, "a begin is queued in the step that makes its session"
                return begin.ticket.first_position
            return begin
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

    # --- what the interceptor asks for, in the step of the group's tick -------------------------------------------------

    def begin(self, group: AppendGroup, keepalive_ms: int) -> Session:
        """Open a session whose begin is `group`. Raises `InvalidArgument` or `Overloaded`, and changes nothing then."""
        keepalive_ms = keepalive_ms or self.limits.keepalive_ms_default
        if not 1 <= keepalive_ms <= self.limits.age_s_max * 1000:
            raise InvalidArgument(
                f"a keepalive of {keepalive_ms} ms is not within 1 ms and {self.limits.age_s_max:g} s — ask for one that is"
            )
        if len(self._sessions) >= self.limits.sessions_max:
            raise Overloaded(f"{len(self._sessions)} transactions are open, the limit — end some of them first")
        now_ms = self._now_ms()
        session = Session(group.time_tick, keepalive_ms, self.limits, begun_ms=now_ms, active_ms=now_ms)
        self._sessions[session.txn_id] = session
        self._begins[session.txn_id] = group
        return session

    def join(self, group: AppendGroup, txn_id: int) -> tuple[Session, list[Change]]:
        """Add a group of bodies to its session. Raises a typed error, after dooming the session where that is why.

        Raises `Overloaded`, which changes nothing, when there is no room in memory. It never waits for it: room comes from
        other transactions, whose callers may be waiting in the same way.
        """
        session = self._get(txn_id)
        bodies = [Change.of(message) for message in group.messages]
        self._judge(session, {body.vchannel for body in bodies})
        if session.state is SessionState.IN_FLIGHT and session.overflows(bodies):
            self._doom(session, Doom.TOO_LARGE)
        size_bytes = size_of_bodies(bodies)
        if session.state is SessionState.IN_FLIGHT and not self._memory.has_room(size_bytes):
            raise Overloaded(
                f"open transactions hold {self._memory.held_bytes} bytes, {size_bytes} more do not fit — "
                "end some of them first, or raise writes.pending_bytes_max"
            )
        session.add_bodies(bodies)
        self._memory.keep(size_bytes)
        return session, bodies

    def drop_bodies(self, session: Session, bodies: list[Change]) -> None:
        """Take back bodies that were just added: the log never had them."""
        session.drop_bodies(bodies)
        self._memory.give_back(size_of_bodies(bodies))

    def bodies_ended(self, session: Session, *, acknowledged: bool) -> None:
        """Count one append of bodies as over; one that was acknowledged keeps the session alive."""
        if session.bodies_ended(self._now_ms() if acknowledged else None):
            self._let_commit_come_again(session)

    def request_commit(self, group: AppendGroup, txn_id: int) -> tuple[Session, asyncio.Future[None] | None]:
        """Return the session, and a future if its commit has to wait for bodies on their way and then come again."""
        session = self._get(txn_id)
        self._judge(session, session.vchannels)
        if session.request_commit():
            return session, None
        return session, self._drained.setdefault(txn_id, asyncio.get_running_loop().create_future())

    def request_rollback(self, txn_id: int) -> Session:
        """Return the session, rolling back; bodies on their way come before the rollback in the log, so nothing waits."""
        session = self._get(txn_id)
        session.apply(SessionEvent.ROLLBACK)
        return session

    def refuse(self, session: Session, event: SessionEvent, doom: Doom) -> None:
        """Take note that the log never had the session's end; a rollback has to follow."""
        session.apply(event)
        session.doom = session.doom or doom
        self._wake.set()

    def end(self, session: Session, event: SessionEvent | None = None) -> None:
        """Forget a session whose commit or rollback is in the log (no event: whose begin never got there)."""
        if event is not None:
            session.apply(event)
        if session.state is SessionState.COMMITTED:
            self._commits.add(session.txn_id)
        del self._sessions[session.txn_id], self._begins[session.txn_id]
        self._memory.give_back(session.size_bytes)
        if not self._sessions:
            self._fences.clear()

    def let_go(self) -> None:
        """Hold no memory any more: the term is over, and the next one counts what it finds in the log."""
        self._memory.give_back(self.size_bytes)
        self._sessions.clear()
        self._begins.clear()

    # --- exclusive messages and time ------------------------------------------------------------------------------------

    def fence(self, vchannels: Iterable[str], tick: int) -> dict[str, int]:
        """Let no session that began before `tick` go on at these vchannels; return what `unfence` needs.

        It counts from the exclusive message's own step, not from its durability: a commit between the two would span it.
        """
        before = {vchannel: self._fences.get(vchannel, 0) for vchannel in vchannels}
        if self._sessions:
            self._fences.update(dict.fromkeys(before, tick))
        return before

    def unfence(self, before: Mapping[str, int]) -> None:
        """Undo `fence` in the same step: the exclusive message was refused."""
        if self._sessions:
            self._fences.update(before)

    def fail_at(self, vchannels: Collection[str], tick: int) -> None:
        """Doom the sessions with bodies at `vchannels` that the exclusive message at `tick` overtook.

        Does nothing for an exclusive message that was refused: its fence is gone again.
        """
        for session in list(self._sessions.values()):
            spanned = session.vchannels.intersection(vchannels) if session.state in DOOMABLE else ()
            if any(session.txn_id < tick == self._fences.get(vchannel) for vchannel in spanned):
                self._doom(session, Doom.OVERTAKEN)

    def expire(self) -> int:
        """Doom every session whose time is over, by idleness or age; return how many. For a timer."""
        now_ms = self._now_ms()
        due = [(session, doom) for session in self._sessions.values() if (doom := session.due(now_ms))]
        for session, doom in due:
            self._doom(session, doom)
        return len(due)

    # --- the rollback worker --------------------------------------------------------------------------------------------

    async def wait_for_doomed(self) -> None:
        """Wait until a session is doomed that was not handed out yet."""
        await self._wake.wait()

    def take_doomed(self) -> list[Session]:
        """Hand out the sessions that need a rollback in the log; one that did not get it is doomed and comes again."""
        self._wake.clear()
        return [session for session in self._sessions.values() if session.state is SessionState.DOOMED]

    def _doom(self, session: Session, doom: Doom) -> None:
        session.set_doom(doom)
        self._wake.set()
        self._let_commit_come_again(session)  # to hear the verdict

    def _let_commit_come_again(self, session: Session) -> None:
        drained = self._drained.pop(session.txn_id, None)
        if drained is not None and not drained.done():
            drained.set_result(None)

    def _judge(self, session: Session, vchannels: Iterable[str]) -> None:
        """Doom the session if its time is over or a fence is above its begin; the transition that follows raises."""
        if session.state not in DOOMABLE:
            return
        if doom := session.due(self._now_ms()):
            self._doom(session, doom)
        elif self._fences and self._is_fenced(session, vchannels):
            self._doom(session, Doom.OVERTAKEN)

    def _is_fenced(self, session: Session, vchannels: Iterable[str]) -> bool:
        return any(self._fences.get(vchannel, 0) > session.txn_id for vchannel in vchannels)

    def _get(self, txn_id: int) -> Session:
        session = self._sessions.get(txn_id)
        if session is None:
            raise self._missing(txn_id)
        return session

    def _missing(self, txn_id: int) -> StreamingNodeError:
        if txn_id in self._commits:
            return InvalidTransactionState(f"transaction {txn_id} is committed already — begin a new one")
        if txn_id <= self._commits.known_after:
            return InvalidTransactionState(
                f"transaction {txn_id} ended too long ago to say whether it committed — read back whether its rows are there"
            )
        return TransactionExpired(
            f"transaction {txn_id} is not open: rolled back, expired or unknown — begin a new one"
        )

    def _recover(self, begin: Message, bodies: Sequence[Message], at_tick: int) -> None:
        assert isinstance(begin.header, BeginTxnHeader)
        last_tick = max(message.time_tick for message in (begin, *bodies))
        session = Session(
            begin.txn_id,
            begin.header.keepalive_ms,
            self.limits,
            begun_ms=self._now_ms() - _elapsed_ms(begin.time_tick, at_tick),
            active_ms=self._now_ms() - _elapsed_ms(last_tick, at_tick),
        )
        if bodies:
            session.add_bodies([Change.of(body) for body in bodies])
            session.bodies_ended(None)
            self._memory.keep(session.size_bytes)
        self._sessions[session.txn_id] = session
        self._begins[session.txn_id] = begin.position


def _elapsed_ms(from_tick: int, to_tick: int) -> int:
    return max(0, physical_ms(to_tick) - physical_ms(from_tick))
