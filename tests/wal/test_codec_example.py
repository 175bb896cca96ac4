"""The worked example of docs/format.md is what the codec writes."""

import re
from pathlib import Path

from wal.codec import ENTRY_HEADER_BYTES, MESSAGE_HEADER_BYTES, decode_entry, encode_entry
from wal.headers import BeginTxnHeader, MessageType
from wal.message import MutableMessage
from wal.position import ProducerStamp

FORMAT = Path(__file__).parents[2] / "docs" / "format.md"
TICK = 469_762_048_000_000


def documented_bytes() -> bytes:
    (block,) = re.findall(r"test_codec_example.py -->\n```\n(.*?)```", FORMAT.read_text(), re.DOTALL)
    return bytes.fromhex("".join(line.partition("  ")[2].partition("  ")[0] for line in block.splitlines()))


def encoded_example() -> bytes:
    message = MutableMessage(MessageType.BEGIN_TXN, BeginTxnHeader(keepalive_ms=10_000), txn_id=TICK)
    message.with_time_tick(TICK).with_wal_term(2)
    return encode_entry([message], first_position=1, previous_crc32c=0, producer=ProducerStamp(1, 2, 7))


def test_the_documented_example_is_byte_for_byte_what_is_written() -> None:
    assert documented_bytes() == encoded_example()


def test_the_documented_example_reads_back_as_described() -> None:
    entry = decode_entry(documented_bytes(), wal_name="rocks", previous_crc32c=0)
    assert (entry.first_position, entry.time_tick, entry.wal_term) == (1, TICK, 2)
    assert entry.messages[0].header == BeginTxnHeader(keepalive_ms=10_000)
    assert entry.producer == ProducerStamp(producer_id=1, epoch=2, sequence=7)


def test_the_documented_header_sizes_are_the_real_ones() -> None:
    text = FORMAT.read_text()
    assert f"An entry is {ENTRY_HEADER_BYTES} bytes of header" in text
    assert f"Each message is {MESSAGE_HEADER_BYTES} bytes" in text
