"""All seeded bugs: the first sixteen are tried at each commit, every one in long runs."""

from tests.chaos.seeded import cuts, disk, packs, readers, ticks, writes
from tests.chaos.seeded.bug import SeededBug

EACH_COMMIT: tuple[SeededBug, ...] = (
    disk.ACKNOWLEDGE_BEFORE_SYNC,
    disk.NO_DIRECTORY_FSYNC,
    writes.WINDOW_NOT_PERSISTED,
    writes.ABORT_LOST,
    readers.SCAN_OFF_BY_ONE,
    ticks.TICK_GOES_BACK,
    cuts.COMMIT_WITHOUT_BODY,
    cuts.CUT_DROPS_A_ROW,
    writes.RETRY_NOT_RECOGNISED,
    ticks.CONFIRMED_WHEN_QUEUED,
    ticks.STALE_TICK,
    cuts.CHECKPOINT_TOO_FAR,
    packs.BOUNDARY_OFF_BY_ONE,
    packs.RESULT_OF_ANOTHER,
    packs.CANCELLED_AND_WRITTEN,
    packs.TORN_ENTRY,
)
BUGS: tuple[SeededBug, ...] = (
    *EACH_COMMIT,
    *disk.OTHERS,
    *ticks.OTHERS,
    *readers.OTHERS,
    *writes.OTHERS,
    *cuts.OTHERS,
    *packs.OTHERS,
)
