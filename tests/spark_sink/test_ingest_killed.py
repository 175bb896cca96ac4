"""An ingest killed with SIGKILL at each of its steps, then run again: every row once, nothing left
over that is not known.

Where only the driver dies it borrows the JVM of the test session, which saves a start; a JVM that
dies is its own.
"""

import copy
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_sink.ingestion import COMMIT_BYTES_MAX, IngestJob
from tests.chaos.borrowed_spark import environment
from tests.chaos.failpoint_table import FAILPOINTS
from tests.spark_sink.conftest import STEPS, Ingest
from tests.spark_sink.ingest_without_jvm import LOST
from tests.spark_sink.node_builder import NodeBuilder, orders
from tests.spark_sink.table_reading import lease_of, rows_of

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]


def start(
    spark: SparkSession, node: NodeBuilder, tables: Path, *, failpoints: str = ""
) -> "subprocess.Popen[bytes]":
    arguments = [str(node.path), str(tables), str(COMMIT_BYTES_MAX)]
    command = [sys.executable, "-m", "tests.chaos.borrowed_spark", *arguments]
    return subprocess.Popen(command, env=environment(spark, failpoints), cwd=ROOT)


@pytest.fixture(scope="module")
def prepared(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> NodeBuilder:
    """A node with a table beside it, and cuts to take that add, delete, drop a partition and end a
    collection.
    """
    root = tmp_path_factory.mktemp("prepared")
    node = NodeBuilder(root / "data")
    node.create()
    node.create_partition("orders", "eu")
    node.insert("orders", orders(1, 2, 3))
    node.insert("orders", orders(4, 5), "eu")
    node.create("old")
    node.insert("old", orders(1))
    node.cut()
    IngestJob(spark, node.path, root / "tables", progress=lambda *_: None).run()
    node.upsert("orders", orders(2, 6, amount=2.0))
    node.drop_partition("orders", "eu")
    node.cut()
    node.delete("orders", [1])
    node.drop("old")
    node.create("young")
    node.insert("young", orders(9))
    node.cut()
    return node


@pytest.fixture
def node(prepared: NodeBuilder, tmp_path: Path) -> NodeBuilder:
    """A copy of the prepared node and its tables; leases name places, so they are left behind and
    lag.
    """
    shutil.copytree(
        prepared.path.parent, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("leases")
    )
    mine = copy.copy(prepared)
    mine.path = tmp_path / "data"
    return mine


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_any_step_every_row_is_there_once(
    step: str, spark: SparkSession, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    assert start(spark, node, tables, failpoints=f"{step}=kill").wait() == -signal.SIGKILL
    ingest()
    check(node, tables)


@pytest.mark.crash
@pytest.mark.parametrize("action", ["kill", "error"])
@pytest.mark.parametrize("name", [name for name in FAILPOINTS if name.startswith("ingest.")])
def test_an_ingest_that_dies_or_meets_a_failing_disk_at_a_failpoint_leaves_every_row_once(
    name: str, action: str, spark: SparkSession, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    ended = start(spark, node, tables, failpoints=f"{name}={action}").wait()
    assert ended == -signal.SIGKILL if action == "kill" else ended in {0, 1}
    ingest()
    check(node, tables)


def check(node: NodeBuilder, tables: Path) -> None:
    """Fail unless the tables hold every cut exactly once."""
    for name in ("orders", "young"):
        assert rows_of(tables / name) == node.expected(name)
        assert lease_of(node, tables / name).cut == 3
        versions = [
            entry["streamingnode"]["cut"] for entry in DeltaTable(str(tables / name)).history()
        ]
        assert versions == sorted(set(versions), reverse=True)
    assert not (tables / "old").exists()
    assert not list((node.path / "leases").glob("old-*"))


@pytest.mark.parametrize(
    "moment, ended",
    [
        # each starts a Spark of its own
        pytest.param("writing", LOST, id="while it writes", marks=pytest.mark.crash),
        # What is left is copied, and needs no Spark.
        pytest.param("ingest.written", 0, id="after it has written", marks=pytest.mark.crash),
        pytest.param(
            "both", -signal.SIGKILL, id="together with its driver", marks=pytest.mark.crash
        ),
    ],
)
def test_spark_killed_under_its_driver_every_row_is_there_once(
    moment: str, ended: int, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.spark_sink.ingest_without_jvm",
        str(node.path),
        str(tables),
        moment,
    ]
    assert (
        subprocess.run(
            command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, check=False
        ).returncode
        == ended
    )
    ingest()
    check(node, tables)


def test_two_jobs_at_once_take_every_cut_once(
    spark: SparkSession, node: NodeBuilder, tables: Path
) -> None:
    jobs = [start(spark, node, tables) for _ in range(2)]
    assert [job.wait() for job in jobs] == [0, 0]
    for name in ("orders", "young"):
        assert rows_of(tables / name) == node.expected(name)
