import pytest

from interceptors import txn_manager as commits
from interceptors.txn_manager import Commits


def test_a_transaction_that_never_committed_is_not_taken_for_one_that_did_nor_for_a_forgotten_one() -> None:
    known = Commits()
    known.add(7)
    assert 7 in known
    assert 5 not in known
    assert known.known_after == 0


def test_forgetting_a_commit_makes_older_ones_unknown_and_not_uncommitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "COMMITS_MAX", 2)
    known = Commits(known_after=3)
    for txn_id in (9, 5, 8, 20):
        known.add(txn_id)
    assert [txn_id in known for txn_id in (9, 5, 8, 20)] == [False, False, True, True]
    assert known.known_after == 9, "not the id forgotten last: commits do not come in the order of begins"
