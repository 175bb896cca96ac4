"""What a node is made of, as the client side sees it: the composition root fills this in, `Node` uses it.

Nothing here does anything. Every field belongs to one running node and is used on its event loop only.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import pyarrow as pa

from interceptors.shard.catalog import CollectionInfo
from scanner.deliver_policy import DeliverPolicy
from scanner.named_reader import NamedReaders, ReaderPosition
from scanner.scanner import Scanner
from streamingnode.statistics import NodeStatistics
from streamingnode.upkeep import Upkeep
from streamingnode.writing.coalescer import Coalescer
from streamingnode.writing.producer import ProducerDirectory
from streamingnode.writing.results import Durability
from wal.admission import PendingBytes
from wal.append import Append
from wal.message_type import MessageType


class CatalogReader(Protocol):
    """What exists now; every call answers at once."""

    def collections(self) -> Sequence[CollectionInfo]:
        """Return the live collections by id."""

    def collection_by_name(self, name: str) -> CollectionInfo:
        """Return the live collection of this name, one object until it changes. Raises `CollectionNotFound`."""


class OpenScanner(Protocol):
    """Open a scanner on one pchannel; `None` means all."""

    def __call__(
        self,
        pchannel: str,
        policy: DeliverPolicy,
        *,
        vchannels: frozenset[str],
        types: frozenset[MessageType],
        after_tick: int,
    ) -> Scanner:
        """Return the scanner; it finds its place when it is first used. Raises `Overloaded` or `OnShutdown`."""


class FlushedSegment(msgspec.Struct, frozen=True, kw_only=True):
    """One segment that a cut sealed; `path` is relative to the node directory."""

    segment_id: int
    collection_id: int
    partition_id: int
    rows: int
    bytes: int
    path: str


class FlushResult(msgspec.Struct, frozen=True, kw_only=True):
    """A cut: everything up to `tick` is in files. `segments` are those sealed since the cut before it.

    `crc32c` is the checksum of its manifest: whoever holds it, as tables do, tells the cut from one of another history.
    """

    number: int
    tick: int
    crc32c: int = 0
    segments: tuple[FlushedSegment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeServices:
    """The parts of one running node.

    `wal_name` is the kind of log, as message ids name it. `appends` has the WAL of each pchannel. `allocate_id` returns an
    id that no collection or partition of a pchannel ever had. `find_position` says where a deliver policy starts, for a new
    named reader. `flush` makes a cut and returns it, or the newest one when there is nothing to cut. `snapshot` returns a
    collection's current rows, or those as of a tick. `consistent_tick` returns, for pchannels, a tick that no append
    acknowledged before the call is above; `newest_tick` returns one that is above every tick given out, and no earlier than
    now. `upkeep` verifies and backs up what is on the disk. `statistics` is told the inserts that wait outside these
    parts. `pending` is the room in memory that writes share. `stop_waiting` sends away whoever waits for a failed log to
    come back, `stop_appends` whoever waits for anything but the disk; it returns when no append is under way any more.
    """

    path: str | None
    node_id: str
    wal_name: str
    durability: Durability
    catalog: CatalogReader
    appends: Mapping[str, Append]
    allocate_id: Callable[[str], int]
    open_scanner: OpenScanner
    named_readers: NamedReaders
    find_position: Callable[[str, DeliverPolicy], Awaitable[ReaderPosition]]
    flush: Callable[[], Awaitable[FlushResult]]
    snapshot: Callable[[CollectionInfo, int | None], Awaitable[pa.Table]]
    consistent_tick: Callable[[Sequence[str]], Awaitable[int]]
    newest_tick: Callable[[], int]
    producers: ProducerDirectory
    stop_waiting: Callable[[], None]
    stop_appends: Callable[[], Awaitable[None]]
    upkeep: Upkeep
    statistics: Callable[[Coalescer], NodeStatistics]
    pending: PendingBytes
