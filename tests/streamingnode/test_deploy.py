"""What is deployed starts the command as it is: the unit for systemd and the image."""

import json
import logging
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from streamingnode.serve import JsonLines
from tests.parsed_command import parsed
from wal.runtime import event_log

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "streamingnode.service"
IMAGE = ROOT / "Dockerfile"


def entry_point() -> list[str]:
    found = re.search(r"^ENTRYPOINT (.*)$", IMAGE.read_text("utf-8"), re.MULTILINE)
    assert found is not None
    command: list[str] = json.loads(found[1])
    return command


def started_by_unit() -> list[str]:
    found = re.search(r"^ExecStart=(.*)$", UNIT.read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return shlex.split(found[1])


@pytest.mark.parametrize("command", [entry_point(), started_by_unit()], ids=["image", "unit"])
def test_what_is_started_is_a_command_that_answers_monitors_on_the_loopback(
    command: list[str],
) -> None:
    assert Path(command[0]).name == "streamingnode"
    arguments = parsed(command[1:]).params
    assert arguments["http"] == "127.0.0.1:9464"
    assert not arguments["http_for_anybody"]
    assert arguments["log_format"] == "json"


def test_image_copies_what_there_is_runs_as_a_user_of_its_own_and_asks_whether_node_lives() -> None:
    text = IMAGE.read_text("utf-8")
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    assert text.index("USER streamingnode") < text.index("ENTRYPOINT")
    assert "http://127.0.0.1:9464/livez" in text


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / UNIT.name  # with a program and a user that this machine has
    text = UNIT.read_text("utf-8").replace("/opt/streamingnode/bin/streamingnode", sys.executable)
    unit.write_text(
        text.replace("User=streamingnode", "User=root").replace("Group=streamingnode", "Group=root")
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if UNIT.name in line]) == (
        0,
        [],
    )


def test_an_event_is_one_json_object_with_its_own_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    event_log("wal.rocks.recovery").warning(
        "torn", path="a\nb \udcff", kept=3, pchannel="p0", term=7
    )
    try:
        raise ValueError("broken")
    except ValueError:
        event_log("elsewhere").error("failed", exc_info=True)
    logging.getLogger("streamingnode.remote.server").info("plain %s", "text")
    lines = [JsonLines().format(record) for record in caplog.records]
    assert not [line for line in lines if "\n" in line]
    torn, failed, plain = map(json.loads, lines)
    assert (
        torn.items()
        >= {"event": "torn", "kept": 3, "channel": "p0:rw@7", "path": "a\nb \udcff"}.items()
    )
    assert (torn["component"], torn["level"]) == ("wal-opener", "warning")
    assert torn["time"].endswith("+00:00")
    assert failed["component"] == "elsewhere"
    assert "ValueError: broken" in failed["exception"]
    assert (plain["event"], plain["component"]) == ("plain text", "server")


def test_the_unit_lets_the_node_write_backups_where_the_crontab_of_the_documents_puts_them() -> (
    None
):
    found = re.search(
        r"streamingnode backup \S+ (/\w+)/", (ROOT / "docs" / "production.md").read_text("utf-8")
    )
    assert found is not None
    assert f"ReadWritePaths=-{found[1]}\n" in UNIT.read_text("utf-8")
