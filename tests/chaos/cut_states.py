"""A node with cuts of random changes, and what each of its collections holds at each of them.

In: an empty directory and choices. Out: the closed node, and its state by cut number. Rows are
added, replaced and deleted, in partitions that come and go, in collections that are dropped and
made anew.
"""

import random
from pathlib import Path

import pyarrow as pa

import streamingnode as sn

CUTS = 4
COLLECTIONS = ("a", "b")
CHANGES_OF_A_CUT = 8
ROWS_MAX = 20
KEYS = 60
DROP_SHARE = 0.05
PARTITION = "eu"
SCHEMA = pa.schema(
    [pa.field("key", pa.int64(), nullable=False), pa.field("value", pa.int64(), nullable=False)]
)

Rows = dict[int, tuple[int, str]]
"""Value and partition by key: every key has one row at most."""

States = dict[int, dict[int, dict[int, int]]]
"""Value by key, by cut number and by id of each collection that is there; of a dropped one nothing
is promised.
"""


async def make_cuts(directory: Path, choose: random.Random) -> States:
    """Make a node of `CUTS` cuts."""
    states: States = {}
    async with sn.open_node(directory, cut_interval_s=None) as node:
        changing = _Changing(node, choose)
        for _ in range(CUTS):
            for _ in range(CHANGES_OF_A_CUT):
                await changing.change()
            cut = await node.flush()
            states[cut.number] = changing.state()
    return states


class _Changing:
    def __init__(self, node: sn.Node, choose: random.Random) -> None:
        self._node = node
        self._choose = choose
        self._rows: dict[str, Rows] = {}
        self._ids: dict[str, int] = {}
        self._values = 0

    def state(self) -> dict[int, dict[int, int]]:
        return {
            self._ids[name]: {key: value for key, (value, _) in rows.items()}
            for name, rows in self._rows.items()
        }

    async def change(self) -> None:
        """Do one thing to one collection, which is made if it is not there."""
        name = self._choose.choice(COLLECTIONS)
        if name not in self._rows:
            made = await self._node.create_collection(
                name, SCHEMA, primary_key="key", shards=2, partitions=[PARTITION]
            )
            self._rows[name] = {}
            self._ids[name] = made.id
        if self._choose.random() < DROP_SHARE:
            await self._node.drop_collection(name)
            del self._rows[name]
            return
        action = self._choose.choice(
            [self._insert, self._upsert, self._upsert, self._delete, self._renew_partition]
        )
        await action(name, self._rows[name])

    async def _insert(self, name: str, rows: Rows) -> None:
        keys = [key for key in self._keys() if key not in rows]
        await self._write(name, rows, keys, upsert=False)

    async def _upsert(self, name: str, rows: Rows) -> None:
        await self._write(name, rows, self._keys(), upsert=True)

    async def _delete(self, name: str, rows: Rows) -> None:
        keys = self._keys()
        await self._node.delete(name, keys)
        for key in keys:
            rows.pop(key, None)

    async def _renew_partition(self, name: str, rows: Rows) -> None:
        await self._node.drop_partition(name, PARTITION)
        await self._node.create_partition(name, PARTITION)
        for key in [key for key, (_, partition) in rows.items() if partition == PARTITION]:
            del rows[key]

    async def _write(self, name: str, rows: Rows, keys: list[int], *, upsert: bool) -> None:
        partition = self._choose.choice(["_default", PARTITION])
        self._values += 1
        write = self._node.upsert if upsert else self._node.insert
        await write(
            name, [{"key": key, "value": self._values} for key in keys], partition=partition
        )
        rows.update((key, (self._values, partition)) for key in keys)

    def _keys(self) -> list[int]:
        return self._choose.sample(range(KEYS), self._choose.randint(1, ROWS_MAX))
