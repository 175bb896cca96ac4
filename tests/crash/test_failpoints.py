"""Each named failpoint, once as `kill -9` and once as a failing disk: what was acknowledged is
there, and nothing else.

The life that is cut off and the one that judges it run in processes of their own, forked from one
that has imported everything already.
"""

import multiprocessing
import re
import signal
from pathlib import Path

import pytest

import streamingnode as sn
from tests.chaos import failpoint_life
from tests.chaos.failpoint_table import DOCUMENT, FAILPOINTS, rendered_failpoints
from tests.chaos.journal import read_journal
from tests.chaos.judge.verdict import check
from wal import failpoint

ROOT = Path(__file__).parents[2]


BEFORE = {
    "recovery.cut_adopted": "flush.cut_published=kill",
    "recovery.orphan_removing": "flush.files_renamed=kill",
}
"""What has to happen in a life before, so that the next one comes past these."""

REOPENING = (
    "recovery.write_failed",
    "recovery.term_ended",
    "recovery.database_released",
    "recovery.reopened",
)
A_WRITE_FAILS = "append.written=error@5"
"""What makes a running node open its log again, and come past `REOPENING`."""

OUTSIDE_SPARK = [name for name in FAILPOINTS if not name.startswith(("ingest.", "compact."))]

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["streamingnode.composition", "tests.chaos.failpoint_life"])


def run(target: object, *arguments: object) -> int:
    """Run a function in a forked process, and return its exit code: minus the signal for one that
    was killed.
    """
    process = forks.Process(target=target, args=arguments)  # type: ignore[arg-type]
    process.start()
    process.join(60)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


def judged(directory: Path, journal: Path, number: int) -> None:
    assert run(failpoint_life.judge, directory, journal, number) == 0
    assert check(read_journal(journal)) == []


def lives_before(name: str, directory: Path, journal: Path) -> int:
    if name not in BEFORE:
        return 0
    assert run(failpoint_life.live, directory, journal, 0, BEFORE[name]) == -signal.SIGKILL
    return 1


def arming(name: str, action: str) -> str:
    return f"{A_WRITE_FAILS},{name}={action}" if name in REOPENING else f"{name}={action}"


@pytest.mark.crash
@pytest.mark.parametrize("name", OUTSIDE_SPARK)
def test_a_node_killed_at_a_failpoint_has_what_it_acknowledged(tmp_path: Path, name: str) -> None:
    node = tmp_path / "node"
    journal = tmp_path / "journal"
    number = lives_before(name, node, journal)
    assert run(failpoint_life.live, node, journal, number, arming(name, "kill")) == -signal.SIGKILL
    judged(node, journal, number + 1)


@pytest.mark.crash
@pytest.mark.parametrize("name", OUTSIDE_SPARK)
def test_a_node_whose_disk_fails_at_a_failpoint_has_what_it_acknowledged(
    tmp_path: Path, name: str
) -> None:
    node = tmp_path / "node"
    journal = tmp_path / "journal"
    number = lives_before(name, node, journal)
    assert run(failpoint_life.live, node, journal, number, arming(name, "error")) in {0, 1}
    judged(node, journal, number + 1)


# --- the table ------------------------------------------------------------------------------------


def test_the_table_has_every_failpoint_in_the_code_and_no_other() -> None:
    assert failpoint.placed_failpoints() == set(FAILPOINTS)


def test_there_are_at_least_sixty_failpoints_each_with_what_it_leaves() -> None:
    assert len(FAILPOINTS) >= 60
    assert all(FAILPOINTS.values())


def test_the_document_has_the_table() -> None:
    assert rendered_failpoints() in DOCUMENT.read_text("utf-8"), (
        "run: python -m tests.chaos.documents"
    )


def test_every_failpoint_that_a_test_arms_is_in_the_table() -> None:
    areas = "|".join(sorted({name.split(".")[0] for name in FAILPOINTS}))
    named: set[str] = set()
    for source in (ROOT / "tests").rglob("*.py"):
        text = source.read_text("utf-8")
        if "failpoint" in text:
            named |= set(re.findall(rf'"((?:{areas})\.[a-z_]+[a-z])["=]', text))
    settings = {setting.key for setting in sn.load_config().origins()}
    assert named - settings - set(FAILPOINTS) == set(), "what nobody passes is never hit"


def test_a_failpoint_that_is_not_armed_does_nothing_and_one_that_is_acts_once_at_its_hit() -> None:
    failpoint.failpoint("append.taken")
    failpoint.arm_from("append.taken=error@2, append.synced=error@9")
    try:
        failpoint.failpoint("append.synced")
        failpoint.failpoint("append.taken")
        with pytest.raises(OSError, match=r"failpoint append\.taken"):
            failpoint.failpoint("append.taken")
        failpoint.failpoint("append.taken")
    finally:
        failpoint.disarm_all()
    failpoint.failpoint("append.synced")


@pytest.mark.parametrize("text", ["append.taken", "append.taken=burn", "append.taken=kill@x"])
def test_what_names_no_action_or_no_hit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not name=|invalid literal"):
        failpoint.arm_from(text)


def test_a_name_that_no_code_passes_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'append.nowhere' in STREAMINGNODE_FAILPOINTS is no failpoint"
    ):
        failpoint.arm_from("append.taken=error@9, append.nowhere=kill")
    failpoint.disarm_all()
