"""The stable hash that maps a primary key to its shard: `docs/format.md`, section "Shard hash",
specifies it with test vectors.

A key always maps to the same shard, on every machine and in every language, so the hash must never
change. No I/O.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""The increment of SplitMix64. It is odd, so every power of it has an inverse modulo 2^64."""
_GAMMA_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

_BLOCK_BYTES = 1 << 16
"""Bytes of keys hashed at a time; both tables of powers (512 KiB each) are computed once for this
size.
"""


def hash_integers(values: NDArray[np.int64]) -> Hashes:
    """Return the hash of each integer: that of its 64-bit two's complement, for a column of any
    width.
    """
    return _finalize(values.view(np.uint64))


def hash_bytes(data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Hashes:
    """Return the hash of each byte string `data[offsets[i]:offsets[i + 1]]`; text is hashed as
    UTF-8.
    """
    sums = np.empty(len(offsets) - 1, np.uint64)
    first = 0
    while first < len(sums):
        end = int(np.searchsorted(offsets, offsets[first] + _BLOCK_BYTES, side="right")) - 1
        end = max(first + 1, end)  # a key longer than a block forms its own block
        begin = offsets[first]
        sums[first:end] = _polynomials(data[begin : offsets[end]], offsets[first : end + 1] - begin)
        first = end
    return _finalize(sums)


def shards_of(hashes: Hashes, shards: int) -> NDArray[np.int64]:
    """Return the shard, 0 to `shards - 1`, of each hash."""
    return (hashes % np.uint64(shards)).view(np.int64)


def _polynomials(data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Hashes:
    """Return length + sum of byte[i] * GAMMA^(i + 1) for each key, vectorised.

    One running sum weights byte j of the whole block with GAMMA^j; the difference of two of its
    values is a key's polynomial times GAMMA^start, and the inverse power removes that factor. Empty
    keys need no special case.
    """
    running = np.zeros(len(data) + 1, np.uint64)
    np.cumsum(data * _powers(int(_GAMMA), len(data)), out=running[1:])
    starts = offsets[:-1]
    ends = offsets[1:]
    shift_back = _powers(int(_GAMMA_INVERSE), len(data) + 1)[starts]
    return (running[ends] - running[starts]) * shift_back * _GAMMA + (ends - starts).view(np.uint64)


def _powers(base: int, count: int) -> Hashes:
    """Return base^0 to base^(count - 1) modulo 2^64."""
    table_size = _BLOCK_BYTES + 1
    return (
        _power_table(base, table_size)[:count] if count <= table_size else _make_powers(base, count)
    )


def _make_powers(base: int, count: int) -> Hashes:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, out=factors)


_power_table = cache(_make_powers)


def _finalize(values: Hashes) -> Hashes:
    """SplitMix64's output function: every bit of the input reaches every bit of the hash."""
    mixed = values + _GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(31))
