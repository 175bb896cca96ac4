"""The append groups that begin and end a streamed transaction. No I/O."""

from wal.append import AppendGroup
from wal.headers import BeginTxnHeader, CommitTxnHeader, RollbackTxnHeader
from wal.message import MutableMessage
from wal.message_type import MessageType


def begin_group(keepalive_ms: int) -> AppendGroup:
    """Return a begin; `keepalive_ms` 0 lets the node choose how long the transaction may be idle."""
    return AppendGroup([MutableMessage(MessageType.BEGIN_TXN, BeginTxnHeader(keepalive_ms=keepalive_ms))])


def commit_group(txn_id: int) -> AppendGroup:
    """Return the commit of a transaction."""
    return AppendGroup([MutableMessage(MessageType.COMMIT_TXN, CommitTxnHeader(), txn_id=txn_id)])


def rollback_group(txn_id: int, *, reason: str) -> AppendGroup:
    """Return the rollback of a transaction."""
    return AppendGroup([MutableMessage(MessageType.ROLLBACK_TXN, RollbackTxnHeader(reason), txn_id=txn_id)])
