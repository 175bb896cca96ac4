"""Which files of a backup may take the place of damaged ones: those whose checksum the node itself knows. Reads; blocks.

A data file is known by its manifest, a manifest by the next one or by the checkpoint. What nobody can vouch for is not
taken.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flusher.checkpoint import Checkpoint
from flusher.cuts.cut_log import CUTS, cut_numbers
from flusher.manifest import decode_manifest, manifest_crc32c, manifest_name
from streamingnode.verification.file_check import measure_file
from wal.errors import StreamingNodeError


@dataclass(frozen=True, slots=True)
class KnownFile:
    """A file by what the node knows of it; a length of None is not known, for manifests."""

    path: str
    crc32c: int
    bytes: int | None

    def matches(self, directory: Path) -> bool:
        """Whether the file in `directory` is the one that is known."""
        if self.bytes is None:
            return _manifest_crc(directory / self.path) == self.crc32c
        try:
            found = _measure(directory / self.path)
        except OSError:
            return False
        return found == (self.bytes, self.crc32c)


@dataclass(frozen=True, slots=True)
class KnownCut:
    """A manifest that the node can vouch for, and the data files it names."""

    manifest: KnownFile
    files: tuple[KnownFile, ...]


def known_cuts(directory: Path, checkpoint: Checkpoint, backup: Path | None, *, first_kept: int) -> Iterator[KnownCut]:
    """Go back from the checkpoint's cut as far as one manifest vouches for the one before it, here or in the backup.

    Cuts before both `first_kept` and the node's earliest are passed over: retention took them, they are not lost. Below
    `first_kept` a cut that is missing between others is lost all the same, as retention takes the earliest first.
    """
    oldest = min([first_kept, *cut_numbers(directory)])
    number, crc32c = checkpoint.cut_number, checkpoint.manifest_crc32c
    while number and number >= oldest:
        file = KnownFile(f"{CUTS}/{manifest_name(number)}", crc32c, None)
        place = next((each for each in (directory, backup) if each is not None and file.matches(each)), None)
        if place is None:
            return
        manifest = decode_manifest((place / file.path).read_bytes(), name=file.path)
        named = (*manifest.segments, *manifest.deletes)
        yield KnownCut(file, tuple(KnownFile(each.path, each.crc32c, each.bytes) for each in named))
        number, crc32c = number - 1, manifest.previous_crc32c


def _manifest_crc(path: Path) -> int | None:
    try:
        content = path.read_bytes()
        decode_manifest(content, name=path.name)
    except (OSError, StreamingNodeError):
        return None
    return manifest_crc32c(content)


def _measure(path: Path) -> tuple[int, int]:
    steps = measure_file(path)
    try:
        while True:
            next(steps)
    except StopIteration as ended:
        found: tuple[int, int] = ended.value
        return found
