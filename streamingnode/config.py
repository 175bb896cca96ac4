"""The settings of a node: one frozen object, put together from the parts' own limits and checked once.

In: defaults < a TOML file < `STREAMINGNODE_*` environment variables < arguments of `open_node` or command-line flags. Out: a
`NodeConfig`; `origins()` says where each value came from. A setting is named by its dotted path, as in
`flush.schedule.interval_s`, by the last part of it where only one setting ends so, or by an alias. An unknown name is an
error with a suggestion.
"""

import difflib
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
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
"""Variables with our prefix that mean something else."""

_KINDS: Mapping[object, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
"""What a setting takes, in words."""

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
        "coalescer.group_rows_max",
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

SMALLER_MAX: Mapping[str, int] = {"wal.group_bytes_max": 1 << 30}
"""Settings whose largest value is less: a group is one entry of the log, whose lengths have 32 bits."""


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
            Setting(key, value, self.set_by.get(key, DEFAULT_ORIGIN))
            for key, value in sorted(_flatten_options(self))
            if key not in FIXED
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
    found: dict[str, _Given] = {}
    if file is not None:
        found.update(_from_tables(_read_toml(file), f"file {file}"))
    found.update(_from_environment(environment))
    for name, value in (arguments or {}).items():
        found.update(_from_tables({name: value}, f"argument {name}"))
    config = _build(NodeConfig, {key: given.value for key, given in found.items()})
    assert isinstance(config, NodeConfig)
    return _with_origins(config, {key: given.origin for key, given in found.items()})


class _Given(NamedTuple):
    value: object
    origin: str


def _known_settings() -> dict[str, object]:
    """Return the type of every setting by dotted path."""
    return {key: kind for key, kind in _flatten_types(NodeConfig) if key not in FIXED}


def _flatten_types(options: type, prefix: str = "") -> Iterator[tuple[str, object]]:
    hints = get_type_hints(options)
    for each in fields(options):
        kind = hints[each.name]
        if is_dataclass(kind) and isinstance(kind, type):
            yield from _flatten_types(kind, f"{prefix}{each.name}.")
        elif each.name != "set_by":
            yield f"{prefix}{each.name}", kind


def _flatten_options(options: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    for each in fields(options):  # type: ignore[arg-type]  # only called on dataclasses
        value = getattr(options, each.name)
        if is_dataclass(value):
            yield from _flatten_options(value, f"{prefix}{each.name}.")
        elif each.name != "set_by":
            yield f"{prefix}{each.name}", value


def _read_toml(file: Path) -> Mapping[str, object]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InvalidArgument(
            f"config file {file} cannot be read: {error.strerror} — name another, or leave it out"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"config file {file} is not TOML: {error} — correct it") from error


def _from_tables(tables: Mapping[str, object], origin: str) -> Iterator[tuple[str, _Given]]:
    """Yield settings from nested tables, or from whole sections given as options objects."""
    known = _known_settings()
    for name, value, is_option in _flatten_tables(tables):
        if is_option and name in FIXED:
            yield name, _Given(value, origin)
            continue
        key = _resolve(name, known, origin)
        yield key, _Given(_convert(key, value, known[key], origin, is_text=isinstance(value, str)), origin)


def _flatten_tables(tables: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object, bool]]:
    """Yield names and values, and whether each is from an options object."""
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flatten_tables(value, f"{prefix}{name}.")
        elif is_dataclass(value) and not isinstance(value, type):
            yield from ((key, each, True) for key, each in _flatten_options(value, f"{prefix}{name}."))
        else:
            yield f"{prefix}{name}", value, False


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, _Given]]:
    known = _known_settings()
    variables = {_variable(name): key for name, key in [*((key, key) for key in known), *ALIASES.items()]}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in _NO_SETTINGS:
            continue
        if variable not in variables:
            raise _unknown(variable, variables, "environment")
        key, origin = variables[variable], f"environment {variable}"
        yield key, _Given(_convert(key, text, known[key], origin, is_text=True), origin)


def _variable(key: str) -> str:
    return ENVIRONMENT_PREFIX + key.upper().replace(".", "_")


def _resolve(name: str, known: Mapping[str, object], origin: str) -> str:
    if name in known:
        return name
    if name in ALIASES:
        return ALIASES[name]
    endings = [key for key in known if key.rpartition(".")[2] == name]
    if len(endings) == 1:
        return endings[0]
    if endings:
        raise InvalidArgument(f"{origin}: {name!r} could be {' or '.join(endings)} — write it out")
    raise _unknown(name, known, origin)


def _unknown(name: str, known: Mapping[str, object], origin: str) -> InvalidArgument:
    endings = Counter(key.rpartition(".")[2] for key in known)
    candidates = [*known, *ALIASES, *(ending for ending, count in endings.items() if count == 1)]
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]!r}?" if near else "`streamingnode config show` lists all settings"
    return InvalidArgument(f"{origin}: there is no setting {name!r} — {advice}")


def _convert(key: str, value: object, kind: object, origin: str, *, is_text: bool) -> object:
    try:
        converted: object = msgspec.convert(value, kind, strict=not is_text)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{origin}: {key} = {shown(value)} does not fit — give {_expected(kind)}") from error
    if isinstance(converted, (int, float)) and not isinstance(converted, bool):
        _check_range(key, converted, origin)
    return converted


def _check_range(key: str, number: float, origin: str) -> None:
    is_zero_fine, most = key in ZERO_IS_A_VALUE, _most(key, number)
    # Comparing, unlike `math.isfinite`, also takes whole numbers that no float holds.
    if not (0 < number <= most or (number == 0 and is_zero_fine)):
        least = "0 or more" if is_zero_fine else "more than 0"
        raise InvalidArgument(f"{origin}: {key} = {number!r} is out of range — give {least}, {most} at most")


def _most(key: str, number: float) -> int:
    """Return the largest value of a setting; the numbers with a fraction are seconds."""
    if key.rpartition(".")[2].endswith(("_ms", "_ms_default")):
        return SECONDS_MAX * 1000
    return SECONDS_MAX if isinstance(number, float) else SMALLER_MAX.get(key, WHOLE_MAX)


def _expected(kind: object) -> str:
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    kinds = [each for each in get_args(kind) or (kind,) if each is not NoneType]
    named = " or ".join(map(repr, choices)) or " or ".join(_KINDS.get(each, str(each)) for each in kinds)
    return f"{named}, or null" if NoneType in get_args(kind) else named


def _build(options: type, values: Mapping[str, object], prefix: str = "") -> object:
    hints, arguments = get_type_hints(options), {}
    for each in fields(options):
        kind, key = hints[each.name], f"{prefix}{each.name}"
        if is_dataclass(kind) and isinstance(kind, type):
            arguments[each.name] = _build(kind, values, f"{key}.")
        elif key in values:
            arguments[each.name] = values[key]
    return options(**arguments)


def _with_origins(config: NodeConfig, set_by: Mapping[str, str]) -> NodeConfig:
    sections = {each.name: getattr(config, each.name) for each in fields(config) if each.name != "set_by"}
    return NodeConfig(**sections, set_by=dict(set_by))
