"""Power over a forgetful disk, for a driver: mount it, arm a cut, learn when power went, and switch it on again."""

import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from bench.chaos.forgetful.disk import Loss
from bench.chaos.forgetful.server import Answer, Order

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

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "bench.chaos.forgetful.server", str(self.path)],
            cwd=Path(__file__).resolve().parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answer(ANSWER_S)
        assert self.path.is_mount(), "what is written from here on must go to the forgetful disk"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
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
        self._order(Order(do="arm", changes=changes))

    def went_off(self, timeout_s: float) -> bool:
        """Wait until an armed cut came, at most so long; say whether it did."""
        assert self._server.stdout is not None
        ready, _, _ = select.select([self._server.stdout], [], [], timeout_s)
        return bool(ready) and self._answer(ANSWER_S).off

    def off(self) -> Answer:
        """Take power away now."""
        return self._order(Order(do="off"))

    def on(self, *, seed: int, loss: Loss = "all") -> None:
        """Bring power back, with what was not synced lost. Whoever used the disk must have been killed before."""
        self._order(Order(do="on", seed=seed, loss=loss))

    def _order(self, order: Order) -> Answer:
        assert self._server.stdin is not None
        self._server.stdin.write(msgspec.json.encode(order))
        self._server.stdin.flush()
        return self._answer(ANSWER_S)

    def _answer(self, timeout_s: float) -> Answer:
        assert self._server.stdout is not None
        ready, _, _ = select.select([self._server.stdout], [], [], timeout_s)
        line = os.read(self._server.stdout.fileno(), 1 << 16) if ready else b""
        if not line:
            raise ChildProcessError("the forgetful file system does not answer")
        return msgspec.json.decode(line.splitlines()[-1], type=Answer)
