"""What a power cut leaves of a log that was acknowledged before it was synced: under durability `os`, a suffix may be gone.

In: an open database and the floor. Out: the same without what lies behind a hole. RocksDB makes none in one log file, but
goes on from file to file: of one that was full it knows no end, so where the disk had kept the beginning of the next and not
the end of this one, what it recovers is a log with a hole, and no error. The floor is synced with each sync of the log, so
everything up to it is there, and the hole is found behind it.
"""

from collections.abc import Mapping

import msgspec
from rocksdict import Rdict, WriteBatch

from wal.codec import decode_entry
from wal.errors import Corrupt
from wal.event_log import event_log
from wal.message_id import RocksMessageId
from wal.rocks.floor import Floor
from wal.rocks.keys import decode_number, entry_key, first_position_key, split_entry_key
from wal.rocks.options import ENTRY_FAMILY
from wal.rocks.recovery import Survey

_log = event_log(__name__)


def drop_behind_holes(database: Rdict, found: Survey, floor: Floor) -> Survey:
    """Give up what lies behind a hole in the unsynced part of each log, and return what is left. Synced; blocks.

    A power cut before that leaves the hole, which is found again. Nothing is given up of a log that was synced before its
    acknowledgements, nor of one whose hole is not behind the floor: that is damage, and reading it says so.
    """
    if found.synced_each_batch:
        return found
    kept = {log_id: chain_end(database, log_id, floor) for log_id in found.last_positions}
    torn = {log_id: end for log_id, end in kept.items() if end < found.last_positions[log_id]}
    if torn:
        _drop(database, found, torn)
    return msgspec.structs.replace(found, last_positions={**found.last_positions, **torn})


def chain_end(database: Rdict, log_id: int, floor: Floor) -> int:
    """Return the last position of a log up to which entry follows on entry, behind the last that the floor knows."""
    recorded = database.get(first_position_key(log_id))
    first = decode_number(recorded) if isinstance(recorded, bytes) else 1
    end, previous_crc32c = max(floor.positions.get(log_id, 0), first - 1), None
    iterator = database.get_column_family(ENTRY_FAMILY).iter()
    # Behind it: what is wrong with a synced entry is damage and no hole, and nothing is given up for it.
    iterator.seek(entry_key(log_id, end + 1))
    while iterator.valid():
        found_id, last_position = split_entry_key(iterator.key())
        if found_id != log_id:
            return end
        try:
            entry = decode_entry(iterator.value(), wal_name=RocksMessageId.wal_name, previous_crc32c=previous_crc32c)
        except Corrupt:
            return end
        if entry.first_position > end + 1:
            return end
        end, previous_crc32c = last_position, entry.crc32c
        iterator.next()
    iterator.status()  # without this a damaged block looks like the end
    return end


def _drop(database: Rdict, found: Survey, torn: Mapping[int, int]) -> None:
    # No handle in this frame: an error's traceback would keep the database open with it.
    database.write(_batch_to_drop(database, found, torn))
    database.flush_wal(sync=True)


def _batch_to_drop(database: Rdict, found: Survey, torn: Mapping[int, int]) -> WriteBatch:
    family = database.get_column_family_handle(ENTRY_FAMILY)
    batch = WriteBatch(raw_mode=True)
    for name, log_id in found.log_ids.items():
        if log_id in torn:
            kept, reached = torn[log_id], found.last_positions[log_id]
            batch.delete_range(entry_key(log_id, kept + 1), entry_key(log_id, reached + 1), family)
            _log.warning("torn_tail_dropped", log=name, kept=kept, dropped=reached - kept)
    return batch
