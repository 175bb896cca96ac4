"""A collection whose id was given out before that of another, and whose message is in the log after
it.
"""

from pathlib import Path

import anyio
import pytest

from flusher.directory import NodeDirectory
from flusher.flusher import Flusher, FlusherState
from flusher.manifest import checkpoint_key
from flusher.run import FlushOptions, FlushRun, RetentionOptions
from scanner.scanner import Scanner
from tests.flusher.cut_reading import manifests
from tests.flusher.stamped_log import StampedLog, flusher_of
from wal.memory_store import MemoryLogStore
from wal.timetick import physical_ms


def test_files_of_a_collection_with_an_older_id_than_one_before_it_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id was given out, and its append waited: the log has a collection of a later id before
    it.
    """
    go = anyio.Event()
    follow = FlushRun.follow

    async def held(run: FlushRun, scanner: Scanner) -> None:
        await go.wait()
        await follow(run, scanner)

    async def main() -> None:
        store = MemoryLogStore()
        log = StampedLog(await store.open_log("p0"))
        given_out = log.next_id
        log.next_id = log.next_id + 2
        log.insert(log.create(), [1])
        log.cut()
        options = FlushOptions(retention=RetentionOptions(min_age_s=0))

        def restarted() -> Flusher:
            directory = NodeDirectory(tmp_path)
            return flusher_of(
                directory, store, log.log, options=options, now_ms=lambda: physical_ms(log.tick)
            )

        async def run_until(number: int) -> None:
            flusher = restarted()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(flusher.run)
                await flusher.wait_for_cut(number)
                tasks.cancel_scope.cancel()

        await run_until(1)
        checkpoint = await store.state.get(checkpoint_key("p0"))
        following = log.next_id
        log.next_id = given_out
        late = log.create()
        log.next_id = following
        log.insert(late, [7, 8])
        log.cut()
        await run_until(2)
        # as a kill behind the published cut leaves it
        await store.state.put({checkpoint_key("p0"): checkpoint})
        monkeypatch.setattr(FlushRun, "follow", held)
        flusher = restarted()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flusher.run)
            while flusher.state is not FlusherState.RUNNING:
                await anyio.lowlevel.checkpoint()
            await flusher.enforce_retention()
            go.set()
            await flusher.wait_for_cut(2)
            tasks.cancel_scope.cancel()
        assert all(
            (tmp_path / file.path).exists() for cut in manifests(tmp_path) for file in cut.files
        )

    anyio.run(main)
