"""Every error that a caller can get, from the node itself and from the packages below.

Each has a stable `code`, and its text ends with the next step. `retryable` states whether the same
call may be retried: "yes" or "no" when nothing was done, and "indeterminate" when it may have been
done. To repeat an indeterminate write, use a named producer; otherwise it may be written twice.
"""

from interceptors.errors import CollectionNotFound as CollectionNotFound
from interceptors.errors import InvalidTransactionState as InvalidTransactionState
from interceptors.errors import PartitionNotFound as PartitionNotFound
from interceptors.errors import ProducerFenced as ProducerFenced
from interceptors.errors import SchemaMismatch as SchemaMismatch
from interceptors.errors import SequenceTooOld as SequenceTooOld
from interceptors.errors import TransactionExpired as TransactionExpired
from scanner.deliver_policy import ReaderBusy as ReaderBusy
from scanner.deliver_policy import ReaderNotFound as ReaderNotFound
from spark_sink.errors import PackageMissing as PackageMissing
from spark_sink.errors import TableAhead as TableAhead
from wal.errors import AccessDenied as AccessDenied
from wal.errors import AlreadyExists as AlreadyExists
from wal.errors import AlreadyOwned as AlreadyOwned
from wal.errors import ChannelFenced as ChannelFenced
from wal.errors import Corrupt as Corrupt
from wal.errors import DeadlineExceeded as DeadlineExceeded
from wal.errors import GroupNotFound as GroupNotFound
from wal.errors import Indeterminate as Indeterminate
from wal.errors import InvalidArgument as InvalidArgument
from wal.errors import LogReopening as LogReopening
from wal.errors import OnShutdown as OnShutdown
from wal.errors import Overloaded as Overloaded
from wal.errors import ProtocolError as ProtocolError
from wal.errors import StorageFailed as StorageFailed
from wal.errors import StorageFull as StorageFull
from wal.errors import StreamingNodeError as StreamingNodeError
from wal.errors import TooLarge as TooLarge
from wal.errors import TopicNotFound as TopicNotFound
from wal.errors import Truncated as Truncated
from wal.errors import Unauthenticated as Unauthenticated
from wal.errors import Unreachable as Unreachable
from wal.errors import UnsupportedFormat as UnsupportedFormat
