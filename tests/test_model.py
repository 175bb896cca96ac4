"""The whole embedded node against a list: after any steps, closes, crashes and cuts, readers and
snapshots equal the model.

The model knows each acknowledged change with its tick. What is read back must be those changes: all
of them, once, in tick order, transactions whole, also from the middle. A thrifty node gives up log
behind its cuts, at moments of its own choice: its readers see an end of the changes, with
everything since the last cut and everything a named reader has not acknowledged.
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

from interceptors.errors import InvalidTransactionState, PartitionNotFound, TransactionExpired
from scanner.deliver_policy import DeliverPolicy
from streamingnode.node import Node
from streamingnode.read_message import ReadMessage
from tests.expected_rows import (
    DEFAULT,
    Change,
    Expected,
    Normal,
    Row,
    as_dicts,
    message_changes,
    without_order,
)
from tests.model_node import ModelNode
from wal.errors import Truncated
from wal.headers import MessageType

SCHEMA = pa.schema([pa.field("key", pa.int64(), nullable=False), pa.field("value", pa.int64())])
COLLECTIONS = {"wide": 3, "narrow": 1}
"""Names and numbers of shards."""

collections = st.sampled_from(sorted(COLLECTIONS))
keys = st.integers(0, 5)
key_lists = st.lists(keys, min_size=1, max_size=4)

partitions = st.sampled_from([DEFAULT, "eu", "us"])

OVERTAKEN = (TransactionExpired, InvalidTransactionState)
"""What a transaction that a schema change ended gets: the second once its end is so long ago that
nobody knows.
"""


class NodeModel(RuleBasedStateMachine):
    """Random use of one node on disk."""

    transactions = Bundle("transactions")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="model-"))
        self.under = ModelNode(self.root, **self.node_settings())
        self.expected = {name: Expected() for name in COLLECTIONS}
        self.value = 0
        self.last_tick = self.last_change_tick = 0
        self.cut_tick = 0
        self.changed_at = dict.fromkeys(COLLECTIONS, 0)
        self.streamed_ticks: set[int] = set()

    is_thrifty = False

    def node_settings(self) -> dict[str, object]:
        return {"cut_interval_s": None}

    @property
    def node(self) -> Node:
        """The open node; another one after every reopen."""
        return self.under.node

    @initialize()
    def create_collections(self) -> None:
        for name, shards in COLLECTIONS.items():
            self.under.run(
                self.node.create_collection(name, SCHEMA, primary_key="key", shards=shards)
            )

    # --- writes -----------------------------------------------------------------------------------

    @rule(name=collections, chosen=key_lists, partition=partitions)
    def insert(self, name: str, chosen: list[int], partition: str) -> None:
        rows = self.rows_for(chosen)
        expected = self.expected[name]
        if partition not in expected.partitions:
            with pytest.raises(PartitionNotFound):
                self.under.run(self.node.insert(name, as_dicts(rows), partition=partition))
            return
        result = self.under.run(self.node.insert(name, as_dicts(rows), partition=partition))
        expected.partition_of.update(
            (value, partition) for _, value in rows if partition != DEFAULT
        )
        self.note(result.time_tick, {name: (("insert", rows),)})
        assert sum(count for _, count in result.row_offsets.values()) == len(rows)

    @rule(name=collections, chosen=st.lists(keys, min_size=1, max_size=4, unique=True))
    def upsert(self, name: str, chosen: list[int]) -> None:
        rows = self.rows_for(chosen)
        result = self.under.run(self.node.upsert(name, as_dicts(rows)))
        self.note(result.time_tick, {name: (("delete", tuple(chosen)), ("insert", rows))})

    @rule(name=collections, chosen=key_lists)
    def delete(self, name: str, chosen: list[int]) -> None:
        result = self.under.run(self.node.delete(name, chosen))
        self.note(result.time_tick, {name: (("delete", tuple(chosen)),)})

    @rule(wide=key_lists, narrow=key_lists, gives_up=st.booleans())
    def transaction(self, wide: list[int], narrow: list[int], *, gives_up: bool) -> None:
        inserted = self.rows_for(wide)
        upserted = self.rows_for(sorted(set(narrow)))

        async def work() -> int:
            async with self.node.transaction() as txn:
                await txn.insert("wide", as_dicts(inserted))
                await txn.upsert("narrow", as_dicts(upserted))
                if gives_up:
                    raise _GivenUpError
            assert txn.result is not None
            return txn.result.time_tick

        try:
            tick = self.under.run(work())
        except _GivenUpError:
            return
        deleted = tuple(key for key, _ in upserted)
        self.note(
            tick,
            {
                "wide": (("insert", inserted),),
                "narrow": (("delete", deleted), ("insert", upserted)),
            },
        )

    # --- streamed transactions --------------------------------------------------------------------

    @rule(target=transactions)
    def begin(self) -> "_Open":
        return _Open(self.under.run(self.node.begin_transaction(keepalive_s=600)))

    @rule(open_=transactions, name=collections, chosen=key_lists)
    def add_rows(self, open_: "_Open", name: str, chosen: list[int]) -> None:
        rows = self.rows_for(chosen)
        self.add_body(
            open_,
            name,
            ("insert", rows),
            self.node.insert(name, as_dicts(rows), txn_id=open_.txn_id),
        )

    @rule(open_=transactions, name=collections, chosen=key_lists)
    def add_keys(self, open_: "_Open", name: str, chosen: list[int]) -> None:
        self.add_body(
            open_,
            name,
            ("delete", tuple(chosen)),
            self.node.delete(name, chosen, txn_id=open_.txn_id),
        )

    @rule(open_=consumes(transactions))
    def commit(self, open_: "_Open") -> None:
        if self.is_overtaken(open_):
            with pytest.raises(OVERTAKEN):
                self.under.run(self.node.commit_transaction(open_.txn_id))
            return
        result = self.under.run(self.node.commit_transaction(open_.txn_id))
        self.note(
            result.time_tick,
            {name: tuple(changes) for name, changes in open_.changes.items()},
            streamed=True,
        )
        with pytest.raises((InvalidTransactionState, TransactionExpired)):
            self.under.run(self.node.commit_transaction(open_.txn_id))

    @rule(open_=consumes(transactions))
    def roll_back(self, open_: "_Open") -> None:
        try:
            self.under.run(self.node.rollback_transaction(open_.txn_id))
        except OVERTAKEN:
            assert self.is_overtaken(open_)

    # --- what there is ----------------------------------------------------------------------------

    @rule(name=collections, partition=partitions)
    def make_or_drop_a_partition(self, name: str, partition: str) -> None:
        expected = self.expected[name]
        if partition == DEFAULT:
            return
        if partition in expected.partitions:
            self.under.run(self.node.drop_partition(name, partition))
            expected.drop_partition(partition)
            expected.partition_dropped_at = self.changed(name)
        else:
            self.under.run(self.node.create_partition(name, partition))
            expected.partitions.add(partition)
            expected.partition_of = {
                value: at for value, at in expected.partition_of.items() if at != partition
            }
            self.changed(name)

    @rule(name=collections)
    def make_a_collection_anew(self, name: str) -> None:
        self.under.run(self.node.drop_collection(name))
        self.expected[name] = Expected()
        self.under.run(
            self.node.create_collection(name, SCHEMA, primary_key="key", shards=COLLECTIONS[name])
        )
        self.changed(name)

    def changed(self, name: str) -> int:
        """Note that a collection is not what it was, and return a tick after that."""
        self.changed_at[name] = self.under.run(self.node.consistent_tick())
        return self.changed_at[name]

    def add_body(
        self, open_: "_Open", name: str, change: Change, work: Coroutine[object, object, object]
    ) -> None:
        open_.changes.setdefault(name, []).append(change)
        if self.is_overtaken(open_):
            with pytest.raises(OVERTAKEN):
                self.under.run(work)
        else:
            self.under.run(work)

    def is_overtaken(self, open_: "_Open") -> bool:
        """Whether a collection that the transaction writes to has changed since it began: that ends
        it.
        """
        return any(self.changed_at[name] > open_.txn_id for name in open_.changes)

    # --- cuts and restarts ------------------------------------------------------------------------

    @rule()
    def cut(self) -> None:
        flushed = self.under.run(self.node.flush())
        assert flushed.tick >= self.last_change_tick
        self.cut_tick = flushed.tick

    @rule()
    def reopen(self) -> None:
        self.under.reopen()

    @rule()
    def crash(self) -> None:
        self.under.crash()

    # --- what must hold ---------------------------------------------------------------------------

    @invariant()
    def readers_see_exactly_the_acknowledged_changes(self) -> None:
        for name, expected in self.expected.items():
            found = [
                (each.time_tick, message_changes(each))
                for each in self.read(name, DeliverPolicy.all())
            ]
            self.check_read(
                expected,
                found,
                [(tick, without_order(changes)) for tick, changes in expected.changes],
            )

    def check_read(self, expected: Expected, found: "list[Normal]", wanted: "list[Normal]") -> None:
        """Check what a reader found of all changes there ever were."""
        assert found == wanted

    @rule(name=collections, at=st.floats(0, 1))
    def resuming_after_a_message_misses_and_repeats_nothing(self, name: str, at: float) -> None:
        messages = self.read(name, DeliverPolicy.all())
        if messages:
            resumed_at = int(at * (len(messages) - 1))
            try:
                rest = self.read(name, DeliverPolicy.start_after(messages[resumed_at].message_id))
            except Truncated:
                assert self.is_thrifty
                return
            assert [each.time_tick for each in rest] == [
                each.time_tick for each in messages[resumed_at + 1 :]
            ]

    @rule(name=collections, at=st.floats(0, 1))
    def a_named_reader_goes_on_where_it_acknowledged(self, name: str, at: float) -> None:
        expected = self.expected[name]
        found, acknowledged = self.under.run(self.read_by_name(name, at))
        if expected.acknowledged is None:
            assert self.is_thrifty or len(found) == len(expected.changes)
            expected.acknowledged = found[0][0] - 1 if found else self.last_tick
        else:
            wanted = [
                (tick, without_order(each))
                for tick, each in expected.changes
                if tick > expected.acknowledged
            ]
            assert [each for each in wanted if each in found] == found
            # What began before the place where the reader first started is not its, whenever it was
            # committed.
            assert all(
                each in found or (self.is_thrifty and each[0] in self.streamed_ticks)
                for each in wanted
            )
        expected.acknowledged = max(expected.acknowledged, acknowledged)

    async def read_by_name(self, name: str, at: float) -> "tuple[list[Normal], int]":
        """Read what the collection's named reader has to read, acknowledge some of it, and return
        up to where.
        """
        until = await self.node.consistent_tick()
        rows = [MessageType.INSERT, MessageType.DELETE]
        async with self.node.read(name, name="billing", until=until, types=rows) as messages:
            found = [message async for message in messages]
            acknowledged = found[: int(at * len(found))][-1:]
            for message in acknowledged:
                await messages.ack(message)
        return [(each.time_tick, message_changes(each)) for each in found], sum(
            each.time_tick for each in acknowledged
        )

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
            if tick < self.expected[name].partition_dropped_at:
                with pytest.raises(Truncated):
                    self.under.run(self.node.snapshot(name, as_of=tick))
                return
            table = self.under.run(self.node.snapshot(name, as_of=tick))
            found = Counter(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))
            assert found == self.expected[name].state(tick)

    def teardown(self) -> None:
        self.under.end()
        shutil.rmtree(self.root)

    # --- bookkeeping ------------------------------------------------------------------------------

    def rows_for(self, chosen: Iterable[int]) -> tuple[Row, ...]:
        rows = []
        for key in chosen:
            self.value += 1
            rows.append((key, self.value))
        return tuple(rows)

    def note(
        self, tick: int, changes: dict[str, tuple[Change, ...]], *, streamed: bool = False
    ) -> None:
        assert tick > self.last_tick
        self.last_tick = tick
        self.last_change_tick = tick if changes else self.last_change_tick
        if streamed:
            self.streamed_ticks.add(tick)
        for name, of_collection in changes.items():
            self.expected[name].changes.append((tick, of_collection))

    def read(self, name: str, policy: DeliverPolicy) -> list[ReadMessage]:
        async def work() -> list[ReadMessage]:
            until = await self.node.consistent_tick()
            async with self.node.read(name, policy, until=until) as messages:
                return [message async for message in messages if message.type not in _DDL]

        return self.under.run(work())


class ThriftyNodeModel(NodeModel):
    """The same use of a node that keeps no more log than it must."""

    is_thrifty = True

    def node_settings(self) -> dict[str, object]:
        return {"cut_interval_s": None, "retention_s": 0, "flush.retention.interval_s": 0.005}

    def check_read(self, expected: Expected, found: "list[Normal]", wanted: "list[Normal]") -> None:
        """Check that the log ends right and holds what it must; a streamed transaction may have
        begun before its start.
        """
        first_tick = found[0][0] if found else self.last_tick + 1
        held_after = (
            self.cut_tick
            if expected.acknowledged is None
            else min(self.cut_tick, expected.acknowledged)
        )
        must = [each for each in wanted if each[0] > held_after]
        assert found[len(found) - len(must) :] == must
        assert [each for each in wanted if each in found] == found
        assert all(
            each in found or each[0] in self.streamed_ticks
            for each in wanted
            if each[0] >= first_tick
        )

    def read(self, name: str, policy: DeliverPolicy) -> list[ReadMessage]:
        while True:
            try:
                return super().read(name, policy)
            except Truncated:
                if policy != DeliverPolicy.all():
                    raise  # else it was overtaken, and starts again


_DDL = {
    MessageType.CREATE_COLLECTION,
    MessageType.DROP_COLLECTION,
    MessageType.CREATE_PARTITION,
    MessageType.DROP_PARTITION,
}


class _GivenUpError(Exception):
    pass


@dataclass
class _Open:
    txn_id: int
    changes: dict[str, list[Change]] = field(default_factory=dict)


STEPS = int(os.environ.get("MODEL_STEPS", "25"))
EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "8"))


@pytest.mark.timeout(900)  # finding the shortest failing example takes up to five minutes
@pytest.mark.parametrize("model", [NodeModel, ThriftyNodeModel])
def test_the_node_behaves_as_the_list_it_is_compared_with(model: type[NodeModel]) -> None:
    run_state_machine_as_test(
        model,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
