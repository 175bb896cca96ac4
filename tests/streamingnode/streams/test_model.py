"""A tick stream on a real node, under restarts, seeks and delays in any order, against a plain
sort.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import streamingnode as sn
from streamingnode.streams.factory import MsgStreamFactory
from streamingnode.streams.messages import MsgPack, TsMsg
from streamingnode.streams.stream import StartPosition, TtMsgStream
from tests.streamingnode.streams.messages_of import insert, tick_of, told

CHANNELS = ["a", "b"]


class TicksModel(RuleBasedStateMachine):
    """Two channels; everything produced is kept, and every pack is compared with what lies between
    its ticks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.sent: dict[str, list[TsMsg]] = {name: [] for name in CHANNELS}
        self.ticks = dict.fromkeys(CHANNELS, 0)
        self.all_ticks: dict[str, set[int]] = {name: set() for name in CHANNELS}
        self.packs: list[MsgPack] = []
        self.number = self.groups = 0

    @initialize()
    def open(self) -> None:
        self.runner.run(self._open())

    async def _open(self) -> None:
        self.opening = sn.open_node(Path(self.directory.name) / "node")
        self.node = await self.opening.__aenter__()
        self.factory = MsgStreamFactory(self.node.mq)
        self.stream = await self._subscribe()

    async def _subscribe(self) -> TtMsgStream:
        stream = self.factory.new_tt_msg_stream()
        self.groups += 1
        if self.packs:  # a new group, which has acknowledged nothing
            await stream.as_consumer(CHANNELS, f"g{self.groups}", StartPosition.UNKNOWN)
            await stream.seek(self.packs[-1].end_positions)
        else:
            await stream.as_consumer(CHANNELS, f"g{self.groups}")
        return stream

    async def _close(self) -> None:
        await self.stream.close()
        await self.opening.__aexit__(None, None, None)

    @rule(
        channel=st.sampled_from(CHANNELS), above=st.lists(st.integers(1, 9), min_size=1, max_size=4)
    )
    def produce(self, channel: str, above: list[int]) -> None:
        batch = []
        for each in above:
            self.number += 1
            batch.append(insert(self.ticks[channel] + each, id_=self.number))
        self.sent[channel] += batch
        self.runner.run(self._send(channel, batch))

    @rule(channels=st.sampled_from([["a"], ["b"], CHANNELS]), on=st.integers(1, 5))
    def tick(self, channels: list[str], on: int) -> None:
        ts = max(self.ticks[channel] for channel in channels) + on
        for channel in channels:
            self.ticks[channel] = ts
            self.all_ticks[channel].add(ts)
            self.runner.run(self._send(channel, [tick_of(ts)]))

    async def _send(self, channel: str, batch: list[TsMsg]) -> None:
        async with self.factory.new_msg_stream() as producer:
            await producer.as_producer([channel])
            await producer.broadcast(MsgPack(batch))

    @rule()
    def consume(self) -> None:
        """A pack is there for each tick that both channels have."""
        shared = sorted(self.all_ticks["a"] & self.all_ticks["b"])
        if len(shared) > len(self.packs):
            pack = self.runner.run(self.stream.consume())
            assert pack.end_ts == shared[len(self.packs)]
            self.packs.append(pack)

    @rule()
    def restart_the_node(self) -> None:
        async def restart() -> None:
            await self._close()
            await self._open()

        self.runner.run(restart())

    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        if self.packs:
            at = data.draw(st.integers(0, len(self.packs) - 1))

            async def again() -> None:
                await self.stream.seek(self.packs[at].start_positions)
                for expected in self.packs[at:]:
                    pack = await self.stream.consume()
                    assert (told(pack), pack.end_positions) == (
                        told(expected),
                        expected.end_positions,
                    )

            self.runner.run(again())

    @invariant()
    def packs_are_a_plain_sort_by_tick(self) -> None:
        found = [
            key
            for pack in self.packs
            for key in sorted((each.end_ts, each.id) for each in pack.messages)
        ]
        last = self.packs[-1].end_ts if self.packs else 0
        everything = sorted(
            (each.end_ts, each.id) for batch in self.sent.values() for each in batch
        )
        assert found == [key for key in everything if key[0] <= last]
        assert [pack.begin_ts for pack in self.packs] == [0, *(pack.end_ts for pack in self.packs)][
            : len(self.packs)
        ]

    def teardown(self) -> None:
        self.runner.run(self._close())
        self.runner.close()
        self.directory.cleanup()


TestTicksModel = TicksModel.TestCase
TestTicksModel.settings = settings(
    max_examples=settings().max_examples // 5,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestTicksModel = pytest.mark.may_block(TestTicksModel)
