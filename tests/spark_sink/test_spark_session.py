"""The session as a stranger's machine starts it, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import spark_sink
from spark_sink.runtime import LazySession
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
        [sys.executable, "-c", WITHOUT, package], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == (f"PACKAGE_MISSING {package}\n", "")


def test_a_session_listens_to_this_machine_alone(spark: SparkSession) -> None:
    assert spark.sparkContext.getConf().get("spark.driver.host") == "127.0.0.1"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside threads: that is what it is about
def test_a_forked_child_does_not_talk_over_the_sockets_of_its_parents_session(spark: SparkSession) -> None:
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
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"


def test_importing_the_package_does_not_load_spark() -> None:
    program = "import sys, spark_sink; print('pyspark' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"
