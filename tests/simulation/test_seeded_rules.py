"""The seeded bugs that the simulation does not show are found by the test of their rule."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.seeded import rules
from tests.chaos.seeded.bug import SeededBug, seeded
from tests.interceptors.idempotency import test_window
from tests.streamingnode.remote import test_spool_refusals
from tests.wal.rocksmq import test_retention

pytestmark = pytest.mark.anyio

Rule = Callable[[Path], Awaitable[Any]]


async def floor(_path: Path) -> None:
    test_window.test_the_floor_stays_where_it_is_when_a_result_below_it_is_forgotten()


async def outstanding(_path: Path) -> None:
    test_window.test_what_is_outstanding_is_not_forgotten_by_age_here_nor_over_a_reopening()


async def page(path: Path) -> None:
    ends = "group gone and node opened again"
    await test_retention.test_a_page_that_a_group_went_back_to_is_not_acknowledged_any_more(
        path, ends
    )


async def letter(path: Path) -> None:
    await test_spool_refusals.test_what_the_log_has_and_the_node_has_forgotten_is_no_dead_letter(
        path, kept=1, by_another=False, letters=0
    )


@pytest.mark.parametrize(
    "bug, rule",
    [
        (rules.FLOOR_GOES_DOWN, floor),
        (rules.OUTSTANDING_GOES_BY_AGE, outstanding),
        (rules.PAGE_KEEPS_ITS_TIME, page),
        (rules.TOO_OLD_IS_REFUSED, letter),
    ],
    ids=lambda each: each.name if isinstance(each, SeededBug) else "",
)
async def test_a_bug_of_one_line_is_found_by_its_test(
    bug: SeededBug, rule: Rule, tmp_path: Path
) -> None:
    await rule(tmp_path / "right")
    with seeded(bug), pytest.raises((AssertionError, pytest.fail.Exception)):
        await rule(tmp_path / "wrong")
