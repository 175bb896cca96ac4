"""What a command needs beyond the node itself: asked for before any work, with the extra that brings it."""

from collections.abc import Mapping
from importlib.util import find_spec

from spark_sink.errors import PackageMissing

SPARK: Mapping[str, str] = {"pyspark": "spark", "deltalake": "spark"}
DEMO: Mapping[str, str] = {**SPARK, "psutil": "demo", "matplotlib": "demo"}


def require(packages: Mapping[str, str]) -> None:
    """Return if every package can be imported; the values name the extras they come with. Raises `PackageMissing`."""
    for package, extra in packages.items():
        if find_spec(package) is None:
            raise PackageMissing(package, extra)
