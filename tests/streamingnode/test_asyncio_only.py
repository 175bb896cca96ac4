"""Under another library than asyncio a node says what it is for, and tests are told how to choose
it.
"""

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import streamingnode as sn
from streamingnode.opening import OpenNode
from wal.errors import InvalidArgument

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
WAYS: dict[str, Callable[[Path], OpenNode]] = {
    "open_node": sn.open_node,
    "in memory": lambda _: sn.open_node(None),
    "shared": lambda path: sn.open_node(path, share=True),
    "connect": lambda path: sn.connect(f"unix:{path}/node.sock"),
    "spool": lambda path: sn.connect(f"unix:{path}/node.sock", spool=path),
}


async def entered(way: OpenNode) -> None:
    async with way:
        raise AssertionError("it opened")


async def awaited(way: OpenNode) -> None:
    await way


@pytest.mark.parametrize("use", [entered, awaited])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_outside_of_asyncio_no_node_is_opened(
    way: Callable[[Path], OpenNode],
    use: Callable[[OpenNode], Coroutine[Any, Any, None]],
    tmp_path: Path,
) -> None:
    place = tmp_path / "data"
    with pytest.raises(InvalidArgument, match="for asyncio only"):
        use(way(place)).send(None)  # as the loop of another library does

    async def as_host_of_another_loop() -> None:
        """Run it from a callback: so does a loop that is a guest of asyncio's."""
        refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def step() -> None:
            try:
                use(way(place)).send(None)
            except InvalidArgument as error:
                refused.set_exception(error)

        asyncio.get_running_loop().call_soon(step)
        await refused

    with pytest.raises(InvalidArgument, match="for asyncio only"):
        asyncio.run(as_host_of_another_loop())
    assert not place.exists()


def test_the_fixtures_of_the_guide_run_a_test_once_and_on_asyncio(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    (fixtures,) = [block for block in blocks if "anyio_backend" in block]
    test = (
        "import streamingnode as sn\n\n"
        f"{fixtures}\n"
        "@pytest.mark.anyio\n"
        "async def test_it(fresh_node):\n"
        "    assert await fresh_node.consistent_tick()\n"
    )
    (tmp_path / "test_own.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout
