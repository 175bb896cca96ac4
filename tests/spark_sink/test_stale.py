"""An ingest that could not ask a running node for a cut says so, and how old what it took is."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import spark_sink
import streamingnode as sn
from streamingnode.cli import main
from streamingnode.errors import AlreadyOwned
from tests.spark_sink.table_reading import rows_of
from wal.files import LOCK_NAME
from wal.timetick import physical_ms

pytestmark = pytest.mark.spark


@pytest.fixture
def deaf(tmp_path: Path) -> Iterator[Path]:
    """A node that takes no clients, with a row in a cut and one behind it."""
    place = tmp_path / "data"
    with sn.sync.open_node(place, listen=False, cut_interval_s=None) as node:
        # as one that was opened long ago: nobody waits for it to listen
        os.utime(place / LOCK_NAME, (0, 0))
        node.create_collection("orders", pa.schema([("id", pa.int64())]), primary_key="id")
        node.insert("orders", [{"id": 1}])
        node.flush()
        node.insert("orders", [{"id": 2}])
        yield place


def test_the_command_ends_as_flush_does_and_tells_the_age_of_the_newest_cut(
    deaf: Path, tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["ingest", str(deaf), "--tables", str(tables)]
    before_s = time.time()
    assert main([*arguments, "--json"]) == AlreadyOwned.exit_code == main(["flush", str(deaf)])
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    cut_s = physical_ms(report["tick"]) / 1000
    assert report["stale"]
    assert before_s - cut_s <= report["cut_age_s"] <= time.time() - cut_s
    age = f"{report['cut_age_s']:.1f}"
    assert (
        f"stale: the running node could not be asked for a cut, the newest is {age} s old"
        in printed.err
    )
    assert [row["id"] for row in rows_of(tables / "orders")] == [1], (
        "the cut that was there is taken"
    )
    assert main([*arguments, "--no-cut"]) == 0, "nobody wanted a cut"
    assert "stale" not in capsys.readouterr().out


def test_a_round_of_the_ingest_that_stays_says_so_too(deaf: Path, tables: Path) -> None:
    told = next(spark_sink.ingest_every(deaf, tables))
    assert (told.stale, told.failures, told.rows_added) == (True, (), 1)
    assert told.cut_age_s is not None
    assert told.lag_s is not None
    assert not next(spark_sink.ingest_every(deaf, tables, request_cut=False)).stale


def test_a_round_whose_question_failed_is_stale(tmp_path: Path, tables: Path) -> None:
    place = tmp_path / "data"
    with sn.sync.open_node(place, cut_interval_s=None) as node:
        node.create_collection("orders", pa.schema([("id", pa.int64())]), primary_key="id")
        node.flush()
        rounds = spark_sink.ingest_every(node, tables, every_s=0.001)
        first = next(rounds)
        assert (first.stale, first.failures) == (False, ())
    second = next(rounds)
    assert second.stale
    assert [failure.table for failure in second.failures] == [""]
