"""From a node's cuts to open tables in Spark, exactly once: session, ingest job, readers, data source.

Importing this package loads nothing: an executor that needs one module of it gets that one. The names below load their
module at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spark_sink.ingestion import IngestReport, Progress, TableReport, ingest
    from spark_sink.runtime import register, session
    from spark_sink.tables import TablesAt, read_table, read_tables

_HOMES = {
    "IngestReport": "spark_sink.ingestion",
    "Progress": "spark_sink.ingestion",
    "TableReport": "spark_sink.ingestion",
    "TablesAt": "spark_sink.tables",
    "ingest": "spark_sink.ingestion",
    "read_table": "spark_sink.tables",
    "read_tables": "spark_sink.tables",
    "register": "spark_sink.runtime",
    "session": "spark_sink.runtime",
}

_OF_THE_EXTRA = ("deltalake", "pandas", "py4j", "pyspark")

__all__ = [
    "IngestReport",
    "Progress",
    "TableReport",
    "TablesAt",
    "ingest",
    "read_table",
    "read_tables",
    "register",
    "session",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        from spark_sink.errors import PackageMissing

        package = (error.name or "").partition(".")[0]
        if package not in _OF_THE_EXTRA:
            raise
        raise PackageMissing(package, "spark") from error
