"""Brings a node's cuts into open tables in Spark, exactly once: session, ingest job, table readers,
data source.

Importing this package loads no other module: a name below loads its module at first use, so an
executor loads only the modules that it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spark_sink.ingestion import IngestReport, Progress, TableReport, ingest
    from spark_sink.resident import Failure, IngestRound, ingest_every
    from spark_sink.runtime import register, session
    from spark_sink.tables import TablesAt, read_table, read_tables

_HOMES = {
    "spark_sink.ingestion": {"IngestReport", "Progress", "TableReport", "ingest"},
    "spark_sink.resident": {"Failure", "IngestRound", "ingest_every"},
    "spark_sink.runtime": {"register", "session"},
    "spark_sink.tables": {"TablesAt", "read_table", "read_tables"},
}
_OF_THE_EXTRA = ("deltalake", "pandas", "py4j", "pyspark")

__all__ = [
    "Failure",
    "IngestReport",
    "IngestRound",
    "Progress",
    "TableReport",
    "TablesAt",
    "ingest",
    "ingest_every",
    "read_table",
    "read_tables",
    "register",
    "session",
]


def __getattr__(name: str) -> object:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        from spark_sink.errors import PackageMissing

        package = (error.name or "").partition(".")[0]
        if package not in _OF_THE_EXTRA:
            raise
        raise PackageMissing(package, "spark") from error
