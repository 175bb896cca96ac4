"""docs/configuration.md lists every setting with its real default."""

import re
from pathlib import Path

from streamingnode.config import ALIASES, NodeConfig

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def documented() -> dict[str, str]:
    return dict(
        re.findall(
            r"^\| `([a-z_.]+\.[a-z_.]+)` \| `?([^|`]+?)`? \|", DOCUMENT.read_text(), re.MULTILINE
        )
    )


def written(value: object) -> str:
    """Return a default as TOML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_every_setting_is_documented_with_its_default() -> None:
    assert documented() == {
        setting.key: written(setting.value) for setting in NodeConfig().origins()
    }


def test_every_short_name_is_documented() -> None:
    table = dict(
        re.findall(r"^\| `([a-z_]+)` \| `([a-z_.]+)` \|$", DOCUMENT.read_text(), re.MULTILINE)
    )
    assert table == ALIASES
