"""The process that is the forgetful disk: serves the kernel from /dev/fuse and a driver from
standard input.

In: one JSON order a line (`Order`). Out: one JSON line for each answer, with the order's number,
and one with number 0 at the moment power goes when it was armed to go by itself. While power is off
no request is answered, so whoever writes stands still, as on a machine without power; the driver
kills it, then orders power on.
"""

import ctypes
import os
import random
import select
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from tests.chaos.forgetful import protocol as wire
from tests.chaos.forgetful.disk import ForgetfulDisk, Loss
from tests.chaos.forgetful.requests import CHANGES, Requests

MNT_DETACH = 2
SERVER_NAME = "forgetful"

UNASKED = 0
MOUNTED = 1
"""Numbers of the answers that no order of the driver asked for; its orders count on from there."""

_libc = ctypes.CDLL(None, use_errno=True)


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver wants: `arm` power to go before the n-th change from now on, take power
    `off`, or have it back `on`.

    `on` loses what was unsynced, by `seed` and `loss`. `fresh` puts an empty disk in first. Every
    order is answered.
    """

    do: Literal["arm", "off", "on", "fresh"]
    number: int = 0
    changes: int = 0
    seed: int = 0
    loss: Loss = "all"
    keeps_fsync: bool = True


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`off` is whether power is gone; `changes` how many there were since it came on. `number` 0:
    nobody asked.
    """

    number: int
    off: bool
    changes: int
    unsynced_bytes: int


class ForgetfulServer:
    """One mount point, and the disk behind it."""

    def __init__(self, mount_point: Path) -> None:
        self._mount_point = mount_point
        self._disk = ForgetfulDisk()
        self._device = -1
        self._changes = 0
        self._off_at: int | None = None
        self._off = True
        self._orders = b""
        """Read and not whole yet."""
        self._requests = Requests(self._disk, time_s=int(time.time()))

    def run(self) -> None:
        """Serve until standard input ends, then unmount."""
        self._obey(Order(number=MOUNTED, do="fresh"))
        try:
            while self._serve_one():
                pass
        finally:
            self._unmount()

    def _serve_one(self) -> bool:
        waiting = [sys.stdin.fileno()] if self._off else [sys.stdin.fileno(), self._device]
        ready, _, _ = select.select(waiting, [], [])
        if self._device in ready and not self._off:
            self._serve_request()
        if sys.stdin.fileno() in ready:
            received = os.read(sys.stdin.fileno(), 1 << 16)
            if not received:
                return False
            *lines, self._orders = (self._orders + received).split(b"\n")
            for line in lines:
                self._obey(msgspec.json.decode(line, type=Order))
        return True

    def _obey(self, order: Order) -> None:
        match order.do:
            case "arm":
                self._off_at = self._changes + order.changes
            case "off":
                self._off = True
            case "on":
                self._unmount()
                self._disk.lose_power(random.Random(order.seed), order.loss)
                self._mount()
            case "fresh":
                self._unmount()
                self._disk = ForgetfulDisk(keeps_fsync=order.keeps_fsync)
                self._mount()
        self._tell(order.number)

    def _serve_request(self) -> None:
        try:
            request = os.read(self._device, wire.REQUEST_BYTES_MAX)
        except FileNotFoundError:
            return  # the caller was killed before its request was read
        length, opcode, unique, node, *_ = wire.IN_HEADER.unpack_from(request)
        if opcode in CHANGES:
            self._changes += 1
            if self._off_at is not None and self._changes >= self._off_at:
                self._off = True
                self._tell(UNASKED)
                return
        if opcode in wire.UNANSWERED:
            return
        try:
            body = self._requests.answer(opcode, node, request[wire.IN_HEADER.size : length])
            error = 0
        except OSError as refused:
            body = b""
            error = refused.errno or 5
        self._send(wire.OUT_HEADER.pack(wire.OUT_HEADER.size + len(body), -error, unique) + body)

    def _send(self, answer: bytes) -> None:
        with suppress(FileNotFoundError):  # the caller was killed and does not wait any more
            os.write(self._device, answer)

    def _mount(self) -> None:
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = (
            f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other,"
            f"max_read={wire.WRITE_BYTES_MAX}"
        )
        target = os.fsencode(self._mount_point)
        if _libc.mount(
            SERVER_NAME.encode(), target, b"fuse." + SERVER_NAME.encode(), 0, options.encode()
        ):
            raise OSError(
                ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(self._mount_point)
            )
        self._requests = Requests(self._disk, time_s=int(time.time()))
        self._changes = 0
        self._off_at = None
        self._off = False

    def _unmount(self) -> None:
        if self._device >= 0:
            os.close(self._device)  # ends the waits of whoever is still in a request
            _libc.umount2(os.fsencode(self._mount_point), MNT_DETACH)
            self._device = -1
            self._off = True

    def _tell(self, number: int) -> None:
        answer = Answer(
            number=number,
            off=self._off,
            changes=self._changes,
            unsynced_bytes=self._disk.unsynced_bytes(),
        )
        os.write(sys.stdout.fileno(), msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    ForgetfulServer(Path(sys.argv[1])).run()
