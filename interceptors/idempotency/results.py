"""What the appender of a group was told, or would have been: read off the group's entry in the log. Pure.

A group and its entry say the same, so a retry that comes after a crash hears what the first try would have heard.
"""

from collections.abc import Sequence

from wal.append import AppendGroup, AppendResult
from wal.headers import InsertHeader
from wal.message import AnyMessage, LogEntry, Message, TransactionMessage
from wal.message_id import MessageId


def result_of_entry(entry: LogEntry, visible: Sequence[AnyMessage]) -> AppendResult:
    """Return the result of a synced entry; `visible` is what readers see because of it."""
    head = entry.messages[0]
    kind = type(head.message_id)
    return AppendResult(
        first_message_id=kind(entry.first_position),
        count=len(entry.messages),
        time_tick=entry.time_tick,
        last_confirmed=kind(entry.last_confirmed_position),
        txn_id=head.txn_id,
        row_offsets=_row_offsets(visible),
    )


def result_of_group(group: AppendGroup, kind: type[MessageId]) -> AppendResult:
    """Return the result of a stamped group that turned out to be synced; `kind` is that of its log's ids."""
    ticket, head = group.ticket, group.messages[0]
    assert ticket is not None, "a group that is synced has its place"
    last_confirmed = ticket.first_position if head.last_confirmed is None else head.last_confirmed
    return AppendResult(
        first_message_id=kind(ticket.first_position),
        count=len(group.messages),
        time_tick=group.time_tick,
        last_confirmed=kind(last_confirmed),
        txn_id=head.txn_id,
        row_offsets=group.row_offsets,
    )


def _row_offsets(visible: Sequence[AnyMessage]) -> dict[str, tuple[int, int]]:
    offsets: dict[str, tuple[int, int]] = {}
    for message in visible:
        parts: Sequence[Message] = message.bodies if isinstance(message, TransactionMessage) else (message,)
        for part in parts:
            if isinstance(part.header, InsertHeader):
                first, count = offsets.get(part.vchannel, (part.header.first_offset, 0))
                offsets[part.vchannel] = first, count + part.header.rows
    return offsets
