"""A file whose length and CRC32C are those of what was handed to it, not of what the disk made of that.

Parquet's writer sees an ordinary file object. The checksum ends up in the cut's manifest, so a reader finds every byte that
changed after it left this process.
"""

from typing import BinaryIO

from wal.codec import crc32c


class ChecksummedFile:
    """Wraps a binary file for one writer, front to back; `length` and `crc32c` are of everything written so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._abandoned = False
        self.length = 0
        self.crc32c = 0

    @property
    def closed(self) -> bool:
        """Whether the file below is closed."""
        return self._file.closed

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`."""
        if not self._abandoned:
            self._file.write(data)
        self.crc32c = crc32c(data, self.crc32c)
        self.length += len(data)
        return len(data)

    def tell(self) -> int:
        """Return the position, which is the length."""
        return self.length

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""
        self._file.flush()

    def abandon(self) -> None:
        """Let everything written from now on go nowhere: Parquet's writer insists on a footer even for a file given up."""
        self._abandoned = True

    def close(self) -> None:
        """Close the file below."""
        self._file.close()
