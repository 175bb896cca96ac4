"""What must hold between the entries of a whole log: transactions beside exclusive messages,
inserts inside their segments.

In: entries from a log's beginning, in order. Out: one sentence for each that breaks a promise.
Looks at the log alone, with nothing of the parts that write it.
"""

from collections.abc import Iterable, Iterator

from wal.entry import LogEntry, TransactionBuffer, messages_of
from wal.headers import (
    DDL,
    CreateSegmentHeader,
    CutHeader,
    DropCollectionHeader,
    DropPartitionHeader,
    FlushHeader,
    InsertHeader,
    MessageType,
)
from wal.message import Message, TransactionMessage


def judge_entries(entries: Iterable[LogEntry]) -> Iterator[str]:
    """Yield what is wrong.

    I5: no transaction spans an exclusive message of its vchannels. I6: an insert's segment was
    created before it and sealed after it.
    """
    buffer = TransactionBuffer()
    segments = _Segments()
    begun = dict[int, int]()
    exclusive = dict[str, int]()
    for at, entry in enumerate(entries):
        begun.update(
            (message.txn_id, at)
            for message in entry.messages
            if message.type is MessageType.BEGIN_TXN
        )
        for message in messages_of(buffer.observe(entry)):
            if isinstance(message, TransactionMessage):
                for vchannel in sorted({body.vchannel for body in message.bodies}):
                    if exclusive.get(vchannel, -1) > begun.get(message.txn_id, at):
                        yield f"transaction {message.txn_id} spans a schema change of {vchannel}"
                for body in message.bodies:
                    yield from segments.take(body)
            else:
                yield from segments.take(message)
                if message.type in DDL:
                    exclusive[message.vchannel] = at


class _Segments:
    """The growing segments at one place of a log: where each takes rows from."""

    def __init__(self) -> None:
        self._growing: dict[int, tuple[str, int, int]] = {}

    def take(self, message: Message) -> Iterator[str]:
        """Go on past one message."""
        growing = self._growing
        match message.header:
            case CreateSegmentHeader() as header:
                growing[header.segment_id] = (
                    message.vchannel,
                    header.collection_id,
                    header.partition_id,
                )
            case InsertHeader() as header:
                place = (message.vchannel, header.collection_id, header.partition_id)
                if growing.get(header.segment_id) != place:
                    yield (
                        f"the insert at {message.position} is in segment {header.segment_id}, "
                        "which does not grow there"
                    )
            case FlushHeader(segment_id=segment_id):
                if growing.pop(segment_id, None) is None:
                    yield f"segment {segment_id} is sealed at {message.position}, and did not grow"
            case CutHeader() as header:
                if {*growing} != {*header.segment_ids}:
                    yield (
                        f"the cut at {message.position} seals {header.segment_ids}, "
                        f"growing are {sorted(growing)}"
                    )
                growing.clear()
            case DropCollectionHeader(collection_id=collection_id):
                self._growing = {
                    key: place for key, place in growing.items() if place[1] != collection_id
                }
            case DropPartitionHeader(partition_id=partition_id):
                self._growing = {
                    key: place for key, place in growing.items() if place[2] != partition_id
                }
            case _:
                pass
