"""What a process has in use of its memory, apart from what its allocators keep for later: that
comes and goes for hours.

glibc counts what `malloc` gave out (RocksDB's memory and most of Arrow's), Arrow what its own pool
did, Python its small objects. Linux with glibc 2.33 or newer.
"""

import ctypes
import sys

import pyarrow as pa

SMALL_OBJECT_BYTES = 64
"""An estimate: Python counts its blocks of up to 512 bytes, not their bytes."""


# as in C
MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()  # noqa: SIM905


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO]


_mallinfo = ctypes.CDLL(None).mallinfo2
_mallinfo.restype = _MallInfo


def in_use_bytes() -> int:
    """Return the bytes in use; takes the lock of each arena of malloc for a moment."""
    info = _mallinfo()
    return (
        int(info.uordblks + info.hblkhd)
        + pa.total_allocated_bytes()
        + sys.getallocatedblocks() * SMALL_OBJECT_BYTES
    )
