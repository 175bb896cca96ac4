"""What holds in every test: asyncio through anyio, no blocking on the event loop, and no silent
skips in CI.
"""

import asyncio
import functools
import inspect
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType
from zlib import crc32

import pytest
from blockbuster import BlockBuster
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from streamingnode.opening import load_what_is_slow

load_what_is_slow()
ROOT = Path(__file__).resolve().parent.parent

# A shell that starts this in the background, or `nohup`, has signals ignored, and programs that
# tests start inherit that: they would outlive the signal that is to end them.
for _each in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_each) is signal.SIG_IGN:
        _default = signal.default_int_handler if _each is signal.SIGINT else signal.SIG_DFL
        signal.signal(_each, _default)
IN_CI = os.environ.get("CI", "").lower() not in {"", "0", "false"}
# how a skip for want of something starts: `pytest.skip("needs two disks")`
LACKING = "Skipped: needs "

SPARK_SETTINGS = ROOT / "tests" / "spark_sink"  # its spark-defaults.conf
os.environ.setdefault("SPARK_CONF_DIR", str(SPARK_SETTINGS))

ENDED_AFTER = 0.8  # of the time after which pytest-timeout ends a test

# Deadlines are off: a shared machine stalls for longer than any property takes.
settings.register_profile("dev", max_examples=30, deadline=None, print_blob=True)
settings.register_profile(
    "nightly",
    max_examples=5000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run async tests on asyncio only; the node does not run on trio."""
    return "asyncio"


@pytest.fixture
def default_interrupt() -> Iterator[None]:
    """Children take an interrupt, also where this process was started to ignore it, as in the
    background.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def no_blocking_on_the_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail an async test in which our code reads, writes, stats, sleeps or waits for a lock on the
    event loop.

    Only calls with one of our packages on the stack count, so a test body may prepare its files as
    it likes.
    """
    node = request.node
    if node.get_closest_marker("anyio") is None or node.get_closest_marker("may_block") is not None:
        yield
        return
    detector = _detector()
    detector.activate()
    try:
        yield
    finally:
        detector.deactivate()


SPARK_SESSIONS = 2


class _SparkTogether(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Sends whole files to test processes, and those that use Spark to `SPARK_SESSIONS` of them.

    A Java process takes 10 s to start and to warm up, so each further session costs that much.
    """

    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        if not scope.startswith("tests/spark_sink/"):
            return scope
        return f"spark {crc32(scope.encode()) % SPARK_SESSIONS}"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Put the above in the place of `--dist loadfile`; `loadgroup` asks pytest for what it no
    longer has.
    """
    return _SparkTogether(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """End an async test that hangs from inside its loop, before pytest-timeout does from outside.

    That would leave the test where it hangs, in the task which also ends the fixtures: they would
    wait for it for ever.
    """
    test = pyfuncitem.obj
    if pyfuncitem.get_closest_marker("anyio") is None or not inspect.iscoroutinefunction(test):
        return
    marker = pyfuncitem.get_closest_marker("timeout")
    limit_s = float(
        marker.args[0]
        if marker
        else pyfuncitem.config.getoption("timeout") or pyfuncitem.config.getini("timeout")
    )

    @functools.wraps(test)
    async def bounded(*args: object, **kwargs: object) -> None:
        async with asyncio.timeout(ENDED_AFTER * limit_s):
            await test(*args, **kwargs)

    pyfuncitem.obj = bounded


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip for want of something into a failure when CI is set."""
    report = yield
    _fail_if_lacking(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for a module that skips itself."""
    report = yield
    _fail_if_lacking(report)
    return report


def _fail_if_lacking(report: pytest.TestReport | pytest.CollectReport) -> None:
    if IN_CI and report.skipped and isinstance(report.longrepr, tuple):
        path, line, reason = report.longrepr
        if reason.startswith(LACKING):
            report.outcome = "failed"
            report.longrepr = (
                f"{path}:{line}: {reason} - CI provides everything, so this may not be skipped here"
            )


@functools.cache
def _detector() -> BlockBuster:
    return BlockBuster(scanned_modules=_our_packages())


def _our_packages() -> list[ModuleType]:
    """Return stand-ins that carry the paths only: a test of `wal` must not import the other
    five.
    """
    stand_ins = []
    for marker in ROOT.glob("*/py.typed"):
        stand_in = ModuleType(marker.parent.name)
        stand_in.__path__ = [f"{marker.parent}{os.sep}"]
        stand_ins.append(stand_in)
    return stand_ins
