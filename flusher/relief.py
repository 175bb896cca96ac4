"""Makes room on a disk that gets short of space, before appends have to be refused, and for as long as they are.

In: whether the store is short of space. Out: first what is in files already is given up from the log; if that is not enough
a cut, which seals every growing segment and brings its rows into files; then the log before it is given up too. What named
readers still need stays. A round that did not help is tried again after a pause that doubles.
"""

from collections.abc import Awaitable, Callable

import anyio

from wal.errors import ChannelFenced, OnShutdown, StreamingNodeError
from wal.event_log import event_log

LOOK_S = 0.25
"""How soon a short disk is noticed, and how long a store needs to notice that it no longer is."""
PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 5.0
"""A disk that stays short costs a cut this often, if there is something to cut."""

_log = event_log(__name__)


class SpaceRelief:
    """Watches `is_short`, and relieves. Lives on the event loop.

    `give_up_log` gives up the log that is in files and that nobody needs. `cut` makes a cut and returns when it is in files.
    """

    def __init__(
        self,
        is_short: Callable[[], bool],
        *,
        give_up_log: Callable[[], Awaitable[None]],
        cut: Callable[[], Awaitable[object]],
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._is_short = is_short
        self._give_up_log = give_up_log
        self._cut = cut
        self._sleep = sleep
        self.rounds = 0

    async def run(self) -> None:
        """Work until cancelled, or until the log is closed."""
        pause_s = PAUSE_FIRST_S
        while True:
            await self._sleep(LOOK_S)
            if not self._is_short():
                pause_s = PAUSE_FIRST_S
                continue
            try:
                await self.relieve()
            except (OnShutdown, ChannelFenced):
                return
            except (OSError, StreamingNodeError) as error:
                _log.warning("no_room_made", error=str(error))
            await self._sleep(LOOK_S)
            if self._is_short():
                await self._sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
            else:
                pause_s = PAUSE_FIRST_S

    async def relieve(self) -> None:
        """Make room once. Raises what the cut and the log raise; nothing that is needed is lost then."""
        self.rounds += 1
        await self._give_up_log()
        await self._sleep(LOOK_S)
        if self._is_short():
            await self._cut()
            await self._give_up_log()
