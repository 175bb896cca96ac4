"""How many bytes each part of a walk will about read: what a progress bar is drawn against. Blocks."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

_FOLDERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "log": ("log",),
        "cuts": ("cuts", "segments", "deletes"),
        "backup": ("log", "cuts", "segments", "deletes", "leases"),
        "copy": ("log", "cuts", "segments", "deletes", "leases"),
    }
)


def part_bytes(directory: Path, part: str) -> int | None:
    """Return the size of a part, None for one whose size nobody knows beforehand."""
    if part not in _FOLDERS:
        return None
    total = 0
    for folder in _FOLDERS[part]:
        for parent, _, names in os.walk(directory / folder):
            for name in names:
                with suppress(FileNotFoundError):  # a running node removes files
                    total += (Path(parent) / name).stat().st_size
    return total
