"""A call that failed is tried again when that does no harm."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import stamina

from interceptors.errors import SchemaMismatch
from streamingnode.batching import append_with_retry
from streamingnode.errors import DeadlineExceeded
from streamingnode.node import Node
from streamingnode.writing.write import WriteResult
from tests.parts_of import WAYS, opened_one_way
from tests.streamingnode.batching_cases import (
    SCHEMA,
    Calls,
    ids_in,
    row,
    turns,
    until,
)
from wal.errors import Indeterminate, InvalidArgument, LogReopening, OnShutdown, Overloaded

pytestmark = pytest.mark.anyio


@pytest.fixture(params=WAYS)
async def any_node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    async with opened_one_way(request.param) as opened:
        await opened.create_collection("orders", SCHEMA, primary_key="id")
        await opened.create_collection("spread", SCHEMA, primary_key="id", shards=4)
        yield opened


@pytest.fixture
def no_pauses() -> Iterator[None]:
    """Let calls be tried 5 times at most, without a pause."""
    stamina.instrumentation.set_on_retry_hooks([])
    with stamina.set_testing(True, attempts=5, cap=True):
        yield
    stamina.instrumentation.set_on_retry_hooks(None)


# --- append_with_retry ----------------------------------------------------------------------------


@pytest.mark.usefixtures("no_pauses")
async def test_call_that_did_nothing_is_made_again_until_it_works() -> None:
    calls = Calls(Overloaded("full"), LogReopening("not back"), Overloaded("full"))
    assert await append_with_retry(calls) == 4


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "error",
    [SchemaMismatch("no"), OnShutdown("closed"), ValueError("bug"), asyncio.CancelledError()],
    ids=repr,
)
async def test_call_that_never_works_is_made_once(error: BaseException, *, exact: bool) -> None:
    calls = Calls(error)
    with pytest.raises(type(error)) as caught:
        await append_with_retry(calls, exact=exact)
    assert caught.value is error
    assert calls.count == 1


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("error", [Indeterminate("lost"), DeadlineExceeded("late")], ids=repr)
async def test_call_that_may_have_taken_place_is_made_again_only_when_that_is_exact(
    error: Indeterminate,
) -> None:
    calls = Calls(error)
    with pytest.raises(Indeterminate) as caught:
        await append_with_retry(calls)
    assert (caught.value, calls.count) == (error, 1)
    assert await append_with_retry(Calls(error, Overloaded("full"), error), exact=True) == 4


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("last", [OnShutdown("closed"), Overloaded("full")], ids=repr)
async def test_doubt_about_an_earlier_try_outlives_a_refusal(last: Exception) -> None:
    doubt = Indeterminate("lost")
    with pytest.raises(Indeterminate) as caught:
        await append_with_retry(Calls(doubt, *[last] * 9), exact=True)
    assert caught.value is doubt
    assert caught.value.__cause__ is last


@pytest.mark.usefixtures("no_pauses")
async def test_last_error_is_raised_when_the_tries_are_used_up() -> None:
    errors = [Overloaded(f"full {number}") for number in range(9)]
    calls = Calls(*errors)
    with pytest.raises(Overloaded) as caught:
        await append_with_retry(calls, attempts_max=3)
    assert (caught.value, calls.count) == (errors[2], 3)


async def test_call_that_is_late_already_is_not_made_again() -> None:
    calls = Calls(Overloaded("full"))
    with pytest.raises(Overloaded):
        await append_with_retry(calls, timeout_s=1e-9)
    assert calls.count == 1


async def test_cancelled_pause_ends_the_tries() -> None:
    stamina.instrumentation.set_on_retry_hooks([])
    try:
        calls = Calls(*[Overloaded("full")] * 9)
        trying = asyncio.get_running_loop().create_task(append_with_retry(calls))
        await until(lambda: calls.count)
        await turns()
        trying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trying
        assert calls.count == 1
    finally:
        stamina.instrumentation.set_on_retry_hooks(None)


@pytest.mark.usefixtures("no_pauses")
async def test_producers_write_whose_answer_is_lost_is_in_the_log_once(any_node: Node) -> None:
    producer = await any_node.producer("feed")
    results: list[WriteResult] = []

    async def insert() -> WriteResult:
        results.append(await producer.insert("orders", [row(1)], sequence=7))
        if len(results) == 1:
            raise Indeterminate("the answer is lost")
        return results[-1]

    assert await append_with_retry(insert, exact=True) == results[0]
    assert await ids_in(any_node) == [1]


@pytest.mark.parametrize(
    "bound", [{"timeout_s": -1}, {"attempts_max": 0}, {"attempts_max": 1.5}], ids=str
)
async def test_bound_that_allows_no_try_is_refused(bound: dict[str, Any]) -> None:
    calls = Calls()
    with pytest.raises(InvalidArgument, match=next(iter(bound))):
        await append_with_retry(calls, **bound)
    assert calls.count == 0
