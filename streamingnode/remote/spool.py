"""The spool of a client: while its node is away, writes are kept on the client's disk, and sent in order when it is back.

Each is kept under a sequence of the spool's own producer, by which the node knows it again after any crash of either side,
however much later (ADR 0009). One record is sent at a time, the next when all of it is in the log or a dead letter: so what
one caller wrote after the other takes place in that order.
"""

import asyncio
import errno
import os
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, suppress
from enum import Enum, auto
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
import pyarrow as pa
from anyio import to_thread

from interceptors.errors import ProducerFenced, SequenceTooOld
from interceptors.idempotency import ProducerRecord
from interceptors.shard.catalog import Catalog, CollectionInfo
from streamingnode.errors import Unreachable
from streamingnode.remote.address import Address, LinkOptions
from streamingnode.remote.calls import Welcome, decode, encode
from streamingnode.remote.client import FRAMES_IN_FLIGHT_MAX, RemoteBackend
from streamingnode.remote.link import LinkState
from streamingnode.remote.spool_records import START_BYTES, Record, decode_start, encode_record, encode_start, scan
from streamingnode.remote.writes import FIRST_EPOCH, FrameOfWrites, Lane, Unit, WireWrites, frame_of
from streamingnode.statistics import NodeStatistics, SpoolStatistics
from streamingnode.writing.target import WriteTarget
from wal.append import AppendGroup, AppendResult, Pack
from wal.errors import Corrupt, Indeterminate, Overloaded, StorageFailed, StorageFull, StreamingNodeError
from wal.files import DirectoryLock, create_file, make_directory, open_regular, read_regular, sync_directory
from wal.frames import FRAME_BYTES_MAX, PREFACE, FrameKind, FrameReader, encode_frame
from wal.headers import MessageType
from wal.packer import Packer
from wal.position import ProducerStamp, message_id_kind
from wal.queue import Signal
from wal.runtime import event_log, outlast, unix_ms

_log = event_log(__name__)

LOG_NAME, KNOWN_NAME, LETTERS_NAME = "spool.log", "node", "dead-letters"
PAUSE_S = 0.5
"""Before a node that refuses everything for now is asked again."""
DONE_PER_RECORD = 2
"""Records that are done before one more is kept behind them: so a replay ends, however much is written meanwhile."""
LEFT_OUT_BITS = 32
"""Each opening leaves out a random number of sequences: a copy of the directory never takes those of the original."""


class SpoolState(Enum):
    """Where writes go."""

    DIRECT = auto()
    """To the node; nothing is kept."""
    SPOOLING = auto()
    """To the disk: the node is away."""
    REPLAYING = auto()
    """To the disk, behind what is being sent to the node."""
    CLOSED = auto()


TRANSITIONS = {
    SpoolState.DIRECT: {SpoolState.SPOOLING, SpoolState.CLOSED},
    SpoolState.SPOOLING: {SpoolState.DIRECT, SpoolState.REPLAYING, SpoolState.CLOSED},
    SpoolState.REPLAYING: {SpoolState.DIRECT, SpoolState.SPOOLING, SpoolState.CLOSED},
    SpoolState.CLOSED: set[SpoolState](),
}


class Known(msgspec.Struct, frozen=True):
    """What a spool is opened with while its node is away; of `former` collections something may be kept."""

    producer: str
    """Its name at the node."""
    welcome: Welcome
    collections: tuple[CollectionInfo, ...]
    former: tuple[CollectionInfo, ...] = ()
    epoch: int = 0
    """That the producer was last opened with from this directory."""


class SpoolLog:
    """The records in one file, oldest first. All of it blocks, one call at a time."""

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, -1
        self.first: Record | None = None
        """The oldest that is not done."""
        self.frames = self.writes = 0
        """Of those that are not done."""
        self.next_sequence = 1
        self.start = self.end = START_BYTES
        """Where the first of them begins, and the last ends."""
        self._before = self._checksum = 0
        """Of what comes before these two places."""

    def open(self) -> None:
        """Open the file, made if it is new. Raises `Corrupt`, `UnsupportedFormat`."""
        if self._path.exists():
            self._load()
        else:
            self.shorten()  # to nothing
        self.next_sequence += secrets.randbits(LEFT_OUT_BITS)

    def append(self, record: Record) -> None:
        """Keep a record, durably, whole or not at all. Raises `Indeterminate` when the disk says neither."""
        data, checksum = encode_record(record, self._checksum)
        try:
            left, at = memoryview(data), self.end
            while left:
                written = os.pwrite(self._descriptor, left, at)
                left, at = left[written:], at + written
            os.fsync(self._descriptor)
        except OSError as error:
            try:
                self._cut_off()
            except OSError:  # the next one is written over it; a crash before that may find it whole
                raise Indeterminate(f"{self._path} may have kept a write, and failed: {error}") from error
            raise
        self._take(record, checksum)

    def pop(self) -> None:
        """Be done with the first record."""
        assert self.first is not None, "only what is there is done"
        at, before = self.start + self.first.size, encode_record(self.first, self._before)[1]
        following, _ = next(scan(self._read, at, self.end, before), (None, 0))
        self.frames, self.writes = self.frames - 1, self.writes - self.first.writes
        self.first, self.start, self._before = following, at, before

    def shorten(self) -> None:
        """Give up what is done: the rest is written anew, and takes the place of the old file."""
        replace_file(self._path, self._rest())
        self._load()

    def _rest(self) -> Iterator[bytes]:
        data, checksum = encode_start(self.next_sequence)
        yield data
        for record, _ in scan(self._read, self.start, self.end, self._before):
            data, checksum = encode_record(record, checksum)
            yield data

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _load(self) -> None:
        self.close()
        self._descriptor = open_regular(self._path, os.O_RDWR)
        self.next_sequence, self._checksum = decode_start(self._read(0, START_BYTES))
        self.first, self.frames, self.writes = None, 0, 0
        self.start, self.end, self._before = START_BYTES, START_BYTES, self._checksum
        size_bytes = os.fstat(self._descriptor).st_size
        for record, checksum in scan(self._read, self.start, size_bytes, self._checksum):
            self._take(record, checksum)
        if self.end < size_bytes:  # what a crash left of a write that nobody was told of
            _log.warning("spool_tail_dropped", path=str(self._path), bytes=size_bytes - self.end)
            self._cut_off()

    def _take(self, record: Record, checksum: int) -> None:
        self.first = self.first or record
        self.frames, self.writes = self.frames + 1, self.writes + record.writes
        self.next_sequence = max(self.next_sequence, record.last + 1)
        self.end, self._checksum = self.end + record.size, checksum

    def _read(self, at: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, at)

    def _cut_off(self) -> None:
        os.ftruncate(self._descriptor, self.end)
        os.fsync(self._descriptor)


def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Put a file in the place of another, whole and durably."""
    new = path.with_suffix(".new")
    with create_file(new) as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    sync_directory(path.parent)


def letters_of(
    writes: WireWrites, payload: memoryview, refused: dict[int, StreamingNodeError], known: Known
) -> dict[str, bytes]:
    """Return writes that were refused as Arrow files, by their names: one for the rows or keys of each collection."""
    infos = {(each.id, each.schema_version): each for each in (*known.former, *known.collections)}
    lanes, at, letters = list[tuple[pa.RecordBatch | memoryview, dict[str, str]]](), 0, dict[str, bytes]()
    for wire in writes.targets:
        data, at = payload[at : at + wire.payload_bytes], at + wire.payload_bytes
        info = infos.get((wire.collection_id, wire.schema_version))
        if info is None:  # made and dropped between two catalogs: its rows as they were sent
            lanes.append((data, {}))
            continue
        target, is_delete = WriteTarget(info), wire.type == MessageType.DELETE
        into = target.deletes if is_delete else target.inserts(wire.partition_id)
        said = {"kind": "delete" if is_delete else "insert", "collection": target.info.name}
        said["partition"] = "".join([each.name for each in target.info.partitions if each.id == wire.partition_id])
        lanes.append((into.joined([Lane(into, data, is_plain=wire.is_plain).rows]), said))
    starts = [0] * len(lanes)
    for index, group in enumerate(writes.groups):
        for piece, (lane, length) in enumerate(group.pieces):
            (batch, said), start = lanes[lane], starts[lane]
            starts[lane] += length
            if (error := refused.get(index)) is None:
                continue
            if isinstance(batch, memoryview):
                letters[f"{group.sequence}-{piece}.rows"] = bytes(batch)
            else:
                sink = pa.BufferOutputStream()
                schema = batch.schema.with_metadata(said | {"code": error.code, "error": str(error)})
                with pa.ipc.new_file(sink, schema) as file:
                    file.write_batch(batch.slice(start, length).cast(schema))
                letters[f"{group.sequence}-{piece}.arrow"] = sink.getvalue().to_pybytes()
    return letters


class SpoolingBackend(RemoteBackend):
    """A node of another process whose writes are kept in a directory while it is away; see `Backend`."""

    def __init__(self, address: Address, options: LinkOptions, *, directory: Path, bytes_max: int) -> None:
        super().__init__(address, options)
        self.state = SpoolState.SPOOLING
        self._directory, self._bytes_max = directory, bytes_max
        self._log = SpoolLog(directory / LOG_NAME)
        self._letters: list[tuple[str, int]] = []
        """Names and sizes of the dead letters' files."""
        self._known: Known | None = None
        self._news: tuple[CollectionInfo, ...] | None = None
        """The collections, when they are not those that are known."""
        self._held = ExitStack()
        self._turn = asyncio.Lock()
        """Of who does something on the disk."""
        self._wanted = asyncio.Event()
        """Set when there may be something to replay, or news."""
        self._moved = Signal()
        """Woken when the state changes, and when a record is done."""
        self._done = 0
        """How many records, so far."""
        self._producer: ProducerRecord | None = None
        self._reached = 0
        """The producer's last sequence in the log when it was opened, if it is ours: records before that one's are done."""
        self._direct: Packer
        self._spooling: Packer

    async def open(self) -> None:
        """Open the spool, then connect, which may come later when the node is known. Raises `AlreadyOwned`, `Corrupt`."""
        await to_thread.run_sync(self._open_directory)
        await self.link.open(self._known.welcome if self._known else None)
        if self._known and self.link.state is not LinkState.READY:
            self.catalog = Catalog(self._known.collections)
        self._settle_in()
        make = partial(Packer, self._keep_or_send, self.pending.rows, repeats=False)
        self._direct, self._spooling = make(in_flight_max=FRAMES_IN_FLIGHT_MAX), make(in_flight_max=1)
        await self._on_disk(self._save)
        self.link.on_state = self._on_state
        self._on_state(self.link.state)

    def _open_directory(self) -> None:
        make_directory(self._directory / LETTERS_NAME)
        self._held.callback(DirectoryLock(self._directory).release)
        self._held.callback(self._log.close)
        self._log.open()
        self._look_at_letters()
        if (path := self._directory / KNOWN_NAME).exists():
            data = read_regular(path)
            found = [record for record, _ in scan(lambda at, size: data[at : at + size], 0, len(data), 0)]
            if not found:
                raise Corrupt(f"{path} is not whole — move its directory elsewhere, and connect with a new one")
            self._known = decode(found[0].frame, Known)

    def work(self) -> Iterable[Coroutine[None, None, None]]:
        """Return what runs in the background until the node closes."""
        return (*super().work(), self._replay())

    async def close(self) -> None:
        """Close the connection and give the directory back, what is in it stays; idempotent."""
        await super().close()
        if self.state is not SpoolState.CLOSED:
            self._become(SpoolState.CLOSED)
        await self._on_disk(self._held.close)

    @property
    def spool(self) -> SpoolStatistics:
        """What is kept."""
        log = self._log
        return SpoolStatistics(
            state=self.state.name.lower(),
            frames=log.frames,
            writes=log.writes,
            bytes=log.end - log.start,
            bytes_max=self._bytes_max,
            age_s=0.0 if log.first is None else max(0, unix_ms() - log.first.at_ms) / 1000,
            dead_letters=len({name.partition("-")[0] for name, _ in self._letters}),
        )

    async def statistics(self) -> NodeStatistics:
        """As `Node.statistics`."""
        told: NodeStatistics = await super().statistics()
        return msgspec.structs.replace(told, spool=self.spool)

    # --- keeping --------------------------------------------------------------------------------------------------------

    def append(self, group: AppendGroup) -> Awaitable[AppendResult]:
        """Append a group at the node, or keep it; what is not kept waits for the node, and for all that is."""
        is_direct = self.state is SpoolState.DIRECT
        if group.pieces and group.producer is None:
            return (self._direct if is_direct else self._spooling).append(group)
        return super().append(group) if is_direct else self._append_behind(group)

    async def _append_behind(self, group: AppendGroup) -> AppendResult:
        while self.state is not SpoolState.DIRECT:
            await self.link.wait_ready()
            if self.state is SpoolState.REPLAYING:
                await self._moved.wait()
        return await super().append(group)

    async def _keep_or_send(self, pack: Pack) -> None:
        while True:
            due = self._done + DONE_PER_RECORD
            while self.state is SpoolState.REPLAYING and self._done < due:
                await self._moved.wait()
            if self.state is not SpoolState.DIRECT and await outlast(self._keep(pack)):
                return None
            try:
                return await self._send(pack)
            except Unreachable:  # lost while it waited for room to be sent
                if pack.sent:
                    raise

    async def _keep(self, pack: Pack) -> bool:
        """Keep the writes of a pack in one record, durably; return False when they are to go to the node, after all."""
        async with self._turn:
            if self.state in {SpoolState.DIRECT, SpoolState.CLOSED}:
                return False
            first = self._log.next_sequence
            stamps = (ProducerStamp(0, FIRST_EPOCH, sequence) for sequence in count(first))
            bytes_max = self.config.wal.group_bytes_max // 2
            frame = frame_of(0, pack.groups, lambda _: next(stamps), settled=lambda: 0, unit_bytes_max=bytes_max)
            pack.sent = True
            await to_thread.run_sync(self._put, Record(first, len(frame.units), unix_ms(), b"".join(frame.parts)))
        kind = message_id_kind(self.wal_name)
        result = AppendResult(
            kind=kind, first_position=0, count=0, time_tick=0, last_confirmed_position=0, spooled=True
        )
        for group in pack.groups:
            group.settle(result)
        return True

    def _put(self, record: Record) -> None:
        if self._free_bytes < record.size:
            self._look_at_letters()
            if self._log.start > START_BYTES:
                with suppress(OSError):  # for want of room, too
                    self._log.shorten()
        if self._free_bytes < record.size:
            raise Overloaded(
                f"the spool {self._directory} has room for {self._free_bytes} of {self._bytes_max} bytes, "
                f"{record.size} do not fit — wait for the node, clear {LETTERS_NAME}/ or raise spool_bytes_max"
            )
        try:
            self._save()  # whatever becomes of its collection, what is kept can be read
            self._log.append(record)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(str(self._directory), 0, record.size) from error
            raise StorageFailed(f"{self._directory}: {error.strerror} — look after the disk of the spool") from error

    @property
    def _free_bytes(self) -> int:
        return max(0, self._bytes_max - self._log.end - sum([size for _, size in self._letters]))

    def _look_at_letters(self) -> None:
        self._letters = [(each.name, each.stat().st_size) for each in (self._directory / LETTERS_NAME).glob("*.arrow")]

    def _take_catalog(self, collections: tuple[CollectionInfo, ...]) -> None:
        super()._take_catalog(collections)
        self._news = collections
        self._wanted.set()

    def _save(self) -> None:
        """Bring what is known of the node to the disk, if there is news."""
        if (news := self._news) is None:
            return
        old = self._known or Known(f"spool-{secrets.token_hex(8)}", self.link.welcome, ())
        former = tuple([info for info in old.collections if info not in news]) + (
            old.former if self._log.frames else ()
        )
        epoch = self._producer.epoch if self._producer else old.epoch
        known = Known(old.producer, self.link.welcome, news, former, epoch)
        replace_file(self._directory / KNOWN_NAME, [encode_record(Record(0, 0, unix_ms(), encode(known)), 0)[0]])
        self._known = known
        if self._news is news:  # none have come meanwhile
            self._news = None

    def _on_state(self, state: LinkState) -> None:
        """Follow the connection."""
        if state is not LinkState.READY and self.state in {SpoolState.DIRECT, SpoolState.REPLAYING}:
            self._become(SpoolState.SPOOLING)
            self._direct.hand_over(self._spooling)  # what was not sent need not wait for answers to what was
        elif state is LinkState.READY and self.state is SpoolState.SPOOLING:
            is_empty = not self._log.frames and not self._turn.locked()
            self._become(SpoolState.DIRECT if is_empty else SpoolState.REPLAYING)

    def _become(self, state: SpoolState) -> None:
        assert state in TRANSITIONS[self.state], f"{state} after {self.state}"
        self.state = state
        self._moved.wake()
        self._wanted.set()

    async def _on_disk(self, step: Callable[[], None]) -> None:
        async with self._turn:
            await to_thread.run_sync(step)

    # --- replaying ------------------------------------------------------------------------------------------------------

    async def _replay(self) -> None:
        """Replay whenever the node is there, until cancelled."""
        while True:
            self._wanted.clear()
            try:
                await self._on_disk(self._save)
                while self.state is SpoolState.REPLAYING:
                    await self._replay_one()
            except (StreamingNodeError, OSError) as error:
                _log.warning("spool_not_replayed", path=str(self._directory), error=f"{type(error).__name__}: {error}")
                self._step(DONE_PER_RECORD)  # a node that refuses everything makes nobody wait
                await asyncio.sleep(PAUSE_S)
            else:
                await self._wanted.wait()

    async def _replay_one(self) -> None:
        """Send the oldest record and be done with it, or end the replay when there is none."""
        await self.link.drain()  # what was sent before the spool comes before it
        if (record := self._log.first) is not None:
            await self._send_again(record)
            await self._on_disk(self._log.pop)
            self._step(1)
            return
        async with self._turn:
            if self._log.first is None:
                try:
                    await to_thread.run_sync(self._log.shorten)
                finally:  # on a full disk it stays as long as it is: what is done is known to the node
                    if self.state is SpoolState.REPLAYING:
                        self._become(SpoolState.DIRECT)

    def _step(self, done: int) -> None:
        self._done += done
        self._moved.wake()

    async def _send_again(self, record: Record) -> None:
        """Return when each write of a record is in the log, or a dead letter. Raises what the node refuses with for now."""
        assert self._known is not None, "nothing is kept before the node is known"
        if self._producer is None:
            self._producer, reached = await self.open_producer(self._known.producer)
            self._reached = reached if self._producer.epoch == self._known.epoch + 1 else 0  # by nobody else meanwhile
            self._news = self.catalog.collections()
            await self._on_disk(self._save)
        if record.last < self._reached:
            return  # it was sent before the one that the log has
        (frame,) = FrameReader(FRAME_BYTES_MAX).feed(PREFACE + record.frame)
        writes: WireWrites = frame.value(WireWrites)
        stamp = {"producer_id": self._producer.producer_id, "epoch": self._producer.epoch}
        groups = tuple([msgspec.structs.replace(each, **stamp) for each in writes.groups])
        number, told = self.link.number(), [AppendGroup() for _ in groups]
        parts = encode_frame(FrameKind.WRITES, number, msgspec.structs.replace(writes, groups=groups), frame.payload)
        sent = FrameOfWrites([Unit([each]) for each in told], parts, sum(map(len, parts)))
        await self.link.send_writes(number, sent, lambda: None)
        errors = {
            index: each.outcome for index, each in enumerate(told) if isinstance(each.outcome, StreamingNodeError)
        }
        for index, error in list(errors.items()):
            if isinstance(error, ProducerFenced):
                self._producer = None  # deleted, or opened by who has a copy of the directory
            if isinstance(error, SequenceTooOld):  # nobody knows any more whether it is there, unless it was the last
                if groups[index].sequence == self._reached:
                    del errors[index]
            elif not error.decides or error.retryable != "no":
                raise error
        if errors:
            await self._on_disk(partial(self._put_letters, writes, memoryview(frame.payload), errors))

    def _put_letters(self, writes: WireWrites, payload: memoryview, refused: dict[int, StreamingNodeError]) -> None:
        assert self._known is not None, "nothing is kept before the node is known"
        for name, data in letters_of(writes, payload, refused, self._known).items():
            replace_file(self._directory / LETTERS_NAME / name, [data])
        self._look_at_letters()
        for index, error in refused.items():
            sequence = writes.groups[index].sequence
            _log.error("spooled_write_refused", sequence=sequence, code=error.code, error=str(error))
