"""Streams over a real queue of a test."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from pathlib import Path

import pytest

from streamingnode.streams.factory import MsgStreamFactory
from streamingnode.streams.messages import MsgPack, TsMsg
from streamingnode.streams.stream import MsgStream, StartPosition, StreamOptions, TtMsgStream
from tests.streamingnode.remote.nodes import node_behind_proxy
from tests.wal.rocksmq.queues import opened
from wal.rocksmq.contract import MessageQueue


class Streams:
    """Makes streams of one queue, and the usual ones of them."""

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue

    def factory(self, **options: object) -> MsgStreamFactory:
        return MsgStreamFactory(self.queue, options=StreamOptions(**options))  # type: ignore[arg-type]

    @asynccontextmanager
    async def producer(self, *channels: str) -> AsyncIterator[MsgStream]:
        async with self.factory().new_msg_stream() as stream:
            await stream.as_producer(channels)
            yield stream

    @asynccontextmanager
    async def consumer(
        self,
        *channels: str,
        of: str = "g",
        position: StartPosition = StartPosition.EARLIEST,
        **options: object,
    ) -> AsyncIterator[MsgStream]:
        async with self.factory(**options).new_msg_stream() as stream:
            await stream.as_consumer(channels, of, position)
            yield stream

    @asynccontextmanager
    async def tick_consumer(
        self, *channels: str, of: str = "g", **options: object
    ) -> AsyncIterator[TtMsgStream]:
        async with self.factory(**options).new_tt_msg_stream() as stream:
            await stream.as_consumer(channels, of)
            yield stream


@asynccontextmanager
async def _over_a_connection(path: Path) -> AsyncIterator[MessageQueue]:
    async with node_behind_proxy(path / "node") as served, served.client() as client:
        yield client.mq


QUEUES: dict[str, Callable[[Path], AbstractAsyncContextManager[MessageQueue]]] = {
    "here": opened,
    "over a connection": _over_a_connection,
}
_where = ContextVar("_where", default="here")


@pytest.fixture(params=QUEUES)
def everywhere(request: pytest.FixtureRequest) -> Iterator[None]:
    """Has a test run with each kind of queue."""
    token = _where.set(request.param)
    yield
    _where.reset(token)


@asynccontextmanager
async def streams_in(path: Path) -> AsyncIterator[Streams]:
    async with QUEUES[_where.get()](path) as queue:
        yield Streams(queue)


async def send(stream: MsgStream, *parts: list[TsMsg]) -> None:
    """Produce each part as a batch of its own."""
    for part in parts:
        await stream.produce(MsgPack(part))
