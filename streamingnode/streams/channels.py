"""The channel service: hands out channels by name, says whose they are, and takes them back.

A channel is a topic and a record in the store's map of state; the record counts. It is written after its topic is made and
removed before it is destroyed, so a crash leaves at most a topic without a record: an empty one is taken over by the next
creation, and what was to be destroyed is on a list that the next call works off.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from wal.errors import Corrupt, InvalidArgument, TopicNotEmpty, TopicNotFound, shown
from wal.rocksmq.contract import MessageQueue

CHANNELS_MAX = 4096
"""Of one call."""
CHANNEL_KEY, DESTROYED_KEY, NEXT_KEY = "channels/of/", "channels/destroyed/", "channels/next"
TEXT_MAX = 4096
"""Characters of each field of an owner."""


class StateMap(Protocol):
    """The part of a `LogStore` that the service uses."""

    async def scan_meta(self, prefix: str) -> dict[str, bytes]:
        """See `LogStore.scan_meta`."""

    async def put_meta(self, changes: Mapping[str, bytes | None]) -> None:
        """See `LogStore.put_meta`."""


class OwnerDescription(msgspec.Struct, frozen=True, array_like=True):
    """Whose a channel is, for people: the service reads nothing into it."""

    role: str
    address: str = ""
    description: str = ""


class ChannelDescription(msgspec.Struct, frozen=True):
    """A channel and whose it is."""

    name: str
    owner: OwnerDescription


class ChannelService:
    """Channels of one node. Each call does all it was asked for or nothing, and is durable when it returns."""

    def __init__(self, store: StateMap, queue: MessageQueue) -> None:
        self._store, self._queue = store, queue
        self._turn = asyncio.Lock()

    async def create_channels(self, owner: OwnerDescription, num_channels: int) -> list[str]:
        """Return the names of new channels; no name is given out twice, also not of a channel that is gone."""
        if type(num_channels) is not int or not 0 < num_channels <= CHANNELS_MAX:
            raise InvalidArgument(f"num_channels={num_channels!r} — create 1 to {CHANNELS_MAX} at a time")
        if not isinstance(owner, OwnerDescription) or not all(
            isinstance(text, str) and len(text) <= TEXT_MAX for text in msgspec.structs.astuple(owner)
        ):
            raise InvalidArgument(f"{shown(owner)} is no owner — give an OwnerDescription of short texts")
        record = msgspec.msgpack.encode(owner)
        async with self._turn:
            await self._finish_destroying()
            number = int((await self._store.scan_meta(NEXT_KEY)).get(NEXT_KEY, b"1"))
            names: list[str] = []
            while len(names) < num_channels:
                name, number = f"channel-{number}", number + 1
                if await self._is_free(name):
                    names.append(name)
            for name in names:
                await self._queue.create_topic(name)
            records: dict[str, bytes | None] = {CHANNEL_KEY + name: record for name in names}
            await self._store.put_meta(records | {NEXT_KEY: str(number).encode()})
        return names

    async def destroy_channels(self, names: Sequence[str]) -> None:
        """Destroy channels, their subscriptions and messages; none of them for an unknown one, which is `TopicNotFound`."""
        async with self._turn:
            await self._finish_destroying()
            owners = await self._owners(names)
            changes: dict[str, bytes | None] = {DESTROYED_KEY + name: b"" for name in owners}
            await self._store.put_meta(changes | dict.fromkeys(CHANNEL_KEY + name for name in owners))
            await self._finish_destroying()

    async def describe_channels(self, names: Sequence[str]) -> list[ChannelDescription]:
        """Return name and owner of channels, in the order of `names`. Raises `TopicNotFound` for an unknown one."""
        owners = await self._owners(names)
        return [ChannelDescription(name, owners[name]) for name in names]

    async def _owners(self, names: Sequence[str]) -> dict[str, OwnerDescription]:
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise InvalidArgument(f"names={shown(names)} — give a list of names")
        records = await self._store.scan_meta(CHANNEL_KEY)
        if unknown := [name for name in names if CHANNEL_KEY + name not in records]:
            raise TopicNotFound(f"there is no channel {shown(unknown[0])} — create_channels() says the names it made")
        try:
            return {name: msgspec.msgpack.decode(records[CHANNEL_KEY + name], type=OwnerDescription) for name in names}
        except msgspec.MsgspecError as error:
            raise Corrupt(f"the record of a channel does not decode: {error}") from error

    async def _is_free(self, name: str) -> bool:
        """Whether a name is no topic of somebody else: an empty one may be what a crash left of a creation."""
        try:
            await self._queue.check_topic_valid(name)
        except TopicNotFound:
            return True
        except TopicNotEmpty:
            return False
        return True

    async def _finish_destroying(self) -> None:
        destroyed = await self._store.scan_meta(DESTROYED_KEY)
        for name in (key.removeprefix(DESTROYED_KEY) for key in destroyed):
            with suppress(TopicNotFound):
                await self._queue.destroy_topic(name)
        if destroyed:
            await self._store.put_meta(dict.fromkeys(destroyed))
