"""Errors of collections, transactions and producers: what the append path refuses, and why."""

from wal.errors import InvalidArgument, StreamingNodeError, Truncated
from wal.timetick import tick_shown


class CollectionNotFound(StreamingNodeError):
    """No live collection has this name."""


def before_creation(collection: str, tick: int, created_tick: int, *, first: int = 0) -> Truncated:
    """Return the error for a tick before the collection's creation: it had no state then, which
    differs from having no rows.

    `first` is the earliest readable tick, if that is later than the creation.
    """
    earliest = max(created_tick, first)
    return Truncated(
        f"tick {tick_shown(tick)}",
        earliest,
        f"ask for {tick_shown(earliest)} or later; rows of an earlier {collection!r} are gone",
        why=f"is before collection {collection!r} was created, at {tick_shown(created_tick)}",
    )


class PartitionNotFound(StreamingNodeError):
    """No live partition of the collection has this name."""


class SchemaMismatch(InvalidArgument):
    """Rows do not fit the collection's schema, or were encoded for another version of it.

    `column` and `row` name the place, if it is known.
    """

    def __init__(self, message: str, *, column: str | None = None, row: int | None = None) -> None:
        self.column = column
        self.row = row
        super().__init__(message)


class TransactionExpired(StreamingNodeError):
    """The transaction is gone: expired, too large, unknown, or ended by a schema change.

    None of its rows will appear.
    """


class InvalidTransactionState(StreamingNodeError):
    """The transaction has already ended, or is ending."""


class ProducerFenced(StreamingNodeError):
    """A later call opened the producer again or deleted it, so this one can write no more.

    The call wrote nothing.
    """

    decides = False

    def __init__(self, epoch: int, newer_epoch: int | None) -> None:
        self.epoch = epoch
        self.newer_epoch = newer_epoch
        why = "deleted" if newer_epoch is None else f"opened again with epoch {newer_epoch}"
        super().__init__(
            f"this producer has epoch {epoch} and was {why} since — stop this writer, or open the "
            "producer to take over"
        )


class SequenceTooOld(StreamingNodeError):
    """The write is older than every remembered result of its producer, so it may be in the log or
    not.

    The call wrote nothing.
    """

    decides = False

    def __init__(self, sequence: int, oldest: int) -> None:
        self.sequence = sequence
        self.oldest = oldest
        super().__init__(
            f"sequence {sequence} is older than the earliest remembered result, {oldest} — "
            "go on from last_sequence, and read back whether earlier writes are there"
        )
