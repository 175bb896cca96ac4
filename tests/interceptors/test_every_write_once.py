"""Whatever fails, waits, is cancelled or comes again at once: what a caller is told of a write is
what the log has of it.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from interceptors.recovery import recover
from interceptors.shard.catalog import CollectionInfo
from tests.interceptors.live_channel import Fails, messages_in, settle_tasks, target_of
from tests.interceptors.live_wal import FEED, OTHER, LiveWal
from tests.wal.packed import piece, rows_group
from wal.append import AppendGroup, AppendResult
from wal.errors import Indeterminate, StreamingNodeError
from wal.headers import CreatePartitionHeader, FlushHeader, InsertHeader, MessageType
from wal.message import Message, MutableMessage
from wal.position import ProducerStamp
from wal.rows import Piece

ROW_BYTES = 10
ACTIONS = (
    "writes",
    "writes",
    "writes",
    "named",
    "again",
    "next",
    "cancel",
    "cancel",
    "lose",
    "keep",
    "seal",
    "seal",
    "lock",
    "hold",
    "release",
)
Step = tuple[str, int, bool]
"""What, with which number, and whether everything else comes to rest before the next."""
steps = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 7), st.sampled_from([True, False, False])),
    max_size=30,
)


@dataclass(eq=False)
class Write:
    """One call: its rows are told from those of all others by what is in them."""

    name: bytes
    group: AppendGroup
    task: "asyncio.Task[None]"
    outcome: AppendResult | StreamingNodeError | None = None
    begun: bool = True
    """For one that was cancelled: whether the caller was told that it may be in the log."""


@dataclass
class Clients:
    live: LiveWal
    infos: list[CollectionInfo]
    writes: list[Write] = field(default_factory=list)
    others: list["asyncio.Task[None]"] = field(default_factory=list)
    sequence: int = 0

    def step(self, action: str, number: int) -> None:  # noqa: C901  # one arm for each action
        match action:
            case "writes":
                for each in range(number, number + 4):
                    self._write(each, None)
            case "named":
                self.sequence += 1
                self._write(number, ProducerStamp(FEED, 1, self.sequence))
            case "again" if self.sequence:
                self._write(number, ProducerStamp(FEED, 1, 1 + number % self.sequence))
            case "next":
                self._write(number, ProducerStamp(OTHER, 1, 0))
            case "cancel" if self.writes:
                self.writes[-1 - number % len(self.writes)].task.cancel()
            case "lose" | "keep":
                self.live.fail_once(Fails.LOST if action == "lose" else Fails.KEPT)
            case "seal":
                self.others.append(asyncio.ensure_future(self._seal(number)))
            case "lock":
                self.others.append(asyncio.ensure_future(self._lock(number)))
            case "hold":
                self.live.log.release()
                self.live.log.hold()
            case "release":
                self.live.log.release()
            case _:
                pass  # nothing there to do it with

    def _write(self, number: int, stamp: ProducerStamp | None) -> None:
        name = b"%010d" % len(self.writes)
        pieces = (
            [self._rows(number, name), self._rows(number + 1, name)]
            if number % 3 == 0
            else [self._rows(number, name)]
        )
        group = rows_group(*pieces, is_transaction=number % 2 == 0)
        group.producer = stamp

        async def append() -> None:
            try:
                write.outcome = await self.live.wal.append(group)
            except StreamingNodeError as error:
                write.outcome = error
            except asyncio.CancelledError:
                write.begun = group.begun
                raise

        write = Write(name, group, asyncio.ensure_future(append()))
        self.writes.append(write)

    def _rows(self, number: int, name: bytes) -> Piece:
        info = self.infos[number % 2]
        target = target_of(
            MessageType.INSERT, info.id, info.partitions[0].id, info.schema_version, info.vchannels
        )
        return piece(target, (number // 2 % 2, name))

    async def _seal(self, number: int) -> None:
        segments = list(self.live.channel.shard.state.segments.values())
        if segments:
            segment = segments[number % len(segments)]
            header = FlushHeader(
                segment.collection_id, segment.partition_id, segment.segment_id, "asked"
            )
            with suppress(StreamingNodeError):
                await self.live.wal.append(
                    AppendGroup([MutableMessage(MessageType.FLUSH, header, segment.vchannel)])
                )

    async def _lock(self, number: int) -> None:
        info = self.infos[number % 2]
        header = CreatePartitionHeader(
            info.id, self.live.channel.shard.allocate_id(), f"p{len(self.others)}"
        )
        messages = [
            MutableMessage(MessageType.CREATE_PARTITION, header, vchannel)
            for vchannel in info.vchannels
        ]
        with suppress(StreamingNodeError):
            await self.live.wal.append(AppendGroup(messages))

    async def end(self) -> None:
        self.live.log.release()
        async with asyncio.timeout(60):
            await asyncio.gather(
                *[write.task for write in self.writes], *self.others, return_exceptions=True
            )
            await self.live.wal.drain()


async def run(done: list[Step]) -> None:
    async with LiveWal.open() as live:
        clients = Clients(
            live, [await live.channel.create_collection(name, shards=2) for name in ("a", "b")]
        )
        for action, number, rests in done:
            clients.step(action, number)
            if rests:
                await settle_tasks()
        await clients.end()
        await check(clients)


async def check(clients: Clients) -> None:
    live = clients.live
    entries = await live.channel.entries()
    found = [
        placed for entry in entries for message in messages_in(entry) for placed in rows_in(message)
    ]
    for write in clients.writes:
        check_told(
            write, [tick for name, tick in found if name == write.name], {tick for _, tick in found}
        )
    stamps = [
        stamp
        for entry in entries
        if entry.rows is not None
        for stamp in entry.rows.producers
        if stamp is not None
    ]
    assert len(set(stamps)) == len(stamps), "a named write is in the log once"
    assert all(stamp.sequence for stamp in stamps)
    recovered = await recover(live.memory)
    assert recovered.shard_state.snapshot() == live.channel.shard.state.snapshot()
    for producer_id, known in live.channel.idempotency.window.producers.items():
        of_log = recovered.window.producers.get(producer_id)
        in_log = {} if of_log is None else of_log.results
        assert known.results == in_log
    assert live.channel.idempotency._under_way == {}
    assert not live.wal.in_flight
    assert live.wal.packer._memory.held_bytes == 0


def rows_in(message: Message) -> list[tuple[bytes, int]]:
    """Return what is in the rows of an insert, each with its tick."""
    if not isinstance(message.header, InsertHeader):
        return []
    payload = bytes(message.payload)
    first = message.first_row
    end = message.first_row + message.header.rows
    return [
        (payload[row * ROW_BYTES : (row + 1) * ROW_BYTES], message.time_tick)
        for row in range(first, end)
    ]


def check_told(write: Write, found: list[int], ticks: set[int]) -> None:
    """Hold what the caller was told against the ticks at which the log has the rows of the
    write.
    """
    assert len(found) in {0, len(write.group.pieces)}, "whole, and not twice"
    assert len(set(found)) <= 1, "at one tick"
    stamp = write.group.producer
    match write.outcome:
        case AppendResult() as result:
            assert result.time_tick in (set(found) or ticks)
            assert found or (stamp is not None and stamp.producer_id == FEED), (
                "else no other try stands for it"
            )
        case Indeterminate():
            pass
        case StreamingNodeError():
            assert not found, "what did not happen"
        case None:
            assert write.task.cancelled()
            assert write.begun or not found


@settings(max_examples=100)
@given(steps)
def test_every_write_is_in_the_log_as_its_caller_was_told(done: list[Step]) -> None:
    asyncio.run(run(done))
