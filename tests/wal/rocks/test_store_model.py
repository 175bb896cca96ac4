"""A store against a list and a dict, over appends, reads, truncations, closings and kills."""

import asyncio
import shutil
import tempfile
from itertools import count
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.copying import copy_at_rest
from tests.wal.entries import stamped
from tests.wal.log_contract import read_all, stamped_pack
from tests.wal.packed import FakeTarget, insert_group, pack_of
from wal.entry import LogEntry
from wal.errors import Truncated
from wal.rocks.layout import RocksOptions
from wal.rocks.log import RocksLog
from wal.rocks.store import RocksStore, open_rocks_store

OPTIONS = RocksOptions(free_bytes_min=0, memtable_bytes=1 << 20)
NAMES = ("p0", "p01")
names = st.sampled_from(NAMES)
Kept = tuple[int, int, list[bytes]]
"""First position, messages, and payloads of an entry."""
payloads = st.lists(st.sampled_from([0, 1, 300, 40_000]).map(bytes), min_size=1, max_size=4)


class StoreMachine(RuleBasedStateMachine):
    """The model: for each log the entries acknowledged and kept, and what was truncated; the state
    map as a dict.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.path = self.directory / "0"
        self.copies = count(1)
        self.ticks = count(1)
        self.entries: dict[str, list[Kept]] = {name: [] for name in NAMES}
        self.next_position = dict.fromkeys(NAMES, 1)
        self.meta: dict[str, bytes] = {}
        self.promised = self.term = 0
        self.open()

    def open(self) -> None:
        async def opened() -> tuple[RocksStore, dict[str, RocksLog]]:
            store = await open_rocks_store(self.path, options=OPTIONS)
            return store, {name: await store.open_log(name) for name in NAMES}

        self.store, self.logs = self.runner.run(opened())
        assert self.store.term > self.term
        self.term = self.store.term
        assert self.store.promised_tick >= self.promised

    @rule(name=names, groups=st.lists(payloads, min_size=1, max_size=5))
    def append(self, name: str, groups: list[list[bytes]]) -> None:
        async def appended() -> None:
            log = self.logs[name]
            tickets = [log.append(stamped_pack(*group, tick=self.next_tick())) for group in groups]
            for ticket, group in zip(tickets, groups, strict=True):
                assert ticket.first_position == self.next_position[name]
                self.entries[name].append((ticket.first_position, len(group), group))
                self.next_position[name] += len(group)
                await ticket.written

        self.runner.run(appended())

    @rule(name=names, rows=st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=5))
    def append_rows(self, name: str, rows: list[bytes]) -> None:
        """Append packed inserts of a row each, which share a payload."""
        first_tick, *_ = [self.next_tick() for _ in rows]
        target = FakeTarget()
        pack = stamped(pack_of(*[insert_group(target, data=row) for row in rows]), tick=first_tick)

        async def appended() -> None:
            ticket = self.logs[name].append(pack)
            assert ticket.first_position == self.next_position[name]
            await ticket.written

        self.runner.run(appended())
        self.entries[name].append((self.next_position[name], len(rows), [b"".join(rows)]))
        self.next_position[name] += len(rows)

    @rule(name=names, part=st.floats(0, 1))
    def truncate(self, name: str, part: float) -> None:
        position = int(self.next_position[name] * part)
        self.runner.run(self.logs[name].truncate(position))
        entries = self.entries[name]
        while len(entries) > 1 and entries[1][0] <= position:
            del entries[0]

    @rule(name=names, part=st.floats(0, 1), bytes_max=st.sampled_from([1, 1000, 1 << 20]))
    def read_from(self, name: str, part: float, bytes_max: int) -> None:
        position = max(1, int(self.next_position[name] * part))
        kept = self.entries[name]
        try:
            found = self.runner.run(
                read_all(self.logs[name], position=position, bytes_max=bytes_max)
            )
        except Truncated:
            assert position < kept[0][0]
            return
        wanted = [entry for entry in kept if entry[0] + entry[1] > position]
        assert plain(found) == wanted

    @rule(key=st.sampled_from(["a", "ab", "b"]), value=st.none() | st.binary(max_size=5))
    def set_meta(self, key: str, value: bytes | None) -> None:
        self.runner.run(self.store.state.put({key: value}))
        self.meta.pop(key, None)
        if value is not None:
            self.meta[key] = value

    @rule()
    def promise(self) -> None:
        self.promised = self.next_tick()
        self.runner.run(self.store.promise_tick(self.promised))

    @rule()
    def close_and_open(self) -> None:
        self.runner.run(self.store.close())
        self.open()

    @precondition(lambda self: next(self.copies) < 4)
    @rule()
    def kill_and_open(self) -> None:
        """Go on with a copy made while the store is open: what a kill leaves behind."""
        killed = self.directory / str(next(self.copies))
        copy_at_rest(self.path, killed)
        self.runner.run(self.store.close())
        self.path = killed
        self.open()

    @invariant()
    def ends_and_state_are_as_in_the_model(self) -> None:
        for name, log in self.logs.items():
            kept = self.entries[name]
            assert log.first_position == (kept[0][0] if kept else 1)
            assert log.next_position == self.next_position[name] == log.durable_position + 1
        assert self.runner.run(self.store.state.scan("")) == dict(sorted(self.meta.items()))

    def next_tick(self) -> int:
        return next(self.ticks)

    def teardown(self) -> None:
        self.runner.run(self.store.close())
        self.runner.close()
        shutil.rmtree(self.directory)


def plain(entries: list[LogEntry]) -> list[Kept]:
    """Return entries as the model keeps them."""
    return [
        (
            entry.first_position,
            entry.count,
            [
                bytes(each.payload)
                for each in (entry.messages if entry.rows is None else entry.rows.batches)
            ],
        )
        for entry in entries
    ]


TestStoreModel = StoreMachine.TestCase
TestStoreModel.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)
