"""All gates by name. A gate that needs what a machine lacks says so; it is imported when it
runs.
"""

import dataclasses
from collections.abc import Callable
from importlib import import_module

from tests.chaos.failpoint_table import FAILPOINTS
from tests.chaos.forgetful.power import lacking as lacking_for_power
from tests.chaos.gate import Gate, Settings
from tests.chaos.gates.ingest import lacking as lacking_for_ingest
from tests.chaos.gates.syscalls import lacking as lacking_for_syscalls
from tests.chaos.report import GateReport
from tests.chaos.small_disk import lacking as lacking_for_full


def _run_of(module: str) -> Callable[[Gate, Settings], GateReport]:
    def run(gate: Gate, settings: Settings) -> GateReport:
        report: GateReport = import_module(module).run(gate, settings)
        return report

    return run


def _gate(
    name: str,
    *,
    each_commit: int,
    target: int,
    unit: str,
    lacking: Callable[[], str | None] = lambda: None,
) -> Gate:
    run = _run_of(f"tests.chaos.gates.{name.replace('-', '_')}")
    return Gate(
        name=name, run=run, each_commit=each_commit, target=target, unit=unit, lacking=lacking
    )


def _first_stretch() -> int:
    first: int = import_module("tests.chaos.gates.bytes").first_seed()
    return first


INGEST = tuple(name for name in FAILPOINTS if name.startswith("ingest."))
OUTSIDE_SPARK = tuple(name for name in FAILPOINTS if not name.startswith(("ingest.", "compact.")))


GATES: dict[str, Gate] = {
    gate.name: gate
    for gate in (
        _gate("kill", each_commit=100, target=10_000, unit="kills"),
        _gate("failpoints", each_commit=40, target=100 * len(OUTSIDE_SPARK), unit="crashes"),
        _gate(
            "ingest",
            each_commit=5,
            target=100 * len(INGEST),
            unit="crashes",
            lacking=lacking_for_ingest,
        ),
        _gate("rocksmq", each_commit=20, target=2_000, unit="kills"),
        _gate("takeover", each_commit=12, target=1_000, unit="takeovers"),
        _gate(
            "syscalls",
            each_commit=8,
            target=1_000,
            unit="injected faults",
            lacking=lacking_for_syscalls,
        ),
        _gate("full", each_commit=6, target=1_000, unit="full disks", lacking=lacking_for_full),
        _gate("rot", each_commit=6 * 64, target=100_000, unit="flipped bits"),
        dataclasses.replace(
            _gate("bytes", each_commit=128, target=30_000, unit="bytes"),
            first_seed=_first_stretch,
        ),
        _gate("recovery", each_commit=3, target=100, unit="opens"),
        _gate("soak", each_commit=60, target=24 * 3600, unit="seconds"),
        _gate("simulation", each_commit=2_000, target=1_000_000, unit="seeds"),
        _gate("bugs", each_commit=16, target=70, unit="seeded bugs"),
        _gate("steps", each_commit=20_000, target=10_000_000, unit="steps"),
        _gate("fuzz", each_commit=50_000, target=200_000_000, unit="inputs"),
        _gate("network", each_commit=12, target=1_000, unit="faults"),
        _gate("power", each_commit=20, target=2_000, unit="power cuts", lacking=lacking_for_power),
    )
}
