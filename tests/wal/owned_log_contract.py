"""The contract of `wal.entry_log.OwnedLog` and `wal.log.BatchMap` as tests: the test module of each
store subclasses `OwnedLogContract` and brings `store`.
"""

import asyncio

import pytest

from tests.wal.log_contract import stamped_pack
from wal.entry_log import Batch, OwnedLog
from wal.errors import OnShutdown, Truncated
from wal.log import TopicStore
from wal.rocksmq.messages import TopicEntry, decode_entry, encode_entry
from wal.rocksmq.topic import LOG_ID_FIRST

FIRST = 1000
WHOLE_LOG = 1 << 40


class Owner:
    """Appends entries to one log, and knows where it ends."""

    def __init__(self, store: TopicStore, log_id: int = LOG_ID_FIRST) -> None:
        self.state = store.state
        self.log: OwnedLog[TopicEntry] = store.state.owned_log(
            log_id, decode_entry, first_position=FIRST, last_position=FIRST - 1, title="at"
        )
        self.last_position = FIRST - 1
        self.crc32c = 0

    def stage(self, batch: Batch, *payloads: bytes) -> None:
        """Put one entry into a batch."""
        bodies = [body for payload in payloads for body in (payload, b"")]
        first = self.last_position + 1
        data = encode_entry(bodies, first_id=first, previous_crc32c=self.crc32c)
        self.last_position += len(payloads)
        self.crc32c = TopicEntry(bodies, data, first).crc32c
        batch.append(self.log, self.last_position, data)

    async def append(self, *payloads: bytes) -> None:
        """Append one entry, and wait until it is durable."""
        batch = Batch()
        self.stage(batch, *payloads)
        await self.state.write(batch)

    async def payloads(self, position: int = FIRST) -> list[list[bytes]]:
        """Read from a position to the end."""
        entries = await self.log.read(position, bytes_max=WHOLE_LOG)
        return [[message.payload for message in entry.messages] for entry in entries]


class OwnedLogContract:
    """Tests of the logs that users of one store keep, which the subclass's fixture opens."""

    @pytest.fixture
    def owner(self, store: TopicStore) -> Owner:
        return Owner(store)

    async def test_an_owned_log_begins_where_its_owner_says(self, owner: Owner) -> None:
        log = owner.log
        ends = (log.first_position, log.next_position, log.durable_position)
        assert ends == (FIRST, FIRST, FIRST - 1)
        assert await log.read(FIRST, bytes_max=WHOLE_LOG) == []
        await log.go_on(FIRST, FIRST - 1, 0)

    async def test_entries_and_records_of_a_batch_come_together(self, owner: Owner) -> None:
        batch = Batch({"end": b"3"})
        owner.stage(batch, b"one", b"two")
        owner.stage(batch, b"three")
        assert not batch.is_empty
        outcome = owner.state.write(batch)
        assert owner.log.next_position == FIRST + 3
        await outcome
        assert owner.log.durable_position == FIRST + 2
        assert await owner.payloads() == [[b"one", b"two"], [b"three"]]
        assert await owner.state.get("end") == b"3"

    async def test_an_empty_batch_says_so(self, owner: Owner) -> None:
        assert Batch().is_empty
        assert not Batch({"removed": None}).is_empty

    async def test_reading_inside_an_owned_entry_returns_the_whole_entry(
        self, owner: Owner
    ) -> None:
        await owner.append(b"one", b"two")
        await owner.append(b"three")
        assert await owner.payloads(FIRST + 1) == [[b"one", b"two"], [b"three"]]
        assert await owner.payloads(FIRST + 2) == [[b"three"]]
        assert await owner.payloads(FIRST + 3) == []
        assert len(await owner.log.read(FIRST, bytes_max=1)) == 1

    async def test_a_truncation_may_lie_inside_an_entry(self, owner: Owner) -> None:
        await owner.append(b"one")
        await owner.append(b"two", b"three")
        batch = Batch({"begin": b""})
        batch.truncate(owner.log, FIRST + 2)
        await owner.state.write(batch)
        await owner.state.reclaim(batch)
        assert owner.log.first_position == FIRST + 2
        with pytest.raises(Truncated) as truncated:
            await owner.log.read(FIRST + 1, bytes_max=1)
        assert truncated.value.earliest == FIRST + 2
        assert await owner.payloads(FIRST + 2) == [[b"two", b"three"]]

    async def test_a_log_that_is_truncated_to_its_end_goes_on(self, owner: Owner) -> None:
        await owner.append(b"one")
        batch = Batch()
        batch.truncate(owner.log, FIRST + 1)
        await owner.state.write(batch)
        await owner.append(b"two")
        assert await owner.payloads(FIRST + 1) == [[b"two"]]

    async def test_a_removed_log_leaves_the_others_alone(self, store: TopicStore) -> None:
        first = Owner(store)
        second = Owner(store, LOG_ID_FIRST + 1)
        await first.append(b"one")
        await second.append(b"two")
        batch = Batch()
        batch.remove(first.log)
        await first.state.write(batch)
        await first.state.reclaim(batch)
        first.state.release(first.log)
        first.state.release(first.log)
        assert await second.payloads() == [[b"two"]]
        again = Owner(store)
        assert await again.payloads() == []

    async def test_waiting_beyond_an_owned_position_ends_with_its_entry(self, owner: Owner) -> None:
        waiting = asyncio.ensure_future(owner.log.wait_beyond(FIRST - 1))
        await asyncio.sleep(0)
        assert not waiting.done()
        await owner.append(b"one")
        await waiting

    async def test_batches_and_packs_share_a_store(self, store: TopicStore, owner: Owner) -> None:
        log = await store.open_log("p0")  # type: ignore[attr-defined]
        ticket = log.append(stamped_pack(b"row"))
        await owner.append(b"message")
        await ticket.durable
        assert await owner.payloads() == [[b"message"]]
        assert len(await log.read(1, bytes_max=WHOLE_LOG)) == 1

    async def test_closing_ends_the_wait_of_owned_logs(
        self, store: TopicStore, owner: Owner
    ) -> None:
        waiting = asyncio.ensure_future(owner.log.wait_beyond(FIRST))
        await asyncio.sleep(0)
        await store.close()  # type: ignore[attr-defined]
        with pytest.raises(OnShutdown):
            await waiting
        with pytest.raises(OnShutdown):
            await owner.log.read(FIRST, bytes_max=1)
        with pytest.raises(OnShutdown):
            owner.state.write(Batch({"late": b""}))
        with pytest.raises(OnShutdown):
            store.check_admitted(makes_room=True)
