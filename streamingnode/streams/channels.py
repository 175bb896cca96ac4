"""The channel service: names of channels that no other channel has or had, and who owns them, in the store's state map.

A channel is a name. Its topic is made by the first stream that uses it, and goes with `MessageQueue.destroy_topic`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from wal.errors import ChannelNotFound, Corrupt, InvalidArgument, TooLarge, shown

T = TypeVar("T")

PREFIX = "channels/"
NEXT_KEY = f"{PREFIX}next"
NAME_PREFIX = f"{PREFIX}name/"
CREATED_AT_ONCE_MAX = 4096
"""Channels of one call."""
DESCRIPTION_BYTES_MAX = 4096
"""Of the three texts of an owner together, in UTF-8."""


class StateMap(Protocol):
    """The part of `LogStore` that keeps the channels."""

    async def scan_meta(self, prefix: str) -> dict[str, bytes]:
        """See `LogStore.scan_meta`."""

    async def put_meta(self, changes: Mapping[str, bytes | None]) -> None:
        """See `LogStore.put_meta`."""


class OwnerDescription(msgspec.Struct, frozen=True, array_like=True):
    """Who owns a channel, for people; nothing follows from it."""

    role: str
    address: str = ""
    description: str = ""


class ChannelDescription(msgspec.Struct, frozen=True):
    """A channel and its owner."""

    name: str
    owner: OwnerDescription


class Channels(Protocol):
    """What a node's channel service does, in this process or another one; see `ChannelService`."""

    async def create_channels(self, owner: OwnerDescription, num_channels: int) -> list[str]:
        """As `ChannelService.create_channels`."""

    async def destroy_channels(self, names: Sequence[str]) -> None:
        """As `ChannelService.destroy_channels`."""

    async def describe_channels(self, names: Sequence[str] | None = None) -> list[ChannelDescription]:
        """As `ChannelService.describe_channels`."""


class ChannelService:
    """Creates, destroys and describes channels; one service has a store's channels for itself.

    What changes something is durable when it returns, all of it or nothing, and raises what `LogStore.put_meta` does.
    """

    def __init__(self, store: StateMap, *, prefix: str = "channel") -> None:
        """Names begin with `prefix`."""
        self._store, self._prefix = store, prefix
        self._changing = asyncio.Lock()

    async def create_channels(self, owner: OwnerDescription, num_channels: int) -> list[str]:
        """Return the names of new channels. Raises `InvalidArgument`, `TooLarge`."""
        if type(num_channels) is not int or num_channels < 1:
            raise InvalidArgument(f"num_channels={shown(num_channels)} — ask for at least one")
        if num_channels > CREATED_AT_ONCE_MAX:
            raise TooLarge(f"{num_channels} channels in one call — create at most {CREATED_AT_ONCE_MAX} at a time")
        _check_owner(owner)
        async with self._changing:
            first = await self._next_number()
            names = [f"{self._prefix}_{number}" for number in range(first, first + num_channels)]
            record = msgspec.msgpack.encode(owner)
            changes: dict[str, bytes | None] = {NAME_PREFIX + name: record for name in names}
            # Kept beside them, so that no name comes again after its channel is destroyed.
            changes[NEXT_KEY] = msgspec.msgpack.encode(first + num_channels)
            await self._store.put_meta(changes)
        return names

    async def destroy_channels(self, names: Sequence[str]) -> None:
        """Destroy channels, all or none. Raises `ChannelNotFound` when there is no such channel."""
        async with self._changing:
            await self.describe_channels(names)
            await self._store.put_meta(dict.fromkeys(NAME_PREFIX + name for name in names))

    async def describe_channels(self, names: Sequence[str] | None = None) -> list[ChannelDescription]:
        """Return channels with their owners, in the order of `names`; None: all there are. Raises `ChannelNotFound`."""
        if isinstance(names, str) or not isinstance(names, Sequence | None):
            raise InvalidArgument(f"names={shown(names)} — pass a list of names")
        stored = await self._store.scan_meta(NAME_PREFIX)
        if names is None:
            names = sorted(key.removeprefix(NAME_PREFIX) for key in stored)
        found: list[ChannelDescription] = []
        for name in names:
            record = stored.get(f"{NAME_PREFIX}{name}")
            if record is None:
                raise ChannelNotFound(f"there is no channel {shown(name)}")
            found.append(ChannelDescription(name, _decode(record, name, OwnerDescription)))
        return found

    async def _next_number(self) -> int:
        record = (await self._store.scan_meta(NEXT_KEY)).get(NEXT_KEY)
        return 0 if record is None else _decode(record, NEXT_KEY, int)


def _check_owner(owner: OwnerDescription) -> None:
    if not isinstance(owner, OwnerDescription) or not all(
        isinstance(text, str) for text in msgspec.structs.astuple(owner)
    ):
        raise InvalidArgument(f"owner={shown(owner)} — pass an OwnerDescription of texts")
    try:
        size_bytes = sum(len(text.encode()) for text in msgspec.structs.astuple(owner))
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"owner={shown(owner)} has no UTF-8 — correct its texts") from error
    if size_bytes > DESCRIPTION_BYTES_MAX:
        raise TooLarge(f"the owner has {size_bytes} bytes of text — keep it within {DESCRIPTION_BYTES_MAX}")


def _decode(record: bytes, name: str, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(record, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Corrupt(f"the record of channel {name!r} does not decode: {error}") from error
