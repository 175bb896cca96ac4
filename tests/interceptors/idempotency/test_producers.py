"""Names of producers: their epochs rise with each opening and are durable before they are used."""

import asyncio
import secrets
from collections.abc import Callable

import anyio
import pytest

from interceptors.errors import ProducerFenced
from interceptors.idempotency import IdempotencyInterceptor, Producers
from interceptors.window import ProducerLimits, Window
from tests.interceptors.idempotency.test_window import result_at
from tests.scanner.test_named_reader import SlowStateMap, turns
from wal.append import AppendGroup, AppendResult, Pack
from wal.errors import Corrupt, Indeterminate, Overloaded
from wal.log import StateMap
from wal.memory_store import MemoryLogStore
from wal.position import ProducerStamp

pytestmark = pytest.mark.anyio


@pytest.fixture
def ids(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Say which numbers are drawn next."""

    def draw(*numbers: int) -> None:
        drawn = iter(numbers)
        monkeypatch.setattr(secrets, "randbits", lambda _bits: next(drawn))

    return draw


async def opened(state: StateMap, window: Window | None = None) -> Producers:
    producers = Producers(state, "p0", ProducerLimits(producers_max=2))
    await producers.load()
    producers.bind(IdempotencyInterceptor(window or Window(), producers.sequences))
    return producers


async def test_epoch_rises_with_each_opening_and_over_restarts(ids: Callable[..., None]) -> None:
    state = MemoryLogStore().state
    ids(5)
    producers = await opened(state)
    epochs = [(await producers.open("feed")).epoch for _ in range(2)]
    after = await (await opened(state)).open("feed")
    assert (*epochs, after.epoch) == (1, 2, 3)
    assert after.producer_id == 5


async def test_opening_fences_the_one_before_and_says_how_far_it_came(
    ids: Callable[..., None],
) -> None:
    window = Window()
    ids(5)
    producers = await opened(MemoryLogStore().state, window)
    first = await producers.open("feed")
    window.add(ProducerStamp(first.producer_id, first.epoch, 41), result_at(1))
    second = await producers.open("feed")
    assert producers.last_sequence(second.producer_id) == 41
    with pytest.raises(ProducerFenced):
        window.find(ProducerStamp(first.producer_id, first.epoch, 42))
    assert window.find(ProducerStamp(second.producer_id, second.epoch, 41)) == result_at(1)


async def test_opening_waits_for_what_the_one_before_has_under_way(
    ids: Callable[..., None],
) -> None:
    state = MemoryLogStore().state
    window = Window()
    ids(5)
    producers = Producers(state, "p0", ProducerLimits())
    interceptor = IdempotencyInterceptor(window, producers.sequences)
    producers.bind(interceptor)
    first = await producers.open("feed")
    acknowledged: asyncio.Future[AppendResult] = asyncio.get_running_loop().create_future()

    async def append(pack: Pack) -> None:
        pack.groups[0].settle(await acknowledged)

    async def write() -> AppendResult:
        group = AppendGroup(producer=ProducerStamp(first.producer_id, first.epoch, 9))
        await interceptor.do_append(Pack([group]), append)
        return group.result()

    writing = asyncio.get_running_loop().create_task(write())
    await asyncio.sleep(0)
    opening = asyncio.get_running_loop().create_task(producers.open("feed"))
    await anyio.wait_all_tasks_blocked()
    assert not opening.done()
    acknowledged.set_result(result_at(1))
    assert producers.last_sequence((await opening).producer_id) == 9
    assert await writing == result_at(1)


async def test_epoch_given_out_after_the_last_write_fences_after_a_restart(
    ids: Callable[..., None],
) -> None:
    state = MemoryLogStore().state
    window = Window()
    ids(5)
    producers = await opened(state, window)
    zombie = await producers.open("feed")
    await producers.open("feed")
    rebuilt = Window()
    rebuilt.add(ProducerStamp(5, zombie.epoch, 1), result_at(1))  # all that the log knows
    await opened(state, rebuilt)
    with pytest.raises(ProducerFenced):
        rebuilt.find(ProducerStamp(5, zombie.epoch, 1))


async def test_deleted_producer_is_fenced_and_its_name_starts_anew_with_another_id(
    ids: Callable[..., None],
) -> None:
    window = Window()
    ids(5, 6)
    producers = await opened(MemoryLogStore().state, window)
    first = await producers.open("feed")
    window.add(ProducerStamp(first.producer_id, first.epoch, 41), result_at(1))
    assert await producers.delete("feed")
    assert not await producers.delete("feed")
    with pytest.raises(ProducerFenced, match="deleted"):
        window.find(ProducerStamp(first.producer_id, first.epoch, 41))
    again = await producers.open("feed")
    assert (again.producer_id, again.epoch, producers.last_sequence(6)) == (6, 1, 0)


async def test_ids_of_nobody_and_of_others_are_never_drawn(ids: Callable[..., None]) -> None:
    ids(0, 5, 5, 6)
    producers = await opened(MemoryLogStore().state)
    assert [(await producers.open(name)).producer_id for name in ("a", "b")] == [5, 6]


async def test_one_producer_too_many_is_refused_and_deleting_one_helps(
    ids: Callable[..., None],
) -> None:
    ids(5, 6, 7)
    producers = await opened(MemoryLogStore().state)
    for name in ("a", "b"):
        await producers.open(name)
    with pytest.raises(Overloaded, match="delete_producer"):
        await producers.open("c")
    await producers.delete("a")
    assert (await producers.open("c")).epoch == 1


async def test_window_forgets_producers_that_have_no_name() -> None:
    window = Window()
    window.add(ProducerStamp(77, 1, 1), result_at(1))
    await opened(MemoryLogStore().state, window)
    assert window.last_sequence(77) == 0


async def test_record_that_does_not_decode_is_corrupt_and_named() -> None:
    state = MemoryLogStore().state
    await state.put({"producer/p0/feed": b"\x01"})
    with pytest.raises(Corrupt, match="producer/p0/feed"):
        await opened(state)


@pytest.mark.parametrize("call", ["open", "delete"])
async def test_call_that_is_cancelled_fences_the_producer_with_its_write(
    ids: Callable[..., None], call: str
) -> None:
    state = SlowStateMap()
    window = Window()
    ids(5)
    producers = await opened(state, window)
    state.gate.set()
    first = await producers.open("feed")
    state.gate.clear()
    changing = asyncio.ensure_future(
        producers.open("feed") if call == "open" else producers.delete("feed")
    )
    await turns()
    changing.cancel()
    await turns()
    state.open_once()
    await turns()
    with pytest.raises(ProducerFenced):
        window.find(ProducerStamp(first.producer_id, first.epoch, 1))


async def test_producer_that_may_be_forgotten_after_a_restart_is_fenced_until_it_is_opened_again(
    ids: Callable[..., None],
) -> None:
    state = SlowStateMap()
    window = Window()
    state.gate.set()
    ids(5)
    producers = await opened(state, window)
    first = await producers.open("feed")
    state.failures.append(Indeterminate("nobody knows"))
    with pytest.raises(Indeterminate):
        await producers.delete("feed")
    with pytest.raises(ProducerFenced):
        window.find(ProducerStamp(first.producer_id, first.epoch, 1))
    again = await producers.open("feed")
    assert window.find(ProducerStamp(again.producer_id, again.epoch, 1)) is None
