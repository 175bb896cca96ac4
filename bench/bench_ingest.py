"""What an ingest costs beside the bare copy of the same files: Spark reading the segments and
writing Parquet, nothing else.

Run as `python -m bench.bench_ingest`. The bare copy is the limit: no checksums, no deletes, no
sync, no commit. Measured in the same run and session, in turn; medians of `--rounds`. `--roads`
measures only what small cuts cost, copied and by Spark.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

import spark_sink
from flusher.directory import manifest_path
from flusher.manifest import (
    CollectionEntry,
    CutManifest,
    DataFile,
    DeleteFile,
    PartitionEntry,
    SegmentFile,
    delete_path,
    encode_manifest,
    manifest_crc32c,
    segment_path,
    stored_schema,
)
from spark_sink import commit
from spark_sink.commit import Road
from spark_sink.ingestion import IngestJob
from spark_sink.runtime import LazySession
from streamingnode.schema import AnyArray, AnyField
from wal.codec import crc32c

_USER_FIELDS: list[AnyField] = [
    pa.field("id", pa.int64()),
    pa.field("item", pa.string()),
    pa.field("amount", pa.float64()),
    pa.field("body", pa.binary()),
]
COLUMNS = pa.schema(_USER_FIELDS)
SYSTEM = stored_schema(pa.schema([]))
BODY_BYTES = 64
VCHANNEL = "p0_1v0"


@dataclass(frozen=True, slots=True)
class Measured:
    """One line of the result; `ratio` is the speed relative to its baseline, None for a baseline or
    a latency.
    """

    what: str
    seconds: float
    rows_per_s: float | None
    ratio: float | None


class NodeDirectory:
    """A node directory with cuts of many rows; only what an ingest reads."""

    def __init__(self, path: Path, *, collections: int = 1) -> None:
        self.path = path
        self._collections = collections
        self._number = self._crc = self._offset = 0
        self._random = np.random.default_rng(11)
        (path / "cuts").mkdir(parents=True)

    def cut(self, *, segments: int, rows: int, deletes: int = 0) -> None:
        """Write a cut of `segments` files of `rows` rows, and `deletes` of keys spread over
        everything before.
        """
        self._number += 1
        keys = (
            self._random.choice(self._offset, deletes, replace=False)
            if deletes
            else np.array([], np.int64)
        )
        gone = [self._deletes(np.sort(keys))] if deletes else []
        ids = range(1, self._collections + 1)
        files = [
            self._segment(collection, number, rows)
            for collection in ids
            for number in range(segments)
        ]
        tick = self._number << 18
        entry = CollectionEntry(
            collection_id=1,
            name="orders",
            schema=COLUMNS.serialize().to_pybytes(),
            schema_version=1,
            primary_key="id",
            partitions=(PartitionEntry(partition_id=1, name="_default"),),
            vchannels=(VCHANNEL,),
            created_tick=1,
        )
        content = encode_manifest(
            CutManifest(
                format=1,
                node_id="bench",
                number=self._number,
                tick=tick,
                previous_tick=tick - (1 << 18),
                previous_crc32c=self._crc,
                created_ms=0,
                collections=tuple(
                    msgspec.structs.replace(
                        entry, collection_id=each, name="orders" if each == 1 else f"orders{each}"
                    )
                    for each in ids
                ),
                vchannels=(),
                segments=tuple(files),
                deletes=tuple(gone),
            )
        )
        self._crc = manifest_crc32c(content)
        (self.path / manifest_path(self._number)).write_bytes(content)

    def segment_paths(self) -> list[str]:
        """Return every segment file."""
        return [str(path) for path in sorted((self.path / "segments").rglob("*.parquet"))]

    def _segment(self, collection: int, number: int, rows: int) -> SegmentFile:
        offsets = np.arange(self._offset, self._offset + rows)
        self._offset += rows
        body = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(BODY_BYTES), rows, [None, pa.py_buffer(self._random.bytes(rows * BODY_BYTES))]
        )
        columns: list[AnyArray] = [
            pa.array(offsets),  # the key is the offset: deletes of old keys hit old files
            pa.array([f"item-{value}" for value in self._random.integers(0, 1000, rows)]),
            pa.array(self._random.random(rows)),
            body.cast(pa.binary()),
            *self._system(offsets),
        ]
        table = pa.Table.from_arrays(columns, schema=pa.schema([*COLUMNS, *SYSTEM]))
        segment_id = 1000 * self._number + number
        described = self._write(collection, segment_path(collection, segment_id), table)
        return SegmentFile(
            segment_id=segment_id, partition_id=1, **msgspec.structs.asdict(described)
        )

    def _deletes(self, keys: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> DeleteFile:
        below = np.full(len(keys), self._offset)
        table = pa.Table.from_arrays(
            [pa.array(keys), *self._system(below)], schema=pa.schema([COLUMNS.field("id"), *SYSTEM])
        )
        return DeleteFile(
            **msgspec.structs.asdict(self._write(1, delete_path(1, self._number, VCHANNEL), table))
        )

    def _system(self, offsets: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> list[AnyArray]:
        ticks = np.full(len(offsets), self._number << 18)
        return [pa.array(ticks), pa.array(offsets), pa.repeat(pa.scalar(VCHANNEL), len(offsets))]

    def _write(self, collection: int, relative: str, table: pa.Table) -> DataFile:
        path = self.path / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, compression="zstd", write_page_checksum=True)
        content = path.read_bytes()
        keys = table["id"].to_numpy()
        offsets = table["_offset"].to_numpy()
        return DataFile(
            path=relative,
            bytes=len(content),
            crc32c=crc32c(content),
            rows=table.num_rows,
            collection_id=collection,
            vchannel=VCHANNEL,
            tick_min=self._number << 18,
            tick_max=self._number << 18,
            offset_min=int(offsets.min()),
            offset_max=int(offsets.max()),
            key_min=int(keys.min()),
            key_max=int(keys.max()),
        )


def medians_s(rounds: int, actions: Mapping[str, Callable[[int], object]]) -> dict[str, float]:
    """Return the median time of each action, run in turn `rounds` times after two that do not
    count.

    In turn, because the JVM gets faster for minutes and the machine may be shared: what is compared
    runs side by side.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(rounds + 2):
        for name, action in actions.items():
            started = time.perf_counter()
            action(turn)
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(found[2:]) for name, found in times.items()}


def measure(
    spark: SparkSession, root: Path, *, segments: int, rows: int, rounds: int
) -> list[Measured]:
    """Measure copies, ingests and reads of `segments` files of `rows` rows."""
    node = NodeDirectory(root / "node")
    node.cut(segments=segments, rows=rows)
    paths = node.segment_paths()
    total = segments * rows

    def bare_copy(turn: int) -> None:
        spark.read.parquet(*paths).write.option("compression", "zstd").parquet(
            str(root / f"copy-{turn}")
        )

    def ingest(turn: int) -> None:
        spark_sink.ingest(spark, node.path, root / f"tables-{turn}", request_cut=False)

    took = medians_s(rounds, {"copy": bare_copy, "ingest": ingest, "idle": lambda _: ingest(0)})
    node.cut(segments=1, rows=rows, deletes=max(1, total // 100))
    took |= medians_s(rounds, {"deletes": ingest})
    source = (
        spark.read.format("streamingnode")
        .option("node", str(node.path))
        .option("subscribe", "orders")
    )
    took |= medians_s(
        rounds,
        {
            "parquet": lambda _: _scan(spark.read.parquet(*node.segment_paths())),
            "table": lambda _: _scan(spark_sink.read_table(spark, root / "tables-0" / "orders")),
            "source": lambda _: _scan(source.load()),
        },
    )
    after = total + rows
    return [
        _line("bare copy by Spark (limit)", total, took["copy"]),
        _line("ingest, inserts only", total, took["ingest"], limit_s=took["copy"]),
        _line("ingest, 1 % of old keys deleted: all files rewritten", after, took["deletes"]),
        _line("ingest with nothing to take", 0, took["idle"]),
        _line("scan of the segments by spark.read.parquet (limit)", after, took["parquet"]),
        _line("scan of the table by read_table", after, took["table"], limit_s=took["parquet"]),
        _line(
            "scan by the data source, deletes applied",
            after,
            took["source"],
            limit_s=took["parquet"],
        ),
    ]


ROAD_ROWS = 1_000
ROAD_TABLES = (1, 20)


def measure_roads(spark: SparkSession, root: Path, *, rounds: int) -> list[Measured]:
    """Measure one cut of inserts into some tables by each road, in turn, tables warm: as a resident
    ingest takes it.
    """
    lines: list[Measured] = []
    for tables in ROAD_TABLES:
        node = NodeDirectory(root / f"node-{tables}", collections=tables)
        sessions = LazySession(spark)

        def take(road: Road, node: NodeDirectory = node, sessions: LazySession = sessions) -> float:
            """Make a cut, and return the seconds in which it is in every table."""
            into = node.path.with_name(f"{node.path.name}-by-{road.value}")
            node.cut(segments=1, rows=ROAD_ROWS)
            job = IngestJob(sessions, node.path, into, progress=lambda *_: None)
            with patch.object(commit, "COPIED_FILES_MAX", 64 if road is Road.COPY else 0):
                began = time.perf_counter()
                told = job.run()
                took = time.perf_counter() - began
            assert [table.road for table in told.tables] == [road.value] * len(told.tables)
            return took

        times: dict[Road, list[float]] = {Road.COPY: [], Road.SPARK: []}
        # each takes the other's cut as well: the same work on both sides
        for _ in range(rounds + 1):
            for road, found in times.items():
                found.append(take(road))
        by_copy, by_spark = (statistics.median(found[1:]) for found in times.values())
        what = f"two cuts of {ROAD_ROWS} rows into each of {tables} tables"
        lines.append(_line(f"{what}, by Spark", 2 * ROAD_ROWS * tables, by_spark))
        lines.append(_line(f"{what}, copied", 2 * ROAD_ROWS * tables, by_copy, limit_s=by_spark))
    return lines


def _line(what: str, rows: int, seconds: float, *, limit_s: float | None = None) -> Measured:
    return Measured(
        what, seconds, rows / seconds if rows else None, limit_s / seconds if limit_s else None
    )


def _scan(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def report(results: Sequence[Measured]) -> dict[str, object]:
    """Return the results with what they were measured on."""
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} "
        f"{platform.release()}",
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in ("pyspark", "deltalake", "pyarrow")},
        "results": [asdict(result) for result in results],
    }


def main() -> None:
    """Print the results as a table and as JSON."""
    parser = argparse.ArgumentParser(
        description="what an ingest costs beside the bare copy of its files"
    )
    parser.add_argument("--segments", type=int, default=6)
    parser.add_argument("--rows", type=int, default=100_000, help="rows in a segment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--roads", action="store_true", help="only what one small cut costs, copied and by Spark"
    )
    arguments = parser.parse_args()
    spark = spark_sink.session()
    root = Path(tempfile.mkdtemp())
    try:
        if arguments.roads:
            results = measure_roads(spark, root, rounds=arguments.rounds)
        else:
            results = measure(
                spark,
                root,
                segments=arguments.segments,
                rows=arguments.rows,
                rounds=arguments.rounds,
            )
    finally:
        shutil.rmtree(root)
        spark.stop()
    for result in results:
        speed = f"{result.rows_per_s:12,.0f} rows/s" if result.rows_per_s else " " * 19
        ratio = f"{result.ratio:6.2f} of the limit" if result.ratio else ""
        print(f"{result.what:52} {result.seconds:7.2f} s {speed} {ratio}")
    print(json.dumps(report(results)))


if __name__ == "__main__":
    main()
