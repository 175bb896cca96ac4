import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wal.log_contract import append, stamped_pack
from wal.errors import AlreadyOwned, InvalidArgument, StorageFailed
from wal.files import LOCK_NAME, DirectoryLock
from wal.rocks.store import open_rocks_store

HOLDER = """
import sys
from pathlib import Path
from wal.files import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()  # until it is killed, or nobody is there who could
"""


def test_a_second_owner_in_another_process_is_told_the_pid_of_the_first(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(AlreadyOwned) as owned:
            DirectoryLock(tmp_path)
        assert (owned.value.path, owned.value.pid, owned.value.own) == (
            str(tmp_path),
            holder.pid,
            False,
        )
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        DirectoryLock(tmp_path).release()


def test_a_released_directory_can_be_owned_again_and_names_the_new_owner(tmp_path: Path) -> None:
    DirectoryLock(tmp_path).release()
    lock = DirectoryLock(tmp_path)
    assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()}\n"
    lock.release()
    lock.release()


def test_a_process_that_inherited_the_descriptors_keeps_no_released_directory(
    tmp_path: Path,
) -> None:
    """As one that another thread is just starting does, until it runs its program."""
    lock = DirectoryLock(tmp_path)
    places = [tmp_path, tmp_path / LOCK_NAME]
    found = [(each, each.name) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    inherited = [int(name) for each, name in found if each.exists() and each.readlink() in places]
    assert len(inherited) == len(places)
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=inherited):
        lock.release()
        DirectoryLock(tmp_path).release()


def test_unlinking_the_lock_file_lets_nobody_else_in(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    (tmp_path / LOCK_NAME).unlink()
    with pytest.raises(AlreadyOwned):
        DirectoryLock(tmp_path)
    lock.release()


def test_the_pid_of_this_process_in_a_lock_of_another_makes_it_no_owner(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        # as in a container that counts its processes from 1, too
        (tmp_path / LOCK_NAME).write_text(f"{os.getpid()}\n")
        with pytest.raises(AlreadyOwned) as owned:
            DirectoryLock(tmp_path)
        assert not owned.value.own
        holder.kill()


@pytest.mark.anyio
async def test_a_store_that_is_open_in_this_process_refuses_a_second_opener(tmp_path: Path) -> None:
    store = await open_rocks_store(tmp_path / "node")
    with pytest.raises(
        AlreadyOwned, match=rf"this process \(pid {os.getpid()}\) has it open already"
    ) as owned:
        await open_rocks_store(tmp_path / "node")
    assert (owned.value.pid, owned.value.own) == (os.getpid(), True)
    await store.close()
    await (await open_rocks_store(tmp_path / "node")).close()


@pytest.mark.anyio
async def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    store = await open_rocks_store(tmp_path / "node")
    log = await store.open_log("p0")
    await append(log, b"before")
    pid = os.fork()
    if pid == 0:
        refused = 0
        promise = store.promise_tick(1)
        for call in (lambda: log.append(stamped_pack(b"child")), lambda: promise.send(None)):
            try:
                call()
            except StorageFailed:
                refused += 1
        os._exit(refused)
    _, status = os.waitpid(pid, 0)  # noqa: ASYNC222 - the child exits at once
    assert os.waitstatus_to_exitcode(status) == 2
    await append(log, b"after")
    assert log.durable_position == 2
    await store.close()


@pytest.mark.anyio
async def test_a_path_that_is_a_file_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="is a file — "):
        await open_rocks_store(tmp_path / "file")
    with pytest.raises(StorageFailed, match="file"):
        await open_rocks_store(tmp_path / "file" / "node")
