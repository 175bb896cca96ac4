"""Messages as tests write them: by their ticks alone."""

from collections.abc import Iterable, Sequence

from streamingnode.streams import streams_pb2 as pb
from streamingnode.streams.messages import TICKS, Batch, MsgPack, MsgType, StreamType, TsMsg
from wal.headers import MessageType


def insert(
    tick: int, *, id_: int = 0, keys: Sequence[int] = (0,), end_ts: int | None = None
) -> TsMsg:
    """Return an insert of one row for each key."""
    body = pb.InsertRequest(
        collection="c", row_ids=range(len(keys)), rows=[b"%d" % tick] * len(keys)
    )
    return TsMsg(MsgType.INSERT, tick, tick if end_ts is None else end_ts, body, keys, id_)


def inserts(*ticks: int) -> list[TsMsg]:
    """Return an insert of one row for each tick."""
    return [insert(tick) for tick in ticks]


def delete(tick: int, *, id_: int = 0, keys: Sequence[int] = (0,)) -> TsMsg:
    """Return a delete of a primary key for each hash key."""
    return TsMsg(
        MsgType.DELETE, tick, tick, pb.DeleteRequest(collection="c", primary_keys=keys), keys, id_
    )


def tick_of(tick: int, type_: StreamType = MsgType.TIME_TICK) -> TsMsg:
    """Return a time tick."""
    return TsMsg(
        type_,
        tick,
        tick,
        pb.TimeTick() if type_ is MsgType.TIME_TICK else pb.StreamingMessage(),
        (0,),
    )


def creation(tick: int, *, id_: int = 0) -> TsMsg:
    """Return a message that creates a collection."""
    return TsMsg(
        MessageType.CREATE_COLLECTION, tick, tick, pb.StreamingMessage(header=b"h"), (0,), id_
    )


def batch_of(messages: list[TsMsg]) -> Batch:
    """Return messages as the batch that decoding would make of them."""
    ticks = [at for at, each in enumerate(messages) if each.type in TICKS]
    return Batch(
        messages,
        min(each.begin_ts for each in messages),
        max(each.end_ts for each in messages),
        ticks,
    )


def ends(messages: Iterable[TsMsg]) -> list[int]:
    """Return the end ticks of messages."""
    return [message.end_ts for message in messages]


def told(pack: MsgPack) -> tuple[list[tuple[int, int, int, int]], int, int]:
    """Return what a pack says, for comparison: type, end, id and part of each message, and its
    range.
    """
    messages = [(int(each.type), each.end_ts, each.id, each.part) for each in pack.messages]
    return messages, pack.begin_ts, pack.end_ts


SEEK_LOG = [
    [tick_of(0)],
    inserts(1, 3, 19),
    [tick_of(5)],
    inserts(14, 9),
    [tick_of(11)],
    inserts(12, 13),
    [tick_of(15)],
    [tick_of(20)],
]
"""What a channel of the vectors for seeks holds, ticks and what is below them."""
