"""Writes the reference of the API from the docstrings: `python -m tests.reference` writes
docs/api.md.

The page shows what a program may import: a signature as the source has it, then the docstring. A
public name without a docstring is an error.
"""

import ast
import importlib
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
PUBLIC = ("streamingnode", "spark_sink", "streamingnode.batching")
"""Modules whose `__all__`, or own names, are the public interface, with `streamingnode.streams`."""
WIDTH = 100
PARTS = ("CollectionCalls",)
"""Classes that are part of a public one: their calls are shown there."""
HEAD = """\
# API

What a program may import: the names of `streamingnode`, `streamingnode.batching` and `spark_sink`,
and the modules of `streamingnode.streams`. A name that is not here may change without notice.
`python -m tests.reference` writes this page from the docstrings.
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> list[types.ModuleType]:
    """Return the modules that a program imports, each once."""
    found = [importlib.import_module(name) for name in PUBLIC]
    inside = [getattr(module, name) for module in found for name in public_names(module)]
    streams = sorted(path.stem for path in (ROOT / "streamingnode" / "streams").glob("[a-z]*.py"))
    names = [f"streamingnode.streams.{name}" for name in streams if not name.endswith("_pb2")]
    return [*found, *filter(inspect.ismodule, inside), *map(importlib.import_module, names)]


def public_names(module: types.ModuleType) -> list[str]:
    """Return the names of `__all__`; without one the module's own classes and functions, and the
    errors that a module of errors imports.
    """
    if names := getattr(module, "__all__", None):
        return list(names)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and _belongs_to(module, value)
    ]


def _belongs_to(module: types.ModuleType, value: object) -> bool:
    if inspect.isclass(value) and issubclass(value, Exception):
        return module.__name__.endswith(".errors") or value.__module__ == module.__name__
    is_definition = inspect.isclass(value) or inspect.isfunction(value)
    return is_definition and getattr(value, "__module__", "") == module.__name__


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    shown = set[int]()
    for module in modules():
        parts.append(f"## {module.__name__}\n")
        parts.append(f"{inspect.getdoc(module)}\n")
        for name in public_names(module):
            value = getattr(module, name)
            if inspect.ismodule(value) or id(value) in shown:
                continue
            shown.add(id(value))
            parts.extend(_entry(name, value))
    return "\n".join(parts)


def _entry(name: str, value: object) -> Iterator[str]:
    yield f"### {name}\n"
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        yield f"A type for annotations: `{value}`.\n"
        return
    if inspect.isfunction(value) and (original := inspect.unwrap(value)) is not value:
        yield f"The blocking form of `{original.__module__}.{original.__name__}`.\n"
        return
    definition = _definition_of(value)
    if isinstance(definition, ast.ClassDef):
        yield from _class(name, value, definition)
    else:
        assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
        yield _code(_signature(definition))
        yield docstring(name, definition)


def _class(name: str, value: object, definition: ast.ClassDef) -> Iterator[str]:
    bases = ", ".join(ast.unparse(base) for base in definition.bases)
    made = _found(definition, "__init__")
    fields = list(_fields(definition))
    lines = [f"class {definition.name}({bases})" if bases else f"class {definition.name}"]
    if made is not None:
        lines += _signature(made).splitlines()
    lines += [ast.unparse(field) for field, _ in fields]
    yield _code("\n    ".join(lines))
    yield docstring(name, definition)
    for field, text in fields:
        if text:
            yield textwrap.fill(f"`{_target(field)}`: {text}", WIDTH) + "\n"
    for member in _members(value, definition):
        if not isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if member.name.startswith("_") or _is_second(member):
            continue
        yield f"#### {name}.{member.name}\n"
        yield _code(_signature(member))
        yield docstring(f"{name}.{member.name}", member)


def _members(value: object, definition: ast.ClassDef) -> Iterator[ast.stmt]:
    """Yield what a class defines itself, and what it has from its `PARTS`."""
    yield from definition.body
    assert isinstance(value, type)
    for base in value.__mro__[1:]:
        if base.__name__ in PARTS:
            found = _definition_of(base)
            assert isinstance(found, ast.ClassDef)
            yield from found.body


def _fields(definition: ast.ClassDef) -> Iterator[tuple[ast.AnnAssign | ast.Assign, str]]:
    """Yield each public field, and the text behind it."""
    for member, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if not isinstance(member, ast.AnnAssign | ast.Assign):
            continue
        if not _target(member).startswith("_"):
            yield member, _text_of(after)


def _target(field: ast.AnnAssign | ast.Assign) -> str:
    target = field.target if isinstance(field, ast.AnnAssign) else field.targets[0]
    return ast.unparse(target)


def _text_of(statement: ast.stmt | None) -> str:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return ""
    text = statement.value.value
    return inspect.cleandoc(text) if isinstance(text, str) else ""


def _is_second(member: Function) -> bool:
    """Whether it is a setter, or an overload, of what is shown already."""
    names = {ast.unparse(each).rpartition(".")[2] for each in member.decorator_list}
    return bool(names & {"setter", "overload"})


def _found(definition: ast.ClassDef, name: str) -> Function | None:
    for member in definition.body:
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and member.name == name:
            return member
    return None


def _signature(function: Function) -> str:
    """Return the definition of a function; one parameter a line where it is too wide."""
    prefix = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
    decorators = [ast.unparse(each) for each in function.decorator_list]
    marks = "".join(f"@{each}\n" for each in decorators if "property" in each or "method" in each)
    returned = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    arguments = ast.unparse(function.args)
    one_line = f"{prefix} {function.name}({arguments}){returned}"
    if len(one_line) <= WIDTH - 4:
        return marks + one_line
    shown = "".join(f"    {each},\n" for each in _parameters(function.args))
    return f"{marks}{prefix} {function.name}(\n{shown}){returned}"


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    without = len(positional) - len(arguments.defaults)
    for at, each in enumerate(positional):
        default = None if at < without else arguments.defaults[at - without]
        yield _parameter(each, default)
    if arguments.vararg:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    for each, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(each, given)
    if arguments.kwarg:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(argument)
    return f"{ast.unparse(argument)} = {ast.unparse(default)}"


def _code(text: str) -> str:
    return f"```py\n{text}\n```\n"


def docstring(name: str, definition: ast.ClassDef | Function) -> str:
    text = ast.get_docstring(definition)
    if not text:
        sys.exit(f"{name} is public and has no docstring")
    return f"{text}\n"


def _definition_of(value: object) -> ast.AST:
    """Return where a class or function is defined, as the source has it."""
    module = importlib.import_module(getattr(value, "__module__", ""))
    found: ast.AST = _source(inspect.getsourcefile(module) or "")
    for part in getattr(value, "__qualname__", "").split("."):
        found = next(
            each for each in getattr(found, "body", ()) if getattr(each, "name", None) == part
        )
    return found


@cache
def _source(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text("utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
