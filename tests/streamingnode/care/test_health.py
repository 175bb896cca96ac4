"""What `check` makes of what a running node tells: from where on it warns, from where on it is
critical, and what to do.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import msgspec
import pyarrow as pa
import pytest

import streamingnode as sn
from flusher.flusher import FlusherState
from streamingnode.care.findings import Finding, Report, Severity
from streamingnode.care.health import Thresholds, flusher_lag_s, judge
from streamingnode.holders import ReaderInfo, TransactionInfo
from streamingnode.statistics import NodeStatistics, SpaceStatistics
from wal.timetick import compose_tick

replace = msgspec.structs.replace
WARNING = Severity.WARNING
CRITICAL = Severity.DAMAGE
DAY_S = 86_400


@pytest.fixture(scope="module")
def well() -> NodeStatistics:
    """What a node tells that is well, on a disk with much space."""

    async def ask() -> NodeStatistics:
        async with sn.open_node(None) as node:
            await node.create_collection(
                "c", pa.schema([pa.field("id", pa.int64())]), primary_key="id"
            )
            return await node.statistics()

    space = SpaceStatistics(
        level="ample",
        free_bytes=1 << 40,
        needed_bytes=1 << 28,
        log_bytes=0,
        reserve_bytes=0,
        queued_bytes=0,
    )
    return replace(anyio.run(ask), space=space, uptime_s=1e9)


@contextmanager
def findings_of(
    told: NodeStatistics, *, readers: Any = (), transactions: Any = (), **limits: Any
) -> Iterator[list[Finding]]:
    report = Report()
    judge(told, readers, transactions, Thresholds(**limits), report)
    yield report.findings


def worst(told: NodeStatistics, **options: Any) -> Severity | None:
    with findings_of(told, **options) as found:
        assert all(each.next_step for each in found)
        assert len(found) <= 1
        return found[0].severity if found else None


def waiting(told: NodeStatistics, seconds: int, **changes: Any) -> NodeStatistics:
    """Return what is told when the oldest row has waited so long for its cut."""
    since = compose_tick(told.at_ms - seconds * 1000)
    return replace(
        told, flusher=dataclasses.replace(told.flusher, unflushed_since_tick=since, **changes)
    )


def test_a_node_that_is_well_has_no_finding(well: NodeStatistics) -> None:
    assert worst(well) is None


@pytest.mark.parametrize(
    "seconds, severity", [(119, None), (120, WARNING), (899, WARNING), (900, CRITICAL)]
)
def test_a_row_that_waits_long_for_its_cut_is_told_of(
    well: NodeStatistics, seconds: int, severity: Severity | None
) -> None:
    assert worst(waiting(well, seconds)) is severity
    assert worst(waiting(well, seconds), flusher_lag_s=(1e6, 1e7)) is None


def test_what_waited_while_the_node_was_closed_does_not_count(well: NodeStatistics) -> None:
    assert flusher_lag_s(replace(waiting(well, 9_000), uptime_s=3.0)) == 3.0
    assert flusher_lag_s(well) == 0


def test_a_flusher_that_has_stopped_is_critical(well: NodeStatistics) -> None:
    stopped = waiting(well, 1, state=FlusherState.FAILED, last_error="damage")
    with findings_of(stopped) as (found,):
        assert (found.severity, found.place) == (CRITICAL, "flusher")
        assert "damage" in found.detail


@pytest.mark.parametrize(
    "mib, severity", [(4096, None), (4095, WARNING), (256, WARNING), (255, CRITICAL)]
)
def test_a_disk_is_judged_as_doctor_does(
    well: NodeStatistics, mib: int, severity: Severity | None
) -> None:
    assert well.space is not None
    short = replace(well, space=replace(well.space, free_bytes=mib << 20))
    assert worst(short) is severity


def test_a_disk_on_which_the_node_refuses_appends_is_critical_whatever_was_asked_for(
    well: NodeStatistics,
) -> None:
    assert well.space is not None
    full = replace(well, space=replace(well.space, free_bytes=1, needed_bytes=2))
    assert worst(full, free_bytes=(0, 0)) is CRITICAL


def test_a_node_in_memory_has_no_disk(well: NodeStatistics) -> None:
    assert worst(replace(well, space=None)) is None


@pytest.mark.parametrize("state", ["recovering", "waiting", "failed"])
def test_a_log_that_takes_no_appends_is_critical(well: NodeStatistics, state: str) -> None:
    with findings_of(replace(well, log=replace(well.log, state=state, last_error="no disk"))) as (
        found,
    ):
        assert (found.severity, found.place) == (CRITICAL, "log")
        assert "no disk" in found.detail


@pytest.mark.parametrize("age_s, severity", [(59.0, None), (60.0, WARNING), (300.0, CRITICAL)])
def test_the_oldest_transaction_is_judged_by_its_age(
    well: NodeStatistics, age_s: float, severity: Severity | None
) -> None:
    made = {
        "state": "in_flight",
        "collections": (),
        "bodies": 0,
        "bytes": 0,
        "idle_s": 0.0,
        "keepalive_s": 600.0,
    }
    transactions = [
        TransactionInfo(txn_id=id_, age_s=age, **made)  # type: ignore[arg-type]
        for id_, age in ((1, 0.0), (2, age_s))
    ]
    assert worst(well, transactions=transactions) is severity
    with findings_of(well, transactions=transactions) as found:
        assert all("txn abort DIR 2" in each.next_step for each in found)


@pytest.mark.parametrize(
    "behind_s, severity", [(DAY_S - 1, None), (DAY_S, WARNING), (7 * DAY_S, CRITICAL)]
)
def test_a_reader_that_holds_the_log_is_judged_by_how_long(
    well: NodeStatistics, behind_s: float, severity: Severity | None
) -> None:
    reader = ReaderInfo(
        collections=("c",),
        name="r",
        is_open=False,
        message_id="rocks/1",
        tick=1,
        backlog=1,
        behind_s=behind_s,
    )
    assert worst(well, readers=[reader]) is severity
    assert worst(well, readers=[replace(reader, backlog=0)]) is None, (
        "nothing is behind it, so it holds nothing"
    )
