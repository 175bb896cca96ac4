"""The bridge from a topic into a collection, exactly once: bodies that are Arrow IPC streams or
JSON objects become rows.

A batch of messages is one write of a named producer. Its sequence is the id of the last message,
because ids of a topic are never reused. So the producer's last sequence says where to go on,
whatever the group has acknowledged. Messages that do not fit go to the topic `<topic>.dead`, as
dead letters. Before these are sent, the bridge stores in the producer's note the id of the first
such message and the id of the newest letter. After a crash in between, it finds the letters that
were sent after that one, and does not send them twice.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.types as pt

from interceptors.errors import SchemaMismatch
from streamingnode.collections import check_name
from streamingnode.json_mistake import mistake_in
from streamingnode.remote.writes import is_compressed
from streamingnode.rows import Rows, row_shape, to_batches
from streamingnode.schema import has_leaf, row_decoder
from streamingnode.streams.messages import parts_within
from streamingnode.writing.write import check_rows_fit
from wal.errors import (
    AlreadyExists,
    GroupNotFound,
    Indeterminate,
    InvalidArgument,
    Overloaded,
    TooLarge,
    shown,
)
from wal.rocksmq.contract import Consumer
from wal.rocksmq.messages import DEAD_SUFFIX, ConsumerMessage, ProducerMessage, dead_letter
from wal.rocksmq.messages import check_name as check_topic_name
from wal.runtime import in_thread

if TYPE_CHECKING:
    from streamingnode.node import Node
    from streamingnode.writing.producer import Producer

MESSAGES_MAX = 1_000
"""The most messages of one write."""
WAIT_S = 60.0
"""How long one call waits for messages."""
DEAD_BYTES = 1 << 20
"""About the most bytes of dead letters in one call."""
ROWS_BYTES_MAX = 128 << 20
"""The most bytes of one body's rows, and about the most rows in memory before some are written."""
CONTESTS_MAX = 10
"""How often in a row the bridge takes its messages back from other consumers of its group."""

_UNFIT = (
    *(SchemaMismatch, InvalidArgument, TooLarge),
    *(msgspec.DecodeError, UnicodeDecodeError, RecursionError),
    *(pa.ArrowException, OSError),
)
"""The errors of a body that has no rows for the collection."""


class BridgeReport(msgspec.Struct):
    """The progress of a bridge since its start: messages, their rows, and dead letters.

    All messages up to `last_id` are done.
    """

    messages: int = 0
    rows: int = 0
    dead: int = 0
    last_id: int = 0


class _Fitted(NamedTuple):
    """A message with its rows, or with the reason why it has none."""

    message: ConsumerMessage
    batches: list[pa.RecordBatch]
    error: str


async def bridge(
    node: "Node",
    topic: str,
    collection: str,
    *,
    name: str | None = None,
    once: bool = False,
    on_progress: Callable[[BridgeReport], None] = lambda _: None,
) -> BridgeReport:
    """Insert the messages of a topic into a collection, each exactly once, in order, until
    cancelled.

    A body is a plain Arrow IPC stream or one JSON object. A message that does not fit goes to the
    topic `<topic>.dead`, with `error`, `topic`, `id` and `bridge` in its properties; a body that is
    too large for that is left out, and `left_out_bytes` is its size. The bridge may be stopped at
    any point, also by a crash, and goes on when it is called again. `name` is the name of its
    consumer group and its producer, `bridge.<topic>.<collection>` by default; starting it again
    fences the previous one. With `once` it returns when the topic is drained.

    Raises `TopicNotFound`, `CollectionNotFound`, `ProducerFenced`, `Overloaded` while others
    consume from its group, and the errors of `MessageQueue` and `Producer`. After `Indeterminate`
    it goes on by itself.
    """
    name = check_name("producer", f"bridge.{topic}.{collection}" if name is None else name)
    # check the name now, before the first dead letter needs it
    check_topic_name("topic", f"{topic}{DEAD_SUFFIX}")
    report = BridgeReport()
    while True:
        crossing = _Crossing(node, topic, collection, name, report)
        # the producer has the outcome once it is opened again
        with suppress(Indeterminate):
            await crossing.run(once=once, on_progress=on_progress)
            return report


def _arrow_rows(body: bytes, schema: pa.Schema) -> pa.Table:
    """Return the rows of an Arrow IPC stream; refuses a few bytes that would become gigabytes."""
    for message in pa.ipc.MessageReader.open_stream(body):
        if message.type != "schema" and (
            message.type != "record batch" or is_compressed(message.metadata)
        ):
            raise InvalidArgument(
                "the body is compressed or has dictionaries — write plain columns"
            )
    rows = pa.ipc.open_stream(body).read_all()
    for field in rows.schema:
        # Any number of values of these types may share a few bytes, or need none. A plain column of
        # nulls is allowed: it has one value for each row.
        kinds = pt.is_null, pt.is_string_view, pt.is_binary_view, pt.is_run_end_encoded
        if not pt.is_null(field.type) and any(has_leaf(field.type, each) for each in kinds):
            raise InvalidArgument(
                f"column {shown(field.name)} is {field.type} — write it as the collection has it"
            )
    if rows.num_rows * sum(pa.nulls(1, field.type).nbytes for field in schema) > ROWS_BYTES_MAX:
        raise TooLarge(
            f"{rows.num_rows} rows may take over {ROWS_BYTES_MAX} bytes — write fewer in a body"
        )
    return rows


def _is_json(body: bytes) -> bool:
    """Whether a body is meant to be JSON: an Arrow IPC stream never begins like a JSON value."""
    return body.lstrip()[:1] in (b"{", b'"', b"[")


class _Crossing:
    """One opening of a bridge: it goes on after the producer's last write, and fences the previous
    opening.
    """

    def __init__(
        self, node: "Node", topic: str, collection: str, name: str, report: BridgeReport
    ) -> None:
        self._node = node
        self._mq = node.mq
        self._topic = topic
        self._collection = collection
        self._name = name
        self._dead = topic + DEAD_SUFFIX
        self._report = report
        into = node.collection(collection)
        self._shape = row_shape(into.schema, primary_key=into.primary_key)
        self._decode = row_decoder(into.schema)
        self._next_id = 0
        self._behind = -1
        self._sent: set[int] = set()
        """Messages whose dead letters an earlier opening sent without acknowledging the
        messages.
        """

    async def run(self, *, once: bool, on_progress: Callable[[BridgeReport], None]) -> None:
        """Insert messages until cancelled, or with `once` until there are no more."""
        with suppress(AlreadyExists):
            await self._mq.create_consumer_group(self._topic, self._name)
        producer = await self._node.producer(self._name)
        await self._go_to(max(await self._current_id(), producer.last_sequence + 1))
        if producer.note:
            first_id, behind = msgspec.msgpack.decode(producer.note, type=tuple[int, int])
            if first_id >= self._next_id:
                self._behind, self._sent = behind, await self._letters(behind)
        async with await self._mq.register_consumer(
            self._topic, self._name, ack_timeout_s=None
        ) as consumer:
            messages: Sequence[ConsumerMessage] = ()
            while messages := messages or await self._take(consumer, once=once):
                fitted = await in_thread(self._fit, messages)
                messages = messages[len(fitted) :]
                for is_dead, run in groupby(fitted, key=self._is_dead):
                    await (self._bury if is_dead else self._insert)(producer, found := list(run))
                    await consumer.ack([each.message.message_id for each in found])
                    self._report.messages += len(found)
                    self._report.last_id = found[-1].message.message_id
                    on_progress(self._report)

    def _fit(self, messages: Sequence[ConsumerMessage]) -> list[_Fitted]:
        """Decode the first messages to rows, as many as may be in memory; runs in a thread."""
        fitted = list[_Fitted]()
        size_bytes = 0
        for message in messages:
            body = message.payload
            batches = list[pa.RecordBatch]()
            reason = ""
            try:
                batches = to_batches(self._rows_of(body), self._shape)
                check_rows_fit(batches, self._node.config.wal.group_bytes_max)
            except _UNFIT as error:
                batches = []
                reason = self._reason(body, error)
            fitted.append(_Fitted(message, batches, reason))
            if (size_bytes := size_bytes + sum(batch.nbytes for batch in batches)) > ROWS_BYTES_MAX:
                break
        return fitted

    def _rows_of(self, body: bytes) -> Rows:
        return [self._decode(body)] if _is_json(body) else _arrow_rows(body, self._shape.schema)

    def _reason(self, body: bytes, error: Exception) -> str:
        """Return the reason why a body has no rows."""
        is_undecoded = isinstance(error, msgspec.DecodeError | UnicodeDecodeError)
        mistake = mistake_in(body, self._shape.schema) if is_undecoded else None
        if mistake is None:
            return f"{type(error).__name__}: {error}"
        place = "" if mistake.column is None else f"column {mistake.column!r}: "
        return f"{SchemaMismatch.__name__}: {place}{mistake.found} — {mistake.next_step}"

    def _is_dead(self, fitted: _Fitted) -> bool:
        return bool(fitted.error) or fitted.message.message_id in self._sent

    async def _current_id(self) -> int:
        info = (await self._mq.info()).get(self._topic)
        if info is None or self._name not in info.groups:
            raise GroupNotFound(
                f"topic {self._topic!r} has no group {self._name!r} any more — start the bridge "
                "again"
            )
        return info.groups[self._name].current_id

    async def _go_to(self, message_id: int) -> None:
        """Move the group to `message_id`, so that also messages that other consumers hold come to
        this bridge.
        """
        await self._mq.force_seek(self._topic, self._name, message_id)
        self._next_id = await self._current_id()

    async def _take(self, consumer: Consumer, *, once: bool) -> list[ConsumerMessage]:
        """Return the next messages without a gap: the sequence of a write means that all messages
        before it are done.

        Another bridge of the name, fenced by now, may have taken some of them; then the group is
        moved back. Returns an empty list at the end, with `once`.
        """
        contests = 0
        while contests <= CONTESTS_MAX:
            messages = await consumer.consume(MESSAGES_MAX, wait_s=0 if once else WAIT_S)
            ids = range(self._next_id, self._next_id + len(messages))
            if messages and [message.message_id for message in messages] == [*ids]:
                self._next_id = ids.stop
                return messages
            if messages or self._next_id <= await self._mq.get_latest_msg(self._topic):
                contests += 1
                await self._go_to(self._next_id)
            elif once:
                return []
        raise Overloaded(
            f"others consume from group {self._name!r} — stop them, or give the bridge another name"
        )

    async def _insert(self, producer: "Producer", run: Sequence[_Fitted]) -> None:
        batches = [batch for each in run for batch in each.batches]
        if batches:
            rows = pa.Table.from_batches(batches)
            await producer.insert(self._collection, rows, sequence=run[-1].message.message_id)
            self._report.rows += rows.num_rows

    async def _bury(self, producer: "Producer", run: Sequence[_Fitted]) -> None:
        first_id = run[0].message.message_id
        await self._mq.create_topic(self._dead)
        # otherwise letters of this run may already lie above the id in the last note
        if first_id > max(self._sent, default=0):
            self._behind = await self._mq.get_latest_msg(self._dead)
        # The letters of messages from `first_id` on are sent after this note, with ids above
        # `_behind` in their topic.
        await producer.put_note(msgspec.msgpack.encode((first_id, self._behind)))
        unsent = [self._letter(each) for each in run if each.message.message_id not in self._sent]
        for letters in parts_within(unsent, DEAD_BYTES):
            try:
                await self._mq.produce(self._dead, letters)
            except TooLarge:  # the error adds to the size, and a connection has a lower limit
                await self._mq.produce(self._dead, [_without_body(letter) for letter in letters])
            self._report.dead += len(letters)

    def _letter(self, fitted: _Fitted) -> ProducerMessage:
        message = fitted.message
        return dead_letter(
            message.payload,
            message.properties,
            error=fitted.error,
            topic=self._topic,
            message_id=message.message_id,
            bridge=self._name,
        )

    async def _letters(self, behind: int) -> set[int]:
        """Return the ids of messages with a dead letter of this bridge above the id `behind`."""
        dead = (await self._mq.info()).get(self._dead)
        found = set[int]()
        for letter_id in range(max(behind + 1, dead.begin_id), dead.end_id + 1) if dead else ():
            if letter := await self._mq.get_message(self._dead, letter_id):
                of, origin, message_id = map(letter.properties.get, ("topic", "bridge", "id"))
                if (
                    (of, origin) == (self._topic, self._name)
                    and message_id
                    and message_id.isdecimal()
                ):
                    found.add(int(message_id))
        return found


def _without_body(letter: ProducerMessage) -> ProducerMessage:
    origin = {name: letter.properties[name] for name in ("error", "topic", "id", "bridge")}
    return ProducerMessage(b"", origin | {"left_out_bytes": str(len(letter.payload))})
