"""Each wish beside each process that has the directory, by the tables; see `test_serve.py` and
`remote/test_share.py` for what processes make of them.
"""

from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

import streamingnode as sn
from streamingnode.care.inspect import check_free, holder
from streamingnode.config import NodeConfig
from streamingnode.opening import OpenNode, visit_node
from streamingnode.reaching import (
    CLIENTS,
    COMMANDS,
    IN_TURN,
    STEPS,
    TRANSITIONS,
    Reach,
    Wish,
    _Reaching,
    reach,
)
from tests.streamingnode.remote.nodes import SCHEMA, rows
from wal.errors import AlreadyOwned
from wal.files import DirectoryLock
from wal.runtime import Supervisor

pytestmark = pytest.mark.anyio


def reaching(wish: Wish, path: Path, closing: AsyncExitStack) -> _Reaching:
    supervisor = Supervisor(lambda _: None)
    return _Reaching(wish, OpenNode, path, NodeConfig(), supervisor, closing, None)


def test_every_state_has_a_step_and_is_reached_and_left() -> None:
    assert STEPS.keys() == TRANSITIONS.keys() == set(Reach)
    assert {after for state in TRANSITIONS.values() for after in state} == set(Reach)


@pytest.mark.parametrize("wish", Wish)
async def test_of_a_free_directory_every_wish_makes_an_owner(wish: Wish, tmp_path: Path) -> None:
    async with AsyncExitStack() as closing:
        step = reaching(wish, tmp_path, closing)
        closing.push_async_callback(step.close)
        await step.step()
        with pytest.raises(AlreadyOwned) as owned:
            check_free(tmp_path)
        assert owned.value.brief == (wish in COMMANDS)
        assert step.in_turn == (wish in IN_TURN)


@pytest.mark.parametrize("is_brief", [False, True], ids=["service", "command"])
@pytest.mark.parametrize("wish", Wish)
async def test_beside_an_owner_that_does_not_answer_each_wish_ends_as_its_way_says(
    wish: Wish, is_brief: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When all patience is over: nobody waits for ever, and nobody takes what is not free."""
    monkeypatch.setattr("streamingnode.reaching.OWNER_S_MAX", -1.0)
    monkeypatch.setattr("streamingnode.reaching.OPEN_S_MAX", -1.0)
    async with sn.open_node(tmp_path):
        pass
    lock = DirectoryLock(tmp_path, brief=is_brief)
    try:
        async with AsyncExitStack() as closing:
            step = reaching(wish, tmp_path, closing)
            await step.step()
            with pytest.raises(AlreadyOwned) as owned:
                await step.approach()
        assert ("takes no clients" in str(owned.value)) == (wish in CLIENTS)
        assert step.node is None
    finally:
        lock.release()


async def test_a_service_asks_every_command_that_has_the_directory_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = iter([7, 7, 8, 8, None])
    asked = list[str]()
    closed = list[str]()

    async def client(step: _Reaching, *_: object) -> object:
        async def hand_over() -> None:
            asked.append(str(step._address))

        async def aclose() -> None:
            closed.append(str(step._address))

        return SimpleNamespace(_backend=SimpleNamespace(hand_over=hand_over), aclose=aclose)

    async def take(path: Path, *_: object, **_options: object) -> str:
        if (owner := next(owners)) is None:
            return "open"
        raise AlreadyOwned(str(path), owner, brief=True)

    monkeypatch.setattr("streamingnode.reaching.PAUSE_S", 0)
    monkeypatch.setattr(_Reaching, "_client", client)
    monkeypatch.setattr("streamingnode.reaching.compose", take)
    async with AsyncExitStack() as closing:
        config = NodeConfig()
        supervisor = Supervisor(lambda _: None)
        node: object = await reach(Wish.OWN, OpenNode, tmp_path, config, supervisor, closing)
    assert node == "open"
    assert asked == closed == [f"unix:{tmp_path}/node.sock"] * 2


async def test_a_process_that_shares_takes_the_directory_from_a_command_that_lasts(
    tmp_path: Path,
) -> None:
    async with sn.open_node(tmp_path) as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
    async with visit_node(tmp_path, lasting=True) as command:
        await command.insert("c", rows(1))
        async with sn.open_node(tmp_path, share=True) as service:
            with pytest.raises(AlreadyOwned) as owned:
                check_free(tmp_path)
            assert not owned.value.brief
            await command.insert("c", rows(2))
            assert (await service.snapshot("c")).num_rows == 2


async def test_a_command_beside_a_service_is_only_its_client(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path), AsyncExitStack() as closing:
        step = reaching(Wish.STAY, tmp_path, closing)
        await step.step()
        await step.approach()
        assert step.node is not None
        assert not step.in_turn, "and does not take over when that ends"


async def test_an_owner_that_hands_over_leaves_the_directory_to_the_service_that_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as closing:
        step = reaching(Wish.STAY, tmp_path, closing)
        closing.push_async_callback(step.close)
        await step.step()
        await step._own._backend.hand_over()
        await step.step()
        assert holder(tmp_path) is None
        await step.step()
        assert step._state is Reach.ASKED
        assert holder(tmp_path) is None
        monkeypatch.setattr("streamingnode.reaching.OWNER_S_MAX", 0.0)
        await step.step()
        assert step._state is Reach.FREE
