"""Power over a forgetful disk, for a driver: mount it, arm a cut, learn when power went, and switch
it on again.

Linux, root. Why a file system of our own: `docs/adr/0011-power-cuts.md`.
"""

import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tests.chaos.forgetful.disk import Loss
from tests.chaos.forgetful.server import MOUNTED, UNASKED, Answer, Order

CAP_SYS_ADMIN = 1 << 21
ANSWER_S = 30.0
"""The server answers at once; a minute half gone means it is stuck."""


def lacking() -> str | None:
    """Return what this machine lacks for a mount, None when it lacks nothing."""
    if sys.platform != "linux" or not Path("/dev/fuse").exists():
        return "needs Linux and /dev/fuse"
    return None if may_mount() else "needs root that may mount a file system"


def may_mount() -> bool:
    """Return whether this process may mount: root in a container often may not."""
    status = Path("/proc/self/status").read_text("utf-8")
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) & CAP_SYS_ADMIN)


class ForgetfulMount:
    """A mounted forgetful disk; use as a context. Orders return when they are done."""

    def __init__(self, mount_point: Path) -> None:
        self.path = mount_point
        self._last_order = MOUNTED
        self._lines = b""
        """Read from the server and not taken yet."""
        self._gone = False
        """Whether an armed cut came since the last order to arm one."""

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.forgetful.server", str(self.path)],
            cwd=Path(__file__).resolve().parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answer_to(MOUNTED)
        assert self.path.is_mount(), "what is written from here on must go to the forgetful disk"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(ANSWER_S)
        self._server.stdout.close()

    def fresh(self, *, keeps_fsync: bool = True) -> None:
        """Put an empty disk in, power on; without `keeps_fsync` its syncs keep nothing."""
        self._order(Order(do="fresh", keeps_fsync=keeps_fsync))

    def arm(self, changes: int) -> None:
        """Have power go before the n-th change from now on."""
        self._gone = False
        self._order(Order(do="arm", changes=changes))

    def went_off(self, timeout_s: float) -> bool:
        """Wait until an armed cut came, at most so long; say whether it did."""
        deadline_s = time.monotonic() + timeout_s
        while (
            not self._gone
            and (answer := self._next(max(0.0, deadline_s - time.monotonic()))) is not None
        ):
            assert answer.number == UNASKED, "every order waits for its own answer"
        return self._gone

    def off(self) -> None:
        """Take power away now, if it is not gone already."""
        self._order(Order(do="off"))

    def on(self, *, seed: int, loss: Loss = "all") -> None:
        """Bring power back, with what was not synced lost. Whoever used the disk must have been
        killed before.
        """
        self._order(Order(do="on", seed=seed, loss=loss))

    def _order(self, order: Order) -> None:
        assert self._server.stdin is not None
        self._last_order += 1
        self._server.stdin.write(
            msgspec.json.encode(msgspec.structs.replace(order, number=self._last_order)) + b"\n"
        )
        self._server.stdin.flush()
        self._answer_to(self._last_order)

    def _answer_to(self, number: int) -> None:
        """Wait for the answer to an order; that an armed cut came may be told before it."""
        deadline_s = time.monotonic() + ANSWER_S
        answer = None
        while answer is None or answer.number != number:
            answer = self._next(deadline_s - time.monotonic())
            if answer is None:
                raise ChildProcessError("the forgetful file system does not answer")

    def _next(self, timeout_s: float) -> Answer | None:
        """Return the server's next line, None when there is none in time. Raises when the server
        has ended.
        """
        assert self._server.stdout is not None
        while b"\n" not in self._lines:
            ready, _, _ = select.select([self._server.stdout], [], [], max(0.0, timeout_s))
            if not ready:
                return None
            received = os.read(self._server.stdout.fileno(), 1 << 16)
            if not received:
                raise ChildProcessError("the forgetful file system has ended")
            self._lines += received
        line, _, self._lines = self._lines.partition(b"\n")
        answer = msgspec.json.decode(line, type=Answer)
        self._gone |= answer.number == UNASKED
        return answer
