"""Style that no linter knows, as tests."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamingnode.ownership import ROOT_PACKAGES

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
CONTRACTS = {contract["id"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]}
WHEEL_PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]

TEST_NAME_WORDS_MIN = 4  # fewer words make no sentence that can be false
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "core", "base", "misc"}
TEST_NAME = re.compile(r"^ *(?:async )?def test_(\w+)", re.MULTILINE)
LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
MACHINE_PATH = re.compile(r"(?<![\w.~<>{}-])/(?:root|work|farm|Users|home/\w+)/[\w.]")
REGISTRY = re.compile(
    r"pythonhosted|artifactory|pypi[.]org|maven[.]org|--(?:extra-)?index-url|--find-links[ =]\S"
)


def _tracked() -> list[Path]:
    """Return what git tracks or would track; a copy without git has only what was tracked."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(listing, cwd=ROOT, capture_output=True, check=False)
    if found.returncode == 0:
        paths = [ROOT / name for name in found.stdout.decode().split("\0") if name]
    else:
        ignored = {
            ".git",
            *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text("utf-8").splitlines()),
        }
        paths = [
            path for path in ROOT.rglob("*") if not ignored & set(path.relative_to(ROOT).parts)
        ]
    return sorted(path for path in paths if path.is_file())


TRACKED = _tracked()
PYTHON = [path for path in TRACKED if path.suffix == ".py"]
TESTS = [path for path in PYTHON if path.is_relative_to(ROOT / "tests")]
MARKDOWN = [path for path in TRACKED if path.suffix == ".md"]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _lines_with(pattern: re.Pattern[str]) -> Iterator[str]:
    for path in TRACKED:
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        yield from (
            f"{_name(path)}:{text.count(chr(10), 0, at.start()) + 1}"
            for at in pattern.finditer(text)
        )


def test_root_packages_agree_in_tree_wheel_layers_and_guard() -> None:
    in_tree = {
        path.parent.name
        for path in PYTHON
        if path.name == "__init__.py" and path.parent.parent == ROOT
    }
    in_tree -= {"bench"}  # run from the checkout, not shipped
    layers = [part.strip() for layer in CONTRACTS["layers"]["layers"] for part in layer.split("|")]
    linted = PROJECT["tool"]["importlinter"]["root_packages"]
    for named in (WHEEL_PACKAGES, layers, linted, CONTRACTS["acyclic"]["ancestors"], ROOT_PACKAGES):
        assert sorted(named) == sorted(in_tree)


@pytest.mark.parametrize("package", WHEEL_PACKAGES)
def test_package_carries_its_type_marker(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize("contract", CONTRACTS)
def test_contract_names_only_modules_that_exist(contract: str) -> None:
    for module in CONTRACTS[contract].get("source_modules", ()):
        path = ROOT.joinpath(*module.removesuffix(".**").removesuffix(".*").split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), (
            f"{module} is gone; take it off {contract}"
        )


def test_tests_carry_no_init_file() -> None:
    assert not [_name(path) for path in TESTS if path.name == "__init__.py"]


def test_no_module_is_named_after_nothing() -> None:
    assert not [_name(path) for path in PYTHON if VAGUE_NAMES & {path.stem, path.parent.name}]


def test_every_test_name_is_a_sentence() -> None:
    tests = [
        (_name(path), name) for path in TESTS for name in TEST_NAME.findall(path.read_text("utf-8"))
    ]
    assert len(tests) > len(TESTS)
    assert not [(at, name) for at, name in tests if len(name.split("_")) < TEST_NAME_WORDS_MIN]


def test_no_test_sleeps_to_wait() -> None:
    # a pause is part of what they do to a node
    tools = (ROOT / "tests" / "chaos", ROOT / "tests" / "doors.py")
    for path in TESTS:
        if "sleep" in (text := path.read_text("utf-8")) and not any(
            path.is_relative_to(tool) for tool in tools
        ):
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            assert not [f"{_name(path)}:{call.lineno}" for call in calls if _sleeps(call)]


def _sleeps(call: ast.Call) -> bool:
    """Recognize `sleep(...)` of any module; `sleep(0)` only yields to other tasks."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    only_yields = (
        len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0
    )
    return name in {"sleep", "sleep_until"} and not only_yields


PARQUET_READERS = {"ParquetFile", "ParquetDataset", "read_table"}


@pytest.mark.parametrize("package", WHEEL_PACKAGES)
def test_whoever_reads_parquet_has_its_page_checksums_compared(package: str) -> None:
    unchecked = []
    for path in (path for path in PYTHON if path.is_relative_to(ROOT / package)):
        if "pyarrow.parquet" not in (text := path.read_text("utf-8")):
            continue
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            if not isinstance(call.func, ast.Attribute) or call.func.attr not in PARQUET_READERS:
                continue
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            if given.get("page_checksum_verification") != "True":
                unchecked.append(f"{_name(path)}:{call.lineno}")
    assert not unchecked


DETECTING = {
    *(
        "CancelScope",
        "Condition",
        "Event",
        "Lock",
        "Semaphore",
        "create_task_group",
        "current_time",
    ),
    *("current_effective_deadline", "fail_after", "get_cancelled_exc_class", "move_on_after"),
}
"""What of anyio asks which library runs, which beside sniffio only a task can tell."""


def test_plain_functions_of_the_product_make_nothing_that_asks_which_library_runs() -> None:
    """A callback of the event loop may call a plain function, and uvloop calls protocol factories
    outside of any task.
    """
    product = [path for path in PYTHON if path.relative_to(ROOT).parts[0] in ROOT_PACKAGES]
    found = []
    for path in product:
        assert not re.search(
            rf"from anyio import .*\b({'|'.join(DETECTING)})\b", path.read_text("utf-8")
        ), path
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.Lambda):
                found += [
                    f"{_name(path)}:{call.lineno}" for call in _calls_in(function) if _detects(call)
                ]
    (entering,) = found  # `Scope.__enter__`, which a task calls
    assert entering.startswith("wal/runtime.py:")


def _calls_in(function: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls in a function, but for those in coroutine functions inside it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef | ast.Lambda):
            yield from _calls_in(node)


def _detects(call: ast.Call) -> bool:
    of = call.func
    return (
        isinstance(of, ast.Attribute)
        and getattr(of.value, "id", "") == "anyio"
        and of.attr in DETECTING
    )


@pytest.mark.parametrize("page", MARKDOWN, ids=_name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    targets = LINK.findall(CODE.sub("", page.read_text("utf-8")))
    assert not [target for target in targets if not _leads_somewhere(page, target)]


def _leads_somewhere(page: Path, target: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return True
    name, _, anchor = target.partition("#")
    path = page.parent / name if name else page
    return path.exists() and (not anchor or path.suffix != ".md" or anchor in _anchors(path))


def _anchors(page: Path) -> set[str]:
    """Return the anchors that a Git forge makes of a page's headings."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings
    }


def test_decision_records_are_numbered_densely() -> None:
    records = sorted(path.name for path in MARKDOWN if path.parent == ROOT / "docs" / "adr")
    numbers = [int(name.split("-")[0]) for name in records if name[:4].isdigit()]
    assert numbers == list(range(1, len(numbers) + 1)), Counter(numbers).most_common(3)


def test_no_file_names_a_path_of_this_machine() -> None:
    assert not list(_lines_with(MACHINE_PATH))


def test_no_file_names_a_package_registry() -> None:
    this_file = _name(Path(__file__))
    assert not [at for at in _lines_with(REGISTRY) if not at.startswith(this_file)]


def test_executor_imports_load_neither_log_store_nor_event_loop() -> None:
    program = (
        "import sys, spark_sink, flusher.manifest, wal.errors; print(*{'rocksdict', 'anyio'} "
        "& set(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == []


def test_generated_code_is_that_of_its_source(tmp_path: Path) -> None:
    source = Path("streamingnode", "streams", "streams.proto")
    protoc = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I.",
        f"--python_out={tmp_path}",
        f"--pyi_out={tmp_path}",
    ]
    subprocess.run([*protoc, source.as_posix()], cwd=ROOT, check=True)
    for name in ("streams_pb2.py", "streams_pb2.pyi"):
        made = tmp_path / source.with_name(name)
        kept = ROOT / source.with_name(name)
        assert made.read_text("utf-8") == kept.read_text("utf-8"), (
            f"run {' '.join(protoc[1:4])} --python_out=. --pyi_out=."
        )


HANGING_TEST = """
import asyncio
import pytest

@pytest.fixture
async def waited_for():
    yield asyncio.Event()
    await asyncio.sleep(0)  # in the task in which the test hangs

@pytest.mark.anyio
async def test_hangs_until_it_is_ended(waited_for):
    await waited_for.wait()

def test_comes_after_the_one_that_hangs():
    pass
"""


def test_a_test_that_hangs_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    conftest = (ROOT / "tests" / "conftest.py").read_text("utf-8")
    (tmp_path / "conftest.py").write_text(
        re.sub(r"^ENDED_AFTER = [\d.]+", "ENDED_AFTER = 0.005", conftest, flags=re.MULTILINE)
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "test_hanging.py").write_text(HANGING_TEST)
    run = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        "test_hanging.py",
    ]
    ran = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in ran.stdout, ran.stdout
    assert "TimeoutError" in ran.stdout
