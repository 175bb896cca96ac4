"""The reference of the API in the checkout is what the docstrings say."""

import ast
import importlib

import pytest

from tests import reference


def test_page_of_the_api_is_what_the_docstrings_say() -> None:
    written = reference.PAGE.read_text("utf-8")
    assert written == reference.page(), "python -m tests.reference writes it again"


@pytest.mark.parametrize("name", reference.PUBLIC)
def test_page_of_the_api_has_every_name_that_a_package_exports(name: str) -> None:
    headings = set(reference.PAGE.read_text("utf-8").splitlines())
    module = importlib.import_module(name)
    exported = reference.public_names(module)
    assert exported
    assert [each for each in exported if not headings & {f"### {each}", f"## {name}.{each}"}] == []


def test_public_name_without_a_docstring_ends_the_writing_of_the_page() -> None:
    [definition] = ast.parse("def insert(rows): ...").body
    assert isinstance(definition, ast.FunctionDef)
    with pytest.raises(SystemExit, match=r"Node\.insert is public and has no docstring"):
        reference.docstring("Node.insert", definition)
