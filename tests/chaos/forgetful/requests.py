"""Answers the kernel's requests from a `ForgetfulDisk`: bytes in, bytes out; no I/O of its own."""

import errno
import stat
from collections.abc import Callable, Mapping

from tests.chaos.forgetful import protocol as wire
from tests.chaos.forgetful.disk import PAGE_BYTES, Directory, File, ForgetfulDisk, Inode, Special
from tests.chaos.forgetful.protocol import Opcode

VALID_S = 86_400
"""All changes come through this mount, so the kernel may remember names and lengths."""
SIZE_BYTES = 16 << 30
"""The size the file system says it has."""

CHANGES = frozenset(
    {
        Opcode.WRITE,
        Opcode.FSYNC,
        Opcode.FSYNCDIR,
        Opcode.CREATE,
        Opcode.MKNOD,
        Opcode.MKDIR,
        Opcode.RENAME,
        Opcode.RENAME2,
        Opcode.LINK,
        Opcode.UNLINK,
        Opcode.RMDIR,
        Opcode.SETATTR,
    }
)
"""Requests before which power may go: those that change what a power cut would leave, now or at the
next sync.
"""

Answer = Callable[[int, bytes], bytes]


class Requests:
    """One mount's conversation; the handles of open directories are its only state beside the
    disk.
    """

    def __init__(self, disk: ForgetfulDisk, *, time_s: int) -> None:
        self._disk = disk
        self._time_s = time_s
        self._listings: dict[int, list[tuple[bytes, int]]] = {}
        self._answers: Mapping[int, Answer] = {
            Opcode.INIT: self._init,
            Opcode.LOOKUP: self._lookup,
            Opcode.GETATTR: self._attributes,
            Opcode.SETATTR: self._set_attributes,
            Opcode.READLINK: self._read_link,
            Opcode.SYMLINK: self._symlink,
            Opcode.MKNOD: self._make_node,
            Opcode.MKDIR: self._make_directory,
            Opcode.UNLINK: self._remove,
            Opcode.RMDIR: self._remove,
            Opcode.RENAME: self._rename,
            Opcode.RENAME2: self._rename2,
            Opcode.LINK: self._link,
            Opcode.OPEN: self._open,
            Opcode.READ: self._read,
            Opcode.WRITE: self._write,
            Opcode.STATFS: self._statfs,
            Opcode.RELEASE: self._nothing,
            Opcode.FLUSH: self._nothing,
            Opcode.FSYNC: self._sync,
            Opcode.FSYNCDIR: self._sync,
            Opcode.OPENDIR: self._open_directory,
            Opcode.READDIR: self._read_directory,
            Opcode.RELEASEDIR: self._release_directory,
            Opcode.CREATE: self._create,
        }

    def answer(self, opcode: int, node: int, body: bytes) -> bytes:
        """Return the body of the answer. Raises `OSError` with the number to answer instead."""
        found = self._answers.get(opcode)
        if found is None:
            raise OSError(errno.ENOSYS, "not supported")
        return found(node, body)

    def _init(self, node: int, body: bytes) -> bytes:
        _, _, read_ahead, flags = wire.INIT_IN.unpack_from(body)
        wanted = flags & (wire.BIG_WRITES | wire.MAX_PAGES)
        pages = wire.WRITE_BYTES_MAX // PAGE_BYTES
        return wire.INIT_OUT.pack(
            wire.KERNEL_MAJOR,
            wire.MINOR,
            read_ahead,
            wanted,
            16,
            12,
            wire.WRITE_BYTES_MAX,
            1,
            pages,
            0,
            0,
        )

    # --- names ------------------------------------------------------------------------------------

    def _lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(self._disk.lookup(node, _name(body)))

    def _make_node(self, node: int, body: bytes) -> bytes:
        mode = wire.MKNOD_IN.unpack_from(body)[0]
        made: Inode = File(mode) if stat.S_ISREG(mode) else Special(mode)
        return self._entry(self._disk.make(node, _name(body[wire.MKNOD_IN.size :]), made))

    def _make_directory(self, node: int, body: bytes) -> bytes:
        made = Directory(stat.S_IFDIR | wire.MKDIR_IN.unpack_from(body)[0])
        return self._entry(self._disk.make(node, _name(body[wire.MKDIR_IN.size :]), made))

    def _create(self, node: int, body: bytes) -> bytes:
        mode = wire.CREATE_IN.unpack_from(body)[1]
        made = self._disk.make(node, _name(body[wire.CREATE_IN.size :]), File(stat.S_IFREG | mode))
        return self._entry(made) + wire.OPEN_OUT.pack(0, 0, 0)

    def _symlink(self, node: int, body: bytes) -> bytes:
        name, target = body.split(b"\0")[:2]
        return self._entry(self._disk.make(node, name, Special(stat.S_IFLNK | 0o777, target)))

    def _read_link(self, node: int, body: bytes) -> bytes:
        found = self._disk.inodes[node]
        return found.target if isinstance(found, Special) else b""

    def _remove(self, node: int, body: bytes) -> bytes:
        self._disk.remove(node, _name(body))
        return b""

    def _rename(self, node: int, body: bytes) -> bytes:
        (new_directory,) = wire.RENAME_IN.unpack_from(body)
        old, new = body[wire.RENAME_IN.size :].split(b"\0")[:2]
        self._disk.rename(node, old, new_directory, new)
        return b""

    def _rename2(self, node: int, body: bytes) -> bytes:
        new_directory, flags, _ = wire.RENAME2_IN.unpack_from(body)
        if flags:
            raise OSError(errno.EINVAL, "no exchange, no refusal to replace")
        old, new = body[wire.RENAME2_IN.size :].split(b"\0")[:2]
        self._disk.rename(node, old, new_directory, new)
        return b""

    def _link(self, node: int, body: bytes) -> bytes:
        (inode,) = wire.LINK_IN.unpack_from(body)
        self._disk.link(inode, node, _name(body[wire.LINK_IN.size :]))
        return self._entry(inode)

    # --- attributes and bytes ---------------------------------------------------------------------

    def _attributes(self, node: int, body: bytes) -> bytes:
        return wire.ATTRIBUTES_HEAD.pack(VALID_S, 0, 0) + self._packed(node)

    def _set_attributes(self, node: int, body: bytes) -> bytes:
        valid, _, _, size, *_, mode, _, _, _, _ = wire.SETATTR_IN.unpack_from(body)
        if valid & wire.SETATTR_SIZE:
            self._disk.truncate(node, size)
        if valid & wire.SETATTR_MODE:
            inode = self._disk.inodes[node]
            inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(mode)
        return self._attributes(node, b"")

    def _open(self, node: int, body: bytes) -> bytes:
        return wire.OPEN_OUT.pack(0, 0, 0)

    def _read(self, node: int, body: bytes) -> bytes:
        _, offset, size, *_ = wire.READ_IN.unpack_from(body)
        return self._disk.read(node, offset, size)

    def _write(self, node: int, body: bytes) -> bytes:
        _, offset, size, *_ = wire.READ_IN.unpack_from(body)
        self._disk.write(node, offset, body[wire.READ_IN.size : wire.READ_IN.size + size])
        return wire.WRITE_OUT.pack(size, 0)

    def _sync(self, node: int, body: bytes) -> bytes:
        self._disk.sync(node)
        return b""

    def _statfs(self, node: int, body: bytes) -> bytes:
        blocks = SIZE_BYTES // PAGE_BYTES
        return wire.STATFS_OUT.pack(
            blocks, blocks, blocks, 1 << 20, 1 << 20, PAGE_BYTES, 255, PAGE_BYTES, 0
        )

    def _nothing(self, node: int, body: bytes) -> bytes:
        return b""

    # --- directories ------------------------------------------------------------------------------

    def _open_directory(self, node: int, body: bytes) -> bytes:
        handle = 1 + max(self._listings, default=0)
        self._listings[handle] = list(self._disk.directory(node).names.items())
        return wire.OPEN_OUT.pack(handle, 0, 0)

    def _read_directory(self, node: int, body: bytes) -> bytes:
        handle, offset, size, *_ = wire.READ_IN.unpack_from(body)
        listed = b""
        for index, (name, inode) in enumerate(self._listings[handle][offset:], offset + 1):
            kind = (
                stat.S_IFMT(self._disk.inodes[inode].mode) >> 12
                if inode in self._disk.inodes
                else 0
            )
            entry = wire.pad8(wire.DIRENT.pack(inode, index, len(name), kind) + name)
            if len(listed) + len(entry) > size:
                break
            listed += entry
        return listed

    def _release_directory(self, node: int, body: bytes) -> bytes:
        self._listings.pop(wire.OPEN_OUT.unpack_from(body)[0], None)
        return b""

    # --- encoding ---------------------------------------------------------------------------------

    def _entry(self, inode: int) -> bytes:
        return wire.ENTRY_HEAD.pack(inode, 0, VALID_S, VALID_S, 0, 0) + self._packed(inode)

    def _packed(self, number: int) -> bytes:
        inode = self._disk.inodes[number]
        size = len(inode.data) if isinstance(inode, File) else 0
        links = 2 if isinstance(inode, Directory) else self._disk.links[number]
        return wire.ATTRIBUTES.pack(
            number,
            size,
            (size + 511) // 512,
            *[self._time_s] * 3,
            0,
            0,
            0,
            inode.mode,
            links,
            0,
            0,
            0,
            PAGE_BYTES,
            0,
        )


def _name(body: bytes) -> bytes:
    return body[: body.index(b"\0")]
