"""Every named failpoint and what a crash there leaves behind; the table in docs/guarantees.md is
rendered from it.

A name is `area.step`, the step in the past for what has just been done. A line says what is left
behind, and what the next open makes of it. Who adds a `failpoint("...")` adds its line here, then
runs `python -m tests.chaos.documents`.
"""

from pathlib import Path
from types import MappingProxyType

DOCUMENT = Path(__file__).parents[2] / "docs" / "guarantees.md"
BEGIN = "<!-- failpoints: begin -->"
END = "<!-- failpoints: end -->"

_APPEND = {
    "append.admitted": "nothing; the append, one write or several that go together, never happened",
    "append.stamped": "nothing; its ticks were given to nobody",
    "append.queued": "nothing yet on disk; the append never happened",
    "append.taken": "nothing yet on disk; the append never happened",
    "append.staged": "nothing yet on disk; the append never happened",
    "append.written": "the entry survives a killed process, perhaps not a power cut; whole or "
    "absent",
    "append.synced": "the entry; it happened, the floor may be one sync behind",
    "append.floor_recorded": "the entry and its floor; it happened, and its caller has no answer",
    "append.landed": "the entry and its floor; it happened, and its caller has no answer",
    "append.acknowledged": "the entry; it happened, readers of the live tail had not seen it",
    "append.confirming": "the entry; it happened, readers of the live tail had not seen it",
    "append.published": "the entry; readers may have seen it",
    "append.tick_promised": "a promise in the floor file; later ticks start above it",
    "append.floor_synced": "a floor that survives a power cut",
    "append.record_queued": "the old record",
    "append.record_durable": "the new record",
    "append.closing_written": "everything; as after a kill, and nothing was in flight",
    "append.closing_database_closed": "everything; RocksDB has nothing to replay",
}

_TXN = {
    "txn.group_stamped": "nothing; the transaction and what goes with it never happened",
    "txn.group_durable": "the entry with the whole transaction and what went with it; it happened, "
    "and its caller has no answer",
    "txn.beginning": "nothing; the transaction never began",
    "txn.begun": "a begin without an end; expired by the next owner, none of its rows appears",
    "txn.body_joined": "a begin without an end; as above",
    "txn.body_durable": "a begin and a body; expired by the next owner, none of its rows appears",
    "txn.committing": "begin and bodies without a commit; expired by the next owner, none of its "
    "rows appears",
    "txn.commit_durable": "the whole transaction; it happened, and its caller has no answer",
    "txn.rolling_back": "begin and bodies without an end; expired by the next owner",
    "txn.rollback_durable": "a transaction that ended; none of its rows appears",
    "txn.expired": "a begin without an end; expired again by the next owner",
    "txn.fencing": "nothing; the schema change never happened",
    "txn.fenced": "the schema change; it happened, and its caller has no answer",
}

_FLUSH = {
    "flush.cut_requested": "nothing; no cut was made",
    "flush.cut_logged": "a cut in the log; the flusher makes its files after the next open",
    "flush.rows_taken": "the rows in the log; read again",
    "flush.file_created": "an empty temporary file; removed, the rows are read from the log again",
    "flush.rows_written": "a temporary file; removed, the rows are read from the log again",
    "flush.footer_written": "a temporary file; removed, the rows are read from the log again",
    "flush.file_synced": "a whole temporary file; removed, the rows are read from the log again",
    "flush.cut_met": "temporary files; removed, the same cut is made again from the log",
    "flush.file_renaming": "some files under their names that no manifest names; removed, made "
    "again",
    "flush.files_renamed": "files that no manifest names; removed, made again",
    "flush.file_names_synced": "files that no manifest names; removed, made again",
    "flush.manifest_written": "files and a temporary manifest; removed, made again",
    "flush.manifest_synced": "files and a temporary manifest; removed, made again",
    "flush.manifest_renamed": "a published cut, after a power cut perhaps not; adopted, or made "
    "again",
    "flush.manifest_name_synced": "a published cut ahead of its checkpoint; adopted",
    "flush.cut_published": "a published cut ahead of its checkpoint; adopted",
    "flush.checkpoint_saved": "a cut and its checkpoint; its caller has no answer",
    "flush.truncating": "log behind the checkpoint; truncated at the next check of retention",
    "flush.drop_queued": "log behind the checkpoint, perhaps already dropped; both are whole",
    "flush.log_dropped": "a shorter log whose space is not given back; RocksDB does that later",
    "flush.log_compacted": "a shorter log",
    "flush.cut_given_up": "cuts that retention has recorded as deleted and that are still there; "
    "removed at the next check of retention",
    "flush.cut_removing": "a cut that may go; removed at the next check of retention",
    "flush.cut_unlinked": "a manifest that is set aside, after a power cut perhaps not; removed "
    "with its files",
    "flush.cut_gone": "a manifest that is set aside, and its files; removed",
    "flush.cut_file_removed": "a manifest that is set aside, and some of its files; removed",
}

_INGEST = {
    "ingest.created": "an empty table; the next ingest fills it",
    "ingest.intended": "an intent without files; the next ingest starts again",
    "ingest.written": "files the table does not name; written again, removed once old",
    "ingest.file_synced": "files the table does not name; written again, removed once old",
    "ingest.sealed": "files the table does not name; written again, removed once old",
    "ingest.committed": "a commit, after a power cut perhaps not; found taken, or taken again",
    "ingest.log_syncing": "a commit, after a power cut perhaps not; found taken, or taken again",
    "ingest.finished": "a table ahead of its lease; the lease follows, nothing is removed before",
    "ingest.lease_written": "a temporary lease beside the old one; the lease follows",
    "ingest.lease_renamed": "the new lease, after a power cut perhaps the old one",
    "ingest.leased": "a table and its lease",
    "ingest.released": "a dropped collection's table without a lease; renamed by the next ingest",
    "ingest.retired": "a dropped collection's table under its last name",
}

_COMPACT = {
    "compact.intended": "an intent without files; small files are compacted again",
    "compact.written": "a file the table does not name; written again, removed once old",
    "compact.committed": "a commit, after a power cut perhaps not; the same rows in both",
    "compact.checkpoint_made": "a checkpoint beside the table's log; made again",
    "compact.checkpointed": "a checkpoint, and commits that it makes needless; removed after the "
    "next one",
}

_RECOVERY = {
    "recovery.directory_made": "an empty directory; a new node is made in it",
    "recovery.directory_locked": "an empty directory, or the node as it was; the lock ends with "
    "the process",
    "recovery.floor_created": "a floor that has seen nothing; creation starts again",
    "recovery.facts_written": "a floor that has seen nothing, and a temporary database; creation "
    "starts again",
    "recovery.database_created": "a floor that has seen nothing, and a temporary database; "
    "creation starts again",
    "recovery.database_renamed": "a new node, after a power cut perhaps its temporary database; "
    "creation starts again",
    "recovery.database_prepared": "a new node, or the node as it was",
    "recovery.verified": "the node as it was: verifying changes nothing",
    "recovery.token_taken": "an unused fencing token; the next term is above it",
    "recovery.database_opened": "the node as it was; RocksDB replayed its log",
    "recovery.term_written": "an unused term; the next one is higher",
    "recovery.term_synced": "an unused term; the next one is higher",
    "recovery.floor_recorded": "an unused term, in both places",
    "recovery.floor_synced": "an unused term, in both places",
    "recovery.log_named": "a node without its log; made by the next open",
    "recovery.log_made": "an empty log",
    "recovery.store_opened": "a term without an entry",
    "recovery.first_tick_durable": "a term with its first tick and nothing else",
    "recovery.entries_read": "a term with its first tick and nothing else",
    "recovery.state_rebuilt": "a term with its first tick and nothing else",
    "recovery.chain_ready": "a term with its first tick and nothing else",
    "recovery.readers_loaded": "a term with its first tick and nothing else",
    "recovery.write_failed": "a log with an unknown end; verified like any other",
    "recovery.term_ended": "a log with an unknown end; verified like any other",
    "recovery.database_released": "a closed database; verified like any other",
    "recovery.reopened": "a term without an entry",
    "recovery.checkpoint_read": "cuts and what a crash left beside them; sorted out again",
    "recovery.cuts_compared": "cuts and what a crash left beside them; sorted out again",
    "recovery.orphan_removing": "some of what a crash left; sorted out again",
    "recovery.orphans_removed": "what manifests name, and what the node never wrote",
    "recovery.cut_adopted": "a published cut ahead of its checkpoint; adopted again",
}

FAILPOINTS = MappingProxyType({**_APPEND, **_TXN, **_FLUSH, **_INGEST, **_COMPACT, **_RECOVERY})
"""What a crash at each place leaves behind, by name, in the order in which a node passes them."""


def rendered_failpoints() -> str:
    """Return the table between its marks."""
    rows = [f"| `{name}` | {leaves} |" for name, leaves in FAILPOINTS.items()]
    return "\n".join(
        [
            BEGIN,
            "",
            "| killed at | left behind; and what the next open makes of it |",
            "|---|---|",
            *rows,
            "",
            END,
        ]
    )


def write_failpoint_table() -> None:
    """Replace what is between the marks."""
    text = DOCUMENT.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    assert rest, f"{DOCUMENT.name} has the mark {BEGIN}"
    DOCUMENT.write_text(before + rendered_failpoints() + rest.partition(END)[2], "utf-8")
