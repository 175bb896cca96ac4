"""A queue against dicts: topics and groups under produce, consume, ack, seek, retention, crashes
and reopening.
"""

import asyncio
import shutil
import tempfile
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.copying import copy_at_rest
from tests.wal.rocksmq.queues import Clock, open_queue
from wal.errors import AlreadyExists, GroupNotFound, TopicNotFound, Truncated
from wal.rocksmq.contract import MqOptions

OPTIONS = MqOptions(page_bytes=100, retention_s=5, retention_bytes=1000)
topics = st.sampled_from(["a", "ab"])
groups = st.sampled_from(["g", "gg"])
sizes = st.lists(st.sampled_from([0, 1, 30, 300]), min_size=1, max_size=8)


@dataclass
class ModelGroup:
    """Ids that are acknowledged, and that somebody holds."""

    acked: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)


@dataclass
class ModelTopic:
    """Payloads by id, those of retention too; what is kept begins at `begin`."""

    begin: int
    messages: dict[int, bytes] = field(default_factory=dict)
    groups: dict[str, ModelGroup] = field(default_factory=dict)


class QueueMachine(RuleBasedStateMachine):
    """Nothing acknowledged comes again, nothing else is lost, and what is kept is what was
    produced.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = Path(tempfile.mkdtemp(prefix="queue-model-"))
        self.path = self.directory / "0"
        self.copies = count(1)
        self.payloads = count(1)
        self.clock = Clock()
        self.model: dict[str, ModelTopic] = {}
        self.highest: dict[str, int] = {}
        self.store, self.mq = self.runner.run(open_queue(self.path, self.clock, OPTIONS))

    @rule(topic=topics)
    def create_topic(self, topic: str) -> None:
        self.runner.run(self.mq.create_topic(topic))
        if topic not in self.model:
            begin = self.runner.run(self.mq.info())[topic].begin_id
            assert begin > self.highest.get(topic, 0)
            self.model[topic] = ModelTopic(begin)

    @rule(topic=topics)
    def destroy_topic(self, topic: str) -> None:
        try:
            self.runner.run(self.mq.destroy_topic(topic))
            del self.model[topic]
        except TopicNotFound:
            assert topic not in self.model

    @rule(topic=topics, group=groups)
    def create_group(self, topic: str, group: str) -> None:
        try:
            self.runner.run(self.mq.create_consumer_group(topic, group))
        except TopicNotFound:
            assert topic not in self.model
        except AlreadyExists:
            assert group in self.model[topic].groups
        else:
            known = self.model[topic]
            assert group not in known.groups
            known.groups[group] = ModelGroup(
                {each for each in known.messages if each < known.begin}
            )

    @rule(topic=topics, group=groups)
    def destroy_group(self, topic: str, group: str) -> None:
        try:
            self.runner.run(self.mq.destroy_consumer_group(topic, group))
            del self.model[topic].groups[group]
        except (TopicNotFound, GroupNotFound):
            assert topic not in self.model or group not in self.model[topic].groups

    @precondition(lambda self: self.model)
    @rule(data=st.data(), calls=st.lists(sizes, min_size=1, max_size=4))
    def produce(self, data: st.DataObject, calls: list[list[int]]) -> None:
        topic = data.draw(st.sampled_from(sorted(self.model)))
        batches = [[b"%d" % next(self.payloads) + bytes(size) for size in call] for call in calls]

        async def produced() -> list[range]:
            return await asyncio.gather(*(self.mq.produce(topic, batch) for batch in batches))

        known = self.model[topic]
        for ids, batch in zip(self.runner.run(produced()), batches, strict=True):
            assert ids[0] == max(known.messages, default=known.begin - 1) + 1
            known.messages |= dict(zip(ids, batch, strict=True))
        self.highest[topic] = max(known.messages)

    @precondition(lambda self: any(topic.groups for topic in self.model.values()))
    @rule(data=st.data(), wanted=st.integers(1, 20), share=st.sets(st.integers(0, 19)))
    def consume_and_acknowledge_some(
        self, data: st.DataObject, wanted: int, share: set[int]
    ) -> None:
        topic, group = self.draw_group(data)
        known = self.model[topic]
        state = self.model[topic].groups[group]
        found = self.runner.run(self.mq.consume(topic, group, wanted))
        free = sorted(known.messages.keys() - state.acked - state.held)
        assert [message.message_id for message in found] == free[:wanted]
        assert all(known.messages[message.message_id] == message.payload for message in found)
        state.held |= {message.message_id for message in found}
        acked = [message.message_id for at, message in enumerate(found) if at in share]
        self.runner.run(self.mq.ack(topic, group, acked))
        state.acked |= set(acked)
        state.held -= set(acked)

    @precondition(lambda self: any(topic.groups for topic in self.model.values()))
    @rule(data=st.data())
    def acknowledge_anything(self, data: st.DataObject) -> None:
        topic, group = self.draw_group(data)
        known = self.model[topic]
        state = self.model[topic].groups[group]
        if known.messages:
            ids = data.draw(st.lists(st.sampled_from(sorted(known.messages)), max_size=9))
            self.runner.run(self.mq.ack(topic, group, ids))
            state.acked |= set(ids)
            state.held -= set(ids)

    @precondition(lambda self: any(topic.groups for topic in self.model.values()))
    @rule(data=st.data(), offset=st.integers(-3, 30))
    def seek(self, data: st.DataObject, offset: int) -> None:
        topic, group = self.draw_group(data)
        known = self.model[topic]
        target = min(known.begin + offset, max(known.messages, default=known.begin - 1) + 1)
        if target < known.begin:
            with pytest.raises(Truncated) as refused:
                self.runner.run(self.mq.seek(topic, group, target))
            assert refused.value.earliest == known.begin
        else:
            self.runner.run(self.mq.seek(topic, group, target))
            known.groups[group] = ModelGroup({each for each in known.messages if each < target})

    @rule(seconds=st.sampled_from([1, 6, 31]))
    def let_time_pass(self, seconds: int) -> None:
        self.clock.ms += seconds * 1000
        if seconds > 30:
            self.return_all()

    @rule()
    def retain(self) -> None:
        self.runner.run(self.mq.retain())
        for topic, info in self.runner.run(self.mq.info()).items():
            known = self.model[topic]
            assert all(
                info.begin_id <= each
                for group in known.groups.values()
                for each in known.messages.keys() - group.acked
            )
            assert info.begin_id >= known.begin
            known.begin = info.begin_id

    @rule()
    def reopen(self) -> None:
        self.runner.run(self.close())
        self.open()

    @rule()
    def crash(self) -> None:
        """Go on in a copy of the directory, which is what a kill would leave."""
        path = self.directory / str(next(self.copies))
        copy_at_rest(self.path, path)
        self.runner.run(self.close())
        self.path = path
        self.open()

    @invariant()
    def what_the_queue_tells_is_so(self) -> None:
        told = self.runner.run(self.mq.info())
        assert told.keys() == self.model.keys()
        for topic, info in told.items():
            known = self.model[topic]
            assert (info.begin_id, info.end_id) == (
                known.begin,
                max(known.messages, default=known.begin - 1),
            )
            assert info.bytes == sum(
                len(payload) for each, payload in known.messages.items() if each >= known.begin
            )
            assert info.groups.keys() == known.groups.keys()
            for name, group in info.groups.items():
                assert group.lag == len(known.messages.keys() - known.groups[name].acked)
                assert all(
                    each in known.groups[name].acked
                    for each in known.messages
                    if each < group.current_id
                )

    def draw_group(self, data: st.DataObject) -> tuple[str, str]:
        there = [(topic, group) for topic, known in self.model.items() for group in known.groups]
        return data.draw(st.sampled_from(sorted(there)))

    def return_all(self) -> None:
        for known in self.model.values():
            for group in known.groups.values():
                group.held.clear()

    def open(self) -> None:
        self.return_all()
        self.store, self.mq = self.runner.run(open_queue(self.path, self.clock, OPTIONS))

    async def close(self) -> None:
        await self.mq.close()
        await self.store.close()

    def teardown(self) -> None:
        self.runner.run(self.close())
        self.runner.close()
        shutil.rmtree(self.directory)


TestQueue = QueueMachine.TestCase
# A node is opened for each example: fewer of them than of other properties.
TestQueue.settings = settings(max_examples=settings().max_examples // 3, stateful_step_count=40)
