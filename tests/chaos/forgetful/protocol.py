"""What the kernel and a file system say to each other over /dev/fuse, protocol 7.31: only what
`mount` needs.

Little endian, as the machines this runs on. Reference: linux/fuse.h.
"""

import struct
from enum import IntEnum

KERNEL_MAJOR = 7
MINOR = 31

IN_HEADER = struct.Struct("<IIQQIIIHH")
"""length, opcode, unique, node, uid, gid, pid, extensions, padding."""
OUT_HEADER = struct.Struct("<IiQ")
"""length, negative error number, unique."""
INIT_IN = struct.Struct("<IIII")
INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
"""major, minor, read-ahead, flags, background, congestion, bytes of a write, time granularity,
pages, alignment, flags 2.
"""
ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
"""inode, size, blocks, access, change and status time, their nanoseconds, mode, links, uid, gid,
device, block, flags.
"""
ENTRY_HEAD = struct.Struct("<QQQQII")
"""node, generation, seconds the name and the attributes are valid, their nanoseconds."""
ATTRIBUTES_HEAD = struct.Struct("<QII")
OPEN_OUT = struct.Struct("<QII")
WRITE_OUT = struct.Struct("<II")
STATFS_OUT = struct.Struct("<QQQQQIIII24x")
SETATTR_IN = struct.Struct("<IIQQQQQQIIIIIIII")
"""valid, padding, handle, size, owner, three times, three nanoseconds, mode, unused, uid, gid,
unused.
"""
READ_IN = struct.Struct("<QQIIQII")
"""handle, offset, size, flags, owner, flags, padding; `WRITE` has the same, and the bytes behind
it.
"""
MKNOD_IN = struct.Struct("<IIII")
MKDIR_IN = struct.Struct("<II")
RENAME_IN = struct.Struct("<Q")
RENAME2_IN = struct.Struct("<QII")
LINK_IN = struct.Struct("<Q")
CREATE_IN = struct.Struct("<IIII")
DIRENT = struct.Struct("<QQII")
"""inode, offset of the next one, length of the name, type."""

BIG_WRITES = 1 << 5
MAX_PAGES = 1 << 22
SETATTR_MODE = 1 << 0
SETATTR_SIZE = 1 << 3
WRITE_BYTES_MAX = 1 << 20
REQUEST_BYTES_MAX = WRITE_BYTES_MAX + (1 << 16)


class Opcode(IntEnum):
    """The requests that are answered; all others get ENOSYS, which the kernel takes for "not
    needed" or "not supported".
    """

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    RENAME2 = 45


UNANSWERED = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT, Opcode.DESTROY})


def pad8(data: bytes) -> bytes:
    """Return the bytes with zeros up to a multiple of eight."""
    return data.ljust((len(data) + 7) & ~7, b"\0")
