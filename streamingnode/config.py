"""The settings of a node: one frozen object, put together from the parts' own limits and checked once.

Defaults < a TOML file < `STREAMINGNODE_*` environment variables < arguments of `open_node`. A setting is named by its dotted
path, as in `flush.schedule.interval_s`, by the last part of it where only one setting ends so, or by an alias.
"""

import difflib
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from flusher.run import FlushOptions
from interceptors.shard.state import SegmentLimits
from interceptors.timetick import INTERVAL_S
from interceptors.txn_session import TxnLimits
from interceptors.window import ProducerLimits
from streamingnode.writing.coalescer import CoalescerLimits
from wal import failpoint
from wal.adaptor import WalLimits
from wal.errors import InvalidArgument, shown
from wal.lifecycle import ReopenOptions, RetryLimits
from wal.live_tail import CAPACITY_BYTES
from wal.memory_store import MemoryOptions
from wal.rocks.layout import RocksOptions

ENVIRONMENT_PREFIX = "STREAMINGNODE_"
CONFIG_FILE_VARIABLE = "STREAMINGNODE_CONFIG"
"""Names the TOML file when no argument does."""

_NO_SETTINGS = frozenset({CONFIG_FILE_VARIABLE, failpoint.ENVIRONMENT_VARIABLE})
_KINDS: Mapping[object, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}

DEFAULT_ORIGIN = "default"

ALIASES = {
    "durability": "log.durability",
    "cut_interval_s": "flush.schedule.interval_s",
    "cut_bytes_max": "flush.schedule.bytes_max",
    "retention_s": "flush.retention.min_age_s",
}
"""Short names for what people set most."""

FIXED = frozenset(
    {
        "coalescer.group_bytes",
        "coalescer.groups_in_flight_max",
        "coalescer.insert_rows_max",
        "flush.gather_s",
        "flush.retry_first_s",
        "flush.retry_max_s",
        "reopen.first_pause_s",
        "reopen.longest_pause_s",
        "retry.first_s",
        "retry.max_s",
        "segments.bytes_jitter",
        "statistics.file_interval_s",
        "wal.group_messages_max",
    }
)
"""What the parts have besides settings: nobody can name it, a test gives it in an options object of the section."""

ZERO_IS_A_VALUE = frozenset(
    {
        "flush.retention.min_age_s",
        "flush.retention.min_age_short_s",
        "log.free_bytes_min",
        "retry.give_up_s",
        "segments.idle_bytes_min",
        "segments.rows_max",
        "tail.capacity_bytes",
    }
)
"""Settings that may be 0: off, at once, or no limit. Every other number is above 0, and none is negative or infinite."""

SECONDS_MAX = 100 * 365 * 86_400
"""Longest time, a century: more does not fit what is reckoned with it, and fails late and far from the setting."""

WHOLE_MAX = 1 << 50
"""Largest count or size, a pebibyte: RocksDB and the log's headers keep a few times it in 64 bits."""

GROUP_BYTES_MAX = 1 << 30
"""Largest append group: it is one entry of the log, whose lengths have 32 bits."""


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
    """How much the writes of a node hold in memory together; see `wal.queue.PendingBytes`."""

    pending_bytes_max: int = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsOptions:
    """What is measured beyond what costs next to nothing, and how often the file beside the node tells of it, in seconds.

    `time_interceptors` costs about 10 us for each append group.
    """

    time_interceptors: bool = False
    file_interval_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Every setting of a node; each section belongs to the part of that name, which documents it."""

    log: RocksOptions = field(default_factory=RocksOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    wal: WalLimits = field(default_factory=WalLimits)
    writes: WriteLimits = field(default_factory=WriteLimits)
    txn: TxnLimits = field(default_factory=TxnLimits)
    producers: ProducerLimits = field(default_factory=ProducerLimits)
    segments: SegmentLimits = field(default_factory=SegmentLimits)
    flush: FlushOptions = field(default_factory=FlushOptions)
    coalescer: CoalescerLimits = field(default_factory=CoalescerLimits)
    retry: RetryLimits = field(default_factory=RetryLimits)
    reopen: ReopenOptions = field(default_factory=ReopenOptions)
    tail: TailOptions = field(default_factory=TailOptions)
    ticks: TickOptions = field(default_factory=TickOptions)
    statistics: StatisticsOptions = field(default_factory=StatisticsOptions)
    set_by: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where each setting that is not a default came from, by its dotted path."""

    def origins(self) -> "tuple[Setting, ...]":
        """Return every setting with its value and where that comes from, by name."""
        return tuple(
            Setting(key, attrgetter(key)(self), self.set_by.get(key, DEFAULT_ORIGIN))
            for key in sorted(_known_settings())
        )


class Setting(NamedTuple):
    """One setting; `origin` is `default`, `file <path>`, `environment <variable>` or `argument <name>`."""

    key: str
    value: object
    origin: str


def load_config(
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> NodeConfig:
    """Return the settings from all places that are given, later ones winning; reads `file`, so it blocks.

    `environment` is mostly `os.environ`, which `open_node` passes by itself.

    Raises:
        InvalidArgument: an unknown name, a value of the wrong type or out of range, or a file that is not TOML.
    """
    environment = environment or {}
    if file is None and environment.get(CONFIG_FILE_VARIABLE):
        file = Path(environment[CONFIG_FILE_VARIABLE])
    found: list[Setting] = []
    if file is not None:
        found += _from_tables(_read_toml(file), f"file {file}")
    found += _from_environment(environment)
    for name, value in (arguments or {}).items():
        found += _from_tables({name: value}, f"argument {name}")
    values: dict[str, object] = {setting.key: setting.value for setting in found}
    config = _build(NodeConfig, {**values, "set_by": {setting.key: setting.origin for setting in found}})
    assert isinstance(config, NodeConfig)
    return config


@cache
def _known_settings() -> Mapping[str, object]:
    """Return the type of every setting by dotted path."""
    return {key: kind for key, kind in _flatten_types(NodeConfig) if key not in FIXED}


def _flatten_types(options: type, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, kind in get_type_hints(options).items():
        if isinstance(kind, type) and is_dataclass(kind):
            yield from _flatten_types(kind, f"{prefix}{name}.")
        elif name != "set_by":
            yield f"{prefix}{name}", kind


def _build(options: type, values: Mapping[str, object], prefix: str = "") -> object:
    arguments = {}
    for name, kind in get_type_hints(options).items():
        if isinstance(kind, type) and is_dataclass(kind):
            arguments[name] = _build(kind, values, f"{prefix}{name}.")
        elif f"{prefix}{name}" in values:
            arguments[name] = values[f"{prefix}{name}"]
    return options(**arguments)


def _read_toml(file: Path) -> Mapping[str, object]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InvalidArgument(
            f"config file {file} cannot be read: {error.strerror} — name another, or leave it out"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"config file {file} is not TOML: {error} — correct it") from error


def _from_tables(
    tables: Mapping[str, object], origin: str, prefix: str = "", *, in_options: bool = False
) -> Iterator[Setting]:
    """Yield settings from nested tables, or from whole sections given as options objects, which may name fixed ones."""
    for name, value in tables.items():
        key = f"{prefix}{name}"
        if is_dataclass(value) and not isinstance(value, type):
            yield from _from_tables(asdict(value), origin, f"{key}.", in_options=True)
        elif isinstance(value, Mapping):
            yield from _from_tables(value, origin, f"{key}.", in_options=in_options)
        elif in_options and key in FIXED:
            yield Setting(key, value, origin)
        else:
            yield _setting(_resolve(key, origin), value, origin)


def _from_environment(environment: Mapping[str, str]) -> Iterator[Setting]:
    names = ALIASES | {key: key for key in _known_settings()}
    keys = {ENVIRONMENT_PREFIX + name.upper().replace(".", "_"): key for name, key in names.items()}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in _NO_SETTINGS:
            continue
        if variable not in keys:
            raise _unknown(variable, keys, "environment")
        yield _setting(keys[variable], text, f"environment {variable}")


@cache
def _spellings() -> Mapping[str, Sequence[str]]:
    """Return the settings that each name may mean: aliases, last parts, and dotted paths, which mean one."""
    endings: dict[str, list[str]] = {}
    for key in _known_settings():
        endings.setdefault(key.rpartition(".")[2], []).append(key)
    return {**endings, **{alias: [key] for alias, key in ALIASES.items()}, **{key: [key] for key in _known_settings()}}


def _resolve(name: str, origin: str) -> str:
    keys = _spellings().get(name, ())
    if len(keys) > 1:
        raise InvalidArgument(f"{origin}: {name!r} could be {' or '.join(keys)} — write it out")
    if not keys:
        raise _unknown(name, [each for each, keys in _spellings().items() if len(keys) == 1], origin)
    return keys[0]


def _unknown(name: str, known: Collection[str], origin: str) -> InvalidArgument:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]!r}?" if near else "`streamingnode config show` lists all settings"
    return InvalidArgument(f"{origin}: there is no setting {name!r} — {advice}")


def _setting(key: str, value: object, origin: str) -> Setting:
    """Return a setting with its value converted and checked. Raises `InvalidArgument`."""
    kind = _known_settings()[key]
    try:
        converted: object = msgspec.convert(value, kind, strict=not isinstance(value, str))
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{origin}: {key} = {shown(value)} does not fit — give {_expected(kind)}") from error
    if isinstance(converted, (int, float)) and not isinstance(converted, bool):
        _check_range(key, converted, origin)
    return Setting(key, converted, origin)


def _check_range(key: str, number: float, origin: str) -> None:
    if key.endswith(("_ms", "_ms_default")):
        most = SECONDS_MAX * 1000
    elif isinstance(number, float):  # the numbers with a fraction are seconds
        most = SECONDS_MAX
    else:
        most = GROUP_BYTES_MAX if key == "wal.group_bytes_max" else WHOLE_MAX
    is_zero_fine = key in ZERO_IS_A_VALUE
    # Comparing, unlike `math.isfinite`, also takes whole numbers that no float holds.
    if not (0 < number <= most or (number == 0 and is_zero_fine)):
        least = "0 or more" if is_zero_fine else "more than 0"
        raise InvalidArgument(f"{origin}: {key} = {number!r} is out of range — give {least}, {most} at most")


def _expected(kind: object) -> str:
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    kinds = [each for each in get_args(kind) or (kind,) if each is not NoneType]
    named = " or ".join(map(repr, choices)) or " or ".join(_KINDS.get(each, str(each)) for each in kinds)
    return f"{named}, or null" if NoneType in get_args(kind) else named
