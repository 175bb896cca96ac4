"""What docs/format.md says about files, manifests and checkpoints is what the flusher writes."""

import re
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flusher.data_file import (
    DICTIONARY_SAMPLE_ROWS,
    ROW_GROUP_ROWS_MAX,
    ZSTD_LEVEL,
    FileInProgress,
    Rows,
)
from flusher.directory import TEMPORARY_SUFFIX, NodeDirectory, manifest_path
from flusher.manifest import (
    OFFSET,
    TICK,
    VCHANNEL,
    Checkpoint,
    CutManifest,
    CutPosition,
    decode_checkpoint,
    decode_manifest,
    encode_manifest,
    manifest_crc32c,
)
from flusher.run import OpenCut
from interceptors.shard.catalog import Catalog, CollectionInfo
from interceptors.shard.state import ShardSnapshot
from wal.entry import row_batches
from wal.headers import DeleteHeader, InsertHeader, MessageType
from wal.message import Message

TEXT = (Path(__file__).parents[2] / "docs" / "format.md").read_text("utf-8")
FIRST_TICK = 469_762_048_000_000
SCHEMA = pa.schema([pa.field("id", pa.int64())])


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def example(name: str) -> str:
    (block,) = re.findall(rf"test_format_document.py: {name} -->\n```\n(.*?)```", TEXT, re.DOTALL)
    return str(block)


def documented_manifest() -> CutManifest:
    return decode_manifest(example("manifest").encode(), name="the example")


def test_the_documented_manifest_is_byte_for_byte_what_is_written() -> None:
    content = example("manifest")
    assert content.count("\n") == 2
    assert encode_manifest(documented_manifest()).decode() == content


def test_the_documented_manifest_says_what_the_text_around_it_says() -> None:
    manifest = documented_manifest()
    (collection,) = manifest.collections
    (segment,) = manifest.segments
    (delete,) = manifest.deletes
    assert (manifest.node_id, manifest.number, collection.name) == ("n1", 1, "t")
    assert pa.ipc.read_schema(pa.py_buffer(collection.schema)) == SCHEMA
    assert (segment.rows, segment.key_min, segment.key_max) == (2, 7, 8)
    assert (delete.rows, delete.key_min, delete.key_max) == (1, 7, 7)
    assert segment.offset_max < delete.offset_min


@pytest.mark.parametrize("struct", [CutManifest, Checkpoint, ShardSnapshot])
def test_every_field_of_a_document_is_in_the_tables(struct: type[msgspec.Struct]) -> None:
    text = section("Cut manifest" if struct is CutManifest else "Checkpoint")
    documented = {
        name
        for row in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
        for name in row.split(", ")
    }
    assert {f"`{name}`" for name in struct.__struct_fields__} <= documented


def test_the_documented_checkpoint_is_byte_for_byte_what_is_written() -> None:
    content = bytes.fromhex(
        "".join(line.partition("  ")[0] for line in example("checkpoint").splitlines())
    )
    tick = FIRST_TICK + 4
    assert decode_checkpoint(content) == Checkpoint(
        cut_number=1,
        tick=tick,
        position=5,
        manifest_crc32c=manifest_crc32c(example("manifest").encode()),
        history=(CutPosition(tick, 5, 1792000000123),),
    )
    assert msgspec.msgpack.encode(decode_checkpoint(content)) == content


def test_the_documented_arrays_of_a_checkpoint_have_the_fields_in_that_order() -> None:
    documented = (
        "[id, name, schema, schema version, primary key, vchannels, partitions, created "
        "tick, dropped tick]"
    )
    assert documented in section("Checkpoint")
    fields = (
        documented.strip("[]")
        .replace(" version", "_version")
        .replace(" key", "_key")
        .replace(" tick", "_tick")
    )
    assert tuple(fields.split(", ")) == CollectionInfo.__struct_fields__


async def written(root: Path) -> tuple[pq.FileMetaData, pq.FileMetaData]:
    """Write the two files of the worked example, as the flusher does, and return their footers."""
    info = CollectionInfo(
        1, "c", SCHEMA.serialize().to_pybytes(), 1, "id", ("p0_1v0",), (), FIRST_TICK
    )
    start_file = partial(
        FileInProgress,
        NodeDirectory(root),
        node_id="n1",
        row_group_bytes=1 << 20,
        limiter=anyio.CapacityLimiter(1),
    )
    cut = OpenCut(1, Catalog([info]), start_file)

    def batch(kind: MessageType, keys: list[int], offset: int, tick: int) -> Rows:
        payload = pa.record_batch([pa.array(keys)], schema=SCHEMA).serialize().to_pybytes()
        header = InsertHeader(1, 2, 1, len(keys), 3, offset)
        message = Message(
            type=kind,
            header=header if kind is MessageType.INSERT else DeleteHeader(1, len(keys), offset),
            vchannel="p0_1v0",
            payload=payload,
            wal_term=1,
            wal_name="memory",
            position=1,
            last_confirmed_position=1,
            time_tick=tick,
            txn_id=0,
        )
        ((found, ticks),) = row_batches(message)
        return Rows(found, ticks)

    cut.insert(batch(MessageType.INSERT, [7, 8], 0, FIRST_TICK + 2))
    cut.delete(batch(MessageType.DELETE, [7], 2, FIRST_TICK + 3))
    footers = []
    for file in cut.files.values():
        await file.finish()
        assert file.described is not None
        footers.append(pq.read_metadata(root / (file.place["path"] + TEMPORARY_SUFFIX)))
        assert file.place["path"] in example("manifest")
    return footers[0], footers[1]


@pytest.mark.anyio
async def test_files_have_the_documented_columns_encodings_and_keys(tmp_path: Path) -> None:
    segment, delete = await written(tmp_path)
    text = section("Segment file")
    columns = re.findall(r"^\| `(_\w+)` \| `(\w+)` \|", text, re.MULTILINE)
    assert columns == [(TICK, "int64"), (OFFSET, "int64"), (VCHANNEL, "string")]
    for footer in (segment, delete):
        arrow = footer.schema.to_arrow_schema()
        assert [(field.name, str(field.type)) for field in arrow] == [("id", "int64"), *columns]
        chunks = [footer.row_group(0).column(index) for index in range(4)]
        assert {chunk.compression for chunk in chunks} == {"ZSTD"}
        assert all("DELTA_BINARY_PACKED" in chunk.encodings for chunk in chunks[1:3])
        assert "RLE_DICTIONARY" in chunks[3].encodings
        assert f"format version {footer.format_version}" in text.replace("\n", " ")
    documented = set(re.findall(r"^\| `((?:streamingnode|ARROW)[.:]\w+)` \|", text, re.MULTILINE))
    keys = {key.decode() for key in segment.metadata or {}}
    assert keys == documented
    assert {key.decode() for key in delete.metadata or {}} == documented - {
        "streamingnode.segment_id"
    }


def test_the_documented_bounds_of_files_are_the_real_ones() -> None:
    text = section("Segment file")
    assert f"zstd, level {ZSTD_LEVEL} |" in text
    assert f"at most 2^{ROW_GROUP_ROWS_MAX.bit_length() - 1} rows" in text
    assert f"the first {DICTIONARY_SAMPLE_ROWS} rows" in text


def test_the_documented_name_of_a_manifest_is_the_real_one() -> None:
    digits = re.findall(r"`cuts/<cut number, (\d+) digits>.json`", TEXT)
    assert [manifest_path(7)] == [f"cuts/{7:0{count}d}.json" for count in map(int, digits)]
