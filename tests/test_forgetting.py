"""What was dropped is forgotten by the running node, not only by the next one, once no cut or
reader can name it.
"""

import anyio
import anyio.lowlevel
import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.config import load_config
from streamingnode.node import Node
from tests.parts_of import parts_of

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

SCHEMA = pa.schema([pa.field("key", pa.int64(), nullable=False)])
QUICK = {"cut_interval_s": None, "retention_s": 0, "flush.retention.interval_s": 0.01}
HANGS_S = 60


def remembered(node: Node) -> set[str]:
    """Return the names of the collections that the live catalog knows, dropped ones too."""
    return {info.name for info in parts_of(node).channel.catalog.collections(dropped=True)}


async def test_dropped_collections_and_partitions_do_not_pile_up_while_the_node_is_open() -> None:
    async with sn.open_node(None, config=load_config(arguments=QUICK)) as node:
        await node.create_collection("kept", SCHEMA, primary_key="key")
        for number in range(3):
            await node.create_collection(f"dropped{number}", SCHEMA, primary_key="key")
            await node.insert(f"dropped{number}", [{"key": number}])
            await node.create_partition("kept", f"p{number}")
            await node.drop_partition("kept", f"p{number}")
            await node.drop_collection(f"dropped{number}")
        assert len(remembered(node)) == 4
        await node.flush()
        await node.insert("kept", [{"key": 1}])
        await node.flush()
        with anyio.fail_after(HANGS_S):
            while len(remembered(node)) > 1:
                await anyio.lowlevel.checkpoint()
        assert remembered(node) == {"kept"}
        assert [each.name for each in node.collections()] == ["kept"]
        info = parts_of(node).channel.catalog.collection_by_name("kept")
        assert [each.name for each in info.partitions] == ["_default"]
        assert (await node.snapshot("kept")).num_rows == 1
