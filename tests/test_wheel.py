"""The wheel as a stranger gets it: built offline, installed into an empty environment, and asked
who it is.
"""

import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from streamingnode.care.health import REQUIRED

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
ROOT_PACKAGES = set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


def _run(*command: str | Path, cwd: Path) -> str:
    ran = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"{command} ended with {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel with the build backend already installed, so without network."""
    target = tmp_path_factory.mktemp("wheel")
    pip_wheel = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    _run(sys.executable, *pip_wheel, "--wheel-dir", target, ROOT, cwd=target)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a new environment that borrows its dependencies from this one.

    A `.pth` line adds this environment's packages after the new one's own, and `.pth` files found
    there (such as the one of an editable install) are not followed: our packages can only come from
    the wheel.
    """
    home = tmp_path_factory.mktemp("environment")
    _run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    _run(
        *(sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "--quiet"),
        *("--no-deps", "--no-index", "--ignore-installed", wheel),
        cwd=home,
    )
    return home


def test_wheel_carries_six_typed_roots_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    roots = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert roots == ROOT_PACKAGES
    assert {f"{root}/{part}" for root in roots for part in ("__init__.py", "py.typed")} <= set(
        names
    )


def test_wheel_carries_its_license_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if "test" in name.lower()]


def test_installed_packages_come_from_the_wheel(environment: Path) -> None:
    program = (
        f"import {', '.join(sorted(ROOT_PACKAGES))} as last; import sys; "
        "print(sys.modules['wal'].__file__)"
    )
    printed = _run(environment / "bin" / "python", "-c", program, cwd=environment)
    assert Path(printed.strip()).is_relative_to(environment)


def test_installed_roots_have_exactly_one_owner(environment: Path) -> None:
    program = (
        "import importlib.metadata as m; d = m.packages_distributions(); print(*map(d.get, "
        "%r), sep='\\n')"
    )
    printed = _run(
        environment / "bin" / "python", "-c", program % sorted(ROOT_PACKAGES), cwd=environment
    )
    assert printed.splitlines() == ["['streamingnode']"] * len(ROOT_PACKAGES)


def test_installed_guard_accepts_its_own_environment(environment: Path) -> None:
    program = "from streamingnode.ownership import assert_sole_owner; assert_sole_owner()"
    assert _run(environment / "bin" / "python", "-c", program, cwd=environment) == ""


def test_importing_the_node_prints_nothing(environment: Path) -> None:
    assert (
        _run(
            environment / "bin" / "python",
            "-W",
            "error",
            "-c",
            "import streamingnode",
            cwd=environment,
        )
        == ""
    )


def test_installed_command_prints_its_help(environment: Path) -> None:
    assert "demo" in _run(environment / "bin" / "streamingnode", "--help", cwd=environment)


def test_doctor_asks_for_the_packages_that_are_required() -> None:
    names = {
        re.split(r"[<>=]", each)[0].replace("-", "_") for each in PROJECT["project"]["dependencies"]
    }
    assert names == set(REQUIRED)
