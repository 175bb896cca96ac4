"""The session as a stranger's machine starts it, under `spark-submit` and beside Spark Connect,
too.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.sql import SparkSession

import spark_sink
from spark_sink.runtime import (
    LOCAL_SETTINGS,
    LOOPBACK,
    PYTHON,
    WORKER_PATH,
    LazySession,
    _completed,
    _launcher,
    find_java,
)
from tests.spark_sink.node_builder import NodeBuilder, orders
from wal.errors import StorageFailed

ROOT = Path(__file__).resolve().parents[2]

WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None  # as if it were not installed
import spark_sink
try:
    spark_sink.read_table
except Exception as error:
    print(error.code, error.package)
"""


@pytest.mark.parametrize("package", ["pyspark", "deltalake"])
def test_what_needs_a_package_that_is_not_installed_names_it(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, package],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"PACKAGE_MISSING {package}\n", "")


def test_a_session_listens_to_this_machine_alone(spark: SparkSession) -> None:
    assert spark.sparkContext.getConf().get("spark.driver.host") == "127.0.0.1"


# of forking beside threads: that is what it is about
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_does_not_talk_over_the_sockets_of_its_parents_session(
    spark: SparkSession,
) -> None:
    pid = os.fork()
    if not pid:
        refused = 0
        for call in (spark_sink.session, LazySession(spark).get, LazySession().get):
            try:
                call()
            except StorageFailed as error:
                refused += "spawn method" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert spark.range(3).count() == 3


@pytest.mark.parametrize("module", ["spark_sink", "spark_sink.source"])
def test_what_an_executor_imports_loads_neither_store_nor_event_loop(module: str) -> None:
    forbidden = ["rocksdict", "anyio", "deltalake", "streamingnode"]
    program = f"import sys, {module}; print([name for name in {forbidden} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert said.stdout == "[]\n"


def test_importing_the_package_does_not_load_spark() -> None:
    program = "import sys, spark_sink; print('pyspark' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert said.stdout == "False\n"


SUBMITTED = """
import json, sys, spark_sink
spark = spark_sink.session(spark_pyspark_python=sys.argv[1])
context = spark.sparkContext
worker = context.parallelize([1], 1).map(lambda _: __import__("sys").executable).first()
print(json.dumps([dict(context.getConf().getAll()), worker, spark is spark_sink.session()]))
"""


def without_spark(**more: str) -> dict[str, str]:
    """Return the environment of a process that has nothing of this one's Spark."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SPARK_", "PYSPARK_"))
    }
    return {**kept, "PYTHONPATH": str(ROOT), **more}


@pytest.mark.spark
def test_a_submitted_program_has_what_it_was_submitted_with_and_the_python_it_asks_for(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    python = tmp_path / "python"
    program.write_text(SUBMITTED)
    python.symlink_to(sys.executable)
    given = {
        "spark.master": "local[3]",
        "spark.app.name": "mine",
        "spark.driver.host": "localhost",
        "spark.sql.session.timeZone": "Asia/Tokyo",
        "spark.sql.shuffle.partitions": "5",
    }
    options = [part for name, value in given.items() for part in ("--conf", f"{name}={value}")]
    done = subprocess.run(
        [Path(pyspark.__file__).parent / "bin" / "spark-submit", *options, program, python],
        env=without_spark(JAVA_HOME=str(_launcher(find_java())), PYSPARK_PYTHON=sys.executable),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    settings, worker, is_same = json.loads(done.stdout)
    assert given.items() <= settings.items()
    assert (worker, is_same) == (str(python), True)


@pytest.mark.spark
def test_only_a_local_master_gets_settings_of_one_machine(spark: SparkSession) -> None:
    local, cluster = (
        _completed({"spark.master": master}) for master in ("local[2]", "spark://10.0.0.1:7077")
    )
    of_one_machine = {*LOCAL_SETTINGS, *LOOPBACK, WORKER_PATH}
    assert local.keys() - cluster.keys() == of_one_machine
    assert cluster["spark.sql.session.timeZone"] == "UTC"
    elsewhere = _completed(
        {"spark.master": "local[2]", "spark.driver.host": "10.0.0.2", "spark.ui.enabled": "true"}
    )
    assert (elsewhere.get("spark.driver.bindAddress"), elsewhere["spark.ui.enabled"]) == (
        None,
        "true",
    )


@pytest.mark.spark
def test_a_chosen_python_is_the_callers_then_the_environments_then_this_one(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/environment/python")
    assert _completed({PYTHON: "/given/python"})[PYTHON] == "/given/python"
    assert _completed({})[PYTHON] == "/environment/python"
    monkeypatch.delenv("PYSPARK_PYTHON")
    assert _completed({})[PYTHON] == sys.executable


@pytest.mark.spark
def test_a_session_beside_the_active_one_can_be_registered_too(spark: SparkSession) -> None:
    spark.createDataFrame([(1,)], "id int")  # which makes it the active one
    for _ in range(2):
        other = spark_sink.register(spark.newSession())
        with pytest.raises(Exception, match="is no node directory"):
            other.read.format("streamingnode").options(node="/nowhere", subscribe="orders").load()


CONNECTED = """
import json, sys
from pathlib import Path
from pyspark.sql import SparkSession
import spark_sink
from wal.errors import StorageFailed
server, node, tables = sys.argv[1], *map(Path, sys.argv[2:])
mine = SparkSession.builder.remote(server).getOrCreate()
mine.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
spark = spark_sink.session()
said = [spark is mine, spark.conf.get("spark.sql.session.timeZone")]
said.append(spark_sink.ingest(None, node, tables, request_cut=False).tables[0].road)
said.append(spark_sink.read_table(spark, tables / "orders").count())
for file in (tables / "orders").rglob("*.parquet"):
    content = file.read_bytes()
    file.write_bytes(content[:4] + bytes(len(content) - 4))
try:
    spark_sink.read_table(spark, tables / "orders").count()
except Exception as error:
    failure = error
with_job = spark_sink.runtime.LazySession(spark)
try:
    with with_job.telling_loss():
        raise failure
except Exception as error:
    said.append(error is failure)
said.append(spark.range(3).count())
print(json.dumps(said))
"""


@pytest.fixture
def connect_server(spark: SparkSession) -> Iterator[str]:
    """A server of Spark Connect in the Java process of the suite."""
    jvm: Any = spark._jvm
    context = spark.sparkContext._jsc.sc()
    service = getattr(
        getattr(jvm.org.apache.spark.sql.connect.service, "SparkConnectService$"), "MODULE$"
    )
    context.conf().set("spark.connect.grpc.binding.address", "127.0.0.1")
    context.conf().set("spark.connect.grpc.binding.port", "0")
    service.start(context)
    yield f"sc://127.0.0.1:{service.localPort()}"
    nothing = jvm.scala.Option.apply(None)
    service.stop(nothing, nothing)


@pytest.mark.spark
def test_a_session_of_spark_connect_is_returned_as_it_is_and_tells_its_own_errors(
    connect_server: str, node: NodeBuilder, tables: Path
) -> None:
    node.create()
    node.insert("orders", orders(1, 2, 3))
    node.cut()
    spark_sink.ingest(None, node.path, tables, request_cut=False)
    node.upsert("orders", orders(2, amount=2.0))
    node.cut()
    done = subprocess.run(
        [sys.executable, "-c", CONNECTED, connect_server, node.path, tables],
        env=without_spark(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, "Asia/Tokyo", "spark", 3, True, 3]
