"""An ingest in a process of its own, on the JVM of the test session, that kills itself with SIGKILL at a named step.

Run as `python -m tests.spark_sink.ingestion.killed_ingest <node> <tables> <step or ->` with the JVM's gateway in
the environment.
"""

import os
import signal
import sys
from pathlib import Path

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from spark_sink.ingestion.ingest_job import IngestJob
from spark_sink.ingestion.step import Step


def borrowed_session() -> SparkSession:
    """Return a session on a JVM that another process started."""
    gateway = launch_gateway()  # type: ignore[no-untyped-call]
    running = gateway.jvm.org.apache.spark.SparkContext.getOrCreate()
    context = gateway.jvm.org.apache.spark.api.java.JavaSparkContext(running)
    conf = SparkConf(_jconf=context.getConf())
    return SparkSession(SparkContext(gateway=gateway, jsc=context, conf=conf))


def main(node: str, tables: str, last_step: str) -> None:
    def on_step(step: Step) -> None:
        if step.value == last_step:
            os.kill(os.getpid(), signal.SIGKILL)

    job = IngestJob(borrowed_session(), Path(node), Path(tables), progress=lambda *_: None, on_step=on_step)
    job.run()
    os._exit(0)  # the JVM is not ours to stop


if __name__ == "__main__":
    main(*sys.argv[1:])
