"""`streamingnode config show`: every setting, its value, and where the value comes from."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from streamingnode.cli.command import Command, take
from streamingnode.cli.output import EXIT_OK, Output


@dataclass(frozen=True, slots=True)
class _Arguments:
    file: Path | None
    changed: bool


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["show"], help="show: print the settings a node would be opened with here")
    parser.add_argument("--file", type=Path, help="a TOML file of settings (default: what STREAMINGNODE_CONFIG names)")
    parser.add_argument("--changed", action="store_true", help="only what is not a default")


def _run(namespace: argparse.Namespace, output: Output) -> int:
    arguments = take(_Arguments, namespace)
    from streamingnode.config import DEFAULT_ORIGIN, load_config

    settings = [
        setting
        for setting in load_config(file=arguments.file, environment=os.environ).origins()
        if not callable(setting.value) and (not arguments.changed or setting.origin != DEFAULT_ORIGIN)
    ]
    output.table(("setting", "value", "from"), [(s.key, _shown(s.value), s.origin) for s in settings])
    output.document([{"setting": s.key, "value": s.value, "origin": s.origin} for s in settings])
    return EXIT_OK


def _shown(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


COMMAND = Command(
    name="config",
    summary="show every setting, its value, and where that comes from",
    details=(
        "Settings come from defaults, then a TOML file, then STREAMINGNODE_* environment variables, then the arguments of\n"
        "open_node; later ones win. A variable is the setting's name in capitals with `_` for `.`."
    ),
    examples=(
        "streamingnode config show",
        "streamingnode config show --changed --file node.toml",
        "streamingnode config show --json",
    ),
    add_arguments=_add_arguments,
    run=_run,
)
