"""A Spark whose JVM is gone, told by its name instead of by whichever call met it first."""

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from spark_sink.errors import SparkLost
from wal.errors import StreamingNodeError


@contextmanager
def telling_lost_jvm(spark: SparkSession) -> Iterator[None]:
    """Turn what fails in the block into `SparkLost` when Spark's JVM does not answer any more."""
    try:
        yield
    except StreamingNodeError:
        raise
    except Exception as error:
        if answers(spark):
            raise
        raise SparkLost(
            "the Java process of Spark is gone — run it again in a new process; what is committed stays"
        ) from error


def answers(spark: SparkSession) -> bool:
    """Whether the session's JVM is there: asked, because a broken connection looks like many things."""
    try:
        jvm = spark.sparkContext._jvm  # noqa: SLF001 - PySpark has no public way to its JVM
        return jvm is not None and bool(jvm.java.lang.System.nanoTime())
    except Exception:  # noqa: BLE001 - py4j raises its own errors, those of sockets, and TypeError for a class it cannot see
        return False
