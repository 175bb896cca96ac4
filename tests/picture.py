"""Draws packages, chapters and who imports whom, from the imports: `python -m tests.picture` writes
docs/packages.svg.

Packages lie as the layers do: one imports only what lies below it. A line is as thick as there are
imports behind it.
"""

import argparse
import ast
import math
from collections import Counter
from pathlib import Path

from streamingnode.ownership import ROOT_PACKAGES

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "packages.svg"
ORDER = ("streamingnode", "spark_sink", "flusher", "interceptors", "scanner", "wal")
"""From above to below; interceptors and scanner know nothing of each other."""

WIDTH = 1_100
MARGIN = 20
GAP = 26
LINES_WIDTH = 230  # to the right of the boxes, where the imports run
TILE_HEIGHT = 20
TILE_GAP = 5
LETTER = 6.3

_STYLE = """
    rect { rx: 6px }
    .package { fill: #fff; stroke: #334155; stroke-width: 1.5 }
    .chapter { fill: #e0f2fe; stroke: #7dd3fc }
    .name { font-weight: 600; font-size: 14px }
    .small { font-size: 11px }
    .imports { stroke: #64748b; fill: none; opacity: 0.75 }
    .count { font-size: 10px; fill: #475569 }
"""


def chapters() -> dict[str, list[str]]:
    """Return the modules of each package that hold code, as dotted names below it."""
    return {
        package: sorted(
            ".".join(path.relative_to(ROOT / package).with_suffix("").parts)
            for path in (ROOT / package).rglob("*.py")
            if path.name not in ("__init__.py", "__main__.py")
        )
        for package in ROOT_PACKAGES
    }


def imports() -> Counter[tuple[str, str]]:
    """Return how many import statements of each package name a module of another."""
    found: Counter[tuple[str, str]] = Counter()
    for package in ROOT_PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module:
                    target = node.module.partition(".")[0]
                    if target in ROOT_PACKAGES and target != package:
                        found[package, target] += 1
    return found


class _Box:
    """A package on the picture: its place, and its chapters as tiles in rows."""

    def __init__(self, name: str, modules: list[str], x: float, y: float, width: float) -> None:
        self.name = name
        self.x = x
        self.y = y
        self.width = width
        self.tiles: list[tuple[float, float, float, str]] = []
        at_x = x + 10
        at_y = y + 30
        for module in modules:
            tile_width = LETTER * len(module) + 12
            if at_x + tile_width > x + width - 10:
                at_x = x + 10
                at_y = at_y + TILE_HEIGHT + TILE_GAP
            self.tiles.append((at_x, at_y, tile_width, module))
            at_x += tile_width + TILE_GAP
        self.height = at_y + TILE_HEIGHT + 10 - y

    def drawn(self) -> list[str]:
        parts = [
            (
                f'  <rect class="package" x="{self.x:g}" y="{self.y:g}" width="{self.width:g}" '
                f'height="{self.height:g}"/>'
            ),
            f'  <text class="name" x="{self.x + 10:g}" y="{self.y + 19:g}">{self.name}/</text>',
        ]
        for x, y, width, module in self.tiles:
            parts.append(
                f'  <rect class="chapter" x="{x:.1f}" y="{y:g}" width="{width:.1f}" '
                f'height="{TILE_HEIGHT}"/>'
                f'<text class="small" x="{x + 6:.1f}" y="{y + 14:g}">{module}</text>'
            )
        return parts


def drawn() -> str:
    """Return the picture."""
    modules = chapters()
    boxes = dict[str, _Box]()
    y = float(MARGIN)
    for name in ORDER:
        boxes[name] = _Box(name, modules[name], MARGIN, y, WIDTH - 2 * MARGIN - LINES_WIDTH)
        y += boxes[name].height + GAP
    parts = [part for box in boxes.values() for part in box.drawn()]
    parts += _lines(boxes, imports())
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:g}" '
        'font-family="system-ui, sans-serif">'
    )
    background = f'  <rect width="{WIDTH}" height="{y:g}" fill="#f8fafc"/>'
    return "\n".join([head, f"  <style>{_STYLE}  </style>", background, *parts, "</svg>"]) + "\n"


def _lines(boxes: dict[str, _Box], counts: Counter[tuple[str, str]]) -> list[str]:
    """Draw each pair of packages as a bow at the right: the further apart they are, the wider."""
    order = ORDER.index
    right = float(WIDTH - MARGIN - LINES_WIDTH)
    parts = []
    leaving = Counter[str]()
    arriving = Counter[str]()
    for (above, below), count in sorted(
        counts.items(), key=lambda each: (order(each[0][0]), order(each[0][1]))
    ):
        assert order(above) < order(below), f"{above} imports {below}, which lies above it"
        leaving[above] += 1
        arriving[below] += 1
        start = boxes[above].y + boxes[above].height - 8 * leaving[above]
        end = boxes[below].y + 8 * arriving[below]
        bow = right + 40 + 45 * (order(below) - order(above))
        parts.append(
            f'  <path class="imports" stroke-width="{1 + math.log2(count) / 2:.1f}" '
            f'd="M{right:g} {start:g} C{bow:.1f} {start:g} {bow:.1f} {end:g} {right:g} {end:g}"/>'
            f'<text class="count" x="{(right + 3 * bow) / 4 + 4:.1f}" '
            f'y="{(start + end) / 2:g}">{count}</text>'
        )
    return parts


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m tests.picture", description=__doc__).parse_args()
    PICTURE.write_text(drawn(), "utf-8")
