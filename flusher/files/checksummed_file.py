"""A file whose length and CRC32C are those of what was handed to it, not of what the disk made of that.

Parquet's writer sees an ordinary file object. The checksum ends up in the cut's manifest, so a reader finds every byte that
changed after it left this process. The file has a descriptor only from a write to the next `rest`: a node may have thousands
of growing segments, and a process may open 1,024 files by default.
"""

from typing import BinaryIO

from flusher.files.node_directory import NodeDirectory
from wal.codec import crc32c


class ChecksummedFile:
    """A new file at `path` for one writer, front to back; `length` and `crc32c` are of everything written so far.

    Whatever touches the disk raises `OSError`; the file is then of no use but to be removed.
    """

    def __init__(self, directory: NodeDirectory, path: str) -> None:
        self._directory = directory
        self._path = path
        self._file: BinaryIO | None = directory.create(path)
        self._abandoned = False
        self.closed = False
        self.length = 0
        self.crc32c = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`."""
        if not self._abandoned:
            if self._file is None:
                self._file = self._directory.append(self._path)
            self._file.write(data)
        self.crc32c = crc32c(data, self.crc32c)
        self.length += len(data)
        return len(data)

    def tell(self) -> int:
        """Return the position, which is the length."""
        return self.length

    def flush(self) -> None:
        """Do nothing: `rest` is what hands bytes over."""

    def rest(self) -> None:
        """Sync what was written and give the descriptor back; the next write opens the file again."""
        if self._file is None:
            return
        # Not without a sync: Linux reports an error of its own writing only to who has the file open, or opens it while the
        # inode is still in memory. Evicted meanwhile, the file would have a hole that no later sync tells of.
        self._directory.sync(self._file)
        self._file.close()
        self._file = None

    def abandon(self) -> None:
        """Let everything written from now on go nowhere: Parquet's writer insists on a footer even for a file given up."""
        self._abandoned = True

    def close(self) -> None:
        """Close the file, as it is."""
        self.closed = True
        if self._file is not None:
            self._file.close()
