"""The directory a backup, or a restored node, is made in: nobody else's, and there as a whole or not at all.

Work is done in `<name>.unfinished` beside it and renamed at the end. What a crash leaves there is named and left alone.
"""

import os
import shutil
from pathlib import Path

from interceptors.errors import AlreadyExists
from streamingnode.backup.copied_bytes import sync_directories
from wal.errors import InvalidArgument, StorageFailed
from wal.files import DIRECTORY_MODE

UNFINISHED = ".unfinished"


class Target:
    """A directory that does not exist, or is empty, outside of `source`: what lies in a node is taken for its own.

    Raises `InvalidArgument` when it is inside, `AlreadyExists`, `StorageFailed` when it cannot be made.
    """

    def __init__(self, path: Path, source: Path) -> None:
        try:
            self.path = path.absolute()
            if self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir())):
                raise AlreadyExists(f"{path} is there and not empty — name a new directory")
            if Path(os.path.realpath(self.path)).is_relative_to(source.resolve()):
                raise InvalidArgument(f"{path} is inside {source} — name a directory outside it")
            self.building = self.path.with_name(self.path.name + UNFINISHED)
            self.building.mkdir(DIRECTORY_MODE, parents=True)
        except FileExistsError:
            raise AlreadyExists(
                f"{self.building} is left of a run that did not end — remove it, then try again"
            ) from None
        except OSError as error:
            raise StorageFailed(f"cannot make {path}: {error.strerror} — choose a writable place") from error

    def publish(self) -> None:
        """Give what was built its name; durable on return."""
        sync_directories(self.building)
        self.building.rename(self.path)  # over an empty directory too
        sync_directories(self.path)

    def discard(self) -> None:
        """Remove what was built; idempotent, and nothing once it is published."""
        shutil.rmtree(self.building, ignore_errors=True)
