"""Which cuts go before the log does: what was dropped lately can still be read, whoever has taken
it.
"""

import pytest

from flusher.cuts import Lease
from flusher.manifest import CollectionEntry, CutManifest
from flusher.retention import may_remove_cut


@pytest.mark.parametrize("old, goes", [(0, False), (7, True)], ids=["lately", "long ago"])
def test_a_cut_with_a_collection_dropped_lately_stays_though_every_table_has_taken_it(
    old: int, goes: bool
) -> None:
    entries = tuple(
        CollectionEntry(
            collection_id=number,
            name=f"c{number}",
            schema=b"",
            schema_version=1,
            primary_key="id",
            partitions=(),
            vchannels=(),
            created_tick=1,
            dropped_tick=dropped_tick,
        )
        for number, dropped_tick in ((1, 0), (2, 5))
    )
    manifest = CutManifest(
        format=1,
        node_id="me",
        number=3,
        tick=7,
        previous_tick=4,
        previous_crc32c=0,
        created_ms=0,
        collections=entries,
        vchannels=(),
        segments=(),
        deletes=(),
    )
    lease = Lease(node_id="me", collection_id=1, cut=3)
    assert may_remove_cut(manifest, leases=[lease], live={1}, old_tick=old, taken_tick=9) == goes
