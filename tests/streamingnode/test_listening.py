"""A node on disk listens at `node.sock` in its directory while it is open, for its user alone."""

import asyncio
import os
import socket
import stat
import sys
from pathlib import Path

import anyio
import pytest

import streamingnode as sn
from streamingnode.errors import InvalidArgument
from streamingnode.listening import Listener
from tests.parts_of import parts_of
from tests.streamingnode.remote.nodes import SCHEMA, SETTINGS, contents, rows
from wal.address import SOCKET_NAME, SOCKET_PATH_BYTES_MAX
from wal.errors import OnShutdown

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

KILLED = """
import asyncio, os, signal, sys
import streamingnode as sn

async def main():
    await sn.open_node(sys.argv[1], listen=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_the_socket_is_there_while_the_node_is_open_and_for_its_user_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data"
    async with sn.open_node(path, **SETTINGS, listen=True):
        found = (path / SOCKET_NAME).stat()
        assert stat.S_ISSOCK(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o600
    assert not (path / SOCKET_NAME).exists()


async def test_a_client_at_the_socket_has_all_rights_and_is_told_when_the_node_closes(
    tmp_path: Path,
) -> None:
    async with sn.open_node(tmp_path, **SETTINGS, listen=True) as node:
        client = await sn.connect(f"unix:{tmp_path / SOCKET_NAME}", give_up_s=0.1)
        await client.create_collection("c", SCHEMA, primary_key="id")
        await client.insert("c", rows(1))
        assert await contents(node) == await contents(client) == {1: "tea 1"}
        assert client.path == str(tmp_path)
    with pytest.raises(sn.errors.Unreachable):
        await client.consistent_tick()
    await client.aclose()


async def test_a_node_that_is_not_to_listen_has_no_socket(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path, **SETTINGS, listen=False):
        assert not (tmp_path / SOCKET_NAME).exists()


async def test_the_socket_of_a_process_that_was_killed_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "data"
    await anyio.run_process([sys.executable, "-c", KILLED, str(path)], check=False)
    assert (path / SOCKET_NAME).exists()
    with socket.socket(socket.AF_UNIX) as old, pytest.raises(ConnectionRefusedError):
        old.connect(str(path / SOCKET_NAME))
    async with (
        sn.open_node(path, **SETTINGS, listen=True),
        sn.connect(f"unix:{path / SOCKET_NAME}") as client,
    ):
        assert await client.consistent_tick()


async def test_a_path_that_is_too_long_for_a_socket_is_only_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / ("x" * (SOCKET_PATH_BYTES_MAX + 1))
    async with sn.open_node(path, **SETTINGS, listen=True) as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
        assert not (path / SOCKET_NAME).exists()
    assert "not_listening" in caplog.text


async def test_a_directory_where_no_socket_can_be_made_is_only_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with sn.open_node(tmp_path, **SETTINGS):
        pass
    (tmp_path / SOCKET_NAME).mkdir()
    async with sn.open_node(tmp_path, **SETTINGS, listen=True) as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
    assert "not_listening" in caplog.text
    assert (tmp_path / SOCKET_NAME).is_dir()


async def test_a_backup_has_no_socket_and_verifying_does_not_mind_one(tmp_path: Path) -> None:
    path = tmp_path / "data"
    copy = tmp_path / "copy"
    async with sn.open_node(path, **SETTINGS, listen=True) as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
        await node.insert("c", rows(1))
        await node.flush()
        assert (await node.verify()).findings == []
        await node.backup(copy)
    assert not [file for _, _, names in os.walk(copy) for file in names if file == SOCKET_NAME]


@pytest.mark.parametrize("at", [1, 2], ids=["for monitors", "for clients"])
async def test_opening_that_is_cancelled_as_it_begins_to_listen_leaves_nobody_listening(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening = list[asyncio.Server]()
    begin = asyncio.Server._start_serving  # type: ignore[attr-defined]

    def begin_and_cancel(server: asyncio.Server) -> None:
        begin(server)
        listening.append(server)
        if len(listening) == at:
            opening.cancel()

    monkeypatch.setattr(asyncio.Server, "_start_serving", begin_and_cancel)
    opening = asyncio.ensure_future(
        sn.open_node(tmp_path, **SETTINGS, listen=True, http="127.0.0.1:0")
    )
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not [each for each in listening if each.sockets]
    assert not (tmp_path / SOCKET_NAME).exists()


async def test_a_client_finds_its_node_and_token_again_after_its_program_changed_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("a token that nobody asks for")
    monkeypatch.chdir(tmp_path)
    async with sn.open_node("data") as node:
        async with sn.connect("unix:data/node.sock", token_file="token", give_up_s=1) as client:
            (tmp_path / "elsewhere").mkdir()
            monkeypatch.chdir(tmp_path / "elsewhere")
            listener = parts_of(node).listener
            assert isinstance(listener, Listener)
            (session,) = listener.server.sessions
            session.connection.abort(OnShutdown("the network"))
            await client.consistent_tick()


@pytest.mark.parametrize(
    "url",
    [
        f"tcp://{'a' * 64}:1",
        "tcp://a..b:1",
        "tcp://me:secret@host:1",
        "tcp://host:1/data",
        "tcp://host:1#x",
        "unix:\0x",
    ],
)
def test_what_is_no_address_or_more_than_one_is_refused_before_anything_is_asked(url: str) -> None:
    with pytest.raises(InvalidArgument, match="no address"):
        sn.connect(url)
