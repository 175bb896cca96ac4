"""Transactions on the append path: ids, sessions, and who may still commit.

In comes a group that has its tick; out goes the same group with its transaction id, to the shard interceptor. A buffered
transaction (begin, bodies and commit in one group) takes place at one tick and needs no session. Bodies, commits and
rollbacks of a streamed one move its session's state machine. Nothing here suspends before the log has the group: a commit
whose bodies are on their way is sent back with `Redo`.
"""

from dataclasses import replace

import anyio
import msgspec

from interceptors.redo import Redo
from interceptors.txn_manager import TxnManager
from interceptors.txn_session import Doom, Session, SessionEvent, SessionState
from wal.errors import ChannelFenced, Indeterminate, InvalidArgument, OnShutdown, StorageFailed, StreamingNodeError
from wal.failpoint import failpoint
from wal.headers import DML, EXCLUSIVE, BeginTxnHeader, MessageType, RollbackTxnHeader
from wal.log import Append, AppendGroup, AppendResult
from wal.message import ALL_VCHANNELS, MutableMessage
from wal.tasks import event_log

_CONTROL = frozenset({MessageType.BEGIN_TXN, MessageType.COMMIT_TXN, MessageType.ROLLBACK_TXN})


class TxnInterceptor:
    """Wraps the append path with the sessions of `manager`."""

    name = "txn"

    def __init__(self, manager: TxnManager) -> None:
        self._sessions = manager

    async def do_append(self, group: AppendGroup, append: Append) -> AppendResult:
        """Stamp the transaction id and keep the session's books.

        Raises `InvalidArgument` for a group that is no transaction's shape, `TransactionExpired`,
        `InvalidTransactionState` or `Overloaded` for its session's state, `Redo` for a commit whose bodies are on their way.
        """
        head = group.messages[0]
        if head.type in _CONTROL:
            return await self._control(group, append)
        if head.txn_id:
            return await self._bodies(group, append)
        if any(message.txn_id or message.type in _CONTROL for message in group.messages):
            raise InvalidArgument("a group is either a transaction's or no transaction's — append them apart")
        if head.type in EXCLUSIVE:
            return await self._exclusive(group, append)
        return await append(group)

    async def ready(self) -> None:
        """Return at once."""

    async def close(self) -> None:
        """Nothing to do: open transactions stay open in the log, and the next open goes on with them or ends them."""

    async def _control(self, group: AppendGroup, append: Append) -> AppendResult:
        head = group.messages[0]
        if head.type is MessageType.BEGIN_TXN and len(group.messages) > 1:
            return await self._buffered(group, append)
        if len(group.messages) > 1 or head.vchannel != ALL_VCHANNELS:
            raise InvalidArgument(f"{head.type.name} comes alone and names no vchannel — append it by itself")
        if head.type is MessageType.BEGIN_TXN:
            return await self._begin(group, append)
        if head.type is MessageType.COMMIT_TXN:
            return await self._commit(group, append)
        return await self._rollback(group, append)

    async def _buffered(self, group: AppendGroup, append: Append) -> AppendResult:
        first, *bodies, last = group.messages
        if last.type is not MessageType.COMMIT_TXN or any(body.type not in DML for body in bodies):
            raise InvalidArgument(
                "a transaction in one group is a begin, inserts and deletes, and a commit — leave out anything else"
            )
        if not isinstance(first.header, BeginTxnHeader):
            raise InvalidArgument("a begin carries another header — give it that of a begin")
        for message in group.messages:
            message.txn_id = group.time_tick
        failpoint("txn.group_stamped")
        result = await append(group)
        failpoint("txn.group_durable")
        return replace(result, txn_id=group.time_tick)

    async def _begin(self, group: AppendGroup, append: Append) -> AppendResult:
        begin = group.messages[0]
        if not isinstance(begin.header, BeginTxnHeader):
            raise InvalidArgument("a begin carries another header — give it that of a begin")
        session = self._sessions.begin(group, begin.header.keepalive_ms)
        begin.txn_id = session.txn_id
        begin.header = msgspec.structs.replace(begin.header, keepalive_ms=session.keepalive_ms)
        try:
            failpoint("txn.beginning")
            result = await append(group)
            failpoint("txn.begun")
        except BaseException:
            if group.ticket is None:
                self._sessions.end(session)
            raise
        return replace(result, txn_id=session.txn_id)

    async def _bodies(self, group: AppendGroup, append: Append) -> AppendResult:
        txn_id = group.messages[0].txn_id
        if any(message.txn_id != txn_id or message.type not in DML for message in group.messages):
            raise InvalidArgument("bodies are inserts and deletes of one transaction — append others apart")
        session, bodies = self._sessions.join(group, txn_id)
        acknowledged = False
        try:
            failpoint("txn.body_joined")
            result = await append(group)
            failpoint("txn.body_durable")
            acknowledged = True
        except BaseException:
            if group.ticket is None:
                self._sessions.drop_bodies(session, bodies)
            raise
        finally:
            self._sessions.bodies_ended(session, acknowledged=acknowledged)
        return replace(result, txn_id=txn_id)

    async def _commit(self, group: AppendGroup, append: Append) -> AppendResult:
        txn_id = group.messages[0].txn_id
        session, drained = self._sessions.request_commit(group, txn_id)
        if drained is not None:
            raise Redo(until=drained, waiting_for=f"the bodies of transaction {txn_id}")
        try:
            failpoint("txn.committing")
            result = await append(group)
            failpoint("txn.commit_durable")
        except Redo:
            session.apply(SessionEvent.SENT_BACK)
            raise
        except BaseException:  # cancelled is refused too: what waits here is before the log's queue
            self._failed(group, session, SessionEvent.COMMIT_REFUSED, Doom.COMMIT_FAILED)
            raise
        self._sessions.end(session, SessionEvent.COMMIT_DONE)
        return replace(result, txn_id=txn_id)

    async def _rollback(self, group: AppendGroup, append: Append) -> AppendResult:
        session = self._sessions.request_rollback(group.messages[0].txn_id)
        try:
            failpoint("txn.rolling_back")
            result = await append(group)
            failpoint("txn.rollback_durable")
        except BaseException:
            self._failed(group, session, SessionEvent.ROLLBACK_REFUSED, Doom.ROLLBACK_FAILED)
            raise
        self._sessions.end(session, SessionEvent.ROLLBACK_DONE)
        return replace(result, txn_id=session.txn_id)

    def _failed(self, group: AppendGroup, session: Session, event: SessionEvent, doom: Doom) -> None:
        """Decide a session whose end the log never had.

        One that the log had and could not write stays open: the log is opened again, which starts with new sessions.
        """
        if group.ticket is None:
            self._sessions.refuse(session, event, doom)

    async def _exclusive(self, group: AppendGroup, append: Append) -> AppendResult:
        before = self._sessions.fence(group.vchannels, group.time_tick)
        try:
            failpoint("txn.fencing")
            result = await append(group)
            failpoint("txn.fenced")
            return result
        except BaseException:
            if group.ticket is None:
                self._sessions.unfence(before)
            raise


# --- rollback worker ---
#
# Ends the transactions that end without their client: expired, too large, overtaken, with a commit that was refused.
#
# Readers drop a transaction only when the log says so, and the log cannot be truncated past its begin until then; so the
# worker does not give up while the log takes appends.


EXPIRY_INTERVAL_S = 0.2
"""How long after its keepalive an idle transaction may still hold things back; also the pause after a refused rollback."""

_ENDED = (ChannelFenced, Indeterminate, OnShutdown, StorageFailed)
_log = event_log(__name__)


class RollbackWorker:
    """Expires sessions of `manager` and appends rollbacks for the doomed ones."""

    def __init__(self, manager: TxnManager, *, interval_s: float = EXPIRY_INTERVAL_S) -> None:
        self._manager = manager
        self._interval_s = interval_s

    async def run(self, append: Append) -> None:
        """Work until cancelled, or until the log takes no more; the rest is the next open's."""
        while True:
            with anyio.move_on_after(self._interval_s):
                await self._manager.wait_for_doomed()
            try:
                await self.roll_back_due(append)
            except _ENDED as error:
                _log.info("rollbacks_ended", reason=str(error))
                return

    async def roll_back_due(self, append: Append) -> int:
        """Expire what is due now and roll back what is doomed; return how many rollbacks the log has taken.

        Raises `OnShutdown`, `ChannelFenced`, `Indeterminate` or `StorageFailed`; after any other refusal the session is
        left for the next time.
        """
        self._manager.expire()
        rolled_back = 0
        for session in self._manager.take_doomed():
            rolled_back += await self._roll_back(session, append)
        return rolled_back

    async def _roll_back(self, session: Session, append: Append) -> bool:
        if session.state is not SessionState.DOOMED:
            return False  # its client was faster
        assert session.doom is not None, "a doomed session has a reason"
        failpoint("txn.expired")
        header = RollbackTxnHeader(session.doom.value)
        try:
            await append(AppendGroup([MutableMessage(MessageType.ROLLBACK_TXN, header, txn_id=session.txn_id)]))
        except _ENDED:
            raise
        except StreamingNodeError as error:
            _log.debug("rollback_delayed", txn_id=session.txn_id, error=str(error))
            return False
        return True
