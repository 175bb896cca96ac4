"""What a person sees of a long piece of work: a line for each stage, which a terminal rewrites."""

import io
import re

import pytest

from streamingnode.progress import Progress

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def lines_of(stream: io.StringIO) -> list[str]:
    """Return what stands on the terminal at the end."""
    shown = stream.getvalue().replace("\r\n", "\n")
    frame = re.split(r"\r|\x1b\[1A", shown)
    return [line.rstrip() for line in CONTROL.sub("", "".join(frame[-1:])).split("\n")]


def work(stream: io.StringIO) -> str:
    """Go through two stages, and return what is printed."""
    with Progress(stream) as progress:
        progress.stage("log", 10)
        progress.advance(5, "5 entries")
        progress.stage("cuts")
        progress.advance(1, "1 [cut]")
    return stream.getvalue()


def test_nothing_is_said_where_nobody_waits() -> None:
    assert work(io.StringIO()) == ""


def test_terminal_shows_a_line_for_each_stage_with_its_share_note_and_time() -> None:
    stream = Terminal()
    work(stream)
    log, cuts, *rest = lines_of(stream)
    assert re.fullmatch(r"log .* 50% 5 entries +0:00:00", log)
    assert re.fullmatch(r"cuts .* 1 \[cut\] +0:00:00", cuts)
    assert "%" not in cuts
    assert rest == [""]


def test_a_line_that_is_rewritten_does_not_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    with Progress(stream) as progress:
        progress.stage("a collection with a long name")
    assert all(len(line) <= 30 for line in lines_of(stream))


def test_a_stage_that_fails_keeps_where_it_was() -> None:
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt), Progress(stream) as progress:
        progress.stage("log", 10)
        progress.advance(5)
        raise KeyboardInterrupt
    assert "50%" in lines_of(stream)[0]


def test_a_stage_whose_total_turns_out_to_be_nothing_ends() -> None:
    stream = Terminal()
    with Progress(stream) as progress:
        progress.stage("cuts")
        progress.advance(0, "asked", total=1)
        progress.advance(0, "done", total=0)
    assert " done " in stream.getvalue()
