"""The root of all errors, and what the log itself raises; each package above has an `errors` of its
own.

A class is named by what happened to the caller's resource, has a stable `code` for machines, says
whether the same call may be tried again, and carries typed fields. Its text says what happened and,
after a dash, what to do next: one line, the same for a program and on the command line. Violated
contracts inside the system are `AssertionError`s and are never caught.
"""

import copyreg
import re
from collections.abc import Iterable
from enum import Enum, unique
from typing import ClassVar, Literal

_DASH = " — "
SHOWN_MAX = 80
"""Characters of a value in an error text: enough to find it by, and no place to leak rows into a
log.
"""


def escaped(text: str) -> str:
    """Return a text as one printable line: what would begin a line, move a cursor or change
    direction is spelled out.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def shown(value: object) -> str:
    """Return the first `SHOWN_MAX` characters of a value's representation, escaped."""
    if isinstance(value, (str, bytes)):
        value = value[: SHOWN_MAX + 1]  # representing megabytes takes time
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # an integer of more digits than Python converts, or lists in lists in lists
        text = f"<{type(value).__name__}>"
    return brief(text)


def brief(text: str) -> str:
    """Return the first `SHOWN_MAX` characters of a text that may quote a value, escaped."""
    short = escaped(text[:SHOWN_MAX])
    return f"{short}..." if len(text) > SHOWN_MAX else short


def nearest(name: str, names: Iterable[str], *, likeness: float = 0.5) -> str | None:
    """Return the one of `names` that is most like `name`; None below a `likeness` from 0 to 1."""
    import difflib  # few names are wrong

    found = difflib.get_close_matches(name, list(names), n=1, cutoff=likeness)
    return found[0] if found else None


@unique
class Ends(Enum):
    """What has ended when an error is raised, from the least on."""

    CALL = "call"
    """The call; the log goes on, and a worker tries again when its turn comes."""
    TERM = "term"
    """The term of the log, too: its workers end, and the next term begins once the log is back."""
    LOG = "log"
    """The log, for this process: whatever needs it ends."""


class StreamingNodeError(Exception):
    """Root of all errors; catch this to catch everything the system raises on purpose."""

    code: ClassVar[str] = "UNKNOWN"
    """The name of the class as constants are written, so it stays what it is: programs compare
    it.
    """
    retryable: ClassVar[Literal["yes", "no", "indeterminate"]] = "no"
    ends: ClassVar[Ends] = Ends.CALL
    """What comes next is decided by this, not by the class."""
    exit_code: ClassVar[int] = 1
    decides: ClassVar[bool] = True
    """Whether it answers for an earlier try of the same write, too: not what is refused before the
    window was asked.
    """
    next_step: ClassVar[str] = ""
    """What helps in general, for a text without a next step: who finds the error often cannot know
    a better one.
    """

    def __init_subclass__(cls) -> None:
        cls.code = re.sub("(?<=[a-z])(?=[A-Z])", "_", cls.__name__).upper()

    def __init__(self, text: str = "") -> None:
        super().__init__(
            text if _DASH in text or not self.next_step else f"{text}{_DASH}{self.next_step}"
        )

    def __str__(self) -> str:
        return escaped(super().__str__())

    def __reduce__(self) -> tuple[object, ...]:
        # To another process, as a pool's: of its text and fields, which a class mostly makes of
        # other arguments.
        return copyreg.__newobj__, (type(self),), {**vars(self), "args": self.args}  # type: ignore[attr-defined]

    @property
    def happened(self) -> str:
        """What happened, without what to do next: for who knows a better next step."""
        return str(self).partition(_DASH)[0]

    def fields(self) -> dict[str, object]:
        """Return the typed fields of this error, for logs, `--json` output and the wire."""
        return dict(vars(self))


def ends_of(error: BaseException) -> Ends:
    """Return what an error ends; one that is not of this system ends its call."""
    return error.ends if isinstance(error, StreamingNodeError) else Ends.CALL


class OnShutdown(StreamingNodeError):
    """The node or WAL is closing or closed; the call did nothing."""

    ends = Ends.LOG
    decides = False
    next_step = "open the node again"


class ChannelFenced(StreamingNodeError):
    """A newer term owns this log; nothing this owner appends can become visible."""

    ends = Ends.LOG
    decides = False


class AlreadyOwned(StreamingNodeError):
    """Another process has this directory open, or this one has: then `own` is true. One that is
    `brief` is a command.
    """

    retryable = "yes"
    exit_code = 4

    def __init__(
        self, path: str, pid: int | None, *, own: bool = False, brief: bool = False
    ) -> None:
        self.path = path
        self.pid = pid
        self.own = own
        self.brief = brief
        holder = f"process {pid}" if pid else "another process"
        super().__init__(
            f"{path} is in use: this process (pid {pid}) has it open already — use that node, or "
            "close it first"
            if own
            else f"{path} is in use by {holder} — stop that process, connect to it, or have all "
            "open it with share=True"
        )


class UnsupportedFormat(StreamingNodeError):
    """The directory was written by a newer release, or is no node directory at all."""

    exit_code = 3
    next_step = "open it with the release that wrote it, or a newer one"


class Indeterminate(StreamingNodeError):
    """The write failed in a way that leaves its outcome open: it may be in the log after a reopen,
    or not.
    """

    retryable = "indeterminate"
    ends = Ends.TERM
    next_step = "read back whether it is there once the log is open again"


class LogReopening(StreamingNodeError):
    """The log is being reopened after a failed write of somebody, and was not back in time; the
    call did nothing.
    """

    decides = False
    retryable = "yes"
    ends = Ends.TERM
    next_step = "try again; nothing was done"


class StorageFull(StreamingNodeError):
    """The disk has less free space than the node needs to stay safe; the call did nothing, or waits
    for room to go on.
    """

    decides = False
    retryable = "yes"

    def __init__(self, path: str, free_bytes: int, needed_bytes: int) -> None:
        self.path = path
        self.free_bytes = free_bytes
        self.needed_bytes = needed_bytes
        super().__init__(
            f"{path} has {free_bytes / (1 << 20):.4g} MiB free and needs "
            f"{needed_bytes / (1 << 20):.4g} MiB — "
            "free space on that disk; an open node goes on by itself"
        )


class StorageFailed(StreamingNodeError):
    """The storage refused an operation (read-only file system, missing permission, I/O error)
    before it did anything.
    """

    decides = False


class Corrupt(StreamingNodeError):
    """Stored bytes are not what was written; the range is unreadable and nothing is guessed in its
    place.
    """

    exit_code = 3
    next_step = "verify the node to see what else is damaged"


class ProtocolError(StreamingNodeError):
    """A connection carried what is no part of the wire protocol; it is closed, and nothing of that
    was acted on.
    """

    next_step = (
        "look whether a node of a matching version is at that address, and what lies between"
    )


class Truncated(StreamingNodeError):
    """The requested position or state lies before the earliest one there is; `earliest` names that.

    It is no longer kept, or lies before its collection was created.
    """

    def __init__(
        self,
        requested: object,
        earliest: object,
        next_step: str | None = None,
        *,
        why: str = "is no longer kept",
    ) -> None:
        self.requested = requested
        self.earliest = earliest
        next_step = next_step or f"start from {earliest} or later"
        super().__init__(f"{requested} {why}{_DASH}{next_step}")


class InvalidArgument(StreamingNodeError):
    """An argument is outside what the call accepts; nothing was done."""

    exit_code = 2


class TooLarge(InvalidArgument):
    """One message is over the size limit even alone."""


class AlreadyExists(StreamingNodeError):
    """The name is taken, by something with another definition, or what has it is not empty."""


class TopicNotFound(StreamingNodeError):
    """No topic has this name."""

    next_step = "create it first, or choose one that is there"


class GroupNotFound(StreamingNodeError):
    """The topic has no consumer group of this name."""

    next_step = "create it first, or choose one that is there"


class Overloaded(StreamingNodeError):
    """A bound was reached and waiting would not help; the call did nothing."""

    retryable = "yes"


class DeadlineExceeded(Indeterminate, TimeoutError):
    """The caller's deadline passed before the outcome was known: the call may still take effect, or
    not.

    A `TimeoutError`, as `asyncio.timeout` and `anyio.fail_after` raise one.
    """

    ends = Ends.CALL


class Unreachable(StreamingNodeError):
    """No node answers at the address, or the connection to it was lost and did not come back in
    time; nothing was done.
    """

    decides = False
    retryable = "yes"
    exit_code = 4
    next_step = "start the node with `streamingnode serve`, or correct the address"


class Unauthenticated(StreamingNodeError):
    """The node does not know who is calling: the token or certificate is missing, wrong or
    expired.
    """

    next_step = "give the token that the node's operator issued"


class AccessDenied(StreamingNodeError):
    """The caller is known, and may not do this."""

    next_step = "ask the node's operator for this right"
