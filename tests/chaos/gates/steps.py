"""Random steps on a whole node against a list: the model of tests/test_model.py, for as long as
there is time.

A batch is some examples of one of the models under one seed, in a process of its own, in as many
processes as there are lanes. Counted are steps that were executed with everything compared after
them; the creation that begins each example is none. A batch that fails leaves its failing steps in
a file.
"""

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from tests.chaos.gate import Gate, LifeResult, Settings, make_report
from tests.chaos.report import GateReport

if TYPE_CHECKING:
    from tests.test_model import NodeModel

MODEL = "tests.test_model"
PHASES = (Phase.generate,)
"""A failing example is not made shorter: with a node under it that takes minutes, and the run goes
on instead.
"""
EXAMPLES_IN_A_BATCH = 10
STEPS_IN_AN_EXAMPLE = 50
"""Everything is read again after each step, so longer examples cost more for each."""
IN_MEMORY = Path("/dev/shm")
"""A crash of the model is a copy of the directory, so no disk is needed, and one that syncs costs
half of the time.
"""
SEEDS = 2**31


def run(gate: Gate, chosen: Settings) -> GateReport:
    """Run batch after batch until there were enough steps, or the time is over."""
    begun_s = time.monotonic()
    result = LifeResult()
    failed = 0
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([MODEL])
    enough = None if chosen.minutes is not None else chosen.count or gate.each_commit
    with ProcessPoolExecutor(chosen.lanes, mp_context=context) as processes:
        waiting: set[Future[LifeResult]] = set()
        for batch in _batches(chosen, begun_s):
            waiting.add(processes.submit(run_batch, batch, chosen.scratch))
            if len(waiting) >= chosen.lanes:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                failed += sum(_add(result, each.result()) for each in done)
            if enough is not None and result.tried >= enough:
                break
        failed += sum(_add(result, each.result()) for each in waiting)
    return make_report(gate, chosen, result, failed=failed, seconds=time.monotonic() - begun_s)


def run_batch(batch: int, scratch: Path | None) -> LifeResult:
    """Run the examples of one seed, in this process, and count their steps."""
    from tests.test_model import NodeModel, ThriftyNodeModel

    result = LifeResult()
    model = (NodeModel, ThriftyNodeModel)[batch % 2]
    tempfile.tempdir = str(scratch or (IN_MEMORY if IN_MEMORY.is_dir() else tempfile.gettempdir()))
    try:
        run_state_machine_as_test(
            seed(batch % SEEDS)(counting(model, result)),
            settings=settings(
                max_examples=EXAMPLES_IN_A_BATCH,
                stateful_step_count=STEPS_IN_AN_EXAMPLE,
                deadline=None,
                database=None,
                phases=PHASES,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            ),
        )
    except Exception:
        told = Path(tempfile.mkdtemp(prefix=f"chaos-steps-{batch}-")) / "failed.txt"
        told.write_text(traceback.format_exc(), "utf-8")
        again = f"python -m tests.chaos steps --count 1 --seed {batch}"
        last = traceback.format_exc(limit=0).strip().splitlines()[0]
        result.findings.append(f"{model.__name__}: {last}; steps in {told}; again: {again}")
    return result


def counting(model: "type[NodeModel]", result: LifeResult) -> "type[NodeModel]":
    """Return the model, with its examples and steps counted as they are executed."""

    class Counted(model):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            result.counts[f"examples of {model.__name__}"] += 1
            result.tried -= 1  # the creation is looked at too, and is no step

        @invariant()
        def it_was_executed(self) -> None:
            result.tried += 1

    return Counted


def _batches(chosen: Settings, begun_s: float) -> Iterator[int]:
    """Yield seeds while there is time."""
    batch = chosen.seed
    while chosen.minutes is None or time.monotonic() - begun_s < 60 * chosen.minutes:
        yield batch
        batch += 1


def _add(total: LifeResult, part: LifeResult) -> int:
    total.tried += part.tried
    total.findings += part.findings
    total.counts += part.counts
    return len(part.findings)
