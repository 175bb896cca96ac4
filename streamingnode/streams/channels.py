"""The channel service: creates channels, describes their owners, and destroys them.

A channel is a topic and a record; it exists while the record does. The record is written after the
topic is created and removed before the topic is destroyed. A crash leaves at most a topic without a
record: an empty one, which the next creation takes over, or one on a list, which the next call
destroys.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, TypeVar

import msgspec

from wal.errors import Corrupt, InvalidArgument, TopicNotFound, shown
from wal.log import StateMap
from wal.position import POSITION_MAX
from wal.rocksmq.contract import MessageQueue

CHANNELS_MAX = 4096
"""Maximum number of channels of one call."""
CHANNEL_KEY = "channels/name/"
DESTROYED_KEY = "channels/destroyed/"
NEXT_KEY = "channels/next"
Text = Annotated[str, msgspec.Meta(max_length=4096)]
T = TypeVar("T")


class OwnerDescription(msgspec.Struct, frozen=True, array_like=True):
    """The owner of a channel, as text for people; the service does not interpret it."""

    role: Text
    address: Text = ""
    description: Text = ""


class ChannelDescription(msgspec.Struct, frozen=True):
    """A channel and its owner."""

    name: str
    owner: OwnerDescription


class ChannelService:
    """Channels of one node. Each call is atomic, and durable when it returns."""

    def __init__(self, state: StateMap, queue: MessageQueue) -> None:
        self._state = state
        self._queue = queue
        self._turn = asyncio.Lock()

    async def create_channels(self, owner: OwnerDescription, num_channels: int) -> list[str]:
        """Create `num_channels` channels and return their names. Names are never reused, not even
        of destroyed channels.
        """
        if type(num_channels) is not int or not 0 < num_channels <= CHANNELS_MAX:
            raise InvalidArgument(
                f"num_channels={shown(num_channels)} — create 1 to {CHANNELS_MAX} at a time"
            )
        try:
            record = msgspec.msgpack.encode(owner)
            msgspec.msgpack.decode(record, type=OwnerDescription)
        except (msgspec.MsgspecError, TypeError, UnicodeEncodeError) as error:
            raise InvalidArgument(
                f"{shown(owner)} is not an owner — pass an OwnerDescription of short texts"
            ) from error
        async with self._turn:
            await self._finish_destroying()
            found = (await self._state.scan(NEXT_KEY)).get(NEXT_KEY)
            number = 0 if found is None else _decode(found, NEXT_KEY, int)
            # Skip other users' topics. An empty topic without groups may be left over from a
            # crashed creation.
            topics = await self._queue.info()
            taken = {
                name
                for name, topic in topics.items()
                if topic.groups or topic.end_id >= topic.begin_id
            }
            names: list[str] = []
            while len(names) < num_channels:
                name = f"channel_{number}"
                number = number + 1
                if name not in taken:
                    names.append(name)
            await asyncio.gather(*map(self._queue.create_topic, names))  # one write for all
            records: dict[str, bytes | None] = {CHANNEL_KEY + name: record for name in names}
            await self._state.put(records | {NEXT_KEY: msgspec.msgpack.encode(number)})
        return names

    async def destroy_channels(self, names: Sequence[str]) -> None:
        """Destroy channels with their subscriptions and messages. Raises `TopicNotFound` for an
        unknown name, and then destroys none.
        """
        async with self._turn:
            await self._finish_destroying()
            owners = await self._owners(names)
            topics = await self._queue.info()
            changes: dict[str, bytes | None] = {
                DESTROYED_KEY + name: msgspec.msgpack.encode(topics[name].end_id)
                for name in owners
                if name in topics
            }
            await self._state.put(changes | dict.fromkeys(CHANNEL_KEY + name for name in owners))
            await self._finish_destroying()

    async def describe_channels(
        self, names: Sequence[str] | None = None
    ) -> list[ChannelDescription]:
        """Return channels and their owners in the order of `names`; None means all channels, by
        name. Raises `TopicNotFound`.
        """
        owners = await self._owners(names)
        return [
            ChannelDescription(name, owners[name])
            for name in (sorted(owners) if names is None else names)
        ]

    async def _owners(self, names: Sequence[str] | None) -> dict[str, OwnerDescription]:
        is_list = not isinstance(names, str) and isinstance(names, Sequence | None)
        if not is_list or not all(isinstance(name, str) for name in names or ()):
            raise InvalidArgument(f"names={shown(names)} — pass a list of names")
        stored = await self._state.scan(CHANNEL_KEY)
        records = {key.removeprefix(CHANNEL_KEY): record for key, record in stored.items()}
        if unknown := set(names or ()) - records.keys():
            raise TopicNotFound(f"there is no channel {shown(min(unknown))} — name an existing one")
        return {
            name: _decode(records[name], name, OwnerDescription)
            for name in (records if names is None else names)
        }

    async def _finish_destroying(self) -> None:
        if destroyed := await self._state.scan(DESTROYED_KEY):
            topics = await self._queue.info()
            for key, record in destroyed.items():
                # Keep a topic of the same name that was created meanwhile: its ids are above those
                # of the channel.
                name = key.removeprefix(DESTROYED_KEY)
                end_id = _decode(record, key, int) if record else POSITION_MAX
                if name in topics and topics[name].begin_id <= end_id + 1:
                    with suppress(TopicNotFound):
                        await self._queue.destroy_topic(name)
            await self._state.put(dict.fromkeys(destroyed))


def _decode(record: bytes, name: str, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(record, type=kind)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the record of channel {name!r} does not decode: {error}") from error
