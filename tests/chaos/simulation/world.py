"""The world of one seed: a machine with a disk and a clock, on which one node process lives after
another.

A life is a whole node, put together by the composition root as ever, with four things in other
hands: the log store, the files, the clock and the threads. It ends by itself, by a kill at a drawn
turn of its loop, or by a power cut there.
"""

import hashlib
import inspect
import logging
import random
import secrets
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Self
from unittest.mock import patch

import anyio.to_thread
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from anyio._backends import _asyncio as anyio_on_asyncio

from flusher.directory import NodeDirectory, file_paths, read_cut
from flusher.manifest import checkpoint_key, decode_checkpoint
from scanner.named_reader import ReaderPosition
from streamingnode import composition
from streamingnode.config import NodeConfig, load_config
from streamingnode.opening import OpenNode
from tests.chaos.simulation.disk import Disk, EntryWritten, Written
from tests.chaos.simulation.node_files import SimulatedFiles
from tests.chaos.simulation.store import WAL_NAME, SimulatedStore, StoreFaults
from tests.chaos.simulation.virtual_loop import OrderedScope, VirtualLoop, run_inline
from wal.codec import decode_entry
from wal.entry import LogEntry

NODE_ID = "simulated"
READER_PREFIX = "reader/"
START_MS = 1_700_000_000_000
MEMORY = Path("/dev/shm")


class PromiseBroken(AssertionError):
    """An invariant that the world checks by itself does not hold."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances of what goes wrong, of one life."""

    store: StoreFaults = StoreFaults()  # noqa: RUF009 - frozen
    files: float = 0.0
    clock_leap: float = 0.0


class World:
    """Everything that outlives a process; a context manager that removes it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.choose = random.Random(f"world {seed}")
        self.disk = Disk()
        self._root = Path(
            tempfile.mkdtemp(prefix="simulation-", dir=MEMORY if MEMORY.is_dir() else None)
        )
        self.files = SimulatedFiles(self._root, self.choose)
        self.faults = Faults()
        self.elapsed_s = 0.0
        self.clock_offset_ms = 0
        self.clock_leaps = self.choose.random() < 0.5
        self.syncs_late = self.choose.random() < 0.2
        self._loop: VirtualLoop | None = None
        self._digest = hashlib.blake2b(digest_size=16)
        self.turns = self.packs_lost = 0
        self.answers_left = 0
        """So many answers, and the process is killed; 0 for no such end."""
        self.broken: list[str] = []
        self.dropped: set[int] = set()
        """Ids of collections that somebody has asked to drop: their readers hold nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    @property
    def living(self) -> bool:
        """Whether a process lives; after its death its clean-ups are none of anybody's business."""
        return self._loop is not None

    @property
    def trace(self) -> str:
        """What happened so far, as one short text: equal for equal runs."""
        return self._digest.hexdigest()

    def answered(self) -> None:
        """Take note that a client was told something; a life that is to end behind so many answers
        ends now.
        """
        self.answers_left -= 1
        if self.answers_left == 0 and self._loop is not None:
            self._loop.halt_at_turn = self._loop.turns + 1 + self.choose.randint(0, 2)

    def note(self, *what: object) -> None:
        """Add to the trace, while a process lives or between two."""
        self._digest.update(repr(what).encode())

    def now_s(self) -> float:
        """Return virtual seconds since the world began; never back."""
        return self.elapsed_s + (self._loop.time() if self._loop else 0.0)

    def now_ns(self) -> int:
        """Return the same in nanoseconds."""
        return int(self.now_s() * 1e9)

    def elapsed_ms(self) -> int:
        """Return the same in milliseconds: the clock that nobody sets."""
        return int(self.now_s() * 1000)

    def now_ms(self) -> int:
        """Return what the machine's clock says, which somebody may have set."""
        if self.clock_leaps and self.choose.random() < self.faults.clock_leap:
            self.clock_offset_ms += self.choose.choice(
                [-3_600_000, -1000, -1, 1, 1000, 3_599_000, 86_400_000]
            )
        return START_MS + self.clock_offset_ms + int(self.now_s() * 1000)

    def live(self, main: Coroutine[object, object, None], *, turns: int = 0) -> bool:
        """Run one process until `main` ends (True), or until it is killed after so many turns
        (False).
        """
        loop = VirtualLoop(self.choose)
        loop.halt_at_turn = turns
        self._loop = loop
        ended = False
        with _in_our_hands(self):
            try:
                loop.live(main)
                ended = not turns or loop.turns < turns
            finally:
                self.turns += loop.turns
                self.note(
                    "life",
                    loop.turns,
                    len(self.disk.writes),
                    self.disk.synced,
                    self.files.operations,
                )
                self.elapsed_s += loop.time() + 0.001
                self._loop = None
                self._bury(loop)
                # killed before its first step
                if inspect.getcoroutinestate(main) == inspect.CORO_CREATED:
                    main.close()
        return ended

    def _bury(self, loop: VirtualLoop) -> None:
        """End the process for good: what its clean-ups do after death changes nothing."""
        writes = list(self.disk.writes)
        floor = self.disk.floor.copy()
        drawn = self.choose.getstate()
        self.files.end_process()
        loop.bury()
        self.disk.writes = writes
        self.disk.floor = floor
        self.choose.setstate(drawn)

    def lose_power(self) -> None:
        """Cut the power, while no process lives."""
        written = list(self.disk.writes)
        lost = self.disk.lose_power(self.choose)
        self.packs_lost += sum(
            groups_of(entry) > 1 for entry in _decoded(written[len(self.disk.writes) :])
        )
        self.files.lose_power()
        self.note("power", lost)

    def log_entries(self) -> Iterator[LogEntry]:
        """Return all entries of the node's log that are on the disk, truncated ones too."""
        return _decoded(self.disk.writes)

    def open_node(self, **settings: object) -> OpenNode:
        """Return a node on this machine; only within `live`."""
        config = _config_of(tuple(settings.items()))
        return OpenNode(
            None,
            lambda: config,
            partial(composition.compose, now_ms=self.now_ms, elapsed_ms=self.elapsed_ms),
        )

    # --- what composition asks for ----------------------------------------------------------------

    async def open_store(
        self, _path: Path | None, _config: NodeConfig, *, brief: bool
    ) -> SimulatedStore:
        """Return the opened log store of this machine."""
        store = _CheckedStore(self)
        await store.open()
        return store

    async def files_directory(
        self, _path: Path | None, _config: NodeConfig, _closing: AsyncExitStack
    ) -> NodeDirectory:
        """Give out this machine's files."""
        self.files.fault = self.faults.files
        return self.files


class _CheckedStore(SimulatedStore):
    """The store, and what must hold whenever it is told to give something up or to remember
    something.
    """

    def __init__(self, world: World) -> None:
        super().__init__(
            world.disk,
            world.choose,
            faults=world.faults.store,
            node_id=NODE_ID,
            syncs_late=world.syncs_late,
        )
        self._world = world
        self._files = world.files

    def on_append(self, tick: int, last_tick: int) -> None:
        """I10: tick order is position order."""
        if tick <= last_tick:
            self._break(f"tick {tick} is appended after {last_tick}")

    def on_put(self, changes: Mapping[str, bytes | None]) -> None:
        """I7: a checkpoint covers only what is durably in files."""
        for key, content in changes.items():
            if key.startswith(checkpoint_key("")) and content is not None:
                checkpoint = decode_checkpoint(content)
                cut = read_cut(NodeDirectory(self._files.root), checkpoint.cut_number)
                uncovered = {*file_paths(cut.manifest)} & self._files.not_durable()
                if (
                    uncovered
                    or cut.crc32c != checkpoint.manifest_crc32c
                    or cut.manifest.tick != checkpoint.tick
                ):
                    self._break(
                        f"checkpoint {checkpoint.cut_number} is ahead of its files: {uncovered}"
                    )

    def on_truncate(self, position: int) -> None:
        """I8: the log is kept down to the durable checkpoint and every named reader."""
        checkpoint = decode_checkpoint(self.state.records.get(checkpoint_key("p0")))
        bounds = [checkpoint.position]
        bounds += [
            _reader_position(value)
            for key, value in self.state.records.items()
            if key.startswith(READER_PREFIX) and int(key.split("/")[1]) not in self._world.dropped
        ]
        if position > min(bounds):
            self._break(f"truncation to {position} passes {min(bounds)}")

    def _break(self, what: str) -> None:
        self._world.broken.append(what)  # whatever becomes of the error
        raise PromiseBroken(what)


def groups_of(entry: LogEntry) -> int:
    """Return how many writes went into an entry."""
    return 1 if entry.rows is None else len(entry.rows.ticks)


def _decoded(writes: Iterable[Written]) -> Iterator[LogEntry]:
    for written in writes:
        if isinstance(written, EntryWritten):
            yield decode_entry(written.data, wal_name=WAL_NAME, previous_crc32c=None)


@cache
def _config_of(settings: tuple[tuple[str, object], ...]) -> NodeConfig:
    return load_config(arguments=dict(settings))


def _reader_position(value: bytes) -> int:
    return msgspec.msgpack.decode(value, type=ReaderPosition).position


_read_parquet = pq.read_table


def _read_table(source: pa.BufferReader) -> pa.Table:
    """Read Parquet without threads of its own, equal bytes once: the files of a cut are read again
    and again.
    """
    return _read_bytes(source.read())


@lru_cache(maxsize=512)
def _read_bytes(content: bytes) -> pa.Table:
    return _read_parquet(pa.BufferReader(content), use_threads=False)


@contextmanager
def _in_our_hands(world: World) -> Iterator[None]:
    draw = random.Random(f"draws {world.seed} {world.disk.owner}")
    replaced: list[tuple[object, str, Callable[..., object]]] = [
        (anyio.to_thread, "run_sync", run_inline),
        (pq, "read_table", _read_table),
        (composition, "_open_store", world.open_store),
        (composition, "_files_directory", world.files_directory),
        (time, "monotonic", world.now_s),
        (time, "monotonic_ns", world.now_ns),
        (time, "perf_counter", world.now_s),
        (secrets, "randbits", draw.getrandbits),
        (anyio_on_asyncio, "CancelScope", OrderedScope),
        (sys, "unraisablehook", lambda _: None),  # what the clean-ups of a dead process say
    ]
    with ExitStack() as undo, warnings.catch_warnings():
        # of coroutines that a dead process never awaited
        warnings.simplefilter("ignore", RuntimeWarning)
        logging.disable(logging.CRITICAL)
        undo.callback(logging.disable, logging.NOTSET)
        undo.callback(random.setstate, random.getstate())
        random.seed(f"{world.seed} {world.disk.owner}")
        for owner, name, ours in replaced:
            undo.enter_context(patch.object(owner, name, ours))
        yield
