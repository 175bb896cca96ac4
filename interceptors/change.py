"""What one message changes, without its payload: the shape in which decisions, sessions and the shard state pass it on.

Pure. The live append path makes changes from messages it is about to write, recovery and the flusher from messages they
read; both feed the same state, which is why the two agree.
"""

from typing import NamedTuple, Self

from wal.headers import Header
from wal.message import Message, MutableMessage
from wal.message_type import MessageType


class Change(NamedTuple):
    """One message's effect; `payload_bytes` is what its rows or keys count for in segments and transactions."""

    type: MessageType
    vchannel: str
    header: Header
    payload_bytes: int

    @classmethod
    def of(cls, message: MutableMessage | Message) -> Self:
        """Return the change of a message, before or after the log."""
        return cls(message.type, message.vchannel, message.header, len(message.payload))
