"""Every error a caller can meet: those of the node itself, and those of the packages below."""

from interceptors.errors import (
    AlreadyExists,
    CollectionNotFound,
    InvalidTransactionState,
    PartitionNotFound,
    ProducerFenced,
    SchemaMismatch,
    SequenceTooOld,
    TransactionExpired,
)
from scanner.deliver_policy import ReaderBusy
from spark_sink.errors import JavaNotFound, PackageMissing, SparkLost, TableAhead
from wal.errors import (
    AlreadyOwned,
    ChannelFenced,
    Corrupt,
    Indeterminate,
    InvalidArgument,
    LogReopening,
    OnShutdown,
    Overloaded,
    StorageFailed,
    StorageFull,
    StreamingNodeError,
    TooLarge,
    Truncated,
    UnsupportedFormat,
)

__all__ = [
    "AlreadyExists",
    "AlreadyOwned",
    "ChannelFenced",
    "CollectionNotFound",
    "Corrupt",
    "DeadlineExceeded",
    "Indeterminate",
    "InvalidArgument",
    "InvalidTransactionState",
    "JavaNotFound",
    "LogReopening",
    "OnShutdown",
    "Overloaded",
    "PackageMissing",
    "PartitionNotFound",
    "ProducerFenced",
    "ReaderBusy",
    "SchemaMismatch",
    "SequenceTooOld",
    "SparkLost",
    "StorageFailed",
    "StorageFull",
    "StreamingNodeError",
    "TableAhead",
    "TooLarge",
    "TransactionExpired",
    "Truncated",
    "UnsupportedFormat",
]


class DeadlineExceeded(Indeterminate, TimeoutError):
    """The caller's deadline passed before the outcome was known: the call may still take effect, or not."""

    code = "DEADLINE_EXCEEDED"
