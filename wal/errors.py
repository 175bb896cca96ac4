"""The root of all errors, and the errors of the log itself. Each higher package has its own
`errors` module.

A class is named after what happened to the caller's resource. It has a stable `code` for programs,
states whether the same call may be retried, and carries typed fields. Its text is one line: what
happened and, after a dash, what to do next. Programs and the command line get the same text.
Violated contracts inside the system are `AssertionError`s and are never caught.
"""

import copyreg
import re
from collections.abc import Iterable
from enum import Enum, unique
from typing import ClassVar, Literal

_DASH = " — "
SHOWN_MAX = 80
"""Characters of a value in an error text: enough to identify the value, too few to leak rows into a
log.
"""


def escaped(text: str) -> str:
    """Return a text as one printable line: characters that begin a line, move the cursor or change
    direction are escaped.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def shown(value: object) -> str:
    """Return the first `SHOWN_MAX` characters of a value's representation, escaped."""
    if isinstance(value, (str, bytes)):
        value = value[: SHOWN_MAX + 1]  # the representation of megabytes takes long
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # an integer with more digits than Python converts, or lists nested too deeply
        text = f"<{type(value).__name__}>"
    return brief(text)


def brief(text: str) -> str:
    """Return the first `SHOWN_MAX` characters of a text that may quote a value, escaped."""
    short = escaped(text[:SHOWN_MAX])
    return f"{short}..." if len(text) > SHOWN_MAX else short


def nearest(name: str, names: Iterable[str], *, likeness: float = 0.5) -> str | None:
    """Return the one of `names` that is most like `name`; None below a `likeness` from 0 to 1."""
    import difflib  # imported late: few names are wrong

    found = difflib.get_close_matches(name, list(names), n=1, cutoff=likeness)
    return found[0] if found else None


@unique
class Ends(Enum):
    """What an error ends, in ascending order."""

    CALL = "call"
    """Only the call ends; the log goes on, and a worker retries at its next turn."""
    TERM = "term"
    """The term of the log ends, too, with its workers; the next term begins when the log is
    back.
    """
    LOG = "log"
    """The log ends for this process, with everything that needs it."""


class StreamingNodeError(Exception):
    """Root of all errors; catch this to catch everything the system raises on purpose."""

    code: ClassVar[str] = "UNKNOWN"
    """The name of the class in the style of constants. It never changes, because programs compare
    it.
    """
    retryable: ClassVar[Literal["yes", "no", "indeterminate"]] = "no"
    ends: ClassVar[Ends] = Ends.CALL
    """This attribute decides what happens next, not the class."""
    exit_code: ClassVar[int] = 1
    decides: ClassVar[bool] = True
    """Whether the error also decides the outcome of earlier attempts of the same write. False for a
    refusal that comes before the window is checked.
    """
    next_step: ClassVar[str] = ""
    """The general next step for a text without one: the code that raises the error often cannot
    name a better one.
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
        # Pickle text and fields instead of the constructor's arguments, which mostly differ, so
        # that an error can pass between processes.
        return copyreg.__newobj__, (type(self),), {**vars(self), "args": self.args}  # type: ignore[attr-defined]

    @property
    def happened(self) -> str:
        """What happened, without the next step, for code that adds a better next step."""
        return str(self).partition(_DASH)[0]

    def fields(self) -> dict[str, object]:
        """Return the typed fields of this error, for logs, `--json` output and the wire."""
        return dict(vars(self))


def ends_of(error: BaseException) -> Ends:
    """Return what an error ends; an error of another library ends its call."""
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
    """Another process has this directory open, or this process has, then `own` is true. `brief`
    marks an owner that is a command and will release it soon.
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
    """The directory was written by a newer release, or is not a node directory."""

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
    """The log is being reopened after a failed write and was not back in time; the call did
    nothing.
    """

    decides = False
    retryable = "yes"
    ends = Ends.TERM
    next_step = "try again; nothing was done"


class StorageFull(StreamingNodeError):
    """The disk has less free space than the node needs to stay safe; the call did nothing, or waits
    for space.
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
    """Stored bytes differ from the written ones; the range is unreadable, and no data is guessed in
    its place.
    """

    exit_code = 3
    next_step = "verify the node to see what else is damaged"


class ProtocolError(StreamingNodeError):
    """A connection carried data that violates the wire protocol; it is closed, and the data had no
    effect.
    """

    next_step = "check that a node of a matching version is at that address, and what lies between"


class Truncated(StreamingNodeError):
    """The requested position or state lies before the earliest available one, `earliest`.

    It is no longer kept, or is older than its collection.
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
    """A single message exceeds the size limit."""


class AlreadyExists(StreamingNodeError):
    """The name is taken: its owner has another definition, or is not empty."""


class TopicNotFound(StreamingNodeError):
    """No topic has this name."""

    next_step = "create it first, or choose one that is there"


class GroupNotFound(StreamingNodeError):
    """The topic has no consumer group of this name."""

    next_step = "create it first, or choose one that is there"


class Overloaded(StreamingNodeError):
    """A limit is reached and waiting would not help; the call did nothing."""

    retryable = "yes"


class DeadlineExceeded(Indeterminate, TimeoutError):
    """The caller's deadline passed before the outcome was known; the call may still take effect.

    It is also a `TimeoutError`, like the errors of `asyncio.timeout` and `anyio.fail_after`.
    """

    ends = Ends.CALL


class Unreachable(StreamingNodeError):
    """No node answers at the address, or a lost connection did not come back in time; nothing was
    done.
    """

    decides = False
    retryable = "yes"
    exit_code = 4
    next_step = "start the node with `streamingnode serve`, or correct the address"


class Unauthenticated(StreamingNodeError):
    """The node cannot authenticate the caller: the token or certificate is missing, wrong or
    expired.
    """

    next_step = "give the token that the node's operator issued"


class AccessDenied(StreamingNodeError):
    """The caller is authenticated but has no right to do this."""

    next_step = "ask the node's operator for this right"
