"""Tables as another Delta reader sees them, and their leases on the node."""

from pathlib import Path

import msgspec
from deltalake import DeltaTable

from flusher.cuts import Lease, lease_path
from tests.spark_sink.node_builder import NodeBuilder, Value, ordered


def rows_of(path: Path, version: int | None = None) -> list[dict[str, Value]]:
    """Read a table as another Delta reader does."""
    return ordered(DeltaTable(str(path), version=version).to_pyarrow_table().to_pylist())


def lease_of(node: NodeBuilder, table: Path) -> Lease:
    return msgspec.json.decode(lease_path(node.path, table).read_bytes(), type=Lease)
