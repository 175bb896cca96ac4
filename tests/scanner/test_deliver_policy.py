"""A policy says where to start, or why it cannot."""

from typing import Any

import pytest

from scanner.deliver_policy import DeliverPolicy, Start
from wal.errors import InvalidArgument
from wal.position import MemoryMessageId


def test_start_after_takes_a_message_id_or_a_tick() -> None:
    assert DeliverPolicy.start_after(MemoryMessageId(7)) == DeliverPolicy(
        Start.AFTER, MemoryMessageId(7)
    )
    assert DeliverPolicy.start_after(7) == DeliverPolicy(Start.AFTER_TICK, 7)


@pytest.mark.parametrize("after", ["7", True, -1, 1 << 63, None, 7.0])
def test_start_after_refuses_what_is_neither(after: object) -> None:
    with pytest.raises(InvalidArgument):
        DeliverPolicy.start_after(after)  # type: ignore[arg-type]


@pytest.mark.parametrize("message_id", [7, "memory/7", None, MemoryMessageId(0)])
def test_start_from_refuses_what_is_no_message_id(message_id: object) -> None:
    with pytest.raises(InvalidArgument):
        DeliverPolicy.start_from(message_id)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", [("latest",), (Start.FROM,), (Start.AFTER_TICK, "1"), (Start.ALL, 1), ([],)]
)
def test_policy_that_starts_nowhere_is_refused(given: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidArgument, match="DeliverPolicy"):
        DeliverPolicy(*given)
