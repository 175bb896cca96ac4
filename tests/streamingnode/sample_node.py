"""A node directory with known rows in files and in the log, and ways to damage it as disks and
people do.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa

import streamingnode as sn
from tests.streamingnode.append_double import schema_of

SCHEMA = schema_of(id=pa.int64(), item=pa.string())
SETTINGS: dict[str, Any] = {"cut_interval_s": None, "free_bytes_min": 0}
CUTS = 3
PER_CUT = 400
"""Rows in each cut, and as many again in the log alone."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A node that was closed, the same as a kill leaves it, and its rows by key."""

    closed: Path
    killed: Path
    rows: dict[int, str]


def make_sample(place: Path) -> Sample:
    """Make a node with three cuts, deletes in two of them, and rows after the last cut."""
    rows: dict[int, str] = {}

    async def make() -> None:
        async with sn.open_node(place / "closed", **SETTINGS) as node:
            await node.create_collection("orders", SCHEMA, primary_key="id", shards=2)
            for cut in range(CUTS + 1):
                for first in range(cut * PER_CUT, (cut + 1) * PER_CUT, 20):
                    batch = {key: f"item {key} " * 20 for key in range(first, first + 20)}
                    await node.insert(
                        "orders", [{"id": key, "item": item} for key, item in batch.items()]
                    )
                    rows.update(batch)
                if cut in {1, 2}:
                    gone = [cut * 3, cut * PER_CUT + 1]
                    await node.delete("orders", gone)
                    for key in gone:
                        del rows[key]
                if cut < CUTS:
                    await node.flush()
            shutil.copytree(
                place / "closed", place / "killed", ignore=shutil.ignore_patterns("node.sock")
            )

    anyio.run(make)
    return Sample(place / "closed", place / "killed", rows)


def rows_of(path: Path) -> dict[int, str]:
    """Open a node and return its rows, read twice: as a snapshot, and message by message. Raises
    what either raises.
    """

    async def read() -> dict[int, str]:
        async with sn.open_node(path, **SETTINGS) as node:
            table = await node.snapshot("orders")
            found: dict[int, Any] = {row["id"]: row["item"] for row in table.to_pylist()}
            assert len(found) == table.num_rows
            async with node.read("orders", until=await node.consistent_tick()) as messages:
                async for _ in messages:
                    pass
            return found

    return anyio.run(read)


def files_of(path: Path) -> list[str]:
    """Return all files of a node that are not empty, relative to it."""
    found = (each for each in path.rglob("*") if each.is_file() and each.stat().st_size)
    return sorted(each.relative_to(path).as_posix() for each in found)


def largest(path: Path, pattern: str) -> Path:
    """Return the largest file of a pattern."""
    return max(path.glob(pattern), key=lambda each: each.stat().st_size)


def kinds_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each kind of file with one file of it: the largest."""
    patterns = {
        "table of the log": "log/*.sst",
        "RocksDB's log": "log/*.log",
        "RocksDB's manifest": "log/MANIFEST-*",
        "CURRENT": "log/CURRENT",
        "segment": "segments/*/*.parquet",
        "delete file": "deletes/*/*.parquet",
        "cut manifest": "cuts/*.json",
        "floor": "floor",
    }
    for kind, pattern in patterns.items():
        if any(each.stat().st_size for each in path.glob(pattern)):
            yield kind, largest(path, pattern).relative_to(path).as_posix()


def flip(file: Path, offset: int, bit: int = 3) -> None:
    """Flip one bit of a file."""
    content = bytearray(file.read_bytes())
    content[offset] ^= 1 << bit
    file.write_bytes(content)


def swap(one: Path, other: Path) -> None:
    """Let two files take each other's name."""
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def copy_of(path: Path, place: Path) -> Path:
    """Return a fresh copy of a node."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(path, place)
    return place


Damage = Callable[[Path], object]

CUT_1, CUT_2, CUT_3 = (f"cuts/{number:016d}.json" for number in (1, 2, 3))


def segment(path: Path, index: int) -> Path:
    """Return one of a node's segment files, by order of age."""
    return sorted((path / "segments").rglob("*.parquet"), key=lambda each: int(each.stem))[index]


FILE_DAMAGE: dict[str, tuple[Damage, str]] = {
    "segment cut short": (lambda path: os.truncate(segment(path, 1), 500), ""),
    "segment longer": (
        lambda path: segment(path, 1).write_bytes(segment(path, 1).read_bytes() + b"x"),
        "",
    ),
    "segment with a flipped bit": (lambda path: flip(segment(path, 1), 600), "fails its checksum"),
    "segment missing": (lambda path: segment(path, 1).unlink(), ""),
    "segments swapped": (lambda path: swap(segment(path, 1), segment(path, 2)), ""),
    "segment duplicated over another": (
        lambda path: shutil.copy(segment(path, 1), segment(path, 2)),
        "",
    ),
    "manifest with a flipped bit": (lambda path: flip(path / CUT_2, 100), "fails its checksum"),
    "manifest missing": (lambda path: (path / CUT_2).unlink(), ""),
    "first manifest missing": (lambda path: (path / CUT_1).unlink(), ""),
    "newest manifest missing": (lambda path: (path / CUT_3).unlink(), "is missing"),
    "manifest duplicated over the next": (
        lambda path: shutil.copy(path / CUT_2, path / CUT_3),
        "holds cut",
    ),
    "manifests swapped": (lambda path: swap(path / CUT_2, path / CUT_3), "holds cut"),
}
"""Ways to damage files of cuts that a backup can mend, and what the first finding says besides its
place.
"""
