"""The lease that docs/format.md shows is what an ingest writes and what the node's retention
reads.
"""

import re
from pathlib import Path
from zlib import crc32

import msgspec

from flusher.cuts import Lease, lease_path, read_leases, write_lease
from flusher.directory import NodeDirectory

TEXT = (Path(__file__).parents[2] / "docs" / "format.md").read_text("utf-8")


def documented() -> str:
    (block,) = re.findall(r"test_lease_format.py -->\n```\n(.*?)```", TEXT, re.DOTALL)
    return str(block)


def test_the_documented_lease_is_byte_for_byte_what_is_written(tmp_path: Path) -> None:
    lease = msgspec.json.decode(documented(), type=Lease)
    write_lease(tmp_path, lease)
    path = lease_path(tmp_path, Path(lease.table))
    assert path.read_text("utf-8") == documented()
    place = str(Path(lease.table).resolve().parent)
    assert path.relative_to(tmp_path).as_posix() == f"leases/t-{crc32(place.encode()):08x}.json"


def test_the_node_reads_the_documented_lease_and_holds_everything_for_an_unreadable_one(
    tmp_path: Path,
) -> None:
    write_lease(tmp_path, msgspec.json.decode(documented(), type=Lease))
    (tmp_path / "leases" / "torn.json").write_text(documented()[:20])
    assert sorted(
        read_leases(NodeDirectory(tmp_path), node_id="n1"), key=lambda lease: lease.cut
    ) == [
        Lease(node_id="n1", collection_id=0, cut=0, tick=0, table="leases/torn.json"),
        msgspec.json.decode(documented(), type=Lease),
    ]
