"""The shard hash agrees with the specification in `docs/format.md`, written out in plain Python."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wal import shard_hash
from wal.shard_hash import hash_bytes, hash_integers, shards_of

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def specified_integer_hash(value: int) -> int:
    mixed = (value + GAMMA) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)


def specified_bytes_hash(key: bytes) -> int:
    return specified_integer_hash(
        len(key) + sum(byte * pow(GAMMA, i, 1 << 64) for i, byte in enumerate(key, 1)) & MASK
    )


def hashes_of(keys: Sequence[bytes], *, before: bytes = b"") -> list[int]:
    data = np.frombuffer(before + b"".join(keys), np.uint8)
    offsets = np.cumsum([len(before), *map(len, keys)], dtype=np.int64)
    return list(map(int, hash_bytes(data, offsets)))


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_hash_of_integers_is_the_specified_one(values: list[int]) -> None:
    assert hash_integers(np.array(values, np.int64)).tolist() == [
        specified_integer_hash(value & MASK) for value in values
    ]


@given(st.lists(st.binary(max_size=40)), st.binary(max_size=8))
def test_hash_of_byte_strings_is_the_specified_one(keys: list[bytes], before: bytes) -> None:
    assert hashes_of(keys, before=before) == [specified_bytes_hash(key) for key in keys]


def test_hash_does_not_depend_on_how_keys_fall_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [bytes([i]) * (i * 7 % 50) for i in range(200)]
    whole = hashes_of(keys)
    monkeypatch.setattr(shard_hash, "_BLOCK_BYTES", 16)
    assert hashes_of(keys) == whole == [specified_bytes_hash(key) for key in keys]


def test_key_longer_than_a_block_is_hashed_whole() -> None:
    key = bytes(range(256)) * 300
    assert hashes_of([b"a", key, b"b"]) == [
        specified_bytes_hash(each) for each in (b"a", key, b"b")
    ]


def test_keys_that_differ_in_trailing_zeros_differ_in_hash() -> None:
    assert len(set(hashes_of([b"", b"\0", b"\0\0", b"a", b"a\0"]))) == 5


def test_dense_integers_spread_evenly_over_shards() -> None:
    counts = np.bincount(
        shards_of(hash_integers(np.arange(100_000, dtype=np.int64)), 7), minlength=7
    )
    assert counts.min() > 0.97 * 100_000 / 7


def test_vectors_of_the_format_page_hold() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text("utf-8")
    section = page.partition("## Shard hash")[2].partition("\n## ")[0]
    vectors = re.findall(
        r"^\| `(i|b)` \| `([^`]*)` \| `([0-9a-f]{16})` \| (\d) \| (\d) \|$", section, re.MULTILINE
    )
    assert len(vectors) >= 10
    for kind, key, expected, of_2, of_8 in vectors:
        hashes = hash_integers(np.array([int(key)], np.int64)) if kind == "i" else None
        if hashes is None:
            text = bytes.fromhex(key)
            hashes = hash_bytes(np.frombuffer(text, np.uint8), np.array([0, len(text)], np.int64))
        assert f"{int(hashes[0]):016x}" == expected
        assert shards_of(hashes, 2).tolist() == [int(of_2)]
        assert shards_of(hashes, 8).tolist() == [int(of_8)]
