"""A real disk of a few MiB: ext4 in a file, mounted through a loop device, with a ballast file to
fill it. Linux, root.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.forgetful.power import may_mount

PIECE_BYTES = 4 << 20
PIECE_BYTES_MIN = 1024


def lacking() -> str | None:
    """Return what this machine lacks for a small disk."""
    if sys.platform != "linux" or not may_mount():
        return "needs Linux and root that may mount a small disk"
    if shutil.which("mkfs.ext4") is None or not Path("/dev/loop-control").exists():
        return "needs mkfs.ext4 and loop devices for a small disk"
    return None


class SmallDisk:
    """Mounted at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    @property
    def free_bytes(self) -> int:
        """What may still be written, in bytes."""
        disk = os.statvfs(self.path)
        return disk.f_bavail * disk.f_frsize

    def leave(self, size_bytes: int) -> None:
        """Fill the disk until only so much is free, exactly to a block, or give back what is too
        much.
        """
        with self._ballast.open("ab") as ballast:
            size = max(0, os.fstat(ballast.fileno()).st_size + self.free_bytes - size_bytes)
            os.ftruncate(ballast.fileno(), size)
            if size:
                os.posix_fallocate(ballast.fileno(), 0, size)

    def fill(self) -> None:
        """Leave not a single block."""
        with self._ballast.open("ab") as ballast:
            piece = PIECE_BYTES
            while piece >= PIECE_BYTES_MIN:
                try:
                    os.posix_fallocate(ballast.fileno(), os.fstat(ballast.fileno()).st_size, piece)
                except OSError:
                    piece //= 2

    def free(self) -> None:
        """Take the ballast off."""
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(place: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Make a disk of that size below `place`, and take it away again."""
    image = place / "disk.img"
    mount_point = place / "disk"
    mount_point.mkdir()
    with image.open("wb") as file:
        file.truncate(size_bytes)
    _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    _run("mount", "-o", "loop", str(image), str(mount_point))
    try:
        yield SmallDisk(mount_point)
    finally:
        _run("umount", "--lazy", str(mount_point))
        image.unlink()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
