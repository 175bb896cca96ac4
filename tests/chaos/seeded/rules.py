"""Bugs of one line that the simulation does not show; each has a test where its rule alone decides.

A history hides them: the next write raises a floor that went down. Topics and spools are not in the
simulation.
"""

from typing import Any

import msgspec

from interceptors.errors import SequenceTooOld
from interceptors.window import KnownProducer, Window
from streamingnode.remote.spool import SpoolingBackend
from tests.chaos.seeded.bug import Right, SeededBug
from wal.rocksmq.topic import TopicChange


def _floor_goes_down(right: Right) -> Right:
    """What is forgotten may lie below what was forgotten before."""

    def forget(window: Window, known: KnownProducer, sequence: int) -> None:
        right(window, known, sequence)
        known.floor = sequence

    return forget


def _outstanding_goes_by_age(right: Right) -> Right:
    """A cut forgets old results although a write below them is outstanding."""

    def freeze(window: Window, *arguments: Any, **options: Any) -> Window:
        outstanding = window.outstanding()
        for producer_id in outstanding:
            window.settle(producer_id, 0)
        frozen: Window = right(window, *arguments, **options)
        for producer_id, sequence in outstanding.items():
            window.settle(producer_id, sequence)
        return frozen

    return freeze


def _page_keeps_its_time(right: Right) -> Right:
    """A page that a group went back to is still marked as acknowledged."""

    def settle(change: TopicChange, now_ms: int) -> None:
        before = change._pages.copy()
        right(change, now_ms)
        for at, page in enumerate(before):
            if page.acked_ms and not change._pages[at].acked_ms:
                change._pages[at] = page
                change._records[change._page_key(page)] = msgspec.msgpack.encode(page)

    return settle


def _too_old_is_refused(right: Right) -> Right:
    """Of a write that the log may have, the node's answer is taken for a no."""

    def is_final(backend: SpoolingBackend, error: Exception, sequence: int) -> Any:
        return isinstance(error, SequenceTooOld) or right(backend, error, sequence)

    return is_final


FLOOR_GOES_DOWN = SeededBug("a window's floor goes down", Window, "_forget", _floor_goes_down)
OUTSTANDING_GOES_BY_AGE = SeededBug(
    "an outstanding write goes by age", Window, "freeze", _outstanding_goes_by_age
)
PAGE_KEEPS_ITS_TIME = SeededBug(
    "an opened page stays acknowledged", TopicChange, "_settle", _page_keeps_its_time
)
TOO_OLD_IS_REFUSED = SeededBug(
    "too old is a dead letter", SpoolingBackend, "_is_final", _too_old_is_refused
)
