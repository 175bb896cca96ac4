"""A node directory made by hand and the model of what its tables must hold: the other side of the
contract.
"""

import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from flusher.directory import manifest_path
from flusher.manifest import (
    CollectionEntry,
    CutManifest,
    DataFile,
    DeleteFile,
    PartitionEntry,
    SegmentFile,
    VChannelEntry,
    delete_path,
    encode_manifest,
    manifest_crc32c,
    segment_path,
)
from streamingnode.schema import AnyField
from tests.copying import without_socket
from wal.codec import crc32c

Value = int | float | str | bytes | None
Row = Mapping[str, Value]

_ORDER_FIELDS: list[AnyField] = [
    pa.field("id", pa.int64()),
    pa.field("item", pa.string()),
    pa.field("amount", pa.float64()),
]
ORDERS = pa.schema(_ORDER_FIELDS)
SYSTEM: tuple[AnyField, ...] = (
    pa.field("_tick", pa.int64()),
    pa.field("_offset", pa.int64()),
    pa.field("_vchannel", pa.string()),
)
MS = 1 << 18


@dataclass(frozen=True)
class ModelRow:
    row: Row
    partition: str
    partition_id: int
    vchannel: str
    offset: int
    tick: int

    def flat(self) -> dict[str, Value]:
        return {
            **self.row,
            "_tick": self.tick,
            "_offset": self.offset,
            "_vchannel": self.vchannel,
            "_partition": self.partition,
        }


@dataclass
class Collection:
    id: int
    name: str
    schema: pa.Schema
    key: str
    vchannels: tuple[str, ...]
    created_tick: int
    partitions: dict[str, PartitionEntry]
    gone: list[PartitionEntry] = field(default_factory=list)
    dropped_tick: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    rows: list[ModelRow] = field(default_factory=list)
    new: dict[tuple[str, int], list[list[ModelRow]]] = field(default_factory=dict)
    deletes: dict[str, list[dict[str, Value]]] = field(default_factory=dict)


class NodeBuilder:
    """Writes cuts as the contract in `flusher/manifest.py` says; `expected` is the state at the
    newest cut.
    """

    def __init__(self, path: Path, node_id: str = "node-1") -> None:
        self.path = path
        self.node_id = node_id
        (path / "cuts").mkdir(parents=True, exist_ok=True)
        self.tick = 1_700_000_000_000 * MS
        self.number = 0
        self.cut_tick = 0
        self.crc = 0
        self._ids = 100
        self.collections: dict[str, Collection] = {}
        self._ended: list[Collection] = []
        self._expected: dict[str, list[dict[str, Value]]] = {}
        self.history: dict[int, dict[str, list[dict[str, Value]]]] = {}

    def create(
        self, name: str = "orders", schema: pa.Schema = ORDERS, key: str = "id", shards: int = 2
    ) -> Collection:
        number = self._id()
        tick = self._now()
        vchannels = tuple(f"p0_{number}v{shard}" for shard in range(shards))
        default = PartitionEntry(partition_id=self._id(), name="_default")
        made = Collection(number, name, schema, key, vchannels, tick, {"_default": default})
        self.collections[name] = made
        return made

    def create_partition(self, collection: str, name: str) -> None:
        self._now()
        self.collections[collection].partitions[name] = PartitionEntry(
            partition_id=self._id(), name=name
        )

    def drop_partition(self, collection: str, name: str) -> None:
        target = self.collections[collection]
        old = target.partitions.pop(name)
        target.gone.append(
            PartitionEntry(partition_id=old.partition_id, name=name, dropped_tick=self._now())
        )
        target.rows = [row for row in target.rows if row.partition_id != old.partition_id]

    def drop(self, name: str) -> None:
        dropped = self.collections.pop(name)
        dropped.dropped_tick = self._now()
        self._ended.append(dropped)

    def insert(self, collection: str, rows: Iterable[Row], partition: str = "_default") -> None:
        target = self.collections[collection]
        tick = self._now()
        number = target.partitions[partition].partition_id
        for row in rows:
            vchannel = self._vchannel(target, row[target.key])
            offset = target.offsets.get(vchannel, 0)
            target.offsets[vchannel] = offset + 1
            made = ModelRow(row, partition, number, vchannel, offset, tick)
            target.rows.append(made)
            target.new.setdefault((vchannel, number), [[]])[-1].append(made)

    def delete(self, collection: str, keys: Iterable[Value]) -> None:
        target = self.collections[collection]
        tick = self._now()
        for key in keys:
            vchannel = self._vchannel(target, key)
            below = target.offsets.get(vchannel, 0)
            target.deletes.setdefault(vchannel, []).append(
                {target.key: key, "_tick": tick, "_offset": below, "_vchannel": vchannel}
            )
            target.rows = [
                row for row in target.rows if row.row[target.key] != key or row.offset >= below
            ]

    def upsert(self, collection: str, rows: Sequence[Row], partition: str = "_default") -> None:
        key = self.collections[collection].key
        self.delete(collection, [row[key] for row in rows])
        self.insert(collection, rows, partition)

    def seal(self) -> None:
        """End every growing segment: what follows goes into files of its own."""
        for collection in self.collections.values():
            for parts in collection.new.values():
                parts.append([])

    def cut(self) -> int:
        """Write one cut, and return its number."""
        tick = self._now()
        self.number += 1
        shown = [*self._ended, *self.collections.values()]
        manifest = CutManifest(
            format=1,
            node_id=self.node_id,
            number=self.number,
            tick=tick,
            previous_tick=self.cut_tick,
            previous_crc32c=self.crc,
            created_ms=tick // MS,
            collections=tuple(self._entry(collection) for collection in shown),
            vchannels=tuple(
                VChannelEntry(
                    name=name, complete_to=tick, next_offset=collection.offsets.get(name, 0)
                )
                for collection in shown
                for name in collection.vchannels
            ),
            segments=tuple(file for collection in shown for file in self._segments(collection)),
            deletes=tuple(file for collection in shown for file in self._deletes(collection)),
        )
        content = encode_manifest(manifest)
        (self.path / manifest_path(self.number)).write_bytes(content)
        self.crc = manifest_crc32c(content)
        self.cut_tick = tick
        self._ended.clear()
        self._expected = {
            name: [row.flat() for row in collection.rows]
            for name, collection in self.collections.items()
        }
        self.history[self.number] = self._expected
        return self.number

    def expected(self, name: str) -> list[dict[str, Value]]:
        """Return the rows of a collection at the newest cut, in the order of `ordered`."""
        return ordered(self._expected[name])

    def copy(self, path: Path) -> None:
        """Copy the directory as a backup does."""
        shutil.copytree(self.path, path, ignore=without_socket)

    def _entry(self, collection: Collection) -> CollectionEntry:
        partitions = (*collection.gone, *collection.partitions.values())
        collection.gone = []
        return CollectionEntry(
            collection_id=collection.id,
            name=collection.name,
            schema=collection.schema.serialize().to_pybytes(),
            schema_version=1,
            primary_key=collection.key,
            partitions=partitions,
            vchannels=collection.vchannels,
            created_tick=collection.created_tick,
            dropped_tick=collection.dropped_tick,
        )

    def _segments(self, collection: Collection) -> Iterable[SegmentFile]:
        for (vchannel, partition), parts in collection.new.items():
            for rows in filter(None, parts):
                number = self._id()
                flat = [
                    {name: value for name, value in row.flat().items() if name != "_partition"}
                    for row in rows
                ]
                table = pa.Table.from_pylist(flat, schema=pa.schema([*collection.schema, *SYSTEM]))
                described = self._write(
                    segment_path(collection.id, number), table, collection, vchannel
                )
                yield SegmentFile(
                    segment_id=number, partition_id=partition, **msgspec.structs.asdict(described)
                )
        collection.new = {}

    def _deletes(self, collection: Collection) -> Iterable[DeleteFile]:
        for vchannel, rows in collection.deletes.items():
            schema = pa.schema([collection.schema.field(collection.key), *SYSTEM])
            table = pa.Table.from_pylist(rows, schema=schema)
            path = delete_path(collection.id, self.number, vchannel)
            yield DeleteFile(
                **msgspec.structs.asdict(self._write(path, table, collection, vchannel))
            )
        collection.deletes = {}

    def _write(
        self, relative: str, table: pa.Table, collection: Collection, vchannel: str
    ) -> DataFile:
        path = self.path / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        # as a flusher does
        pq.write_table(table, path, compression="zstd", write_page_checksum=True)
        content = path.read_bytes()
        keys = table[collection.key].to_pylist()
        exact = all(isinstance(key, int | str) for key in keys)
        return DataFile(
            path=relative,
            bytes=len(content),
            crc32c=crc32c(content),
            rows=table.num_rows,
            collection_id=collection.id,
            vchannel=vchannel,
            tick_min=extreme(table, "_tick", min),
            tick_max=extreme(table, "_tick", max),
            offset_min=extreme(table, "_offset", min),
            offset_max=extreme(table, "_offset", max),
            key_min=min(keys) if exact else None,  # type: ignore[type-var]
            key_max=max(keys) if exact else None,  # type: ignore[type-var]
        )

    def _vchannel(self, collection: Collection, key: Value) -> str:
        return collection.vchannels[zlib.crc32(repr(key).encode()) % len(collection.vchannels)]

    def _id(self) -> int:
        self._ids += 1
        return self._ids

    def _now(self) -> int:
        self.tick += MS
        return self.tick


def ordered(rows: Iterable[Mapping[str, Value]]) -> list[dict[str, Value]]:
    """Return rows by vchannel and offset, which is the order a collection has."""
    return sorted(
        (dict(row) for row in rows),
        key=lambda row: (str(row["_vchannel"]), int(str(row["_offset"]))),
    )


def extreme(table: pa.Table, column: str, choose: Callable[[list[int]], int]) -> int:
    """Return the smallest or largest value of a whole-number column."""
    return choose([value for value in table[column].to_pylist() if isinstance(value, int)])


def order(number: int, amount: float = 1.0) -> dict[str, Value]:
    return {"id": number, "item": f"item-{number}", "amount": amount}


def orders(*numbers: int, amount: float = 1.0) -> list[dict[str, Value]]:
    return [order(number, amount) for number in numbers]
