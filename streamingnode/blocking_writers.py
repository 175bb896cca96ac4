"""Transactions and named producers without `async`: what a blocking node hands out for writing.

In: calls of any thread. Out: the same calls on the node's event loop, one at a time for each thread.
"""

from functools import partial
from types import TracebackType
from typing import Self

from streamingnode.blocking_loop import BlockingLoop
from streamingnode.rows.row_shape import Keys, Rows
from streamingnode.writing.producer import Producer
from streamingnode.writing.results import WriteResult
from streamingnode.writing.transaction import Transaction


class SyncTransaction:
    """A transaction for a `with` block; see `streamingnode.writing.transaction.Transaction`."""

    def __init__(self, transaction: Transaction, loop: BlockingLoop) -> None:
        self._transaction = transaction
        self._loop = loop

    @property
    def result(self) -> WriteResult | None:
        """See `Transaction.result`."""
        return self._transaction.result

    def insert(self, collection: str, rows: Rows, *, partition: str | None = None) -> None:
        """See `Transaction.insert`."""
        self._loop.call(partial(self._transaction.insert, partition=partition), collection, rows)

    def upsert(self, collection: str, rows: Rows, *, partition: str | None = None) -> None:
        """See `Transaction.upsert`."""
        self._loop.call(partial(self._transaction.upsert, partition=partition), collection, rows)

    def delete(self, collection: str, keys: Keys) -> None:
        """See `Transaction.delete`."""
        self._loop.call(self._transaction.delete, collection, keys)

    def commit(self) -> WriteResult:
        """See `Transaction.commit`."""
        return self._loop.call(self._transaction.commit)

    def rollback(self) -> None:
        """See `Transaction.rollback`."""
        self._loop.call(self._transaction.rollback)

    def __enter__(self) -> Self:
        self._loop.call(self._transaction.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call(self._transaction.__aexit__, kind, error, traceback)


class SyncProducer:
    """A named producer; see `Producer`. Any thread may call it."""

    def __init__(self, producer: Producer, loop: BlockingLoop) -> None:
        self._producer = producer
        self._loop = loop

    @property
    def name(self) -> str:
        """See `Producer.name`."""
        return self._producer.name

    @property
    def epoch(self) -> int:
        """See `Producer.epoch`."""
        return self._producer.epoch

    @property
    def last_sequence(self) -> int:
        """See `Producer.last_sequence`."""

        async def look() -> int:
            return self._producer.last_sequence

        return self._loop.call(look)

    @property
    def note(self) -> bytes:
        """See `Producer.note`."""
        return self._producer.note

    def put_note(self, note: bytes) -> None:
        """See `Producer.put_note`."""
        return self._loop.call(self._producer.put_note, note)

    def insert(
        self,
        collection: str,
        rows: Rows,
        *,
        sequence: int | None = None,
        partition: str | None = None,
        timeout: float | None = None,
    ) -> WriteResult:
        """See `Producer.insert`."""
        insert = partial(self._producer.insert, sequence=sequence, partition=partition, timeout=timeout)
        return self._loop.call(insert, collection, rows)

    def upsert(
        self,
        collection: str,
        rows: Rows,
        *,
        sequence: int | None = None,
        partition: str | None = None,
        timeout: float | None = None,
    ) -> WriteResult:
        """See `Producer.upsert`."""
        upsert = partial(self._producer.upsert, sequence=sequence, partition=partition, timeout=timeout)
        return self._loop.call(upsert, collection, rows)

    def delete(
        self, collection: str, keys: Keys, *, sequence: int | None = None, timeout: float | None = None
    ) -> WriteResult:
        """See `Producer.delete`."""
        return self._loop.call(partial(self._producer.delete, sequence=sequence, timeout=timeout), collection, keys)

    def transaction(self, *, sequence: int | None = None, keepalive_s: float | None = None) -> SyncTransaction:
        """See `Producer.transaction`; use it with `with`."""

        async def make() -> Transaction:
            return self._producer.transaction(sequence=sequence, keepalive_s=keepalive_s)

        return SyncTransaction(self._loop.call(make), self._loop)
