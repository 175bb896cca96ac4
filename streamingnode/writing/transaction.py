"""Transactions as callers write them: `async with node.transaction() as txn`.

Bodies are buffered, and go to the log with their begin and commit as one append group. When they
outgrow a group, they are streamed under a session that the node keeps, and only the commit makes
them appear.
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum, auto
from types import TracebackType
from typing import Self

import anyio
import pyarrow as pa

from interceptors.errors import InvalidTransactionState
from streamingnode.rows import Keys, Rows
from streamingnode.writing.target import Kind, copied, messages_of
from streamingnode.writing.write import (
    Deadline,
    Write,
    WriteResult,
    Writes,
    by_deadline,
    check_seconds,
    messages_within,
    nothing_at,
    slices_within,
)
from wal.append import Append, AppendGroup
from wal.errors import Overloaded, StreamingNodeError
from wal.headers import BeginTxnHeader, CommitTxnHeader, MessageType, RollbackTxnHeader
from wal.message import TRANSACTION_OVERHEAD_BYTES, MutableMessage
from wal.rows import Piece
from wal.runtime import carry_on

ROLLBACK_S_MAX = 5.0
"""How long leaving the block waits for a rollback, which goes on after that."""
ROLLED_BACK = "rolled back by its caller"


class TransactionState(Enum):
    """The state of a transaction, as its caller sees it; the last three are final."""

    OPEN = auto()
    BROKEN = auto()
    """Some of its bodies may be lost, so it can only be rolled back."""
    COMMITTING = auto()
    COMMITTED = auto()
    ROLLED_BACK = auto()
    FAILED = auto()
    """Its commit raised; the error says whether it is not in the log or indeterminate."""


class Transaction:
    """One transaction; made by `Node.transaction`, open from then until it is committed or rolled
    back.

    Leaving the `async with` block commits; an exception in it rolls back and is raised unchanged.
    Before the commit its rows are invisible, also to this caller. Several tasks may write to one
    transaction; they order their own calls. Without rows it appends nothing, and its result is as
    of `consistent_tick`. `append_commit` appends the group that makes it appear.

    A `deadline` bounds every wait of the transaction for the node: for the rows that it sends
    before its commit, for the commit, and for a rollback. Past it, a commit that may be in the log
    raises `DeadlineExceeded`. Every other call that would wait raises `Overloaded`: this
    transaction wrote nothing that will ever appear; an earlier attempt with the same sequence may
    still appear.
    """

    def __init__(
        self,
        writes: Writes,
        *,
        keepalive_s: float | None = None,
        deadline: Deadline | None = None,
        append_commit: Append | None = None,
    ) -> None:
        self._writes = writes
        self._memory = writes.backend.pending.transactions
        self._bodies_bytes_max = writes.group_bytes_max - TRANSACTION_OVERHEAD_BYTES
        # the begin and the commit are two messages of the group
        self._bodies_max = writes.backend.config.wal.group_messages_max - 2
        self._append_commit = append_commit or writes.backend.append
        self._state = TransactionState.OPEN
        self._pieces: list[Piece] = []
        self._messages = 0
        self._bodies_bytes = 0
        """Bytes of the node's memory that the buffered bodies hold."""
        self._keepalive_ms = check_keepalive_ms(
            keepalive_s, age_s_max=writes.backend.config.txn.age_s_max
        )
        self._deadline = deadline
        self._txn_id = 0
        """The id of the session, once bodies are streamed."""
        self._sending = asyncio.Lock()
        self._last: AppendGroup | None = None
        """The group that makes the transaction appear, once it is built."""
        self._result: WriteResult | None = None

    def __del__(self) -> None:
        """Release the memory of a transaction that was never ended; runs in the thread that
        collects garbage.
        """
        if self._bodies_bytes:
            self._memory.give_back_later(self._bodies_bytes)

    @property
    def result(self) -> WriteResult | None:
        """The result of the commit; None until it is committed."""
        return self._result

    async def insert(self, collection: str, rows: Rows, *, partition: str | None = None) -> None:
        """Add rows. Raises `SchemaMismatch` and other errors of the rows at once; the transaction
        stays open, without these rows.

        It raises `Overloaded` when the open transactions of the node hold half of
        `writes.pending_bytes_max`; the transaction stays open too, unless some of the rows were
        added before.

        Past one append group it also raises the errors of an append, and `Overloaded` past the
        transaction's timeout; rows may be lost then, and it can only be rolled back.
        """
        await self._write("insert", collection, rows, partition)

    async def upsert(self, collection: str, rows: Rows, *, partition: str | None = None) -> None:
        """Add rows that replace those of the same keys, earlier ones of this transaction too.
        Raises as `insert` does.
        """
        await self._write("upsert", collection, rows, partition)

    async def delete(self, collection: str, keys: Keys) -> None:
        """Delete the rows of these keys, earlier ones of this transaction too. Raises as `insert`
        does.
        """
        await self._write("delete", collection, keys)

    async def commit(self, *, timeout: float | None = None) -> WriteResult:
        """Make everything appear at one tick and return when it is durable; leaving the block also
        does this.

        `timeout` is in seconds and bounds this call; the transaction's own may end it earlier. Past
        it the commit raises `DeadlineExceeded` when it may be in the log; otherwise it raises
        `Overloaded`, and the transaction is rolled back. After a cancellation the log decides the
        outcome. Raises `InvalidTransactionState` after the end, `TransactionExpired` when the
        session ended meanwhile, and the errors of an append.
        """
        deadline = self._sooner(timeout)
        self._check_in(TransactionState.OPEN)
        self._state = TransactionState.COMMITTING
        self._deadline = deadline
        try:
            if deadline is None:
                self._result = await self._commit_in_turn()
            else:
                commit = self._commit_in_turn
                begun = self._has_begun
                self._result = await by_deadline(deadline, commit, "the transaction", begun=begun)
        except BaseException:
            self._state = TransactionState.FAILED
            self._drop_bodies()
            if not self._has_begun():  # otherwise the log decides
                await self._leave_session("its commit was refused")
            raise
        self._state = TransactionState.COMMITTED
        self._drop_bodies()
        return self._result

    async def rollback(self) -> None:
        """Roll the transaction back. Raises `InvalidTransactionState` after the end.

        Past the transaction's timeout it returns at once, and the rollback goes to the node in the
        background. In either case none of its rows appear.
        """
        self._check_in(TransactionState.OPEN, TransactionState.BROKEN)
        self._state = TransactionState.ROLLED_BACK
        self._drop_bodies()
        if self._deadline is None:
            await self._end_session(ROLLED_BACK)
        else:
            await self._leave_session(ROLLED_BACK)

    async def __aenter__(self) -> Self:
        self._check_in(TransactionState.OPEN)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        state = self._state
        if state is TransactionState.OPEN and kind is None:
            await self.commit()
        elif state in {TransactionState.OPEN, TransactionState.BROKEN}:
            # The caller's error is raised; a session whose rollback fails expires by itself.
            self._state = TransactionState.ROLLED_BACK
            self._drop_bodies()
            await self._leave_session(ROLLED_BACK)
            if kind is None:
                raise InvalidTransactionState(
                    "the transaction lost rows to an error that was caught, and was rolled back — "
                    "repeat all of it"
                )

    async def _write(
        self, kind: Kind, collection: str, rows: Rows | Keys, partition: str | None = None
    ) -> None:
        """Add a few plain values directly, and others as Arrow data."""
        self._check_in(TransactionState.OPEN)
        write = self._writes.write(kind, collection, partition)
        pieces = write.plain(rows, self._bodies_bytes_max)
        if pieces is None:
            await self.add(write, await write.check(rows))
        else:
            await self._add(pieces, first=True)

    async def add(self, write: Write, batches: Sequence[pa.RecordBatch]) -> None:
        """Add a write of checked batches. Raises as `insert` does."""
        self._check_in(TransactionState.OPEN)
        for number, batch in enumerate(
            slices_within(batches, self._bodies_bytes_max, write.size_bytes)
        ):
            # Copy the data: its buffers may be the caller's, who may reuse them after the call.
            await self._add(write.pieces(copied(batch)), first=not number)

    async def _add(self, pieces: Sequence[Piece], *, first: bool) -> None:
        """Buffer pieces, after streaming the buffered ones if they lack room.

        `first` means that these are the first pieces of their call.
        """
        try:
            while not self._buffer(pieces):
                await self._stream_in_time()
        except BaseException:
            if not first:  # some of the call's rows are added already
                self._break()
            raise

    def _break(self) -> None:
        if self._state in {TransactionState.OPEN, TransactionState.COMMITTING}:
            self._state = TransactionState.BROKEN

    def _buffer(self, pieces: Sequence[Piece]) -> bool:
        """Buffer pieces; return False when the buffered ones have to be streamed first."""
        size_bytes = messages = 0
        for piece in pieces:
            size_bytes += piece.size
            messages += min(len(piece.rows), len(piece.target.vchannels))
        is_full = (
            self._bodies_bytes + size_bytes > self._bodies_bytes_max
            or self._messages + messages > self._bodies_max
        )
        if self._pieces and is_full:
            return False
        # refuse instead of waiting: other transactions may wait for this one
        if not self._memory.try_take(size_bytes):
            raise Overloaded(
                f"open transactions hold {self._memory.held_bytes} bytes, {size_bytes} more do not "
                "fit — "
                "end some of them first, or raise writes.pending_bytes_max"
            )
        self._pieces += pieces
        self._messages += messages
        self._bodies_bytes += size_bytes
        return True

    async def _stream_in_time(self) -> None:
        if self._deadline is None:
            await self._stream_bodies()
            return
        stream = self._stream_bodies
        try:
            await by_deadline(self._deadline, stream, "the transaction", begun=lambda: False)
        except Overloaded:
            self._break()
            raise

    async def _stream_bodies(self) -> None:
        """Send the buffered bodies under the session, which begins with the first of them."""
        async with self._sending:
            self._check_in(TransactionState.OPEN)
            try:
                if not self._txn_id:
                    self._txn_id = (
                        await self._writes.backend.append(begin_group(self._keepalive_ms))
                    ).txn_id
                # another task may have ended the transaction meanwhile
                if self._state is TransactionState.OPEN:
                    await self._send_bodies()
            except BaseException:
                self._break()
                raise
            self._check_in(TransactionState.OPEN)  # another task may have ended it meanwhile

    async def _send_bodies(self) -> None:
        pieces = self._pieces
        if pieces:
            self._drop_bodies()  # the session counts them from their append on
            bytes_max = self._writes.group_bytes_max
            bodies = messages_of(pieces, self._txn_id, together_bytes=bytes_max // 2)
            for messages in messages_within(bodies, bytes_max):
                await self._writes.backend.append(AppendGroup(messages))

    def _drop_bodies(self) -> None:
        size_bytes = self._bodies_bytes
        self._pieces = []
        self._bodies_bytes = 0
        self._messages = 0
        self._memory.give_back(size_bytes)

    def _sooner(self, timeout: float | None) -> Deadline | None:
        """Return the transaction's deadline or that of a call, whichever comes first."""
        if timeout is None:
            return self._deadline
        own = Deadline(timeout)
        if self._deadline is not None and self._deadline.left_s < own.left_s:
            return self._deadline
        return own

    def _has_begun(self) -> bool:
        """Whether the transaction is in the log, or may be."""
        return self._last is not None and self._last.begun

    async def _commit_in_turn(self) -> WriteResult:
        async with self._sending:
            # bodies that another task streamed meanwhile are lost
            if self._state is TransactionState.BROKEN:
                self._check_in(TransactionState.COMMITTING)
            return await self._commit()

    async def _commit(self) -> WriteResult:
        if self._txn_id:
            await self._send_bodies()
            self._last = commit_group(self._txn_id)
        elif self._pieces:
            size_bytes = self._bodies_bytes + TRANSACTION_OVERHEAD_BYTES
            self._last = AppendGroup(
                pieces=self._pieces, is_transaction=True, rows_bytes=size_bytes
            )
        else:
            return nothing_at(await self._writes.backend.consistent_tick())
        result = await self._append_commit(self._last)
        # If an earlier attempt of the same write is in the log, this one must not follow it.
        if self._txn_id and result.txn_id != self._txn_id:
            with suppress(StreamingNodeError):
                await self._writes.backend.append(
                    rollback_group(self._txn_id, "its write is in the log already")
                )
        return result

    async def _leave_session(self, reason: str) -> None:
        """End the session, and wait for that within the caller's time; it goes on after that.

        Errors are dropped: a session that is not ended expires.
        """
        if not self._txn_id and not self._sending.locked():
            return
        wait_s = ROLLBACK_S_MAX
        if self._deadline is not None:
            wait_s = min(wait_s, self._deadline.left_s)
        with anyio.move_on_after(wait_s, shield=True), suppress(StreamingNodeError):
            await carry_on(self._end_session(reason))

    async def _end_session(self, reason: str) -> None:
        """Roll the session back now, before it expires: others wait for its room."""
        async with self._sending:  # another task may be sending the begin
            if self._txn_id:
                await self._writes.backend.append(rollback_group(self._txn_id, reason))

    def _check_in(self, *states: TransactionState) -> None:
        if self._state not in states:
            raise InvalidTransactionState(
                f"the transaction is {self._state.name.lower().replace('_', ' ')} — begin another "
                "with node.transaction()"
            )


def check_keepalive_ms(keepalive_s: float | None, *, age_s_max: float) -> int:
    """Return how long a transaction may be idle in milliseconds, 0 for the default. Raises
    `InvalidArgument`.
    """
    asked_s = (
        0.0 if keepalive_s is None else check_seconds("keepalive_s", keepalive_s, longest=age_s_max)
    )
    return math.ceil(asked_s * 1000)


def begin_group(keepalive_ms: int) -> AppendGroup:
    """Return a begin; `keepalive_ms` 0 lets the node choose how long the transaction may be
    idle.
    """
    return AppendGroup([MutableMessage(MessageType.BEGIN_TXN, BeginTxnHeader(keepalive_ms))])


def commit_group(txn_id: int) -> AppendGroup:
    """Return the commit of a transaction."""
    return AppendGroup([MutableMessage(MessageType.COMMIT_TXN, CommitTxnHeader(), txn_id=txn_id)])


def rollback_group(txn_id: int, reason: str) -> AppendGroup:
    """Return the rollback of a transaction."""
    return AppendGroup(
        [MutableMessage(MessageType.ROLLBACK_TXN, RollbackTxnHeader(reason), txn_id=txn_id)]
    )
