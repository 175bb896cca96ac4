"""Random groups of rows, and a slow model of what they are in a log: message after message, without
any array.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from tests.wal.packed import FakeTarget, Row, piece, rows_group
from wal.append import AppendGroup
from wal.entry import PackedRows
from wal.headers import DeleteHeader, InsertHeader, MessageType
from wal.message import AnyMessage, Message, TransactionMessage
from wal.position import SEQUENCE_MAX, ProducerStamp

ROW_BYTES = 2
"""Of each row, so that a payload can be taken apart again."""
SEGMENT = 7
"""Where `lay_out` puts inserts."""

ONE = ("p0_1v0",)
THREE = ("p0_2v0", "p0_2v1", "p0_2v2")

producers = st.none() | st.builds(
    ProducerStamp,
    st.integers(1, 2**63 - 1),
    st.integers(0, 2**31 - 1),
    st.integers(1, SEQUENCE_MAX),
)


def some_targets() -> list[FakeTarget]:
    """Return targets of two collections, of one shard and of three, the second one with two
    partitions.
    """
    return [
        FakeTarget(vchannels=ONE),
        FakeTarget(MessageType.DELETE, vchannels=ONE),
        FakeTarget(collection_id=2, vchannels=THREE),
        FakeTarget(collection_id=2, partition_id=5, schema_version=3, vchannels=THREE),
        FakeTarget(MessageType.DELETE, collection_id=2, vchannels=THREE),
    ]


@st.composite
def random_groups(draw: st.DrawFn, groups_max: int = 8) -> list[AppendGroup]:
    """Return groups on shared targets: plain ones and transactions, with producers and without."""
    targets = some_targets()
    row = 0

    def rows(target: FakeTarget) -> list[Row]:
        nonlocal row
        shards = draw(st.lists(st.integers(0, len(target.vchannels) - 1), min_size=1, max_size=4))
        row += len(shards)
        return [
            (shard, number.to_bytes(ROW_BYTES, "big"))
            for number, shard in enumerate(shards, row - len(shards))
        ]

    groups = []
    for _ in range(draw(st.integers(1, groups_max))):
        chosen = draw(st.lists(st.sampled_from(targets), min_size=1, max_size=4))
        pieces = [piece(target, *rows(target)) for target in chosen]
        group = rows_group(*pieces, is_transaction=draw(st.booleans()))
        group.producer = draw(producers)
        groups.append(group)
    return groups


@st.composite
def groups_of_one_batch(draw: st.DrawFn) -> list[AppendGroup]:
    """Return groups of one piece each, all for one shard: what most packs are."""
    target = draw(st.sampled_from(some_targets()))
    row = 0
    groups = []
    shard = draw(st.integers(0, len(target.vchannels) - 1))
    for count in draw(st.lists(st.integers(1, 3), min_size=1, max_size=8)):
        numbers = range(row, row + count)
        row = row + count
        groups.append(
            rows_group(
                piece(target, *[(shard, number.to_bytes(ROW_BYTES, "big")) for number in numbers])
            )
        )
    return groups


def go_alone(groups: Sequence[AppendGroup]) -> bool:
    """Whether these groups are one write of one kind to one shard, which is in the log as a
    message.
    """
    boundaries = sum(
        len({shard for shard, _ in each.rows}) for group in groups for each in group.pieces
    )
    return boundaries == 1 and not groups[0].is_transaction


def groups_that_pack() -> st.SearchStrategy[list[AppendGroup]]:
    """Return groups that are in the log as packed rows."""
    return random_groups().filter(lambda groups: not go_alone(groups))


class Said(NamedTuple):
    """A message of rows as its reader gets it."""

    position: int
    tick: int
    type: MessageType
    vchannel: str
    header: InsertHeader | DeleteHeader
    rows: tuple[bytes, ...]


class Group(NamedTuple):
    """A group as its readers get it."""

    tick: int
    first_position: int
    length: int
    """How many positions it has."""
    is_transaction: bool
    messages: tuple[Said, ...]


def model_of(
    groups: Sequence[AppendGroup],
    *,
    first_tick: int = 1,
    first_position: int = 1,
    first_offset: int = 0,
) -> list[Group]:
    """Return what groups are in a log, worked out message by message."""
    next_offset: dict[str, int] = {}
    found = []
    position = first_position
    for tick, group in enumerate(groups, first_tick):
        first = position
        messages = list[Said]()
        position += group.is_transaction  # its begin
        for each in group.pieces:
            target = each.target
            for part, shard in enumerate(sorted({shard for shard, _ in each.rows})):
                rows = tuple(data for at, data in each.rows if at == shard)
                vchannel = target.vchannels[shard]
                offset = next_offset.setdefault(vchannel, first_offset)
                header: InsertHeader | DeleteHeader
                if target.type is MessageType.INSERT:
                    next_offset[vchannel] += len(rows)
                    ids = target.collection_id, target.partition_id, target.schema_version
                    header = InsertHeader(*ids, len(rows), SEGMENT, offset, part)
                else:
                    header = DeleteHeader(target.collection_id, len(rows), offset, part)
                messages.append(Said(position, tick, target.type, vchannel, header, rows))
                position += 1
        position += group.is_transaction  # its commit
        found.append(Group(tick, first, position - first, group.is_transaction, tuple(messages)))
    return found


def said(message: Message) -> Said:
    """Return what a message says, its rows taken out of the payload that it shares."""
    header = message.header
    assert isinstance(header, InsertHeader | DeleteHeader)
    payload = bytes(message.payload)
    starts = range(
        ROW_BYTES * message.first_row, ROW_BYTES * (message.first_row + header.rows), ROW_BYTES
    )
    rows = tuple(payload[start : start + ROW_BYTES] for start in starts)
    return Said(message.position, message.time_tick, message.type, message.vchannel, header, rows)


def said_by(rows: PackedRows | None) -> list[tuple[Said, ...]]:
    """Return what packed rows say, a tuple for each transaction and for each message outside of
    one.
    """
    return [] if rows is None else [tuple(map(said, message.bodies)) for message in rows.messages()]


def said_in(groups: Sequence[Group]) -> list[tuple[Said, ...]]:
    """Return what groups of the model say, in the same form."""
    found: list[tuple[Said, ...]] = []
    for group in groups:
        found += (
            [group.messages] if group.is_transaction else [(message,) for message in group.messages]
        )
    return found


def is_whole(message: AnyMessage, group: Group) -> bool:
    """Whether a transaction has the place of its commit in a group of the model."""
    return isinstance(message, TransactionMessage) and (
        message.position,
        message.time_tick,
        message.txn_id,
    ) == (
        group.first_position + group.length - 1,
        group.tick,
        group.tick,
    )
