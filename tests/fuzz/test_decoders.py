"""Whatever bytes a decoder is given, it answers with what they say or with a typed error."""

import random
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.gate import Settings
from tests.chaos.gates.fuzz import (
    INPUT_S_MAX,
    MEMORY_BYTES_MAX,
    Decoder,
    collect_decoders,
    fuzz_once,
    mutated,
)
from tests.chaos.registry import GATES
from wal.codec import decode_entry
from wal.entry import PackedRows
from wal.errors import StreamingNodeError

NAMES = (
    "checkpoint",
    "cut manifest",
    "floor",
    "log entry",
    "producers' window",
    "reader position",
    "shard snapshot",
)


TOO_MANY_BYTES = 2 * MEMORY_BYTES_MAX  # threads that end meanwhile give some back


class Clock:
    now_s = 0.0


clock = Clock()


@pytest.fixture(scope="module")
def decoders() -> dict[str, Decoder]:
    return collect_decoders()


def test_every_decoder_has_valid_bytes_to_start_from(decoders: dict[str, Decoder]) -> None:
    assert tuple(sorted(decoders)) == NAMES
    for decoder in decoders.values():
        assert decoder.corpus
        for data in decoder.corpus:
            decoder.decode(data)
            decoder.decode(decoder.sign(data))


def rows_in(data: bytes) -> PackedRows | None:
    return decode_entry(data, wal_name="rocks", previous_crc32c=None).rows


def test_entries_to_start_from_have_both_forms_and_all_that_packed_rows_may_have(
    decoders: dict[str, Decoder],
) -> None:
    corpus = decoders["log entry"].corpus
    packed = [rows for data in corpus if (rows := rows_in(data)) is not None]
    assert 0 < len(packed) < len(corpus)
    assert any(len(rows.ticks) > 1 for rows in packed)
    assert any(rows.transactions.any() for rows in packed)
    assert any(rows.producers for rows in packed)


def test_whatever_passes_for_packed_rows_can_be_gone_through(decoders: dict[str, Decoder]) -> None:
    seed = random.randrange(2**31)
    choose = random.Random(seed)
    decoder = decoders["log entry"]
    packed = tuple(data for data in decoder.corpus if rows_in(data) is not None)
    gone_through = 0
    for _ in range(1000):
        data = mutated(choose, Decoder(decoder.decode, packed, decoder.sign))
        with suppress(StreamingNodeError):
            entry = decode_entry(data, wal_name="rocks", previous_crc32c=None)
            if (rows := entry.rows) is not None:
                seen = len(list(rows.messages()))
                assert 0 < seen <= rows.count, seed
                assert entry.tick_at(rows.position) == rows.time_tick, seed
                assert rows.within(above=rows.time_tick) is None, seed
                gone_through += 1
    assert gone_through, seed


def test_mutated_bytes_give_typed_errors(decoders: dict[str, Decoder]) -> None:
    seed = random.randrange(2**31)
    findings = [finding for at in range(1000) if (finding := fuzz_once(decoders, seed + at)[1])]
    assert not findings, seed


def take_too_much(_data: bytes) -> object:
    return bytearray(TOO_MANY_BYTES)


def take_too_long(_data: bytes) -> object:
    clock.now_s += INPUT_S_MAX + 0.1
    return None


def fail_untyped(_data: bytes) -> object:
    raise IndexError("past the end")


@pytest.mark.parametrize(
    "decode, said",
    [(take_too_much, "MemoryError"), (take_too_long, "took 1.1 s"), (fail_untyped, "IndexError")],
)
def test_a_decoder_that_breaks_its_promise_is_found(
    decode: Callable[[bytes], object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.chaos.gates.fuzz.time.perf_counter", lambda: clock.now_s)
    _, finding = fuzz_once({"broken": Decoder(decode, (b"corpus",))}, seed=1)
    assert said in finding
    assert len(bytearray(TOO_MANY_BYTES)) == TOO_MANY_BYTES, "the bound ends with the input"


@pytest.mark.parametrize("name", NAMES)
@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_give_typed_errors(
    decoders: dict[str, Decoder], name: str, data: bytes
) -> None:
    for given_ in (data, decoders[name].sign(data)):
        with suppress(StreamingNodeError):
            decoders[name].decode(given_)


@pytest.mark.crash
def test_fifty_thousand_mutated_inputs_give_typed_errors_in_bounded_memory() -> None:
    seed = random.randrange(2**31)
    report = GATES["fuzz"].run(GATES["fuzz"], Settings(seed=seed))
    assert report.passed, report.notes
    assert report.tried == 50_000
