"""Events for operators: structured here, delivered by the standard library's logging as the application configures it.

Unconfigured, that means: warnings and errors on standard error, nothing else anywhere. An event is a short name and typed
fields, never a sentence with values in it. It is one line, whatever is in a path; a traceback follows it, indented.
"""

import logging

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

from wal.errors import escaped

_key_values = structlog.processors.KeyValueRenderer(key_order=["event"], drop_missing=True, repr_native_str=False)


def event_log(name: str) -> FilteringBoundLogger:
    """Return the logger of a module; pass `__name__`."""
    logger: FilteringBoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            _render,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    return logger


def _render(logger: WrappedLogger, method: str, event: EventDict) -> str:
    trace = str(event.pop("exception", ""))
    line = escaped(_key_values(logger, method, event))
    return "\n    ".join([line, *map(escaped, trace.splitlines())])
