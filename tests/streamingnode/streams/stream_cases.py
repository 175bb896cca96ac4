"""Messages and streams that several tests of streams use."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import streamingnode as sn
from streamingnode.streams.messages import AnyType, MsgPack, MsgType, TsMsg, tick
from streamingnode.streams.stream import MsgStream, StreamOptions
from streamingnode.streams.tt_stream import RmqMsgStreamFactory


def message(
    ts: int, *, kind: AnyType = MsgType.INSERT, number: int | None = None, key: int = 0, row: bytes = b"row"
) -> TsMsg:
    identity = ts if number is None else number
    return TsMsg(id=identity, begin_ts=ts, end_ts=ts, type=kind, hash_keys=(key,), rows=(row,))


VECTOR = [
    tick(0), *map(message, (1, 3, 19)), tick(5), *map(message, (14, 9)), tick(11),
    *map(message, (12, 13)), tick(15), tick(20)
]  # fmt: skip
VECTOR_PACKS = [(0, 5, [1, 3]), (5, 11, [9]), (11, 15, [14, 12, 13]), (15, 20, [19])]


def summary(pack: MsgPack) -> tuple[int, int, list[int]]:
    return pack.begin_ts, pack.end_ts, [each.end_ts for each in pack.msgs]


async def send(stream: MsgStream, messages: Sequence[TsMsg]) -> None:
    """Produce messages in their order, whatever their types."""
    for each in messages:
        await stream.broadcast(MsgPack(msgs=[each]))


@asynccontextmanager
async def factory_of(path: Path, **options: object) -> AsyncIterator[RmqMsgStreamFactory]:
    async with sn.open_node(path) as node:
        yield RmqMsgStreamFactory(node.mq, options=StreamOptions(**options))  # type: ignore[arg-type]
