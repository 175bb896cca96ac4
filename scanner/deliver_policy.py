"""Where a reader starts, and the errors of named readers. `scanner.source` finds the position."""

from dataclasses import dataclass
from datetime import datetime
from enum import Enum, unique
from types import NoneType
from typing import NamedTuple

from wal.errors import InvalidArgument, StreamingNodeError, shown
from wal.position import MessageId, message_id_kind
from wal.timetick import tick_given

PlainPlace = tuple[str, int] | int | None
"""The kind of log and the position of a message, a tick, or None."""


class ReaderBusy(StreamingNodeError):
    """Another reader is already open under this name."""

    retryable = "yes"


class ReaderNotFound(StreamingNodeError):
    """The collection has no named reader of this name."""

    next_step = "choose an existing reader"


@unique
class Start(Enum):
    """The kind of place a policy starts at."""

    ALL = "all"
    LATEST = "latest"
    FROM = "message"
    AFTER = "after message"
    AFTER_TICK = "after tick"


class StartingPoint(NamedTuple):
    """Read from `position` and deliver messages with a tick above `after_tick`.

    A reader resumes at one, and each policy leads to one.
    """

    position: int
    after_tick: int

    def __str__(self) -> str:
        return f"position {self.position}"


@dataclass(frozen=True, slots=True)
class DeliverPolicy:
    """Where a reader starts; made by `all`, `latest`, `start_from` and `start_after`."""

    start: Start
    at: MessageId | int | None = None

    def __post_init__(self) -> None:
        kinds = {Start.FROM: MessageId, Start.AFTER: MessageId, Start.AFTER_TICK: int}
        if not isinstance(self.start, Start) or not isinstance(
            self.at, kinds.get(self.start, NoneType)
        ):
            raise InvalidArgument(
                f"{self.start!r} at {self.at!r} is no deliver policy — use one that DeliverPolicy "
                "makes"
            )

    @staticmethod
    def all() -> "DeliverPolicy":
        """Start with the earliest message still kept."""
        return DeliverPolicy(Start.ALL)

    @staticmethod
    def latest() -> "DeliverPolicy":
        """Start with messages that are confirmed after the reader was opened."""
        return DeliverPolicy(Start.LATEST)

    @staticmethod
    def start_from(message_id: MessageId) -> "DeliverPolicy":
        """Start with this message: deliver it and everything with a higher tick."""
        return DeliverPolicy(Start.FROM, _checked_id(message_id))

    @staticmethod
    def start_after(after: MessageId | int | datetime) -> "DeliverPolicy":
        """Start after a message, a time tick or a time: deliver everything with a higher tick.

        A tick before the collection's creation is valid: the creation is then the first message.
        Messages of an earlier collection of the same name are not delivered. Opening the reader
        raises `Truncated` when a message after the given point may no longer be kept.
        """
        if isinstance(after, MessageId):
            return DeliverPolicy(Start.AFTER, _checked_id(after))
        return DeliverPolicy(Start.AFTER_TICK, tick_given("after", after))

    @staticmethod
    def of_plain(start: str, at: PlainPlace) -> "DeliverPolicy":
        """Return the policy with this `plain` form. Raises `InvalidArgument`."""
        try:
            return DeliverPolicy(
                Start(start), message_id_kind(at[0])(at[1]) if isinstance(at, tuple) else at
            )
        except ValueError as error:
            raise InvalidArgument(
                f"invalid deliver policy: {error} — use one that DeliverPolicy makes"
            ) from error

    @property
    def plain(self) -> tuple[str, PlainPlace]:
        """The wire form: the kind of start, and the place."""
        at = self.at
        return self.start.value, (at.wal_name, at.position) if isinstance(at, MessageId) else at

    def __str__(self) -> str:
        return self.start.value if self.at is None else f"{self.start.value} {self.at}"


def _checked_id(message_id: object) -> MessageId:
    if not isinstance(message_id, MessageId):
        raise InvalidArgument(
            f"{shown(message_id)} is no message id — pass the message_id of a message or of a "
            "result"
        )
    if not isinstance(message_id.position, int) or message_id.position < 1:
        raise InvalidArgument(
            f"{message_id} is not valid: positions start at 1 — start at the first message"
        )
    return message_id
