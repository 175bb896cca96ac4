"""A transaction is one group while it fits, a session when it does not, and all or nothing in both
cases.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from itertools import groupby

import anyio
import pyarrow as pa
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from interceptors.errors import (
    CollectionNotFound,
    InvalidTransactionState,
    SchemaMismatch,
    TransactionExpired,
)
from streamingnode.writing.transaction import Transaction, TransactionState
from streamingnode.writing.write import nothing_at
from tests.streamingnode.append_double import (
    AppendDouble,
    collection_info,
    schema_of,
    types_of,
    writes_on,
)
from wal.append import AppendGroup
from wal.errors import StorageFull
from wal.headers import DML, MessageType
from wal.queue import Budget, PendingBytes

pytestmark = pytest.mark.anyio

SCHEMA = schema_of(id=pa.int64(), item=pa.string())
LARGE = "x" * 40_000
GROUP_BYTES_MAX = 64 << 10


class Transactions:
    def __init__(self) -> None:
        self.log = AppendDouble()

    def begin(
        self, *, group_messages_max: int = 1_000, memory: Budget | None = None
    ) -> Transaction:
        pending = PendingBytes(1 << 30)
        pending.transactions = memory or pending.transactions
        writes = writes_on(
            self.log,
            collection_info(SCHEMA),
            collection_info(SCHEMA, name="sharded", shards=4),
            group_bytes_max=GROUP_BYTES_MAX,
            group_messages_max=group_messages_max,
            pending=pending,
        )
        return Transaction(writes)


@pytest.fixture
def transactions() -> Transactions:
    return Transactions()


async def test_small_transaction_is_one_group_from_begin_to_commit(
    transactions: Transactions,
) -> None:
    async with transactions.begin() as txn:
        await txn.insert("orders", [{"id": 1, "item": "a"}])
        await txn.upsert("orders", [{"id": 2, "item": "b"}])
        await txn.delete("orders", [3])
    (group,) = transactions.log.groups
    assert types_of(group) == ["BEGIN_TXN", "INSERT", "DELETE", "INSERT", "DELETE", "COMMIT_TXN"]
    assert txn.result is not None
    assert txn.result.row_offsets == {"p0_7v0": (0, 2)}
    assert (txn.result.time_tick, txn.result.txn_id) == (1, 1)
    assert txn._state is TransactionState.COMMITTED


async def test_empty_transaction_appends_nothing_and_ends_at_the_tick_before_it(
    transactions: Transactions,
) -> None:
    async with transactions.begin() as before:
        await before.insert("orders", [{"id": 1, "item": "a"}])
    async with transactions.begin() as txn:
        await txn.insert("orders", [])
    assert before.result is not None
    assert txn.result == nothing_at(before.result.time_tick)
    assert len(transactions.log.groups) == 1


async def test_exception_in_the_block_rolls_back_and_comes_out_unchanged(
    transactions: Transactions,
) -> None:
    error = RuntimeError("mine")
    with pytest.raises(RuntimeError) as caught:
        async with transactions.begin() as txn:
            await txn.insert("orders", [{"id": 1, "item": "a"}])
            raise error
    assert caught.value is error
    assert transactions.log.groups == []
    assert txn._state is TransactionState.ROLLED_BACK


async def test_transaction_that_outgrows_a_group_is_streamed_under_its_id(
    transactions: Transactions,
) -> None:
    async with transactions.begin() as txn:
        for key in range(4):
            await txn.insert("orders", [{"id": key, "item": LARGE}])
        assert txn._txn_id
        assert txn._bodies_bytes <= GROUP_BYTES_MAX
    kinds = [types_of(group) for group in transactions.log.groups]
    assert kinds[0] == ["BEGIN_TXN"]
    assert kinds[-1] == ["COMMIT_TXN"]
    assert all(kind == ["INSERT"] for kind in kinds[1:-1])
    assert {message.txn_id for message in transactions.log.messages[1:]} == {1}
    assert [row["id"] for row in transactions.log.rows(SCHEMA)] == [0, 1, 2, 3]


@pytest.mark.parametrize("inserts, streamed", [(8, False), (9, True)])
async def test_transaction_is_streamed_once_its_messages_are_more_than_a_group_takes(
    transactions: Transactions, inserts: int, streamed: bool
) -> None:
    async with transactions.begin(group_messages_max=10) as txn:
        for key in range(inserts):
            await txn.insert("orders", [{"id": key, "item": "a"}])
        assert bool(txn._txn_id) is streamed
    assert max(len(group.messages) for group in transactions.log.groups) <= 10
    assert [row["id"] for row in transactions.log.rows(SCHEMA)] == list(range(inserts))


@pytest.mark.parametrize("collection", ["orders", "sharded"])
async def test_small_calls_of_a_streamed_transaction_that_follow_each_other_share_bodies(
    transactions: Transactions, collection: str
) -> None:
    async with transactions.begin(group_messages_max=10_000) as txn:
        for key in range(1_500):
            await txn.insert(collection, [{"id": key, "item": "a"}])
        await txn.delete(collection, [1_499])
        await txn.delete(collection, [1_498])
        await txn.insert(collection, pa.table({"id": [1_500], "item": ["a"]}, schema=SCHEMA))
        await txn.insert(collection, [{"id": 1_501, "item": "a"}])
    bodies = [message for message in transactions.log.messages if message.type in DML]
    assert txn._txn_id
    assert len(bodies) < 50
    assert all(group.size_bytes <= GROUP_BYTES_MAX for group in transactions.log.groups)
    ids = [row["id"] for row in transactions.log.rows(SCHEMA)]
    assert (len(ids), set(ids)) == (1_502, set(range(1_502)))
    assert ids == list(range(1_502)) or collection == "sharded"
    kinds = [kind for kind, _ in groupby(message.type for message in bodies)]
    assert kinds == [MessageType.INSERT, MessageType.DELETE, MessageType.INSERT]


async def test_messages_of_every_shard_count_when_a_transaction_is_streamed(
    transactions: Transactions,
) -> None:
    async with transactions.begin(group_messages_max=10) as txn:
        for start in range(0, 200, 20):
            await txn.insert(
                "sharded", [{"id": key, "item": "a"} for key in range(start, start + 20)]
            )
    assert max(len(group.messages) for group in transactions.log.groups) <= 10
    ids = [row["id"] for row in transactions.log.rows(SCHEMA)]
    assert len(ids) == 200
    assert set(ids) == set(range(200))


async def test_one_large_insert_in_a_transaction_is_split_into_bodies(
    transactions: Transactions,
) -> None:
    async with transactions.begin() as txn:
        await txn.upsert("sharded", [{"id": key, "item": LARGE} for key in range(10)])
    assert all(group.size_bytes <= GROUP_BYTES_MAX for group in transactions.log.groups)
    assert sorted(str(row["id"]) for row in transactions.log.rows(SCHEMA)) == sorted(
        map(str, range(10))
    )


async def test_streamed_transaction_is_rolled_back_in_the_log(transactions: Transactions) -> None:
    with pytest.raises(KeyError):
        async with transactions.begin() as txn:
            await txn.insert("orders", [{"id": key, "item": LARGE} for key in range(4)])
            raise KeyError
    assert types_of(transactions.log.groups[-1]) == ["ROLLBACK_TXN"]


async def test_rollback_that_fails_does_not_hide_the_callers_error(
    transactions: Transactions,
) -> None:
    with pytest.raises(KeyError):
        async with transactions.begin() as txn:
            await txn.insert("orders", [{"id": key, "item": LARGE} for key in range(4)])
            transactions.log.error = TransactionExpired("gone")
            raise KeyError


USES: dict[str, Callable[[Transaction], Awaitable[object]]] = {
    "insert": lambda txn: txn.insert("orders", [{"id": 1, "item": "a"}]),
    "upsert": lambda txn: txn.upsert("orders", [{"id": 1, "item": "a"}]),
    "delete": lambda txn: txn.delete("orders", [1]),
    "commit": lambda txn: txn.commit(),
    "rollback": lambda txn: txn.rollback(),
    "enter": lambda txn: txn.__aenter__(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("ended", ["commit", "rollback", "failed"])
async def test_transaction_used_after_its_end_is_refused(
    transactions: Transactions, use: Callable[[Transaction], Awaitable[object]], ended: str
) -> None:
    txn = transactions.begin()
    await txn.insert("orders", [{"id": 1, "item": "a"}])
    if ended == "failed":
        transactions.log.error = StorageFull("data", 0, 1)
        with pytest.raises(StorageFull):
            await txn.commit()
    else:
        await (txn.commit() if ended == "commit" else txn.rollback())
    groups = len(transactions.log.groups)
    with pytest.raises(InvalidTransactionState, match="begin another"):
        await use(txn)
    assert len(transactions.log.groups) == groups


async def test_block_left_after_an_explicit_commit_does_nothing_more(
    transactions: Transactions,
) -> None:
    async with transactions.begin() as txn:
        await txn.insert("orders", [{"id": 1, "item": "a"}])
        await txn.commit()
    assert len(transactions.log.groups) == 1


async def test_refused_rows_leave_the_transaction_open_without_them(
    transactions: Transactions,
) -> None:
    async with transactions.begin() as txn:
        await txn.insert("orders", [{"id": 1, "item": "a"}])
        with pytest.raises(SchemaMismatch):
            await txn.insert("orders", [{"id": 2, "item": "b"}, {"id": "3", "item": "c"}])
        with pytest.raises(CollectionNotFound):
            await txn.insert("nowhere", [{"id": 1}])
    assert [row["id"] for row in transactions.log.rows(SCHEMA)] == [1]


async def test_caught_loss_of_streamed_rows_still_ends_in_a_rollback(
    transactions: Transactions,
) -> None:
    transactions.log.refuse = _full
    with pytest.raises(InvalidTransactionState, match="repeat all of it"):
        async with transactions.begin() as txn:
            with pytest.raises(StorageFull):
                await txn.insert("orders", [{"id": key, "item": LARGE} for key in range(4)])
            with pytest.raises(InvalidTransactionState, match="broken"):
                await txn.commit()
    assert [types_of(group) for group in transactions.log.groups] == [
        ["BEGIN_TXN"],
        ["ROLLBACK_TXN"],
    ]


def _full(group: AppendGroup) -> StorageFull | None:
    return StorageFull("data", 0, 1) if group.messages[0].type is MessageType.INSERT else None


async def test_cancelled_streaming_leaves_only_a_rollback(transactions: Transactions) -> None:
    txn = transactions.begin()
    transactions.log.hold()
    task = asyncio.get_running_loop().create_task(
        txn.insert("orders", [{"id": n, "item": LARGE} for n in range(4)])
    )
    await transactions.log.arrival()
    task.cancel()
    await asyncio.wait([task])
    assert txn._state is TransactionState.BROKEN
    transactions.log.let_go()
    await txn.rollback()
    assert txn._state is TransactionState.ROLLED_BACK


async def test_commit_cancelled_behind_the_rows_of_another_task_leaves_only_a_rollback(
    transactions: Transactions,
) -> None:
    memory = Budget(1 << 20)
    txn = transactions.begin(memory=memory)
    transactions.log.hold()
    loop = asyncio.get_running_loop()
    insert = loop.create_task(txn.insert("orders", [{"id": n, "item": LARGE} for n in range(4)]))
    await transactions.log.arrival()
    commit = loop.create_task(txn.commit())
    await asyncio.sleep(0)
    commit.cancel()
    await asyncio.sleep(0)
    transactions.log.let_go()
    await asyncio.wait([insert, commit])
    assert commit.cancelled()
    assert isinstance(insert.exception(), InvalidTransactionState)
    assert types_of(transactions.log.groups[-1]) == ["ROLLBACK_TXN"]
    assert memory.held_bytes == 0


async def test_commit_behind_another_task_that_loses_what_it_streams_is_refused(
    transactions: Transactions,
) -> None:
    txn = transactions.begin()
    for key in range(2):
        await txn.insert("orders", [{"id": key, "item": LARGE}])
    transactions.log.hold()
    insert = asyncio.get_running_loop().create_task(
        txn.insert("orders", [{"id": 2, "item": LARGE}])
    )
    while not transactions.log.in_flight:  # row 1, whose insert has returned, on its way
        await anyio.lowlevel.checkpoint()
    commit = asyncio.get_running_loop().create_task(txn.commit())
    await asyncio.sleep(0)
    insert.cancel()
    transactions.log.let_go()
    await asyncio.wait([insert, commit])
    assert isinstance(commit.exception(), InvalidTransactionState)
    assert types_of(transactions.log.groups[-1]) == ["ROLLBACK_TXN"]


async def test_insert_that_is_cancelled_with_half_of_its_rows_in_leaves_only_a_rollback(
    transactions: Transactions,
) -> None:
    loop = asyncio.get_running_loop()
    txn = transactions.begin()
    for key in range(2):
        await txn.insert("orders", [{"id": key, "item": LARGE}])
    transactions.log.hold()
    other = loop.create_task(txn.insert("orders", [{"id": 2, "item": LARGE}]))
    while not transactions.log.in_flight:
        await anyio.lowlevel.checkpoint()
    insert = loop.create_task(
        txn.insert("orders", [{"id": key, "item": LARGE} for key in range(3, 6)])
    )
    while not txn._pieces:  # the first of its rows, the others wait for those that are sent
        await anyio.lowlevel.checkpoint()
    insert.cancel()
    transactions.log.let_go()
    await asyncio.gather(other, insert, return_exceptions=True)
    with pytest.raises(InvalidTransactionState, match="broken"):
        await txn.commit()


async def test_rows_of_a_task_are_refused_when_another_ends_the_transaction_under_it(
    transactions: Transactions,
) -> None:
    memory = Budget(1 << 20)
    txn = transactions.begin(memory=memory)
    loop = asyncio.get_running_loop()
    await txn.insert("orders", [{"id": 0, "item": LARGE}])
    await txn.insert("orders", [{"id": 1, "item": LARGE}])
    transactions.log.hold()
    insert = loop.create_task(txn.insert("orders", [{"id": 2, "item": LARGE}]))
    while not transactions.log.in_flight:
        await anyio.lowlevel.checkpoint()
    rollback = loop.create_task(txn.rollback())
    await asyncio.sleep(0)
    transactions.log.let_go()
    await asyncio.wait([insert, rollback])
    assert isinstance(insert.exception(), InvalidTransactionState)
    assert memory.held_bytes == 0


class TransactionModel(RuleBasedStateMachine):
    """Whatever is done to a transaction, the log has all of its rows at one commit, or no commit of
    it.
    """

    @initialize()
    def begin(self) -> None:
        self._runner = asyncio.Runner()
        self._runner.run(self._begin())
        self._rows: list[int] = []
        self._next = 0

    @rule(count=st.integers(0, 5), size=st.sampled_from([1, 20_000, 50_000]))
    def insert(self, count: int, size: int) -> None:
        keys = list(range(self._next, self._next + count))
        self._next += count
        self._do(self._txn.insert("sharded", [{"id": key, "item": "x" * size} for key in keys]))
        self._rows += keys

    @rule()
    def insert_misfit(self) -> None:
        with pytest.raises((SchemaMismatch, InvalidTransactionState)):
            self._runner.run(self._txn.insert("sharded", [{"id": 1, "item": 1}]))

    @rule(commit=st.booleans())
    def end(self, *, commit: bool) -> None:
        if self._do(self._txn.commit() if commit else self._txn.rollback()):
            commits = [
                message for message in self._log.messages if message.type is MessageType.COMMIT_TXN
            ]
            assert len(commits) == (1 if commit and self._rows else 0)
            if commit:
                assert sorted(str(row["id"]) for row in self._log.rows(SCHEMA)) == sorted(
                    map(str, self._rows)
                )

    def teardown(self) -> None:
        if hasattr(self, "_runner"):
            self._runner.close()

    async def _begin(self) -> None:
        transactions = Transactions()
        self._log = transactions.log
        self._txn = transactions.begin()

    def _do(self, call: Coroutine[None, None, object]) -> bool:
        """Make a call; on an ended transaction it is refused."""
        if self._txn._state is TransactionState.OPEN:
            self._runner.run(call)
            return True
        with pytest.raises(InvalidTransactionState):
            self._runner.run(call)
        return False


TestTransactionModel = TransactionModel.TestCase
