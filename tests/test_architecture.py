"""The structure in docs/architecture.md is the structure of the code."""

import re
from enum import Enum
from pathlib import Path

import pytest

from flusher.flusher import FlusherState
from interceptors.txn_session import SessionState
from streamingnode.remote.link import LinkState
from streamingnode.writing.transaction import TransactionState
from tests.picture import PICTURE, drawn
from wal.lifecycle import LogState
from wal.rocks.group_commit import StoreState

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"


def test_the_picture_of_the_packages_is_drawn_from_the_imports() -> None:
    assert PICTURE.read_text("utf-8") == drawn(), "python -m tests.picture draws it again"


def test_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", PAGE.read_text("utf-8")))
    assert named
    assert not [name for name in sorted(named) if not (ROOT / name).is_file()]


@pytest.mark.parametrize(
    "states",
    [LogState, StoreState, SessionState, TransactionState, LinkState, FlusherState],
    ids=lambda states: states.__name__,
)
def test_drawing_of_a_state_machine_has_its_states_and_no_others(states: type[Enum]) -> None:
    text = PAGE.read_text("utf-8").partition(f"`{states.__name__}` in")[2]
    drawing = text.partition("```text\n")[2].partition("```")[0]
    assert set(re.findall(r"\b[A-Z][A-Z_]+\b", drawing)) == {state.name for state in states}
