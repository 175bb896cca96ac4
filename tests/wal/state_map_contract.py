"""The contract of `wal.log.StateMap` as tests: the test module of each store subclasses
`StateMapContract` and brings `store`.
"""

import asyncio

import pytest

from tests.wal.log_contract import stamped_pack
from wal.errors import OnShutdown
from wal.log import LogStore, StateMap

RECORDS = 500


class StateMapContract:
    """Tests of the map of state of one store, which the subclass's `store` fixture opens."""

    @pytest.fixture
    def state(self, store: LogStore) -> StateMap:
        return store.state

    async def test_it_keeps_sets_and_removes(self, state: StateMap) -> None:
        assert await state.get("a") is None
        await state.put({"a": b"1", "b": b""})
        await state.put({"a": None, "c": b"3", "never there": None})
        assert [await state.get(key) for key in "abc"] == [None, b"", b"3"]
        assert await state.scan("") == {"b": b"", "c": b"3"}

    async def test_a_scan_returns_a_prefix_in_key_order(self, state: StateMap) -> None:
        await state.put(
            {"reader/2": b"2", "reader/10": b"10", "reader": b"", "s": b"", "reader/é": b"e"}
        )
        found = await state.scan("reader/")
        assert list(found.items()) == [("reader/10", b"10"), ("reader/2", b"2"), ("reader/é", b"e")]
        assert list(await state.scan("")) == ["reader", "reader/10", "reader/2", "reader/é", "s"]
        assert await state.scan("none") == {}

    async def test_changes_take_effect_in_call_order(self, state: StateMap) -> None:
        changes = [state.put({"last": b"%d" % number, f"{number:03}": b""}) for number in range(50)]
        await asyncio.gather(*changes)
        assert await state.get("last") == b"49"
        assert len(await state.scan("0")) == 50

    async def test_one_change_may_have_many_records(self, state: StateMap) -> None:
        records = {f"{number:04}": bytes(4096) for number in range(RECORDS)}
        await state.put(records)
        assert await state.scan("") == records
        await state.put(dict.fromkeys(records))
        assert await state.scan("") == {}

    async def test_what_a_scan_returned_does_not_change(self, state: StateMap) -> None:
        await state.put({"a": b"1"})
        found = await state.scan("")
        await state.put({"a": b"2", "b": b""})
        assert found == {"a": b"1"}

    async def test_a_cancelled_change_is_whole_or_never_made(self, state: StateMap) -> None:
        change = asyncio.ensure_future(state.put({"a": b"1", "b": b"1"}))
        await asyncio.sleep(0)
        change.cancel()
        await asyncio.wait([change])
        await state.put({"c": b""})
        assert set(await state.scan("")) in ({"a", "b", "c"}, {"c"})

    async def test_a_change_is_not_durable_before_what_was_acknowledged_before_it(
        self, store: LogStore
    ) -> None:
        log = await store.open_log("p0")
        for _ in range(20):
            ticket = log.append(stamped_pack(b"row"))
            await ticket.written
            await store.state.put({"seen": b"%d" % ticket.first_position})
            assert log.durable_position == ticket.first_position

    async def test_a_closed_store_refuses_all_calls(self, store: LogStore, state: StateMap) -> None:
        await state.put({"a": b""})
        await store.close()
        for refused in (state.put({"a": b""}), state.get("a"), state.scan("")):
            with pytest.raises(OnShutdown):
                await refused
