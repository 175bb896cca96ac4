"""A real disk of a few MiB: ext4 in a file, mounted through a loop device, with a ballast file to fill it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 1 << 20


class SmallDisk:
    """Mounted at `path`. Everything on it goes with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    @property
    def free_bytes(self) -> int:
        disk = os.statvfs(self.path)
        return disk.f_bavail * disk.f_frsize

    def leave(self, size_bytes: int) -> None:
        """Fill the disk until only so much is free, exactly to a block, or give back what is too much."""
        with self._ballast.open("ab") as ballast:
            size = max(0, os.fstat(ballast.fileno()).st_size + self.free_bytes - size_bytes)
            os.ftruncate(ballast.fileno(), size)
            if size:
                os.posix_fallocate(ballast.fileno(), 0, size)

    def fill(self) -> None:
        """Leave not a single block."""
        with self._ballast.open("ab") as ballast:
            os.ftruncate(ballast.fileno(), os.fstat(ballast.fileno()).st_size)
            piece = 4 * MIB
            while piece >= 1024:
                try:
                    os.posix_fallocate(ballast.fileno(), os.fstat(ballast.fileno()).st_size, piece)
                except OSError:
                    piece //= 2

    def free(self) -> None:
        """Take the ballast off."""
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(place: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Make a disk of that size below `place`, and take it away again. Skips where this user may not."""
    image, mount = place / "disk.img", place / "disk"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(size_bytes)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs root, mkfs.ext4 and a loop device: mounts a small disk")
    try:
        yield SmallDisk(mount)
    finally:
        subprocess.run(["umount", str(mount)], check=True)
        image.unlink()
