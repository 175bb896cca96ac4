"""Packages that users have beside the node, and programs that run among all of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = [
    *("celery", "gunicorn", "IPython", "nest_asyncio", "openai", "pandas", "polars", "sniffio"),
    *("trio", "uvicorn", "uvloop"),
]

BESIDE = f"import {', '.join(PACKAGES)}\n"
"""The first line of a program: all of them are loaded."""

RUN_S_MAX = 400
"""Ends what hangs; a machine that is busy takes ten times as long as a quiet one."""


def environment() -> dict[str, str]:
    """Return the environment of a program; Spark needs no more than the tests give it."""
    return {**os.environ, "SPARK_CONF_DIR": str(ROOT / "tests" / "spark_sink")}


def run(*command: str, cwd: Path, given: str = "") -> str:
    """Run a command of Python and return what it prints. It has to end well."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment(),
        input=given,
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def python_blocks(page: str) -> list[str]:
    """Return the blocks of Python of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
