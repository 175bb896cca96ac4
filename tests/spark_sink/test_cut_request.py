"""How an ingest gets its cut: from the open node that it is given, or from a process of its own."""

import asyncio
import socket
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import streamingnode as sn
from flusher.directory import CutLog
from spark_sink import cut_request
from spark_sink.cut_request import node_directory, request_cut
from streamingnode.remote.server import Session
from wal.address import SOCKET_NAME
from wal.errors import InvalidArgument, Overloaded, StorageFailed, StorageFull

SCHEMA = pa.schema([("id", pa.int64())])


def test_an_open_node_makes_the_cut_that_an_ingest_asks_for(tmp_path: Path) -> None:
    with sn.sync.open_node(tmp_path / "data", cut_interval_s=None) as node:
        node.create_collection("orders", SCHEMA, primary_key="id")
        node.insert("orders", [{"id": 1}])
        assert node_directory(node, request_cut=True) == tmp_path / "data"
        cut, is_stale = request_cut(node)
        assert cut is not None
        assert (cut.number, is_stale) == (1, False)
        assert len(CutLog(tmp_path / "data").numbers) == 1
        node.insert("orders", [{"id": 2}])
        cut, is_stale = request_cut(tmp_path / "data")
        assert cut is not None
        assert (cut.number, is_stale) == (2, False), (
            "it takes clients, so it makes the cut for whoever asks by its path"
        )
        assert len(CutLog(tmp_path / "data").numbers) == 2


def test_a_running_node_is_asked_by_this_process_and_a_closed_one_by_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = list[object]()
    run = subprocess.run

    def noted(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", noted)
    with sn.sync.open_node(tmp_path / "data", cut_interval_s=None) as node:
        node.create_collection("orders", SCHEMA, primary_key="id")
        node.insert("orders", [{"id": 1}])
        asked = request_cut(tmp_path / "data")
        assert not commands
    assert request_cut(tmp_path / "data") == asked
    assert len(commands) == 1
    with socket.socket(socket.AF_UNIX) as left_behind:  # as by an owner that was killed
        left_behind.bind(str(tmp_path / "data" / SOCKET_NAME))
    assert request_cut(tmp_path / "data") == asked
    assert len(commands) == 2


def test_a_running_node_that_refuses_a_cut_says_so_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(_session: Session, *_call: object) -> None:
        raise StorageFull("the disk is full — make room", 1, 2)

    with sn.sync.open_node(tmp_path / "data"):
        monkeypatch.setattr(Session, "_answer", full)
        with pytest.raises(StorageFull, match="make room"):
            request_cut(tmp_path / "data")


def test_a_cut_that_takes_too_long_is_told_with_the_command_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_request, "CUT_TIMEOUT_S", 0.0)
    with (
        sn.sync.open_node(tmp_path / "data"),
        pytest.raises(Overloaded, match="run: streamingnode flush"),
    ):
        request_cut(tmp_path / "data")


def test_a_running_node_without_clients_tells_nothing_of_its_cuts_to_who_asks_from_outside(
    tmp_path: Path,
) -> None:
    with sn.sync.open_node(tmp_path / "data", listen=False):
        assert request_cut(tmp_path / "data") == (None, True)


def test_a_node_on_an_event_loop_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async def ask() -> None:
        async with sn.open_node(tmp_path / "data") as node:
            with pytest.raises(
                InvalidArgument, match=r"`await node.flush\(\)`, then `await asyncio.to_thread"
            ):
                node_directory(node, request_cut=True)
            assert node_directory(node, request_cut=False) == tmp_path / "data"

    asyncio.run(ask())


def test_what_is_no_node_on_disk_cannot_be_ingested(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="node=7 is no node"):
        node_directory(7, request_cut=True)  # type: ignore[arg-type]
    with sn.sync.open_node(None) as node, pytest.raises(InvalidArgument, match="in memory"):
        node_directory(node, request_cut=True)


def test_a_cut_that_is_not_made_is_told_in_the_words_of_the_node(tmp_path: Path) -> None:
    with pytest.raises(
        StorageFailed, match=r"ended with 2 and said: INVALID_ARGUMENT.* — run: streamingnode flush"
    ):
        request_cut(tmp_path / "nowhere")
