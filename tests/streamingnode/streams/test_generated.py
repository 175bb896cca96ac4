"""The generated code is what the source says."""

from pathlib import Path

import pytest

from tests.streamingnode.streams.generated import GENERATED, ROOT, generate


def test_generated_code_is_that_of_its_source(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools, which the extra dev has")
    generate(tmp_path)
    for name in GENERATED:
        assert (ROOT / name).read_text("utf-8") == (tmp_path / name).read_text("utf-8"), (
            "python -m tests.streamingnode.streams.generated writes it again"
        )
