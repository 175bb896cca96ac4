"""The page on Spark, run as a reader would: block after block in one session, printing what the
page shows.
"""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from streamingnode.sync import SyncNode
from tests.test_guide import check_blocks

pytestmark = pytest.mark.spark

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"


def test_every_block_of_the_spark_page_prints_what_it_shows(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    session: dict[str, object] = {}
    try:
        check_blocks(PAGE, session)
        assert session["spark"] is spark
    finally:
        if isinstance(node := session.get("node"), SyncNode):
            node.close()
