"""The guide, run as a reader would: block after block in one session, printing what the guide
shows.
"""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from streamingnode.sync import SyncNode

GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"
BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)


def test_every_block_of_the_guide_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # A cut of its own, on a slow machine, would have some of the segments that the page shows.
    monkeypatch.setenv("STREAMINGNODE_FLUSH_SCHEDULE_INTERVAL_S", "3600")
    session: dict[str, object] = {}
    try:
        check_blocks(GUIDE, session)
    finally:
        if isinstance(node := session.get("node"), SyncNode):
            node.close()


def check_blocks(page: Path, session: dict[str, object]) -> None:
    printed = ""
    for kind, text in BLOCK.findall(page.read_text("utf-8")):
        if kind == "python":
            assert printed == "", "a block that prints is followed by what it prints"
            printed = run(text, page, session)
        else:
            assert printed == text
            printed = ""
    assert printed == ""


def run(block: str, page: Path, session: dict[str, object]) -> str:
    with redirect_stdout(io.StringIO()) as output:
        exec(compile(block, str(page), "exec"), session)
    return output.getvalue()
