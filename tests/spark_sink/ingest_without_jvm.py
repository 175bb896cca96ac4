"""An ingest in a process of its own whose JVM is killed with SIGKILL, from outside it, at a named
moment.

Run as `python -m tests.spark_sink.ingest_without_jvm <node> <tables> <moment>`; a moment is a
failpoint, `writing` for as soon as Spark has begun to write files, or `both`, where driver and JVM
die together then. Exits with 3 when ingest raised what it says for a Spark that is gone.
"""

import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession

import spark_sink
from spark_sink.ingestion import IngestJob
from wal import failpoint
from wal.errors import StorageFailed

LOST = 3
LOOK_S = 0.001
MID_WRITE = frozenset({"writing", "both"})


class Killer:
    """Ends the JVM of a session, once, for good."""

    def __init__(self, spark: SparkSession, tables: Path) -> None:
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        self._pid = int(jvm.java.lang.ProcessHandle.current().pid())
        self._tables = tables

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def kill_while_writing(self, *, driver_too: bool) -> None:
        """Watch from another thread: the one that writes waits for Spark."""
        threading.Thread(target=self._watch, kwargs={"driver_too": driver_too}, daemon=True).start()

    def _watch(self, *, driver_too: bool) -> None:
        look = threading.Event()
        while not any(self._tables.glob("*/cut-*/**/*.parquet")):
            look.wait(LOOK_S)
        self.kill()
        if driver_too:
            os.kill(os.getpid(), signal.SIGKILL)


def main(node: str, tables: str, moment: str) -> None:
    spark = spark_sink.session(**{"spark.master": "local[2]", "spark.driver.memory": "512m"})
    killer = Killer(spark, Path(tables))
    if moment in MID_WRITE:
        failpoint.arm(
            "ingest.intended", partial(killer.kill_while_writing, driver_too=moment == "both")
        )
    else:
        failpoint.arm(moment, killer.kill)
    job = IngestJob(spark, Path(node), Path(tables), progress=lambda *_: None)
    try:
        job.run()
    except StorageFailed as error:
        if "the Java process of Spark is gone" not in str(error):
            raise
        print(error, file=sys.stderr)
        os._exit(LOST)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
