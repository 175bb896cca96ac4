"""The README among the packages that users have: its programs, under each event loop and in a
notebook.
"""

import importlib.util
from pathlib import Path

import pytest

import streamingnode as sn
from tests.crowded.surroundings import BESIDE, PACKAGES, python_blocks, run

pytestmark = pytest.mark.crowded

FIRST, INGEST = python_blocks("README.md")[:2]
ORDERS = 1


def test_the_environment_has_what_users_have() -> None:
    assert [name for name in PACKAGES if importlib.util.find_spec(name) is None] == []


def test_the_programs_of_the_readme_run_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(BESIDE + FIRST)
    (tmp_path / "ingest.py").write_text(BESIDE + INGEST)
    for _ in range(2):
        assert "TXN 4" in run("first.py", cwd=tmp_path)
    assert run("ingest.py", cwd=tmp_path).count("tea") == ORDERS


@pytest.mark.parametrize("runner", ["asyncio.run(main())", "uvloop.run(main())", "anyio.run(main)"])
def test_a_client_in_the_same_program_is_answered_under_each_runner(
    tmp_path: Path, runner: str
) -> None:
    program = """
import anyio, asyncio
import streamingnode as sn
async def main():
    async with sn.open_node("data"), sn.connect("unix:data/node.sock", give_up_s=20) as client:
        print(await client.consistent_tick() > 0)
"""
    assert run("-c", f"{BESIDE}{program}{runner}", cwd=tmp_path) == "True\n"


NESTED = """
import asyncio
import pyarrow as pa
import streamingnode as sn
nest_asyncio.apply()

async def main():
    async with sn.open_node("data", share=SHARE) as node:
        schema = pa.schema([("key", pa.int64())])
        create = node.create_collection("c", schema, primary_key="key", if_not_exists=True)
        asyncio.run(create)  # inside the running loop, as notebooks do
        asyncio.run(node.insert("c", [{"key": 1}]))
        async with node.transaction() as txn:
            asyncio.run(txn.insert("c", [{"key": 2}]))
        await node.flush()
        print(asyncio.run(node.snapshot("c")).num_rows)

async def forgets():
    return await sn.open_node("data")

asyncio.run(main())
node = asyncio.run(forgets())  # its loop stands still now, and is not closed
print(asyncio.run(node.snapshot("c")).num_rows)
asyncio.run(node.aclose())
with sn.sync.open_node("data") as node:
    print(node.snapshot("c").num_rows)
"""


@pytest.mark.parametrize("share", ["False", "True"])
def test_a_node_works_inside_a_loop_that_nest_asyncio_lets_run_again(
    tmp_path: Path, share: str
) -> None:
    assert run("-c", BESIDE + NESTED.replace("SHARE", share), cwd=tmp_path) == "2\n2\n2\n"


CELLS = """
import streamingnode as sn, pyarrow as pa
node = await sn.open_node("data")
await node.create_collection("c", pa.schema([("key", pa.int64())]), primary_key="key")
await node.insert("c", [{"key": 1}])
print("rows", (await node.snapshot("c")).num_rows)

"""


def test_a_notebook_awaits_a_node_and_leaves_it_open(tmp_path: Path) -> None:
    (tmp_path / "notebook.ipy").write_text(BESIDE + CELLS)
    assert "rows 1\n" in run(
        "-m", "IPython", "--no-banner", "--quick", "notebook.ipy", cwd=tmp_path
    )
    with sn.sync.open_node(tmp_path / "data") as node:
        assert node.snapshot("c").num_rows == 1
