"""The channel service: names that are new for ever, owners, and all or nothing."""

from collections.abc import Mapping
from pathlib import Path

import pytest

import streamingnode as sn
from streamingnode.streams.channels import PREFIX, ChannelDescription, ChannelService, OwnerDescription
from wal.errors import ChannelNotFound, Corrupt, InvalidArgument, OnShutdown, StorageFailed, TooLarge

pytestmark = pytest.mark.anyio

OWNER = OwnerDescription("proxy", "host:1", "rows of orders")
OTHER = OwnerDescription("index")


async def test_channels_have_new_names_and_their_owners_over_restarts(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path / "node") as node:
        first = await node.channels.create_channels(OWNER, 2)
        await node.channels.destroy_channels(first[:1])
    async with sn.open_node(tmp_path / "node") as node:
        second = await node.channels.create_channels(OTHER, 2)
        assert len({*first, *second}) == 4
        assert await node.channels.describe_channels([second[1], first[1], second[0]]) == [
            ChannelDescription(second[1], OTHER),
            ChannelDescription(first[1], OWNER),
            ChannelDescription(second[0], OTHER),
        ]
        assert (await node.verify()).damages == []
        channels = node.channels
    with pytest.raises(OnShutdown):
        await channels.create_channels(OWNER, 1)


async def test_destroying_is_all_or_nothing() -> None:
    async with sn.open_node(None) as node:
        names = await node.channels.create_channels(OWNER, 2)
        with pytest.raises(ChannelNotFound, match="nobody"):
            await node.channels.destroy_channels([names[0], "nobody"])
        assert len(await node.channels.describe_channels(names)) == 2
        await node.channels.destroy_channels([*names, names[0]])
        with pytest.raises(ChannelNotFound):
            await node.channels.describe_channels(names[1:])


@pytest.mark.parametrize(
    "owner, number, wrong",
    [
        (OWNER, 0, InvalidArgument),
        (OWNER, -1, InvalidArgument),
        (OWNER, True, InvalidArgument),
        (OWNER, 100_000, TooLarge),
        ("me", 1, InvalidArgument),
        (OwnerDescription(3), 1, InvalidArgument),  # type: ignore[arg-type]
        (OwnerDescription("\ud800"), 1, InvalidArgument),
        (OwnerDescription("r" * 5000), 1, TooLarge),
    ],
)
async def test_what_cannot_be_created_leaves_nothing(
    owner: OwnerDescription, number: int, wrong: type[Exception]
) -> None:
    state = State()
    with pytest.raises(wrong):
        await ChannelService(state).create_channels(owner, number)
    assert state.kept == {}


async def test_a_failed_write_creates_no_channel_and_uses_no_name_twice() -> None:
    state = State()
    service = ChannelService(state)
    state.fails = True
    with pytest.raises(StorageFailed):
        await service.create_channels(OWNER, 2)
    state.fails = False
    assert await service.create_channels(OWNER, 1) == ["channel_0"]
    with pytest.raises(InvalidArgument):
        await service.describe_channels("channel_0")


async def test_a_damaged_record_is_corrupt_and_named() -> None:
    state = State()
    service = ChannelService(state)
    [name] = await service.create_channels(OWNER, 1)
    state.kept = dict.fromkeys(state.kept, b"\xc1")
    with pytest.raises(Corrupt, match=name):
        await service.describe_channels([name])
    with pytest.raises(Corrupt, match=f"{PREFIX}next"):
        await service.create_channels(OWNER, 1)


def test_channels_work_without_async(tmp_path: Path) -> None:
    with sn.sync.open_node(tmp_path / "node") as node:
        names = node.channels.create_channels(OWNER, 3)
        assert [each.owner for each in node.channels.describe_channels(names)] == [OWNER] * 3
        node.channels.destroy_channels(names)


class State:
    """A state map that fails on demand."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.fails = False

    async def scan_meta(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in self.kept.items() if key.startswith(prefix)}

    async def put_meta(self, changes: Mapping[str, bytes | None]) -> None:
        if self.fails:
            raise StorageFailed("the disk is gone — mount it")
        for key, value in changes.items():
            self.kept.pop(key, None)
            if value is not None:
                self.kept[key] = value
