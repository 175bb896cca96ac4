"""A process that forks, before, while and after it has a node open: its child is refused, and never
hangs.

Each program runs by itself: a test process is not to be forked.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import streamingnode as sn

HANGS_S = 120

PROGRAM = """
import asyncio, gc, multiprocessing, os, signal, sys
import pyarrow as pa
import streamingnode as sn
from wal.errors import StorageFailed, StreamingNodeError

place = sys.argv[1]
SCHEMA = pa.schema([("key", pa.int64())])

def told(call, *arguments, **options):
    try:
        return call(*arguments, **options)
    except StreamingNodeError as error:
        print(error.code, "after the fork" in str(error) or "spawn" in str(error), flush=True)

def forked(child, end=os._exit):
    '''Run `child` in a fork of this process; one that hangs is killed, and its exit code tells.'''
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        child()
        sys.stdout.flush()
        end(0)
    print("child ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

def make():
    with sn.sync.open_node(place) as node:
        node.create_collection("c", SCHEMA, primary_key="key", if_not_exists=True)

def write():
    with sn.sync.open_node(place) as node:
        return node.insert("c", [{"key": 1}]).time_tick
"""
REFUSED = "STORAGE_FAILED True\n"
ENDED = "child ended 0\n"


def said(path: Path, program: str) -> str:
    """Return what a program prints. It has to end well, and to leave a node that opens."""
    command = [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        "-c",
        PROGRAM + program,
        str(path / "node"),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=HANGS_S, cwd=path
    )
    assert (done.stderr, done.returncode) == ("", 0)
    with sn.sync.open_node(path / "node"):
        return done.stdout


@pytest.mark.parametrize("end", ["os._exit", "sys.exit"])
def test_a_child_forked_after_a_close_is_refused_before_it_locks_the_directory(
    tmp_path: Path, end: str
) -> None:
    program = f"make(); forked(lambda: told(write), {end}); write(); print('parent wrote')"
    assert said(tmp_path, program) == REFUSED + ENDED + "parent wrote\n"


def test_a_child_makes_no_directory_where_it_may_not_open_a_node(tmp_path: Path) -> None:
    program = """
make()
forked(lambda: told(sn.sync.open_node, place + "-other"))
print(os.path.exists(place + "-other"))
"""
    assert said(tmp_path, program) == REFUSED + ENDED + "False\n"


def test_a_child_forked_before_the_first_opening_opens_a_node(tmp_path: Path) -> None:
    assert said(tmp_path, "forked(make); forked(write); make()") == ENDED + ENDED


def test_workers_of_multiprocessing_that_are_forked_are_refused_and_spawned_ones_are_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "work.py").write_text(
        "import sys\n" + PROGRAM.replace("place = sys.argv[1]", "place = 'node'")
    )
    program = """
from work import told, write
if __name__ == "__main__":
    make()
    for method in ("fork", "spawn", "forkserver"):
        worker = multiprocessing.get_context(method).Process(target=told, args=(write,))
        worker.start()
        worker.join(100)
        print(method, worker.exitcode, flush=True)
"""
    assert said(tmp_path, program) == REFUSED + "fork 0\nspawn 0\nforkserver 0\n"


def test_a_child_is_a_client_of_a_node_that_another_process_has(tmp_path: Path) -> None:
    """As workers are that a server forked after it made the collections: RocksDB is not needed for
    that.
    """
    program = """
make()
def ask():
    with sn.sync.connect(f"unix:{place}/node.sock") as client:
        client.insert("c", [{"key": 2}])
def share():
    async def work():
        async with sn.open_node(place, share=True) as node:
            await node.insert("c", [{"key": 3}])
    asyncio.run(work())
with sn.sync.open_node(place) as node:
    forked(ask)
    forked(share)
    print(sorted(node.snapshot("c")["key"].to_pylist()))
"""
    assert said(tmp_path, program) == ENDED + ENDED + "[2, 3]\n"


def test_a_child_that_would_share_a_node_nobody_has_is_told_why_it_cannot(tmp_path: Path) -> None:
    program = """
make()
async def work():
    async with sn.open_node(place, share=True):
        pass
forked(lambda: told(asyncio.run, work()))
"""
    assert said(tmp_path, program) == REFUSED + ENDED


COPY = """
async def program():
    async with OPENING as node:
        await node.create_collection("c", SCHEMA, primary_key="key", if_not_exists=True)
        await node.insert("c", [{"key": 1}])
        def child():
            calls = (lambda: node.insert("c", [{"key": 2}]), lambda: node.consistent_tick(),
                     lambda: node.flush(), lambda: node.transaction().__aenter__(),
                     lambda: node.producer("p"), lambda: node.snapshot("c"))
            for call in calls:
                try:
                    call().send(None)
                except StreamingNodeError as error:
                    print(error.code, flush=True)
            at_once = (node.statistics, node.collections, lambda: node.read("c"), lambda: node.mq)
            for call in at_once:
                try:
                    call()
                except StreamingNodeError as error:
                    print(error.code, flush=True)
            try:
                node.aclose().send(None)
            except StopIteration:
                print("closed", flush=True)
        forked(child, END)
        await node.insert("c", [{"key": 3}])
        print((await node.snapshot("c")).num_rows)
asyncio.run(program())
"""
COPY_SAYS = "STORAGE_FAILED\n" * 10 + "closed\n" + ENDED + "2\n"


@pytest.mark.parametrize("opening", ["sn.open_node(place)", "sn.open_node(place, share=True)"])
def test_the_copy_of_an_open_node_refuses_every_call_and_leaves_the_node_alone(
    tmp_path: Path, opening: str
) -> None:
    assert said(tmp_path, COPY.replace("OPENING", opening).replace("END", "os._exit")) == COPY_SAYS


def test_the_copy_of_a_client_refuses_every_call_and_leaves_the_connection_alone(
    tmp_path: Path,
) -> None:
    with sn.sync.open_node(tmp_path / "served"):
        opening = f"sn.connect('unix:{tmp_path}/served/node.sock')"
        assert (
            said(tmp_path, COPY.replace("OPENING", opening).replace("END", "os._exit")) == COPY_SAYS
        )


def test_a_child_that_throws_its_copy_away_and_ends_as_a_program_does_touches_nothing(
    tmp_path: Path,
) -> None:
    """RocksDB closes its database with the last reference, also at the end of the interpreter, and
    waits for its threads.
    """
    program = """
node = sn.sync.open_node(place)
node.create_collection("c", SCHEMA, primary_key="key")
def child():
    global node
    del node
    gc.collect()
forked(child, sys.exit)
node.insert("c", [{"key": 1}])
forked(lambda: None, sys.exit)
print(node.snapshot("c").num_rows)
node.close()
"""
    assert said(tmp_path, program) == ENDED + ENDED + "1\n"


def test_a_child_that_outlives_its_parent_holds_neither_the_directory_nor_its_clients(
    tmp_path: Path,
) -> None:
    """The parent is killed: what it has open ends then, also where a child was forked that lives
    on.
    """
    owner = (
        PROGRAM
        + """
node = sn.sync.open_node(place)
node.create_collection("c", SCHEMA, primary_key="key")
print("open", flush=True)
sys.stdin.readline()                                            # until there is a client
if not os.fork():
    sys.stdin.read()                                            # lives on, until the test ends
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    command = [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        "-c",
        owner,
        str(tmp_path / "node"),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "open\n"
        with sn.sync.connect(f"unix:{tmp_path}/node/node.sock", give_up_s=60) as client:
            client.consistent_tick()
            process.stdin.write("\n")
            process.stdin.flush()
            process.wait(HANGS_S)
            with sn.sync.open_node(tmp_path / "node") as node:  # the directory is free
                # and the client has heard that its connection ended
                assert client.insert("c", [{"key": 1}]).time_tick
                assert node.snapshot("c").num_rows == 1
