"""The files of a simulated node: a real directory, best in memory, under a disk that fails and
forgets.

Every operation may raise `OSError`. A power cut takes back what was not made durable: bytes of
files that were not synced, and names, new or removed, whose directory was not.
"""

import os
import random
from pathlib import Path
from typing import BinaryIO

from flusher.directory import NodeDirectory


class SimulatedFiles(NodeDirectory):
    """A `NodeDirectory` that one process after another uses; `fault` is the chance of each
    operation to fail.
    """

    def __init__(self, root: Path, choose: random.Random) -> None:
        super().__init__(root)
        self.fault = 0.0
        self.operations = 0
        self._choose = choose
        self._unsynced: set[str] = set()
        self._named: dict[str, str] = {}
        self._removed: dict[str, bytes] = {}
        self._open: list[BinaryIO] = []

    def end_process(self) -> None:
        """Keep what a dead process has not handed over from being written when its memory is
        collected.
        """
        with Path(os.devnull).open("wb") as nowhere:
            for file in self._open:
                if not file.closed:
                    os.dup2(nowhere.fileno(), file.fileno())
        self._open.clear()

    def create(self, path: str) -> BinaryIO:
        """Open a new file; its bytes are not durable."""
        self._turn()
        return self._opened(path, super().create(path))

    def append(self, path: str) -> BinaryIO:
        """Open a file again; the bytes that follow are not durable."""
        self._turn()
        return self._opened(path, super().append(path))

    def sync(self, file: BinaryIO) -> None:
        """Make a file's bytes durable; nothing is really synced, which is what takes the time."""
        self._turn()
        file.flush()
        self._unsynced.discard(Path(file.name).relative_to(self.root).as_posix())

    def rename(self, source: str, target: str) -> None:
        """Rename; the name is not durable."""
        self._turn()
        super().rename(source, target)
        self._named[target] = source
        if source in self._unsynced:
            self._unsynced.remove(source)
            self._unsynced.add(target)

    def sync_parents(self, paths: list[str]) -> None:
        """Make names durable."""
        self._turn()
        parents = {Path(path).parent for path in paths}
        self._named = {
            target: source
            for target, source in self._named.items()
            if Path(target).parent not in parents
        }
        self._removed = {
            path: data for path, data in self._removed.items() if Path(path).parent not in parents
        }

    def remove(self, path: str) -> None:
        """Remove; that is not durable."""
        self._turn()
        target = self.root / path
        if target.exists():
            if path not in self._unsynced:
                self._removed[path] = target.read_bytes()
            super().remove(path)
        self._unsynced.discard(path)
        self._named.pop(path, None)

    def lose_power(self) -> None:
        """Take back what was not durable, or some of it."""
        for path, data in self._removed.items():
            if self._choose.random() < 0.5 and not (self.root / path).exists():
                (self.root / path).write_bytes(data)
        for target, source in self._named.items():
            if self._choose.random() < 0.5 and (self.root / target).exists():
                (self.root / target).rename(self.root / source)
        for path in sorted(
            {
                *self._unsynced,
                *(self._named[path] for path in self._unsynced if path in self._named),
            }
        ):
            if (self.root / path).exists():
                content = (self.root / path).read_bytes()
                (self.root / path).write_bytes(content[: self._choose.randint(0, len(content))])
        self.forget()

    def forget(self) -> None:
        """Count everything as durable."""
        self._unsynced.clear()
        self._named.clear()
        self._removed.clear()

    def not_durable(self) -> set[str]:
        """Return the paths whose bytes or names a power cut may take back."""
        return {*self._unsynced, *self._named}

    def _opened(self, path: str, file: BinaryIO) -> BinaryIO:
        self._unsynced.add(path)
        self._open = [each for each in self._open if not each.closed]
        self._open.append(file)
        return file

    def _make_parents(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)

    def _turn(self) -> None:
        self.operations += 1
        if self._choose.random() < self.fault:
            raise OSError(5, "simulated: the disk does not answer")
