"""The picture of a demo run: memory of the top processes, append rate, and how ticks, cuts and table versions follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamingnode.demo.recorder import Round
from wal.timetick import physical_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PROCESSES_MAX = 6
"""More lines than this cannot be told apart."""


@dataclass(frozen=True, slots=True)
class ReportData:
    """What the picture shows; `memory` maps a process to its (seconds, bytes) points, ticks are of cuts and versions."""

    rounds: Sequence[Round]
    memory: Mapping[str, Sequence[tuple[float, int]]]
    cut_ticks: Sequence[int]
    version_ticks: Mapping[str, Sequence[int]]


def draw_report(data: ReportData, path: Path) -> None:
    """Write the picture to `path` as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 10), layout="constrained")
    FigureCanvasAgg(figure)
    memory, rate, chain = figure.subplots(3, 1, height_ratios=[3, 2, 2])
    _draw_memory(memory, data)
    _draw_rate(rate, data.rounds)
    _draw_chain(chain, data)
    figure.suptitle("From this machine's processes to tables", fontweight="bold")
    figure.savefig(path, dpi=110)


def _draw_memory(axes: "Axes", data: ReportData) -> None:
    for process, points in list(data.memory.items())[:PROCESSES_MAX]:
        axes.plot([at for at, _ in points], [value / 2**20 for _, value in points], label=process)
    axes.set(title="Resident memory of the top processes", ylabel="MiB", xlabel="seconds")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _draw_rate(axes: "Axes", rounds: Sequence[Round]) -> None:
    counts: dict[int, int] = {}
    for sampled in rounds:
        counts[int(sampled.at_s)] = counts.get(int(sampled.at_s), 0) + sampled.rows
    axes.bar([second + 0.5 for second in counts], list(counts.values()), width=0.9, color="#93c5fd")
    axes.set(title="Appended rows and time to commit a round", ylabel="sample rows per second", xlabel="seconds")
    latency = axes.twinx()
    latency.plot([r.at_s for r in rounds], [r.commit_s * 1000 for r in rounds], color="#b45309", linewidth=1)
    latency.set_ylabel("ms to durable", color="#b45309")
    latency.set_ylim(bottom=0)


def _draw_chain(axes: "Axes", data: ReportData) -> None:
    start = physical_ms(data.rounds[0].time_tick)
    lanes: dict[str, Sequence[int]] = {"rounds": [r.time_tick for r in data.rounds], "cuts": data.cut_ticks}
    lanes |= {f"table {name}": ticks for name, ticks in data.version_ticks.items()}
    for lane, (label, ticks) in enumerate(lanes.items()):
        seconds = [(physical_ms(tick) - start) / 1000 for tick in ticks]
        axes.plot(seconds, [lane] * len(ticks), "|" if label == "rounds" else "o", markersize=9)
    for tick in data.cut_ticks:
        axes.axvline((physical_ms(tick) - start) / 1000, color="#cbd5e1", linewidth=1, zorder=0)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    axes.set(title="Ticks of rounds, cuts, and the table versions made from them", xlabel="seconds (by tick)")
