"""What was measured on: without it a number means nothing. Blocks."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "streamingnode",
    "rocksdict",
    "pyarrow",
    "anyio",
    "msgspec",
    "uvloop",
    "pyspark",
    "deltalake",
)


def describe_machine(directory: Path) -> dict[str, object]:
    """Return the machine, the disk of `directory`, versions, and the commit when this is a checkout
    with git.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "processors": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": memory,
        "load": round(os.getloadavg()[0], 2),
        "file_system": _file_system(directory),
        "python": sys.version.split()[0],
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": _commit(),
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _file_system(directory: Path) -> str:
    """Return the type of the file system that holds `directory`, as Linux lists mounts; elsewhere
    nothing.
    """
    mounts = Path("/proc/mounts")
    if not mounts.is_file():
        return ""
    place = directory.resolve()
    found = [line.split()[1:3] for line in mounts.read_text("utf-8").splitlines()]
    holding = [(point, kind) for point, kind in found if place.is_relative_to(point)]
    return max(holding, key=lambda mount: len(mount[0]), default=("", ""))[1]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
