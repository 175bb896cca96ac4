"""The guard against another distribution that ships one of the root packages."""

from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest

from spark_sink.errors import PackageMissing
from streamingnode.ownership import ROOT_PACKAGES, assert_sole_owner, check_owners, check_places


def _installed(site: Path, name: str, *files: str) -> Distribution:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "utf-8")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files), "utf-8")
    return PathDistribution(info)


@pytest.fixture
def ours(tmp_path: Path) -> Distribution:
    return _installed(
        tmp_path / "ours", "StreamingNode", *(f"{root}/__init__.py" for root in ROOT_PACKAGES)
    )


def test_sole_owner_of_all_roots_is_accepted(ours: Distribution) -> None:
    check_owners([ours])


@pytest.mark.parametrize(
    "file", ["wal/__init__.py", "wal/sub/x.py", "wal.py", "wal.cpython-311-x86_64-linux-gnu.so"]
)
def test_stranger_that_ships_a_root_is_named(ours: Distribution, tmp_path: Path, file: str) -> None:
    stranger = _installed(tmp_path, "write_ahead", file)
    with pytest.raises(PackageMissing, match="write-ahead") as caught:
        check_owners([ours, stranger])
    assert caught.value.fields() == {"package": "wal", "other": "write-ahead"}


@pytest.mark.parametrize(
    "file", ["wallet/__init__.py", "walrus.py", "tools/wal/__init__.py", "wal-1.0.dist-info/RECORD"]
)
def test_similar_name_is_no_collision(ours: Distribution, tmp_path: Path, file: str) -> None:
    check_owners([ours, _installed(tmp_path, "other", file)])


def test_same_distribution_seen_twice_is_accepted(ours: Distribution) -> None:
    check_owners([ours, ours])


def test_root_imported_from_elsewhere_is_refused(tmp_path: Path) -> None:
    places: dict[str, Path | None] = dict.fromkeys(ROOT_PACKAGES, tmp_path)
    check_places(places)
    with pytest.raises(PackageMissing, match="stranger"):
        check_places({**places, "scanner": tmp_path / "stranger"})


def test_root_that_cannot_be_found_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackageMissing, match="nowhere"):
        check_places({**dict.fromkeys(ROOT_PACKAGES, tmp_path), "wal": None})


def test_checkout_is_its_own_sole_owner() -> None:
    assert_sole_owner.cache_clear()
    assert_sole_owner()
