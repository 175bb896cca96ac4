"""The settings of a node: one frozen object of all parts' limits, checked once.

Defaults < a TOML file < `STREAMINGNODE_*` environment variables < arguments of `open_node`. A
setting is named by its dotted path, as in `flush.schedule.interval_s`, or by an alias.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeGuard,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from flusher.run import FlushOptions
from interceptors.shard.state import SegmentLimits
from interceptors.timetick import INTERVAL_S
from interceptors.txn_session import TxnLimits
from interceptors.window import ProducerLimits
from wal import failpoint
from wal.adaptor import WalLimits
from wal.errors import InvalidArgument, nearest, shown
from wal.lifecycle import ReopenOptions
from wal.live_tail import CAPACITY_BYTES
from wal.memory_store import MemoryOptions
from wal.rocks.layout import RocksOptions
from wal.rocksmq.contract import MqOptions

ENVIRONMENT_PREFIX = "STREAMINGNODE_"
CONFIG_FILE_VARIABLE = "STREAMINGNODE_CONFIG"
"""Names the TOML file when no argument does."""
TOKEN_FILE_VARIABLE = "STREAMINGNODE_TOKEN_FILE"  # noqa: S105 - a path, not a token
"""Names the file with the token that commands use for a node at an address."""

_NO_SETTINGS = frozenset(
    {CONFIG_FILE_VARIABLE, TOKEN_FILE_VARIABLE, failpoint.ENVIRONMENT_VARIABLE}
)

DEFAULT_ORIGIN = "default"

ALIASES = {
    "durability": "log.durability",
    "cut_interval_s": "flush.schedule.interval_s",
    "cut_bytes_max": "flush.schedule.bytes_max",
    "free_bytes_min": "log.free_bytes_min",
    "http": "serve.http",
    "listen": "serve.listen",
    "retention_s": "flush.retention.min_age_s",
    "traces": "serve.traces",
}
"""Short names of the most used settings."""

FIXED = frozenset(
    {
        "flush.gather_s",
        "flush.retry_first_s",
        "flush.retry_max_s",
        "reopen.first_pause_s",
        "reopen.longest_pause_s",
        "wal.group_messages_max",
    }
)
"""Fields of options objects that are not settings: only a test sets them, in the object of a
section.
"""

ZERO_IS_A_VALUE = frozenset(
    {
        "flush.retention.min_age_s",
        "flush.retention.min_age_short_s",
        "flush.retention.taken_cuts_s",
        "log.free_bytes_min",
        "mq.retention_bytes",
        "mq.retention_s",
        "segments.idle_bytes_min",
        "segments.rows_max",
        "tail.capacity_bytes",
    }
)
"""Settings that may be 0: off, at once, or no limit. Every other number is above 0, and all are
finite.
"""

SECONDS_MAX = 100 * 365 * 86_400
"""Longest time, a century: a longer one would overflow later computations, far from the setting."""
WHOLE_MAX = 1 << 50
"""Largest count or size, a pebibyte: RocksDB and the log's headers store a few times that in 64
bits.
"""
GROUP_BYTES_MAX = 1 << 30
"""Largest append group: it is one entry of the log, whose lengths have 32 bits."""


LogOptions = RocksOptions
"""The log's settings: a union of structs, tagged by `log.kind`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailOptions:
    """How much of the newest log stays in memory for readers."""

    capacity_bytes: int = CAPACITY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class TickOptions:
    """How often an idle log gets a new tick, in seconds."""

    interval_s: float = INTERVAL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteLimits:
    """How much memory the writes of a node hold; see `wal.queue.PendingBytes`."""

    pending_bytes_max: int = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsOptions:
    """Optional measurements; timing the interceptors costs about 10 us for each append group."""

    time_interceptors: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Whether other processes reach the node at `node.sock` in its directory, and how many at a
    time.

    `http` is the `HOST:PORT` of its health and metrics. An address that other machines reach is
    refused unless `http_for_anybody` is set. `traces` creates spans for OpenTelemetry, with the
    extra `otel`.
    """

    listen: bool = True
    connections_max: int = 4_096
    http: str | None = None
    http_for_anybody: bool = False
    traces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Every setting of a node; the part of a section's name documents it."""

    log: LogOptions = field(default_factory=RocksOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    wal: WalLimits = field(default_factory=WalLimits)
    writes: WriteLimits = field(default_factory=WriteLimits)
    txn: TxnLimits = field(default_factory=TxnLimits)
    producers: ProducerLimits = field(default_factory=ProducerLimits)
    segments: SegmentLimits = field(default_factory=SegmentLimits)
    flush: FlushOptions = field(default_factory=FlushOptions)
    reopen: ReopenOptions = field(default_factory=ReopenOptions)
    tail: TailOptions = field(default_factory=TailOptions)
    ticks: TickOptions = field(default_factory=TickOptions)
    statistics: StatisticsOptions = field(default_factory=StatisticsOptions)
    serve: ServeOptions = field(default_factory=ServeOptions)
    mq: MqOptions = field(default_factory=MqOptions)
    set_by: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The origin of each setting that is not a default, by its dotted path."""

    def origins(self) -> "tuple[Setting, ...]":
        """Return every setting with its value and origin, by name."""
        keys = sorted(_known_settings())
        return tuple(
            Setting(key, attrgetter(key)(self), self.set_by.get(key, DEFAULT_ORIGIN))
            for key in keys
        )


class Setting(NamedTuple):
    """One setting; `origin` is `default`, `file <path>`, `environment <variable>` or
    `argument <name>`.
    """

    key: str
    value: object
    origin: str


def load_config(
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> NodeConfig:
    """Return the settings from all given sources; a later one overrides. Reads `file`, so it
    blocks.

    `environment` is usually `os.environ`, which `open_node` passes. Raises `InvalidArgument` for an
    unknown name, a value of the wrong type or out of range, and a file that is not TOML.
    """
    environment = environment or {}
    if file is None and environment.get(CONFIG_FILE_VARIABLE):
        file = Path(environment[CONFIG_FILE_VARIABLE])
    found = [] if file is None else list(_from_tables(_read_toml(file), f"file {file}"))
    found += _from_environment(environment)
    for name, value in (arguments or {}).items():
        found += _from_tables({name: value}, f"argument {name}")
    tables: dict[str, Any] = {"set_by": {key: origin for key, _, origin in found}}
    for key, value, _ in found:
        *sections, name = key.split(".")
        table = tables
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    return msgspec.convert(tables, NodeConfig)


@cache
def _known_settings() -> Mapping[str, object]:
    """Return the type of every setting by dotted path."""
    return {key: kind for key, kind in _flatten_types(NodeConfig) if key not in FIXED}


def _flatten_types(options: type, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, kind in get_type_hints(options).items():
        if sections := _sections(kind):
            yield from _flatten_sections(sections, f"{prefix}{name}.")
        elif name != "set_by" and get_origin(kind) is not ClassVar:
            yield f"{prefix}{name}", kind


def _flatten_sections(sections: Sequence[type], prefix: str) -> Iterator[tuple[str, object]]:
    """Yield the settings of all kinds of a section, and the setting that names its kind."""
    structs = [section for section in sections if issubclass(section, msgspec.Struct)]
    kinds = tuple(each.__struct_config__.tag for each in structs)
    if kinds:
        yield f"{prefix}kind", Literal[kinds]
    for section in sections:
        yield from _flatten_types(section, prefix)


def _sections(kind: object) -> list[type]:
    """Return the options classes that a field of this type can hold; none for a single setting."""
    return [each for each in (kind, *get_args(kind)) if _is_options(each)]


def _is_options(kind: object) -> TypeGuard[type]:
    return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, msgspec.Struct))


def _read_toml(file: Path) -> Mapping[str, object]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
        raise InvalidArgument(
            f"config file {file} {why} — name another, or leave it out"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"config file {file} is not TOML: {error} — correct it") from error


def _from_tables(tables: Mapping[str, object], origin: str, prefix: str = "") -> Iterator[Setting]:
    """Yield settings from nested tables; of an options object of a whole section, yield all fields
    unchanged, also those that are not settings.
    """
    for name, value in tables.items():
        key = f"{prefix}{name}"
        if _is_options(type(value)):
            for inner, _ in _flatten_sections([type(value)], ""):
                full = f"{key}.{inner}"
                given = attrgetter(inner)(value)
                yield (
                    Setting(full, given, origin)
                    if full in FIXED
                    else _setting(full, _names(), given, origin)
                )
        elif isinstance(value, Mapping):
            yield from _from_tables(value, origin, f"{key}.")
        else:
            yield _setting(key, _names(), value, origin)


def _from_environment(environment: Mapping[str, str]) -> Iterator[Setting]:
    keys = {
        ENVIRONMENT_PREFIX + name.upper().replace(".", "_"): key for name, key in _names().items()
    }
    # Kubernetes sets variables for each service, also for a service named like this program.
    services = [
        name.removesuffix("SERVICE_HOST") for name in environment if name.endswith("_SERVICE_HOST")
    ]
    others = tuple(f"{service}{each}" for service in services for each in ("SERVICE_", "PORT"))
    for variable, text in sorted(environment.items()):
        if (
            variable.startswith(ENVIRONMENT_PREFIX)
            and variable not in _NO_SETTINGS
            and not variable.startswith(others)
        ):
            yield _setting(variable, keys, text, f"environment {variable}")


@cache
def _names() -> Mapping[str, str]:
    """Return the dotted path for each name or alias."""
    return ALIASES | {key: key for key in _known_settings()}


def _setting(name: str, keys: Mapping[str, str], value: object, origin: str) -> Setting:
    """Return the setting of a name, with its value converted and checked. Raises
    `InvalidArgument`.
    """
    if name not in keys:
        near = nearest(name, keys)
        advice = "`streamingnode info config` lists all settings"
        if near is not None:
            advice = f"did you mean {near!r}?"
        raise InvalidArgument(f"{origin}: there is no setting {name!r} — {advice}")
    key = keys[name]
    kind = _known_settings()[key]
    try:
        converted: object = msgspec.convert(value, kind, strict=not isinstance(value, str))
    except msgspec.ValidationError as error:
        expected = kind.__name__ if isinstance(kind, type) else str(kind).removeprefix("typing.")
        raise InvalidArgument(
            f"{origin}: {key} = {shown(value)} does not fit — give {expected}"
        ) from error
    if isinstance(converted, (int, float)) and not isinstance(converted, bool):
        is_zero_fine = key in ZERO_IS_A_VALUE
        most = _most(key, converted)
        # A comparison, unlike `math.isfinite`, also works for integers beyond the range of floats.
        if not (0 < converted <= most or (converted == 0 and is_zero_fine)):
            least = "0 or more" if is_zero_fine else "more than 0"
            raise InvalidArgument(
                f"{origin}: {key} = {converted!r} is out of range — give {least}, {most} at most"
            )
    return Setting(key, converted, origin)


def _most(key: str, number: float) -> int:
    if key.endswith(("_ms", "_ms_default")):
        return SECONDS_MAX * 1000
    if isinstance(number, float):  # settings of type float are seconds
        return SECONDS_MAX
    return GROUP_BYTES_MAX if key == "wal.group_bytes_max" else WHOLE_MAX
