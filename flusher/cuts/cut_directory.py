"""The cut manifests of a node directory, as they lie on disk. Reads only; blocks, so it runs in a worker thread.

Numbers are dense from the earliest cut that retention kept to the newest. `orphans`, `retention` and `snapshot` read cuts
through here; only `cut_writer` writes one.
"""

import re
from dataclasses import dataclass

from flusher.files.node_directory import NodeDirectory
from flusher.manifest import CutManifest, decode_manifest, manifest_crc32c, manifest_name
from wal.errors import Corrupt, Truncated

CUTS = "cuts"
_NAME = re.compile(CUTS + r"/(\d{16})\.json")


@dataclass(frozen=True, slots=True)
class PublishedCut:
    """A cut that is on disk, and the checksum by which its successor and the checkpoint name it."""

    manifest: CutManifest
    crc32c: int


def manifest_path(number: int) -> str:
    """Return the path of a cut's manifest, relative to the node directory."""
    return f"{CUTS}/{manifest_name(number)}"


def cut_numbers(directory: NodeDirectory) -> list[int]:
    """Return the numbers of all cuts on disk, ascending."""
    matches = (_NAME.fullmatch(path) for path in directory.files(CUTS))
    return sorted(int(match[1]) for match in matches if match)


def read_cut(directory: NodeDirectory, number: int) -> PublishedCut:
    """Return a cut's manifest and its checksum.

    Raises `Truncated` when retention took it, `Corrupt` when it is missing though no later one is the earliest kept, or is
    not what was written.
    """
    path = manifest_path(number)
    try:
        content = directory.read(path)
    except FileNotFoundError:
        numbers = cut_numbers(directory)
        if numbers and number > numbers[0]:  # retention takes the earliest ones, and never the newest
            raise Corrupt(f"{path} is missing — restore the cuts from a backup") from None
        earliest = f"cut {numbers[0]}" if numbers else "the log"
        raise Truncated(f"cut {number}", earliest, f"ask for {earliest} or later") from None
    manifest = decode_manifest(content, name=path)
    if manifest.number != number:
        raise Corrupt(f"{path} holds cut {manifest.number} — restore the cuts from a backup")
    return PublishedCut(manifest, manifest_crc32c(content))


def file_paths(manifest: CutManifest) -> list[str]:
    """Return the paths of the files a cut names."""
    return [file.path for file in (*manifest.segments, *manifest.deletes)]
