"""What the log's own checks cost an append: checksums, the chain and the floor file, against the
same node without them.

Both run through the public interface, in turns on the same disk: once as it is, once with a
checksum that is always zero and a floor that is never written. The second is no mode anybody can
ask for; it exists in this file only.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from unittest import mock

from bench.baseline import Load, measure_warm, scratch
from bench.measurement import Measurement, median
from bench.report import Settings, main, note
from bench.rows import create, inserts_of
from streamingnode.opening import open_node, run_async
from wal.rocks.floor import FloorFile

CASES = ((1, 100), (16, 100))
"""Outstanding inserts, rows of 1 KiB in each."""
AIM = 0.85


def run(settings: Settings) -> list[Measurement]:
    """Return rows per second with the checks, as a part of those without."""
    return [
        run_async(partial(_measure_case, settings, Load(outstanding=n, batch=rows)))
        for n, rows in CASES
    ]


async def _measure_case(settings: Settings, load: Load) -> Measurement:
    case = f"{load.outstanding} x {load.batch}"
    note(f"checks {case}")
    checked: list[float] = []
    unchecked: list[float] = []
    for _ in range(settings.repeats):
        unchecked.append(await _rows_per_s(settings, load, without_checks()))
        checked.append(await _rows_per_s(settings, load, nullcontext()))
    return Measurement(
        name="checks",
        case=case,
        value=median(checked),
        unit="rows/s",
        baseline=median(unchecked),
        aim=AIM,
    )


async def _rows_per_s(settings: Settings, load: Load, mode: AbstractContextManager[None]) -> float:
    with mode, scratch(settings.directory) as path:
        async with open_node(path) as node:
            insert = inserts_of(node, await create(node, "rows"), load.batch)
            timed = Load(outstanding=load.outstanding, batch=load.batch, seconds=settings.seconds)
            return (await measure_warm(timed, insert)).rows_per_s


@contextmanager
def without_checks() -> Iterator[None]:
    """Make the checksums of entries and floor zero, and leave the floor as it is when its file is
    opened.

    Not those by which RocksDB's own files are looked at: a node would not open.
    """

    def zero(_data: object, _value: int = 0) -> int:
        return 0

    def no_floor(_self: FloorFile, *_positions: object, **_rest: object) -> None:
        return None

    with mock.patch("wal.codec.crc32c", zero), mock.patch("wal.rocks.floor.crc32c", zero):
        with mock.patch.object(FloorFile, "record", no_floor):
            yield


if __name__ == "__main__":
    sys.exit(main("what the log's own checks cost an append", run))
