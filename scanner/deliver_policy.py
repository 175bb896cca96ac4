"""What a reader is opened with: where it starts, and the error when its name is in use. `scanner.source` finds the place."""

from dataclasses import dataclass
from datetime import datetime

from wal.errors import InvalidArgument, StreamingNodeError
from wal.position import MessageId
from wal.timetick import tick_given


class ReaderBusy(StreamingNodeError):
    """Another reader is already open under this name."""

    code = "READER_BUSY"
    retryable = "yes"


class DeliverPolicy:
    """Where a reader starts; made by `all`, `latest`, `start_from` and `start_after`."""

    __slots__ = ()

    @staticmethod
    def all() -> "DeliverPolicy":
        """Start with the earliest message still kept."""
        return DeliverAll()

    @staticmethod
    def latest() -> "DeliverPolicy":
        """Start with what is confirmed after the reader was opened."""
        return DeliverLatest()

    @staticmethod
    def start_from(message_id: MessageId) -> "DeliverPolicy":
        """Start with this message: it and everything with a higher tick is delivered.

        Opening the reader raises `Truncated` when the message is no longer kept.
        """
        return StartFrom(_checked_id(message_id))

    @staticmethod
    def start_after(after: MessageId | int | datetime) -> "DeliverPolicy":
        """Start after a message, a time tick or a time: everything with a higher tick is delivered.

        Opening the reader raises `Truncated` when something after it may no longer be kept.
        """
        if isinstance(after, MessageId):
            return StartAfter(_checked_id(after))
        return StartAfterTick(tick_given("after", after))


@dataclass(frozen=True, slots=True)
class DeliverAll(DeliverPolicy):
    """See `DeliverPolicy.all`."""

    def __str__(self) -> str:
        return "all"


@dataclass(frozen=True, slots=True)
class DeliverLatest(DeliverPolicy):
    """See `DeliverPolicy.latest`."""

    def __str__(self) -> str:
        return "latest"


@dataclass(frozen=True, slots=True)
class StartFrom(DeliverPolicy):
    """See `DeliverPolicy.start_from`."""

    message_id: MessageId

    def __str__(self) -> str:
        return f"message {self.message_id}"


@dataclass(frozen=True, slots=True)
class StartAfter(DeliverPolicy):
    """See `DeliverPolicy.start_after`."""

    message_id: MessageId

    def __str__(self) -> str:
        return f"after message {self.message_id}"


@dataclass(frozen=True, slots=True)
class StartAfterTick(DeliverPolicy):
    """See `DeliverPolicy.start_after`."""

    tick: int

    def __str__(self) -> str:
        return f"after tick {self.tick}"


def check_policy(policy: object) -> None:
    """Return for a policy that `DeliverPolicy` makes; raise `InvalidArgument` for its name, its class and the like."""
    if not isinstance(policy, DeliverAll | DeliverLatest | StartFrom | StartAfter | StartAfterTick):
        raise InvalidArgument(f"{policy!r} is no deliver policy — use one that DeliverPolicy makes")


def _checked_id(message_id: object) -> MessageId:
    if not isinstance(message_id, MessageId):
        raise InvalidArgument(f"{message_id!r} is no message id — pass the message_id of a message or of a result")
    if not isinstance(message_id.position, int) or message_id.position < 1:
        raise InvalidArgument(f"{message_id} names no message: positions start at 1 — start at the first message")
    return message_id
