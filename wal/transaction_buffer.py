"""Assembly of transactions from log entries: whole at their commit, or not at all. No I/O.

Entries come in, in log order, from any position on; plain messages and assembled transactions go out in the same order.
Nothing expires here: the node decides that and logs a rollback. What a scan cannot know it does not guess: bodies whose
begin lies before the first entry are dropped and counted, but a commit whose begin must have been in the range and is not
there is `Corrupt`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from wal.errors import Corrupt
from wal.headers import MessageType
from wal.message import AnyMessage, LogEntry, Message, TransactionMessage, assemble_transaction


class OpenTransaction(NamedTuple):
    """A transaction whose commit or rollback has not been seen yet."""

    begin: Message
    bodies: tuple[Message, ...]


class _Pieces:
    __slots__ = ("begin", "bodies", "size_bytes")

    def __init__(self, begin: Message) -> None:
        self.begin = begin
        self.bodies: list[Message] = []
        self.size_bytes = 0


def _accept_loss(_commit: Message) -> None:
    """Leave it at the count."""


class TransactionBuffer:
    """The transactions in flight at one place of one log.

    `begin_missing` is called with each commit whose begin lies before the first entry observed; it may raise.
    """

    __slots__ = ("_begin_missing", "_first_tick", "_open", "bodies_dropped", "commits_dropped", "size_bytes")

    def __init__(self, *, begin_missing: Callable[[Message], None] = _accept_loss) -> None:
        self._begin_missing = begin_missing
        self._open: dict[int, _Pieces] = {}
        self._first_tick = 0
        self.size_bytes = 0
        self.bodies_dropped = 0
        self.commits_dropped = 0

    @property
    def open_transactions(self) -> tuple[OpenTransaction, ...]:
        """The transactions begun and not ended, in the order of their begins."""
        return tuple(OpenTransaction(pieces.begin, tuple(pieces.bodies)) for pieces in self._open.values())

    def observe(self, entry: LogEntry) -> Sequence[AnyMessage]:
        """Return what `entry` makes visible, in order: its plain messages, or the transaction that it commits.

        Raises `Corrupt` for a commit that fits nothing observed.
        """
        if not self._first_tick:
            self._first_tick = entry.time_tick
        messages = entry.messages
        head = messages[0]
        if not head.txn_id and (len(messages) == 1 or not any(message.txn_id for message in messages)):
            return messages
        last = messages[-1]
        if head.type is MessageType.BEGIN_TXN and last.type is MessageType.COMMIT_TXN and head.txn_id == last.txn_id:
            return (_assemble(head, messages[1:-1], last),)
        visible: list[AnyMessage] = []
        for message in messages:
            outcome = self._observe_message(message)
            if outcome is not None:
                visible.append(outcome)
        return visible

    def _observe_message(self, message: Message) -> AnyMessage | None:
        if not message.txn_id:
            return message
        match message.type:
            case MessageType.BEGIN_TXN:
                self._open.setdefault(message.txn_id, _Pieces(message))
            case MessageType.COMMIT_TXN:
                return self._commit(message)
            case MessageType.ROLLBACK_TXN:
                self._take(message.txn_id)
            case _:
                self._add_body(message)
        return None

    def _add_body(self, body: Message) -> None:
        pieces = self._open.get(body.txn_id)
        if pieces is None:
            self.bodies_dropped += 1
            return
        pieces.bodies.append(body)
        pieces.size_bytes += body.size_bytes
        self.size_bytes += body.size_bytes

    def _commit(self, commit: Message) -> TransactionMessage | None:
        pieces = self._take(commit.txn_id)
        if pieces is not None:
            return _assemble(pieces.begin, pieces.bodies, commit)
        # A transaction's id is its begin's tick, and ticks ascend with positions.
        if commit.txn_id >= self._first_tick:
            raise Corrupt(f"transaction {commit.txn_id} commits at position {commit.position} without its begin")
        self.commits_dropped += 1
        self._begin_missing(commit)
        return None

    def _take(self, txn_id: int) -> _Pieces | None:
        pieces = self._open.pop(txn_id, None)
        if pieces is not None:
            self.size_bytes -= pieces.size_bytes
        return pieces


def _assemble(begin: Message, bodies: Sequence[Message], commit: Message) -> TransactionMessage:
    try:
        return assemble_transaction(begin, bodies, commit)
    except ValueError as error:
        raise Corrupt(
            f"transaction {commit.txn_id} has {len(bodies)} bodies, but its commit at position {commit.position} "
            "assigns another number"
        ) from error
