"""One Spark session for the whole suite, and a node directory with its model for each test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import spark_sink
from spark_sink.commit import Step
from spark_sink.ingestion import COMMIT_BYTES_MAX, IngestJob, IngestReport
from tests.spark_sink.node_builder import NodeBuilder

Ingest = Callable[..., IngestReport]


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = spark_sink.session(**{"spark.master": "local[2]", "spark.driver.memory": "1g"})
    yield session
    session.stop()


@pytest.fixture
def node(tmp_path: Path) -> NodeBuilder:
    return NodeBuilder(tmp_path / "data")


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    return tmp_path / "tables"


@pytest.fixture
def ingest(spark: SparkSession, node: NodeBuilder, tables: Path) -> Ingest:
    """The job as `spark_sink.ingest` runs it, without asking a node process for a cut."""

    def run(
        *,
        on_step: Callable[[Step], None] | None = None,
        commit_bytes_max: int = COMMIT_BYTES_MAX,
        every_cut: bool = False,
        now_s: float = 0.0,
        into: Path | None = None,
    ) -> IngestReport:
        job = IngestJob(
            spark,
            node.path,
            into or tables,
            progress=lambda _stage, _done, _total: None,
            on_step=on_step,
            commit_bytes_max=commit_bytes_max,
            every_cut=every_cut,
            now_s=lambda: now_s,
        )
        return job.run()

    return run
