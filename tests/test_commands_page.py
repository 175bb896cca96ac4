"""`docs/commands.md` is what the program says of itself."""

from pathlib import Path

from tests.commands_page import page
from tests.parsed_command import COMMANDS

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"


def test_the_page_of_commands_is_what_the_program_says_of_itself() -> None:
    assert PAGE.read_text("utf-8") == page(), "python -m tests.commands_page > docs/commands.md"


def test_the_page_has_a_section_for_every_command() -> None:
    headings = [line[3:] for line in page().splitlines() if line.startswith("## ")]
    assert headings == [*COMMANDS]
