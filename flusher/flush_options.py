"""Limits of the flusher, all with a default that fits a laptop."""

from dataclasses import dataclass, field

from flusher.cuts.cut_schedule import CutScheduleOptions
from flusher.removal.retention import RetentionOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushOptions:
    """Memory and threads of the flusher, and what it does when the disk fails.

    A file gets a row group when its encoded rows reach `row_group_bytes` (twice as large ones were measured to take half as
    much processor time again, in page faults); when all rows in memory reach `buffered_bytes_max`, the largest are written
    first and reading waits. `threads` files are written at a time. After a few messages it waits `gather_s` for more, unless
    somebody waits for a cut: appends that come one by one would otherwise each wake it on the event loop they share.
    `group_may_read` opens segments, deletes and cuts to the group of the node's process, for a Spark of another user.
    """

    row_group_bytes: int = 32 << 20
    buffered_bytes_max: int = 256 << 20
    threads: int = 2
    gather_s: float = 0.02
    retry_first_s: float = 0.5
    retry_max_s: float = 30.0
    group_may_read: bool = False
    retention: RetentionOptions = field(default_factory=RetentionOptions)
    schedule: CutScheduleOptions = field(default_factory=CutScheduleOptions)
