"""A disk that fails, or loses power, at its n-th operation.

Until then it is an ordinary directory. A fault is one `OSError`. A power cut makes every later
operation fail too, and takes back what was not made durable: bytes that were not synced, names
whose directory was not.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Self

from flusher.directory import TEMPORARY_SUFFIX, NodeDirectory, file_paths, read_cut
from flusher.manifest import decode_checkpoint
from wal.log import Log, StateMap
from wal.memory_store import MemoryLogStore


class PowerCut(BaseException):
    """The machine is off."""


class Fuse:
    """Counts operations and fails the n-th: once, or for good."""

    def __init__(self, at: int | None = None, *, power: bool = False) -> None:
        self.count = 0
        self.dead = False
        self._at = at
        self._power = power

    @property
    def reached(self) -> bool:
        return self._at is not None and self.count >= self._at

    def burn(self) -> None:
        if self.dead:
            raise PowerCut
        self.count += 1
        if self.count == self._at:
            if self._power:
                self.dead = True
                raise PowerCut
            raise OSError(5, "Input/output error")


class FaultyFile:
    """A file whose every write counts; also its close, which writes what is buffered."""

    def __init__(self, file: BinaryIO, fuse: Fuse) -> None:
        self.file = file
        self._fuse = fuse

    def write(self, data: bytes) -> int:
        self._fuse.burn()
        return self.file.write(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


class FaultyDirectory(NodeDirectory):
    """A node directory on such a disk; `fuse` may be replaced by a fresh one after a failure."""

    def __init__(self, root: Path, fuse: Fuse) -> None:
        super().__init__(root)
        self.fuse = fuse
        self.unsynced: set[str] = set()
        self.unsynced_names: dict[str, str] = {}

    def create(self, path: str) -> BinaryIO:
        self.fuse.burn()
        self.unsynced.add(path)
        return FaultyFile(super().create(path), self.fuse)  # type: ignore[return-value]

    def append(self, path: str) -> BinaryIO:
        self.fuse.burn()
        self.unsynced.add(path)
        return FaultyFile(super().append(path), self.fuse)  # type: ignore[return-value]

    def sync(self, file: BinaryIO) -> None:
        self.fuse.burn()
        real: BinaryIO = file.file if isinstance(file, FaultyFile) else file
        real.flush()  # durability is simulated, and a real sync is what takes the time
        self.unsynced.discard(Path(real.name).relative_to(self.root).as_posix())

    def rename(self, source: str, target: str) -> None:
        self.fuse.burn()
        super().rename(source, target)
        self.unsynced_names[target] = source
        if source in self.unsynced:
            self.unsynced.remove(source)
            self.unsynced.add(target)

    def sync_parents(self, paths: list[str]) -> None:
        self.fuse.burn()
        parents = {Path(path).parent for path in paths}
        self.unsynced_names = {
            target: source
            for target, source in self.unsynced_names.items()
            if Path(target).parent not in parents
        }

    def remove(self, path: str) -> None:
        if not self.fuse.dead:
            self.fuse.burn()
            super().remove(path)
            self.unsynced.discard(path)
            self.unsynced_names.pop(path, None)

    def lose_power(self, randomness: random.Random) -> None:
        """Leave what a power cut may leave: each name that was not synced is there or not, each
        such file is cut short.
        """
        for target, source in self.unsynced_names.items():
            if randomness.random() < 0.5 and (self.root / target).exists():
                (self.root / target).rename(self.root / source)
        for path in self.unsynced:
            for name in (path, path + TEMPORARY_SUFFIX):
                if (self.root / name).exists():
                    content = (self.root / name).read_bytes()
                    (self.root / name).write_bytes(content[: randomness.randint(0, len(content))])
        self.unsynced.clear()
        self.unsynced_names.clear()


class CheckedStateMap:
    """A map of state that fails with the disk, and that refuses a checkpoint ahead of what it
    covers.
    """

    def __init__(self, state: StateMap, directory: FaultyDirectory) -> None:
        self._directory = directory
        self._state = state
        self.get = state.get
        self.scan = state.scan

    async def put(self, changes: Mapping[str, bytes | None]) -> None:
        for content in changes.values():
            self._check_covered(content)
        self._directory.fuse.burn()
        await self._state.put(changes)

    def _check_covered(self, content: bytes | None) -> None:
        checkpoint = decode_checkpoint(content)
        cut = read_cut(NodeDirectory(self._directory.root), checkpoint.cut_number)
        assert cut.crc32c == checkpoint.manifest_crc32c
        assert cut.manifest.tick == checkpoint.tick
        assert not self._directory.unsynced_names, "a name the checkpoint relies on is not durable"
        for path in file_paths(cut.manifest):
            assert (self._directory.root / path).is_file()
            assert path not in self._directory.unsynced


class CheckedStore:
    """A log store whose map of state fails with the disk."""

    queued_bytes = 0
    space = None
    link_copy = None
    topic_store = None

    def __init__(self, store: MemoryLogStore, directory: FaultyDirectory) -> None:
        self._store = store
        self.state = CheckedStateMap(store.state, directory)
        self.node_id = store.node_id
        self.term = store.term
        self.promised_tick = store.promised_tick

    @property
    def short_of_space(self) -> bool:
        return self._store.short_of_space

    @property
    def condition(self) -> str:
        return self._store.condition

    @property
    def taking_writes(self) -> bool:
        return self._store.taking_writes

    async def wait_failed(self) -> None:
        await self._store.wait_failed()

    async def reopen(self) -> None:
        await self._store.reopen()

    async def promise_tick(self, tick: int) -> None:
        await self._store.promise_tick(tick)

    async def open_log(self, name: str) -> Log:
        return await self._store.open_log(name)

    async def close(self) -> None:
        await self._store.close()
