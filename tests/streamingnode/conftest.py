"""Two nodes made once: one to damage copies of, and a stranger."""

from pathlib import Path

import pytest

from tests.streamingnode.sample_node import Sample, make_sample


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """A node with known rows; tests change copies of it only."""
    return make_sample(tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another node of the same shape."""
    return make_sample(tmp_path_factory.mktemp("stranger")).closed
