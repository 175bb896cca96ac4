"""What a caller may say about a transaction: its id and how long it may be idle. Pure."""

from numbers import Real

from wal.errors import InvalidArgument

KEEPALIVE_S_MIN = 0.001
"""Sessions count in milliseconds."""


def check_txn_id(txn_id: int) -> int:
    """Return the id of a transaction, 0 for none. Raises `InvalidArgument`."""
    if isinstance(txn_id, bool) or not isinstance(txn_id, int):
        raise InvalidArgument(f"txn_id={txn_id!r} is no transaction — pass what begin_transaction() returned")
    return txn_id


def check_keepalive_ms(keepalive_s: float | None, *, age_s_max: float) -> int:
    """Return how long a transaction may be idle in milliseconds, 0 for the default. Raises `InvalidArgument`."""
    if keepalive_s is None:
        return 0
    if (
        isinstance(keepalive_s, bool)
        or not isinstance(keepalive_s, Real)
        or not KEEPALIVE_S_MIN <= keepalive_s <= age_s_max
    ):
        raise InvalidArgument(
            f"keepalive_s={keepalive_s!r} — pass {KEEPALIVE_S_MIN:g} to {age_s_max:g} seconds, or None for the default"
        )
    return int(keepalive_s * 1000)
