import asyncio
from types import SimpleNamespace

import pytest

from interceptors.chain import Chain, Interceptor, repeat
from wal.append import AppendGroup, AppendPack, Pack
from wal.errors import (
    ChannelFenced,
    Corrupt,
    Indeterminate,
    LogReopening,
    OnShutdown,
    Overloaded,
    StorageFailed,
    StreamingNodeError,
)
from wal.headers import MessageType, TimeTickHeader
from wal.message import MutableMessage

pytestmark = pytest.mark.anyio


def pack() -> Pack:
    return Pack([AppendGroup([MutableMessage(MessageType.TIME_TICK, TimeTickHeader())])])


class Scribe(Interceptor):
    """Writes down everything that happens to it."""

    def __init__(self, name: str, log: list[str], *, fail_on: str = "") -> None:
        self.name = name
        self._log = log
        self._fail_on = fail_on

    async def do_append(self, pack: Pack, append: AppendPack) -> None:
        self._note("before")
        try:
            await append(pack)
        finally:
            self._note("after")

    async def ready(self) -> None:
        self._note("ready")

    async def close(self) -> None:
        self._note("close")

    def _note(self, what: str) -> None:
        self._log.append(f"{self.name} {what}")
        if what == self._fail_on:
            raise OnShutdown(what)


class Timings:
    def __init__(self) -> None:
        self.seen: list[tuple[str, float, float, bool]] = []

    def interceptor_timed(
        self, name: str, before_s: float, after_s: float, *, failed_before: bool
    ) -> None:
        self.seen.append((name, before_s, after_s, failed_before))

    def append_ended(self, pack: Pack, seconds: float, status: str) -> None:
        raise AssertionError("the chain does not end appends, the WAL does")


def end_noting(log: list[str]) -> AppendPack:
    async def end(_: Pack) -> None:
        log.append("end")

    return end


@pytest.fixture
def counting_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(
        "interceptors.chain.time", SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    )


async def test_first_interceptor_is_outermost() -> None:
    log: list[str] = []
    append = Chain([Scribe("a", log), Scribe("b", log)], end_noting(log)).append
    await append(pack())
    assert log == ["a before", "b before", "end", "b after", "a after"]


async def test_chain_without_interceptors_is_its_end() -> None:
    end = end_noting([])
    assert Chain([], end).append is end


async def test_ready_and_close_go_outermost_first() -> None:
    log: list[str] = []
    chain = Chain([Scribe("a", log), Scribe("b", log)], end_noting(log))
    await chain.ready()
    await chain.close()
    assert log == ["a ready", "b ready", "a close", "b close"]


async def test_failing_interceptor_does_not_keep_the_others_open() -> None:
    log: list[str] = []
    chain = Chain([Scribe("a", log, fail_on="close"), Scribe("b", log)], end_noting(log))
    with pytest.raises(OnShutdown):
        await chain.close()
    assert log == ["a close", "b close"]


@pytest.mark.usefixtures("counting_clock")
async def test_observer_gets_time_before_and_after_the_next_one() -> None:
    log: list[str] = []
    timings = Timings()
    chain = Chain([Scribe("a", log), Scribe("b", log)], end_noting(log), observer=timings)
    await chain.append(pack())
    # one reading at each border: a in, next called, b in, next called, next returned, b out, next
    # returned, a out
    assert timings.seen == [("b", 1.0, 1.0, False), ("a", 1.0, 1.0, False)]


@pytest.mark.usefixtures("counting_clock")
async def test_observer_learns_that_an_interceptor_refused() -> None:
    log: list[str] = []
    timings = Timings()
    chain = Chain([Scribe("a", log, fail_on="before")], end_noting(log), observer=timings)
    with pytest.raises(OnShutdown):
        await chain.append(pack())
    assert timings.seen == [("a", 1.0, 0.0, True)]
    assert "end" not in log


@pytest.mark.usefixtures("counting_clock")
async def test_observer_is_told_of_an_append_that_failed_further_in() -> None:
    log: list[str] = []
    timings = Timings()
    parts = [Scribe("a", log), Scribe("b", log, fail_on="before")]
    with pytest.raises(OnShutdown):
        await Chain(parts, end_noting(log), observer=timings).append(pack())
    assert [(name, failed) for name, _, _, failed in timings.seen] == [("b", True), ("a", False)]


@pytest.mark.parametrize("last", [Indeterminate, LogReopening, OnShutdown, ChannelFenced])
async def test_a_worker_outlives_what_ends_its_step_and_returns_when_the_term_ends(
    last: type[StreamingNodeError],
) -> None:
    errors = [StorageFailed("no descriptor"), Overloaded("full"), Corrupt("a page"), last("over")]
    raised = list[StreamingNodeError]()

    async def step() -> None:
        raised.append(errors[len(raised)])
        raise raised[-1]

    await asyncio.wait_for(repeat(step, asyncio.Event(), 0.0), 10)
    assert raised == errors
