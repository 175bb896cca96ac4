"""Messages as a reader of collections sees them: all parts of one tick together, rows as Arrow. No
I/O.
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
"""What a reader gets unless it asks for certain types; the rest is the node's own bookkeeping."""
PayloadSchemas = Mapping[MessageType, pa.Schema]
"""How inserts and deletes of one collection decode."""


class ReadCollection(NamedTuple):
    """One collection that is read."""

    id: int
    name: str
    schemas: PayloadSchemas


ReadChannels = Mapping[str, ReadCollection]
"""What is read, by vchannel: each belongs to one collection."""


class ReadMessage(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What happened to the collections of a reader at one tick.

    `type` is `INSERT`, `DELETE`, `TXN`, a DDL type, or `TIME_TICK` when ticks were asked for. A
    transaction has its `bodies`, in order and only those of these collections, one for each insert
    or delete, more for one that is too large for one append group; `num_rows` is then their sum.
    `collection` is empty for a tick, and for a transaction over several: its bodies tell theirs.
    Reading that resumes at `last_confirmed`, and passes over ticks up to this one, misses and
    repeats nothing.
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
        """The first row offset and the number of rows inserted on each vchannel; empty for a
        transaction: ask its bodies.
        """
        return {
            part.vchannel: (part.header.first_offset, part.header.rows)
            for part in self.parts
            if isinstance(part.header, InsertHeader)
        }

    def to_arrow(self) -> pa.Table | None:
        """Return the rows of an insert, the keys of a delete in a column named as the primary key,
        or else None.

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
    """Rows that came packed, of many messages: these are made when they are asked for."""

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
        """Return the rows of these vchannels and types, None when there are none."""
        batches = tuple(
            batch for batch in rows.batches if batch.vchannel in channels and batch.type in types
        )
        if len(batches) < len(rows.batches):
            rows = replace(rows, batches=batches)
        return cls(rows, channels, types) if batches else None

    def messages(self) -> list[ReadMessage]:
        """Make the messages, one for each group."""
        made = []
        for _, messages in groupby(self._rows.messages(), attrgetter("time_tick")):
            message = merge_tick(list(messages), self._channels, self._types)
            assert message is not None, "only what is delivered is left"
            made.append(message)
        return made

    @property
    def count(self) -> int:
        """How many messages there are."""
        return int(self._rows.groups_where(lambda _: True).sum())

    def split(self, rows_max: int) -> "tuple[ReadRows | None, ReadRows | None]":
        """Return the first messages, of up to so many rows together, and the others; None for
        none.
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
    """Messages in order; those that came packed are made into objects when they are looked at."""

    def __init__(self, parts: Sequence[ReadMessage | ReadRows]) -> None:
        self._parts = parts

    @property
    def num_rows(self) -> int:
        """The rows and keys of all messages."""
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
    """Return the messages of one tick as one message, None if none of them is of the collections
    and of the types.
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
    """Join the parts that one insert or delete left on several shards."""
    joined: list[list[Message]] = []
    for body in bodies:
        assert isinstance(body.header, (InsertHeader, DeleteHeader)), "only those are asked for"
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
