"""The worked examples of docs/format.md for the floor file and for keys are what is written."""

import re
from pathlib import Path

from wal.rocks.floor import (
    FLOOR_BYTES,
    PROMISE_OFFSET,
    SLOT_BYTES,
    TOKEN_OFFSET,
    Floor,
    decode_floor,
    encode_promise,
    encode_slot,
)
from wal.rocks.layout import (
    encode_log_id,
    encode_number,
    entry_key,
    first_position_key,
    log_id_key,
    meta_key,
)

TEXT = (Path(__file__).parents[2] / "docs" / "format.md").read_text("utf-8")
TICK = 469_762_048_000_000
SLOT = Floor(node_id="n1", generation=2, term=1, tick=TICK, meta_version=3, positions={1: 5})


def documented_file() -> bytes:
    """The example's bytes, each line at the offset it names."""
    (block,) = re.findall(r"test_floor_format.py -->\n```\n(.*?)```", TEXT, re.DOTALL)
    file = bytearray(FLOOR_BYTES)
    for line in block.splitlines():
        offset, content, _ = line.split("  ")
        data = bytes.fromhex(content)
        file[int(offset) : int(offset) + len(data)] = data
    return bytes(file)


def test_the_documented_floor_is_byte_for_byte_what_is_written() -> None:
    written = encode_slot(SLOT).ljust(PROMISE_OFFSET, b"\0") + encode_promise(TICK + 1)
    assert documented_file() == written.ljust(FLOOR_BYTES, b"\0")


def test_the_documented_floor_reads_back_as_described() -> None:
    assert decode_floor(documented_file()) == Floor(
        node_id="n1", generation=2, term=1, tick=TICK + 1, meta_version=3, positions={1: 5}
    )


def test_the_documented_sizes_of_the_floor_are_the_real_ones() -> None:
    assert f"`floor`, {FLOOR_BYTES:,} bytes" in TEXT
    assert f"Two slots of {SLOT_BYTES} bytes" in TEXT
    assert f"at byte {PROMISE_OFFSET}." in TEXT
    assert f"at byte {TOKEN_OFFSET}." in TEXT


def test_the_documented_keys_are_byte_for_byte_what_is_written() -> None:
    table = TEXT.partition("test_floor_format.py: keys -->\n")[2].partition("\n\n")[0]
    assert [
        bytes.fromhex(each)
        for each in re.findall(r"`([0-9a-f]{2}(?: [0-9a-f]{2})+)` \|$", table, re.MULTILINE)
    ] == [
        entry_key(1, 5),
        log_id_key("p0"),
        encode_log_id(1),
        first_position_key(1),
        encode_number(5),
        meta_key("checkpoint/p0"),
    ]
