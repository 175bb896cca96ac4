"""Tailing and catching up against the model, over random schedules."""

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scanner.deliver_policy import DeliverPolicy, StartingPoint
from scanner.scanner import Scanner
from tests.scanner.journal import (
    Bounds,
    Journal,
    assorted,
    batches_until,
    messages_in,
    read_until,
    scan,
    seen,
    tailed_journal,
)
from wal.message import TransactionMessage

pytestmark = pytest.mark.anyio


PACKED = ["insert", "group", "transaction", "pack", "pack", "late", "late pack"]
APPENDS = [*PACKED, "begin", "body", "body", "commit", "rollback", "drop", "time_tick", "idle"]
STEPS = st.sampled_from([*APPENDS, "read", "read", "read"])
SCHEDULES = st.integers(0, 80).flatmap(
    lambda count: st.lists(STEPS, min_size=count, max_size=count)
)


@settings(max_examples=60)
@given(SCHEDULES, st.integers(100, 2000), st.integers(150, 3000))
async def test_tailing_and_catching_up_deliver_what_the_model_says(
    steps: list[str], capacity_bytes: int, batch_bytes: int
) -> None:
    journal = await tailed_journal(capacity_bytes)
    with anyio.fail_after(60):
        await check_invariants(journal, steps, batch_bytes)


async def check_invariants(journal: Journal, steps: list[str], batch_bytes: int) -> None:
    limits = Bounds(batch_bytes=batch_bytes, batch_messages=5)
    follower = Scanner(journal.log, journal.tail, DeliverPolicy.all(), **limits)
    batches = []
    for number, step in enumerate(steps):
        apply(journal, step, number)
        if step == "read" and published(journal) > follower.place.after_tick:
            batches.append(await follower.next_batch())
    end = journal.insert(b"end")
    batches += await batches_until(follower, end.time_tick)
    await follower.close()
    messages = [message for batch in batches for message in messages_in(batch)]
    assert seen(messages) == journal.visible

    ticks = [message.time_tick for message in messages]
    assert ticks == sorted(ticks), "I1: ticks ascend"
    confirmed = 0
    for batch in batches:
        assert batch.confirmed_tick > confirmed
        assert all(
            confirmed < message.time_tick <= batch.confirmed_tick for message in messages_in(batch)
        ), "I2"
        confirmed = batch.confirmed_tick

    catching_up = Scanner(journal.log, None, DeliverPolicy.all(), **limits)
    assert await read_until(catching_up, end.time_tick) == messages, (
        "the log and the tail hold the same"
    )
    await catching_up.close()

    for message in messages[::3]:
        resumed = scan(journal, StartingPoint(message.last_confirmed.position, message.time_tick))
        rest = (
            seen(await read_until(resumed, end.time_tick))
            if message.time_tick < end.time_tick
            else []
        )
        assert rest == [each for each in journal.visible if each.tick > message.time_tick], "I3"
        await resumed.close()
    begun_at: dict[int, int] = {}  # a transaction's id is that tick
    for entry in journal.entries:
        rows = entry.rows
        begun_at |= (
            {entry.time_tick: entry.first_position}
            if rows is None
            else dict(zip(rows.ticks.tolist(), rows.positions.tolist(), strict=True))
        )
    for batch in batches:
        later = [message for message in messages if message.time_tick > batch.confirmed_tick]
        begins = [
            begun_at[message.txn_id] for message in later if isinstance(message, TransactionMessage)
        ]
        assert batch.resume_position <= min(begins, default=batch.resume_position), (
            "a lease there keeps all it needs"
        )
    for batch in batches[:-1]:
        resumed = scan(journal, StartingPoint(batch.resume_position, batch.confirmed_tick))
        rest = seen(await read_until(resumed, end.time_tick))
        assert rest == [each for each in journal.visible if each.tick > batch.confirmed_tick]
        await resumed.close()


def published(journal: Journal) -> int:
    assert journal.tail is not None
    return journal.tail.confirmed_tick


def apply(journal: Journal, step: str, number: int) -> None:  # noqa: C901  # one arm for each step
    """Do one step of a schedule; a step that has nothing to work on does nothing."""
    payload = b"%d" % number
    match step:
        case "insert":
            journal.insert(payload)
        case "group":
            journal.insert(payload, payload + b"'", payload + b"''")
        case "transaction":
            journal.transaction(payload, payload + b"'")
        case "begin":
            journal.begin()
        case "body" | "commit" | "rollback" if journal.open_transactions:
            go_on(
                journal,
                step,
                journal.open_transactions[number % len(journal.open_transactions)],
                payload,
            )
        case "time_tick":
            journal.time_tick()
        case "idle":
            journal.idle()
        case "late":
            journal.append_unpublished(payload)
        case "pack" | "late pack":
            journal.pack(*assorted(payload, number), publish=step == "pack")
        case "drop":
            journal.drop()
        case _:
            pass


def go_on(journal: Journal, step: str, txn_id: int, payload: bytes) -> None:
    match step:
        case "body":
            journal.body(txn_id, payload)
        case "commit":
            journal.commit(txn_id)
        case _:
            journal.rollback(txn_id)
