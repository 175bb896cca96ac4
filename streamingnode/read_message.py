"""Messages as a reader of collections gets them: all parts of one tick in one message, rows as
Arrow. No I/O.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple, overload

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec.structs import replace

from wal.entry import PackedRows
from wal.headers import DDL, DML, DeleteHeader, InsertHeader, MessageType
from wal.message import AnyMessage, Message, TransactionMessage
from wal.position import MessageId, message_id_kind

DELIVERED_TYPES = DML | DDL
"""The types that a reader gets by default; all others are internal to the node."""
PayloadSchemas = Mapping[MessageType, pa.Schema]
"""How inserts and deletes of one collection decode."""


class ReadCollection(NamedTuple):
    """A collection that a reader reads."""

    id: int
    name: str
    schemas: PayloadSchemas


ReadChannels = Mapping[str, ReadCollection]
"""The collections that are read, by vchannel; each vchannel belongs to one collection."""


class ReadMessage(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All changes of a reader's collections at one tick.

    `type` is `INSERT`, `DELETE`, `TXN`, a DDL type, or, with `include_ticks`, `TIME_TICK`. A
    transaction has `bodies`, in order: one for each insert or delete of these collections, and
    several for one that is too large for one append group. Its `num_rows` is their sum.
    `collection` is empty for a tick, and for a transaction over several collections; its bodies
    have theirs. A reader that resumes at `last_confirmed`, and skips ticks up to this one, misses
    and repeats nothing.
    """

    type: MessageType
    message_id: MessageId
    last_confirmed: MessageId
    time_tick: int
    vchannels: tuple[str, ...] = ()
    collection: str = ""
    num_rows: int = 0
    bodies: "tuple[ReadMessage, ...]" = ()
    parts: tuple[Message, ...] = ()
    schemas: PayloadSchemas = {}

    @property
    def row_offsets(self) -> Mapping[str, tuple[int, int]]:
        """The first row offset and the number of inserted rows by vchannel; empty for a
        transaction, whose bodies have them.
        """
        return {
            part.vchannel: (part.header.first_offset, part.header.rows)
            for part in self.parts
            if isinstance(part.header, InsertHeader)
        }

    def to_arrow(self) -> pa.Table | None:
        """Return the rows of an insert, or the keys of a delete in a column named as the primary
        key; None for any other type.

        The data is not copied.
        """
        schema = self.schemas.get(self.type)
        if schema is None:
            return None
        batches = [
            pa.ipc.read_record_batch(pa.py_buffer(part.payload), schema).slice(
                part.first_row, part.header.rows
            )
            for part in self.parts
            if isinstance(part.header, (InsertHeader, DeleteHeader))
        ]
        return pa.Table.from_batches(batches, schema=schema)


class ReadRows:
    """Packed rows of many messages, which are built on request."""

    def __init__(
        self, rows: PackedRows, channels: ReadChannels, types: frozenset[MessageType]
    ) -> None:
        self._rows = rows
        self._channels = channels
        self._types = types
        self.num_rows = sum([batch.rows for batch in rows.batches])
        self.time_tick = rows.ticks.item(max([batch.groups.item(-1) for batch in rows.batches]))

    @classmethod
    def of(
        cls, rows: PackedRows, channels: ReadChannels, types: frozenset[MessageType]
    ) -> "ReadRows | None":
        """Return the rows of these vchannels and types; None if there are none."""
        batches = tuple(
            batch for batch in rows.batches if batch.vchannel in channels and batch.type in types
        )
        if len(batches) < len(rows.batches):
            rows = replace(rows, batches=batches)
        return cls(rows, channels, types) if batches else None

    def messages(self) -> list[ReadMessage]:
        """Return the messages, one for each group."""
        made = []
        for _, messages in groupby(self._rows.messages(), attrgetter("time_tick")):
            message = merge_tick(list(messages), self._channels, self._types)
            assert message is not None, "only rows to be delivered are left"
            made.append(message)
        return made

    @property
    def count(self) -> int:
        """The number of messages."""
        return int(self._rows.groups_where(lambda _: True).sum())

    def split(self, rows_max: int) -> "tuple[ReadRows | None, ReadRows | None]":
        """Return the first messages, with up to `rows_max` rows in total, and the others; None if
        there are none.
        """
        rows_of = np.zeros(len(self._rows.ticks), np.int64)
        for batch in self._rows.batches:
            np.add.at(rows_of, batch.groups, batch.counts)
        fitting = np.cumsum(rows_of) <= rows_max
        return self._only(fitting), self._only(~fitting)

    def _only(self, groups: npt.NDArray[np.bool_]) -> "ReadRows | None":
        rows = self._rows.only(groups)
        return None if rows is None else ReadRows(rows, self._channels, self._types)


class ReadBatch(Sequence[ReadMessage]):
    """Messages in order; packed ones become objects at the first access."""

    def __init__(self, parts: Sequence[ReadMessage | ReadRows]) -> None:
        self._parts = parts

    @property
    def num_rows(self) -> int:
        """The number of rows and keys of all messages."""
        return sum([part.num_rows for part in self._parts])

    @property
    def time_tick(self) -> int:
        """The tick of the last message."""
        return self._parts[-1].time_tick

    def __len__(self) -> int:
        return sum([part.count if isinstance(part, ReadRows) else 1 for part in self._parts])

    @overload
    def __getitem__(self, index: int) -> ReadMessage: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReadMessage]: ...
    def __getitem__(self, index: int | slice) -> ReadMessage | list[ReadMessage]:
        return self._made[index]

    @cached_property
    def _made(self) -> list[ReadMessage]:
        made_of = (
            part.messages() if isinstance(part, ReadRows) else [part] for part in self._parts
        )
        return list(chain.from_iterable(made_of))


def merge_tick(
    messages: Sequence[AnyMessage], channels: ReadChannels, types: frozenset[MessageType]
) -> ReadMessage | None:
    """Return the messages of one tick as one message; None if there are none of these collections
    and types.
    """
    last = messages[-1]
    kind = message_id_kind(messages[-1].wal_name)
    if isinstance(last, TransactionMessage):
        bodies = _bodies(
            [body for body in last.bodies if body.vchannel in channels and body.type in types],
            channels,
        )
        if not bodies:
            return None
        collections = {body.collection for body in bodies}
        return ReadMessage(
            type=MessageType.TXN,
            message_id=kind(last.position),
            last_confirmed=kind(last.last_confirmed_position),
            time_tick=last.time_tick,
            vchannels=tuple(sorted({vchannel for body in bodies for vchannel in body.vchannels})),
            collection=collections.pop() if len(collections) == 1 else "",
            num_rows=sum(body.num_rows for body in bodies),
            bodies=bodies,
        )
    parts = [
        message for message in messages if isinstance(message, Message) and message.type in types
    ]
    return _merged(parts, channels) if parts else None


def _bodies(bodies: Sequence[Message], channels: ReadChannels) -> tuple[ReadMessage, ...]:
    """Join the parts of each insert or delete on several shards."""
    joined: list[list[Message]] = []
    for body in bodies:
        assert isinstance(body.header, (InsertHeader, DeleteHeader)), "bodies are of these types"
        if body.header.part > 0 and joined and joined[-1][-1].position + 1 == body.position:
            joined[-1].append(body)
        else:
            joined.append([body])
    return tuple(_merged(parts, channels) for parts in joined)


def _merged(parts: Sequence[Message], channels: ReadChannels) -> ReadMessage:
    last = parts[-1]
    kind = message_id_kind(parts[-1].wal_name)
    of = channels[last.vchannel]
    return ReadMessage(
        type=last.type,
        message_id=kind(last.position),
        last_confirmed=kind(last.last_confirmed_position),
        time_tick=last.time_tick,
        vchannels=tuple(part.vchannel for part in parts),
        collection=of.name,
        num_rows=sum(
            part.header.rows
            for part in parts
            if isinstance(part.header, (InsertHeader, DeleteHeader))
        ),
        parts=tuple(parts),
        schemas=of.schemas,
    )
