"""What a person sees of a long piece of work: a line for each stage, which a terminal rewrites."""

import io
import re

import pytest

from streamingnode.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(stream: io.StringIO) -> str:
    """Go through two stages, and return what is printed, with times left out."""
    with Progress(stream) as progress:
        progress.stage("log", 10)
        progress.advance(5, "5 entries")
        progress.stage("cuts")
        progress.advance(1, "1 cut")
    return re.sub(r"\d\.\d s", "T", stream.getvalue())


def test_nothing_is_said_where_nobody_waits() -> None:
    assert work(io.StringIO()) == ""


def test_terminal_shows_a_stage_as_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamingnode.progress.REWRITE_INTERVAL_S", -1)
    lines = work(Terminal()).split("\n")
    assert [re.split("\r", line.replace("\x1b[K", "")) for line in lines] == [
        ["", "log", "log: 5 entries, 50%", "log: 5 entries, 50% (T)"],
        ["", "cuts", "cuts: 1 cut", "cuts: 1 cut (T)"],
        [""],
    ]


def test_a_line_that_is_rewritten_does_not_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    stream = Terminal()
    Progress(stream).stage("a collection with a long name")
    assert stream.getvalue() == "\ra collectio\x1b[K"


@pytest.mark.parametrize("stream, printed", [(io.StringIO(), ""), (Terminal(), "\rlog\x1b[K\n")])
def test_stage_that_fails_is_not_said_to_have_ended(stream: io.StringIO, printed: str) -> None:
    with pytest.raises(KeyboardInterrupt), Progress(stream) as progress:
        progress.stage("log")
        raise KeyboardInterrupt
    assert stream.getvalue() == printed


def test_a_stage_with_nothing_to_do_has_no_share() -> None:
    stream = Terminal()
    with Progress(stream) as progress:
        progress.stage("cuts")
        progress.advance(0, "asked", total=1)
        progress.advance(0, "done", total=0)
    assert "\rcuts: done (" in stream.getvalue()
