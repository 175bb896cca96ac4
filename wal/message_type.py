"""Kinds of message, and the classes that decide how the chain and the readers treat them.

Numbers are on disk and on the wire; they follow Milvus, except `CUT`, which has no counterpart there.
"""

from enum import IntEnum, unique


@unique
class MessageType(IntEnum):
    """What a message is; the number is stored."""

    TIME_TICK = 1
    INSERT = 2
    DELETE = 3
    FLUSH = 4
    CREATE_COLLECTION = 5
    DROP_COLLECTION = 6
    CREATE_PARTITION = 7
    DROP_PARTITION = 8
    CREATE_SEGMENT = 10
    CUT = 600
    BEGIN_TXN = 900
    COMMIT_TXN = 901
    ROLLBACK_TXN = 902
    TXN = 999
    """An assembled transaction: made by readers, never in a log."""

    def __str__(self) -> str:
        return self.name


MESSAGE_VERSION = 2
"""Version of every message this release writes; (type, version) names the header's layout."""

SYSTEM = frozenset(
    {
        MessageType.TIME_TICK,
        MessageType.BEGIN_TXN,
        MessageType.COMMIT_TXN,
        MessageType.ROLLBACK_TXN,
        MessageType.TXN,
    }
)
"""Handled whatever a reader's type filter says."""

DDL = frozenset(
    {
        MessageType.CREATE_COLLECTION,
        MessageType.DROP_COLLECTION,
        MessageType.CREATE_PARTITION,
        MessageType.DROP_PARTITION,
    }
)
"""Changes what exists."""

EXCLUSIVE = DDL
"""Takes its vchannels for itself and ends the transactions in flight on them; a cut is none of these."""

DML = frozenset({MessageType.INSERT, MessageType.DELETE})
"""Carries rows or keys."""

MAKES_ROOM = frozenset(
    {
        MessageType.TIME_TICK,
        MessageType.FLUSH,
        MessageType.CUT,
        MessageType.DROP_COLLECTION,
        MessageType.DROP_PARTITION,
        MessageType.ROLLBACK_TXN,
    }
)
"""Little data after which log or files may be given up; the first tick of a term, without which nothing may, is one too."""
