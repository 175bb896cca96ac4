"""An ingest in a process of its own, on the JVM of another: what kills it takes no JVM along, and
none is started for it.

Run as `python -m tests.chaos.borrowed_spark <node> <tables> <bytes of a commit>` with `environment`
in the environment.
"""

import os
import sys
from pathlib import Path

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from spark_sink.ingestion import IngestJob
from wal.failpoint import ENVIRONMENT_VARIABLE

ROOT = Path(__file__).resolve().parents[2]


def environment(spark: SparkSession, armed: str) -> dict[str, str]:
    """Return what a process needs to borrow the JVM of a session, with failpoints armed."""
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    parameters = gateway.gateway_parameters
    return {
        **os.environ,
        "PYSPARK_GATEWAY_PORT": str(parameters.port),
        "PYSPARK_GATEWAY_SECRET": parameters.auth_token,
        "PYTHONPATH": str(ROOT),
        ENVIRONMENT_VARIABLE: armed,
    }


def borrowed_session() -> SparkSession:
    """Return a session on a JVM that another process started."""
    gateway = launch_gateway()  # type: ignore[no-untyped-call]
    running = gateway.jvm.org.apache.spark.SparkContext.getOrCreate()
    context = gateway.jvm.org.apache.spark.api.java.JavaSparkContext(running)
    conf = SparkConf(_jconf=context.getConf())
    return SparkSession(SparkContext(gateway=gateway, jsc=context, conf=conf))


def main(node: str, tables: str, commit_bytes_max: str) -> None:
    """Take every cut there is."""
    job = IngestJob(
        borrowed_session(),
        Path(node),
        Path(tables),
        progress=lambda *_: None,
        commit_bytes_max=int(commit_bytes_max),
    )
    job.run()
    sys.stdout.flush()
    os._exit(0)  # the JVM is not ours to stop


if __name__ == "__main__":
    main(*sys.argv[1:])
