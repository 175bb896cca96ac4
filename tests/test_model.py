"""The whole embedded node against a list: after any steps, closes, crashes and cuts, readers and snapshots equal the model.

The model knows each acknowledged change with its tick. What is read back must be those changes: all of them, once, in tick
order, transactions whole, also from the middle and after truncation.
"""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scanner.deliver_policy import DeliverPolicy
from streamingnode.node import Node
from streamingnode.reading.read_message import ReadMessage
from tests.model_node import ModelNode
from wal.errors import InvalidTransactionState, TransactionExpired
from wal.message_type import MessageType

SCHEMA = pa.schema([pa.field("key", pa.int64(), nullable=False), pa.field("value", pa.int64())])
COLLECTIONS = {"wide": 3, "narrow": 1}
"""Names and numbers of shards."""

collections = st.sampled_from(sorted(COLLECTIONS))
keys = st.integers(0, 5)
key_lists = st.lists(keys, min_size=1, max_size=4)

Row = tuple[int, int]
Change = tuple[str, tuple[Row, ...] | tuple[int, ...]]
"""`insert` with rows, or `delete` with keys."""


@dataclass
class Expected:
    """One collection as it should be: its changes by tick, in order."""

    changes: list[tuple[int, tuple[Change, ...]]] = field(default_factory=list)

    def state(self, up_to: int) -> Counter[Row]:
        """The rows that live at a tick."""
        rows: list[Row] = []
        for tick, changes in self.changes:
            for kind, content in changes if tick <= up_to else ():
                if kind == "insert":
                    rows += content  # type: ignore[arg-type]  # an insert's content is rows
                else:
                    rows = [row for row in rows if row[0] not in content]
        return Counter(rows)


class NodeModel(RuleBasedStateMachine):
    """Random use of one node on disk."""

    transactions = Bundle("transactions")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="model-"))
        self.under = ModelNode(self.root, **self.node_settings())
        self.expected = {name: Expected() for name in COLLECTIONS}
        self.value = 0
        self.last_tick = 0
        self.changed_at = dict.fromkeys(COLLECTIONS, 0)

    def node_settings(self) -> dict[str, object]:
        return {"cut_interval_s": None}

    @property
    def node(self) -> Node:
        """The open node; another one after every reopen."""
        return self.under.node

    @initialize()
    def create_collections(self) -> None:
        for name, shards in COLLECTIONS.items():
            self.under.run(self.node.create_collection(name, SCHEMA, primary_key="key", shards=shards))

    # --- writes -----------------------------------------------------------------------------------------------------------

    @rule(name=collections, chosen=key_lists)
    def insert(self, name: str, chosen: list[int]) -> None:
        rows = self.rows_for(chosen)
        result = self.under.run(self.node.insert(name, _dicts(rows)))
        self.note(result.time_tick, {name: (("insert", rows),)})
        assert sum(count for _, count in result.row_offsets.values()) == len(rows)

    @rule(name=collections, chosen=st.lists(keys, min_size=1, max_size=4, unique=True))
    def upsert(self, name: str, chosen: list[int]) -> None:
        rows = self.rows_for(chosen)
        result = self.under.run(self.node.upsert(name, _dicts(rows)))
        self.note(result.time_tick, {name: (("delete", tuple(chosen)), ("insert", rows))})

    @rule(name=collections, chosen=key_lists)
    def delete(self, name: str, chosen: list[int]) -> None:
        result = self.under.run(self.node.delete(name, chosen))
        self.note(result.time_tick, {name: (("delete", tuple(chosen)),)})

    @rule(wide=key_lists, narrow=key_lists, gives_up=st.booleans())
    def transaction(self, wide: list[int], narrow: list[int], *, gives_up: bool) -> None:
        inserted, upserted = self.rows_for(wide), self.rows_for(sorted(set(narrow)))

        async def work() -> int:
            async with self.node.transaction() as txn:
                await txn.insert("wide", _dicts(inserted))
                await txn.upsert("narrow", _dicts(upserted))
                if gives_up:
                    raise _GivenUpError
            assert txn.result is not None
            return txn.result.time_tick

        try:
            tick = self.under.run(work())
        except _GivenUpError:
            return
        deleted = tuple(key for key, _ in upserted)
        self.note(tick, {"wide": (("insert", inserted),), "narrow": (("delete", deleted), ("insert", upserted))})

    # --- streamed transactions --------------------------------------------------------------------------------------------

    @rule(target=transactions)
    def begin(self) -> "_Open":
        return _Open(self.under.run(self.node.begin_transaction(keepalive_s=600)))

    @rule(open_=transactions, name=collections, chosen=key_lists)
    def add_rows(self, open_: "_Open", name: str, chosen: list[int]) -> None:
        rows = self.rows_for(chosen)
        self.add_body(open_, name, ("insert", rows), self.node.insert(name, _dicts(rows), txn_id=open_.txn_id))

    @rule(open_=transactions, name=collections, chosen=key_lists)
    def add_keys(self, open_: "_Open", name: str, chosen: list[int]) -> None:
        self.add_body(open_, name, ("delete", tuple(chosen)), self.node.delete(name, chosen, txn_id=open_.txn_id))

    @rule(open_=consumes(transactions))
    def commit(self, open_: "_Open") -> None:
        if self.is_overtaken(open_):
            with pytest.raises(TransactionExpired):
                self.under.run(self.node.commit_transaction(open_.txn_id))
            return
        result = self.under.run(self.node.commit_transaction(open_.txn_id))
        self.note(result.time_tick, {name: tuple(changes) for name, changes in open_.changes.items()})
        with pytest.raises((InvalidTransactionState, TransactionExpired)):
            self.under.run(self.node.commit_transaction(open_.txn_id))

    @rule(open_=consumes(transactions))
    def roll_back(self, open_: "_Open") -> None:
        try:
            self.under.run(self.node.rollback_transaction(open_.txn_id))
        except TransactionExpired:
            assert self.is_overtaken(open_)

    @rule(name=collections)
    def change_what_a_collection_is(self, name: str) -> None:
        self.value += 1
        self.under.run(self.node.create_partition(name, f"p{self.value}"))
        self.changed_at[name] = self.under.run(self.node.consistent_tick())

    def add_body(self, open_: "_Open", name: str, change: Change, work: Coroutine[object, object, object]) -> None:
        open_.changes.setdefault(name, []).append(change)
        if self.is_overtaken(open_):
            with pytest.raises(TransactionExpired):
                self.under.run(work)
        else:
            self.under.run(work)

    def is_overtaken(self, open_: "_Open") -> bool:
        """Whether a collection that the transaction writes to has changed since it began: that ends it."""
        return any(self.changed_at[name] > open_.txn_id for name in open_.changes)

    # --- cuts and restarts ------------------------------------------------------------------------------------------------

    @rule()
    def cut(self) -> None:
        flushed = self.under.run(self.node.flush())
        assert flushed.tick >= self.last_tick or not any(each.changes for each in self.expected.values())

    @rule()
    def reopen(self) -> None:
        self.under.reopen()

    @rule()
    def crash(self) -> None:
        self.under.crash()

    # --- what must hold ---------------------------------------------------------------------------------------------------

    @invariant()
    def readers_see_exactly_the_acknowledged_changes(self) -> None:
        for name, expected in self.expected.items():
            messages = self.read(name, DeliverPolicy.all())
            assert [(each.time_tick, _changes(each)) for each in messages] == [
                (tick, _normal(changes)) for tick, changes in self.kept(expected)
            ]

    @rule(name=collections, at=st.floats(0, 1))
    def resuming_after_a_message_misses_and_repeats_nothing(self, name: str, at: float) -> None:
        messages = self.read(name, DeliverPolicy.all())
        if messages:
            resumed_at = int(at * (len(messages) - 1))
            rest = self.read(name, DeliverPolicy.start_after(messages[resumed_at].message_id))
            assert [each.time_tick for each in rest] == [each.time_tick for each in messages[resumed_at + 1 :]]

    @rule(name=collections)
    def the_snapshot_is_the_model(self, name: str) -> None:
        table = self.under.run(self.node.snapshot(name))
        found = Counter(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))
        assert found == self.expected[name].state(self.last_tick)

    @rule(name=collections, at=st.floats(0, 1))
    @precondition(lambda self: self.last_tick)
    def an_earlier_snapshot_is_the_model_then(self, name: str, at: float) -> None:
        ticks = [tick for tick, _ in self.expected[name].changes]
        if ticks:
            tick = ticks[int(at * (len(ticks) - 1))]
            table = self.under.run(self.node.snapshot(name, as_of=tick))
            found = Counter(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))
            assert found == self.expected[name].state(tick)

    def teardown(self) -> None:
        self.under.end()
        shutil.rmtree(self.root)

    # --- bookkeeping ------------------------------------------------------------------------------------------------------

    def rows_for(self, chosen: Iterable[int]) -> tuple[Row, ...]:
        rows = []
        for key in chosen:
            self.value += 1
            rows.append((key, self.value))
        return tuple(rows)

    def note(self, tick: int, changes: dict[str, tuple[Change, ...]]) -> None:
        assert tick > self.last_tick
        self.last_tick = tick
        for name, of_collection in changes.items():
            self.expected[name].changes.append((tick, of_collection))

    def kept(self, expected: Expected) -> list[tuple[int, tuple[Change, ...]]]:
        return expected.changes

    def read(self, name: str, policy: DeliverPolicy) -> list[ReadMessage]:
        async def work() -> list[ReadMessage]:
            until = await self.node.consistent_tick()
            async with self.node.read(name, policy, until=until) as messages:
                return [message async for message in messages if message.type not in _DDL]

        return self.under.run(work())


_DDL = {MessageType.CREATE_COLLECTION, MessageType.CREATE_PARTITION}


class _GivenUpError(Exception):
    pass


@dataclass
class _Open:
    txn_id: int
    changes: dict[str, list[Change]] = field(default_factory=dict)


def _dicts(rows: Iterable[Row]) -> list[dict[str, int]]:
    return [{"key": key, "value": value} for key, value in rows]


def _changes(message: ReadMessage) -> tuple[tuple[str, Counter[object]], ...]:
    """What a message says, without the order of rows across shards, which is not promised."""
    parts = message.bodies or (message,)
    merged: list[tuple[str, Counter[object]]] = []
    for part in parts:
        table = part.to_arrow()
        assert table is not None
        kind = "insert" if part.type is MessageType.INSERT else "delete"
        content: list[object] = table["key"].to_pylist()
        if kind == "insert":
            content = list(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))
        merged.append((kind, Counter(content)))
    return tuple(merged)


def _normal(changes: tuple[Change, ...]) -> tuple[tuple[str, Counter[object]], ...]:
    return tuple((kind, Counter(content)) for kind, content in changes)


STEPS = int(os.environ.get("MODEL_STEPS", "25"))
EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "20"))


def test_the_node_behaves_as_the_list_it_is_compared_with() -> None:
    run_state_machine_as_test(
        NodeModel,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
