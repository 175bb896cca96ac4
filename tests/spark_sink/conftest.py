"""One Spark session for the whole suite, and a node directory with its model for each test."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import spark_sink
from spark_sink import commit, ingestion
from spark_sink.ingestion import COMMIT_BYTES_MAX, IngestJob, IngestReport
from tests.spark_sink.node_builder import NodeBuilder
from wal.failpoint import failpoint

Ingest = Callable[..., IngestReport]

STEPS = tuple(
    f"ingest.{name}"
    for name in (
        *("created", "intended", "written", "sealed", "committed"),
        *("finished", "leased", "released", "retired"),
    )
)
"""The failpoints of an ingest between two effects on disk: a job killed at each leaves a different
disk behind.
"""


@contextmanager
def at_steps(on_step: Callable[[str], None]) -> Iterator[None]:
    """Call `on_step` with the name of each step an ingest of this process comes to."""

    def reached(name: str) -> None:
        failpoint(name)
        if name in STEPS:
            on_step(name)

    with pytest.MonkeyPatch.context() as patched:
        for module in (commit, ingestion):
            patched.setattr(module, "failpoint", reached)
        yield


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
        on_step: Callable[[str], None] = lambda _: None,
        commit_bytes_max: int = COMMIT_BYTES_MAX,
        every_cut: bool = False,
        into: Path | None = None,
    ) -> IngestReport:
        job = IngestJob(
            spark,
            node.path,
            into or tables,
            progress=lambda _stage, _done, _total: None,
            commit_bytes_max=commit_bytes_max,
            every_cut=every_cut,
        )
        with at_steps(on_step):
            return job.run()

    return run
