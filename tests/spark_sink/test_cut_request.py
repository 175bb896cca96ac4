"""How an ingest gets its cut: from the open node that it is given, or from a process of its own."""

import asyncio
from pathlib import Path

import pyarrow as pa
import pytest

import streamingnode as sn
from flusher.directory import CutLog
from spark_sink.cut_request import node_directory, request_cut
from wal.errors import InvalidArgument, StorageFailed

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
