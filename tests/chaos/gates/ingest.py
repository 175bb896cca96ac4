"""An ingest that dies at each of its steps, again and again, while its tables stay states of the
node at a cut.

A life is one node with some cuts and empty tables. An ingest dies at a failpoint, or meets an error
there; then another at the next one, and in the end one comes through. Kept, after each: every
version of every table is its collection at the cut the version names, cuts ascend, and after the
last all tables are at the newest cut. The driver dies, not the JVM.
"""

import asyncio
import dataclasses
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos.cut_states import States, make_cuts
from tests.chaos.failpoint_table import FAILPOINTS
from tests.chaos.gate import Gate, LifeResult, Settings, run_lives
from tests.chaos.nursery import Nursery
from tests.chaos.report import GateReport

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CRASHES_IN_A_LIFE = 5
PLACES = tuple(name for name in FAILPOINTS if name.startswith("ingest."))
PLACE = "crash at: {}"
ERROR_SHARE = 0.25
FIRST_HIT_SHARE = 0.7
HIT_MAX = 3
ATTEMPTS_MAX = 4
"""For each crash: not every place is passed so often, or in every node."""
PRINTED_MAX = 800
COMMIT_BYTES = (1, 1 << 30)
"""One commit for each cut, or one for all."""
INGEST_S_MAX = 600.0
MASTER = "local[2]"
MEMORY = "1g"


def lacking() -> str | None:
    """Say what the gate needs and this installation does not have."""
    return None if find_spec("pyspark") else "needs pyspark — pip install '.[spark]'"


def run(gate: Gate, settings: Settings) -> GateReport:
    """Run the gate on one JVM."""
    import spark_sink

    spark = spark_sink.session(**{"spark.master": MASTER, "spark.driver.memory": MEMORY})
    report = run_lives(gate, settings, partial(live, spark), tries_in_a_life=CRASHES_IN_A_LIFE)
    covered = {place: report.covered.get(place, 0) for place in map(PLACE.format, PLACES)}
    return dataclasses.replace(report, covered=covered)


def live(spark: "SparkSession", _: Nursery, root: Path, seed: int, crashes: int) -> LifeResult:
    """Let ingests of one node die so often, then one come through."""
    choose = random.Random(seed)
    result = LifeResult()
    states = asyncio.run(make_cuts(root / "node", choose))
    ingests = _Ingests(spark, root, choose.choice(COMMIT_BYTES), states, result)
    for attempt in range(ATTEMPTS_MAX * crashes):
        if result.tried == crashes or result.findings:
            break
        place = PLACES[(seed * CRASHES_IN_A_LIFE + attempt) % len(PLACES)]
        action = "error" if choose.random() < ERROR_SHARE else "kill"
        hit = 1 if choose.random() < FIRST_HIT_SHARE else choose.randint(2, HIT_MAX)
        ingests.run(place, f"{place}={action}@{hit}")
    if not result.findings:
        ingests.run("the end", "")
    return result


@dataclass(frozen=True, slots=True)
class _Ingests:
    """Ingest after ingest of one node into the same tables; after one that comes through, into new
    ones.
    """

    spark: "SparkSession"
    root: Path
    commit_bytes_max: int
    states: States
    result: LifeResult

    def run(self, place: str, armed: str) -> None:
        """Run an ingest with failpoints armed, count how it ended, and judge its tables."""
        code, printed = self._ended(armed)
        if code == -signal.SIGKILL:
            self.result.tried += 1
            self.result.covered[PLACE.format(place)] += 1
        elif code == 1 and f"[Errno 5] failpoint {place}" in printed:
            self.result.tried += 1
            self.result.counts["errors that ended an ingest"] += 1
        elif code != 0:
            self.result.findings.append(
                f"{armed or 'the last ingest'} ended with {code}: {printed[-PRINTED_MAX:]}"
            )
        elif armed:
            self.result.counts[
                "ingests that did not come past the place, or outlived an error"
            ] += 1
        found = _findings(self.root / "tables", self.states, whole=code == 0)
        self.result.findings += [f"after {place}: {finding}" for finding in found]
        if code == 0 and not self.result.findings:
            shutil.rmtree(self.root / "tables")
            shutil.rmtree(self.root / "node" / "leases", ignore_errors=True)

    def _ended(self, armed: str) -> tuple[int, str]:
        from tests.chaos.borrowed_spark import ROOT, environment

        arguments = [str(self.root / "node"), str(self.root / "tables"), str(self.commit_bytes_max)]
        ended = subprocess.run(
            [sys.executable, "-m", "tests.chaos.borrowed_spark", *arguments],
            env=environment(self.spark, armed),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=INGEST_S_MAX,
            check=False,
        )
        return ended.returncode, ended.stderr


def _findings(tables: Path, states: States, *, whole: bool = False) -> Iterator[str]:
    """Yield what is wrong with tables; with `whole`, also what they lack of the newest cut."""
    from spark_sink.table import OpenTable

    live = set(states[max(states)])
    found = set[int]()
    for path in sorted(tables.iterdir()) if tables.is_dir() else ():
        table = None if path.name.startswith(".") else OpenTable.load(path)
        if table is None:
            continue
        versions = [version for version in table.history() if version.note.cut in states]
        cuts = [version.note.cut for version in versions]
        if sorted(set(cuts)) != sorted(cuts):
            yield f"{path.name} has taken a cut twice: {sorted(cuts)}"
        for version in versions:
            wanted = states[version.note.cut].get(version.note.collection_id)
            if wanted is not None and _rows(path, version.version) != sorted(wanted.items()):
                yield (
                    f"{path.name} version {version.version} is not its collection "
                    f"at cut {version.note.cut}"
                )
        if table.identity is not None and "@" not in path.name:
            found.add(table.identity.collection_id)
    if whole and found != live:
        yield f"there are tables of collections {sorted(found)}, and collections {sorted(live)}"


def _rows(path: Path, version: int) -> list[tuple[int, int]]:
    from deltalake import DeltaTable

    table = DeltaTable(str(path), version=version).to_pyarrow_table(columns=["key", "value"])
    keys, values = (table[name].to_numpy().tolist() for name in ("key", "value"))
    return sorted(zip(keys, values, strict=True))
