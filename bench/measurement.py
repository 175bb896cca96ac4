"""One measured number, what it is compared with, and what was hoped for. No I/O."""

import statistics
from collections.abc import Sequence

import msgspec


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """The median of some runs of one case; `baseline` is that of the baseline's runs in between, 0
    when there is none.

    `aim` is the ratio to the baseline to reach, or, without a baseline, the value not to exceed; 0
    when nothing was hoped.
    """

    name: str
    case: str
    value: float
    unit: str
    baseline: float = 0.0
    aim: float = 0.0
    note: str = ""

    @property
    def ratio(self) -> float:
        """The value as a part of the baseline; 0 without one."""
        return self.value / self.baseline if self.baseline else 0.0

    @property
    def reached(self) -> bool | None:
        """Whether the aim is reached; None when there is none."""
        if not self.aim:
            return None
        return self.ratio >= self.aim if self.baseline else self.value <= self.aim


def median(values: Sequence[float]) -> float:
    """Return the middle value, 0 when there is none."""
    return statistics.median(values) if values else 0.0


HEADINGS = ("benchmark", "case", "median", "unit", "baseline", "ratio", "aim", "")


def table_row(measured: Measurement) -> tuple[str, ...]:
    """Return the cells of one line under `HEADINGS`."""
    has_baseline = bool(measured.baseline)
    aim = f"{'>=' if has_baseline else '<='} {measured.aim:g}" if measured.aim else "-"
    verdict = {True: "reached", False: "MISSED", None: ""}[measured.reached]
    return (
        measured.name,
        measured.case,
        format_number(measured.value),
        measured.unit,
        format_number(measured.baseline) if has_baseline else "-",
        f"{measured.ratio:.2f}" if has_baseline else "-",
        aim,
        f"{verdict} {measured.note}".strip(),
    )


def format_number(value: float) -> str:
    """Return a number with three significant digits, or whole when it is large."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def as_document(measured: Measurement) -> dict[str, object]:
    """Return the measurement with its ratio and verdict, as machines read it."""
    return {
        **msgspec.structs.asdict(measured),
        "ratio": round(measured.ratio, 4),
        "reached": measured.reached,
    }
