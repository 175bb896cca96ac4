"""Files of the database that carry no rows: a verification says what is wrong with them, and does
not mend it.
"""

from pathlib import Path

import pytest

from streamingnode.care.backup import backup_directory
from streamingnode.care.findings import Severity
from streamingnode.care.verify import verify_directory
from tests.streamingnode.sample_node import Sample, copy_of, rows_of
from tests.wal.rocks.test_torn_manifest import A_LOST_PAGE
from wal.rocks.database import SETTINGS_NAME
from wal.rocks.recovery import manifest_of


def write(settings: Path, content: bytes | None) -> None:
    if content is None:
        settings.unlink()
    else:
        settings.write_bytes(content)


@pytest.mark.parametrize(
    "content", [None, b"", b"garbage", b'{"raw_mode":false,"prefix_extractors":{}}']
)
def test_a_look_leaves_the_settings_as_they_are_to_the_next_opening(
    sample: Sample, tmp_path: Path, content: bytes | None
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    settings = path / "log" / SETTINGS_NAME
    write(settings, content)
    assert verify_directory(path).findings == []
    assert (settings.read_bytes() if settings.exists() else None) == content
    assert rows_of(path) == sample.rows
    assert verify_directory(path).worst is None


@pytest.mark.parametrize("content", [None, b"garbage"])
def test_bad_settings_of_a_backup_stay_damage_however_often_it_is_verified(
    sample: Sample, tmp_path: Path, content: bytes | None
) -> None:
    backup = tmp_path / "backup"
    backup_directory(sample.closed, backup)
    write(backup / "log" / SETTINGS_NAME, content)
    for _ in range(2):
        assert f"log/{SETTINGS_NAME}" in {
            finding.place for finding in verify_directory(backup).findings
        }
        assert verify_directory(backup).damages


def test_torn_end_of_rocksdbs_manifest_is_named_and_opening_drops_it(
    sample: Sample, tmp_path: Path
) -> None:
    path = copy_of(sample.killed, tmp_path / "node")
    manifest = manifest_of(path / "log")
    torn = manifest.read_bytes() + A_LOST_PAGE
    manifest.write_bytes(torn)
    for _ in range(2):
        [finding] = verify_directory(path).findings
        assert finding.severity is Severity.DAMAGE
        assert finding.next_step.startswith("open the node")
    assert manifest.read_bytes() == torn
    assert rows_of(path) == sample.rows
    assert verify_directory(path).worst is None
