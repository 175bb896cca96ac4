"""Delta or Iceberg for the tables of an ingest: what one commit costs on real segment files. ADR
0002 quotes it.

Run as `python -m bench.bench_table_format`. Both get the same Parquet files in one directory, as
Spark would have written them, and commit them with their own library: no data is moved, so what is
measured is the commit. Iceberg needs pyiceberg and SQLAlchemy, which the product does not; without
them only Delta is measured.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema
from deltalake.transaction import AddAction, CommitProperties, RemoveAction, Transaction

from spark_sink.columns import stats_json
from streamingnode.schema import AnyField

ROUNDS = 7
_FIELDS: list[AnyField] = [
    pa.field("id", pa.int64()),
    pa.field("item", pa.string()),
    pa.field("amount", pa.float64()),
    pa.field("_tick", pa.int64()),
    pa.field("_offset", pa.int64()),
]
SCHEMA = pa.schema(_FIELDS)


class Format(Protocol):
    """One table format at work on one directory of files."""

    def add(self, files: list[Path]) -> None:
        """Commit new files and move the watermark."""

    def swap(self, old: Path, new: Path) -> None:
        """Replace a file by its rewritten form and move the watermark, in one commit."""

    def reopen(self) -> int:
        """Open the table as a new process would and return the watermark."""


class Delta:
    """Through delta-rs, addressed by path."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._cut = 0
        DeltaTable.create(str(root), Schema.from_arrow(SCHEMA))

    def add(self, files: list[Path]) -> None:
        """Commit new files and move the watermark."""
        self._commit([self._entry(file) for file in files])

    def swap(self, old: Path, new: Path) -> None:
        """Replace a file by its rewritten form and move the watermark, in one commit."""
        self._commit([RemoveAction(old.name, True, 0, old.stat().st_size, {}), self._entry(new)])

    def reopen(self) -> int:
        """Open the table as a new process would and return the watermark."""
        return DeltaTable(str(self._root)).transaction_version("cut") or 0

    def _commit(self, actions: list[AddAction | RemoveAction]) -> None:
        table = DeltaTable(str(self._root))
        self._cut += 1
        table.create_write_transaction(
            actions,
            "append",
            table.schema(),
            commit_properties=CommitProperties(app_transactions=[Transaction("cut", self._cut)]),
        )

    def _entry(self, file: Path) -> AddAction:
        return AddAction(
            file.name, file.stat().st_size, {}, 0, True, stats_json(pq.read_metadata(file))
        )


class Iceberg:
    """Through pyiceberg, with a catalog in SQLite."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._cut = 0
        catalog = self._catalog()
        catalog.create_namespace("n")
        catalog.create_table("n.t", schema=SCHEMA, properties={"commit.retry.num-retries": "0"})

    def add(self, files: list[Path]) -> None:
        """Commit new files and move the watermark."""
        self._cut += 1
        self._table().add_files(
            [str(file) for file in files], snapshot_properties={"cut": str(self._cut)}
        )

    def swap(self, old: Path, new: Path) -> None:
        """Replace a file by its rewritten form and move the watermark, in one commit."""
        from pyiceberg.io.pyarrow import parquet_files_to_data_files

        self._cut += 1
        table = self._table()
        replaced = next(
            task.file for task in table.scan().plan_files() if task.file.file_path == str(old)
        )
        with table.transaction() as transaction:
            with transaction.update_snapshot(
                snapshot_properties={"cut": str(self._cut)}
            ).overwrite() as swap:
                swap.delete_data_file(replaced)
                for entry in parquet_files_to_data_files(
                    table.io, transaction.table_metadata, iter([str(new)])
                ):
                    swap.append_data_file(entry)

    def reopen(self) -> int:
        """Open the table as a new process would and return the watermark."""
        snapshot = self._table().current_snapshot()
        return int(snapshot.summary["cut"]) if snapshot and snapshot.summary else 0

    def _catalog(self) -> Any:  # pyiceberg is no dependency, so its types are not there to check
        from pyiceberg.catalog.sql import SqlCatalog

        return SqlCatalog(
            "c", uri=f"sqlite:///{self._root}/catalog.db", warehouse=self._root.as_uri()
        )

    def _table(self) -> Any:
        return self._catalog().load_table("n.t")


def write_files(root: Path, count: int, rows: int) -> list[Path]:
    """Write segment-like files and return their paths."""
    source = np.random.default_rng(7)
    paths = []
    for number in range(count):
        offsets = np.arange(number * rows, (number + 1) * rows)
        table = pa.table(
            {
                "id": source.integers(0, 1 << 40, rows),
                "item": pa.array([f"item-{value}" for value in source.integers(0, 1000, rows)]),
                "amount": source.random(rows),
                "_tick": offsets << 18,
                "_offset": offsets,
            },
            schema=SCHEMA,
        )
        paths.append(root / f"{number:05d}.parquet")
        pq.write_table(table, paths[-1], compression="zstd")
    return paths


def median_ms(action: Callable[[int], object]) -> float:
    """Return the median time of `ROUNDS` calls, in milliseconds."""
    times = []
    for turn in range(ROUNDS):
        started = time.perf_counter()
        action(turn)
        times.append(time.perf_counter() - started)
    return round(statistics.median(times) * 1000, 2)


def measure(make: Callable[[Path], Format], files: int, rows: int) -> dict[str, float]:
    """Return what one format takes, in milliseconds."""
    root = Path(tempfile.mkdtemp())
    try:
        written = write_files(root, (files + 2) * ROUNDS, rows)
        table = make(root)
        many = written[: files * ROUNDS]
        rest = written[files * ROUNDS :]
        return {
            f"add {files} files": median_ms(
                lambda turn: table.add(many[turn * files : (turn + 1) * files])
            ),
            "add 1 file": median_ms(lambda turn: table.add([rest[turn]])),
            "swap 1 file": median_ms(lambda turn: table.swap(many[turn], rest[ROUNDS + turn])),
            "reopen": median_ms(lambda _: table.reopen()),
        }
    finally:
        shutil.rmtree(root)


def main() -> None:
    """Print what both formats take, as a table and as JSON."""
    parser = argparse.ArgumentParser(description="what one commit costs in Delta and in Iceberg")
    parser.add_argument("--files", type=int, default=20, help="files in a large commit")
    parser.add_argument("--rows", type=int, default=20_000, help="rows in a file")
    arguments = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for package, make in (("deltalake", Delta), ("pyiceberg", Iceberg)):
        try:
            name = f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
        results[name] = measure(make, arguments.files, arguments.rows)
    for name, medians in results.items():
        for what, milliseconds in medians.items():
            print(f"{name:20} {what:16} {milliseconds:9.2f} ms")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
