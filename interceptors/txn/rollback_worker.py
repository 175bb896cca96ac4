"""Ends the transactions that end without their client: expired, too large, overtaken, with a commit that was refused.

Readers drop a transaction only when the log says so, and the log cannot be truncated past its begin until then; so the
worker does not give up while the log takes appends.
"""

import anyio

from interceptors.txn.manager import TxnManager
from interceptors.txn.session import Session, SessionState
from wal.append import Append, AppendGroup
from wal.errors import ChannelFenced, Indeterminate, OnShutdown, StorageFailed, StreamingNodeError
from wal.event_log import event_log
from wal.failpoint import failpoint
from wal.headers import RollbackTxnHeader
from wal.message import MutableMessage
from wal.message_type import MessageType

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
