"""Errors of readers."""

from wal.errors import StreamingNodeError


class ReaderBusy(StreamingNodeError):
    """Another reader, or scanner, is already open under this name."""

    code = "READER_BUSY"
    retryable = "yes"
