"""Settings come from four places in one order, and a wrong one says what would be right."""

import math
from operator import attrgetter
from pathlib import Path

import pytest

from flusher.run import FlushOptions
from streamingnode.config import ALIASES, FIXED, SECONDS_MAX, WHOLE_MAX, NodeConfig, load_config
from wal.adaptor import WalLimits
from wal.errors import InvalidArgument
from wal.rocks.layout import RocksOptions


def origin(config: NodeConfig, key: str) -> tuple[object, str]:
    return next(
        (setting.value, setting.origin) for setting in config.origins() if setting.key == key
    )


def test_without_anything_every_setting_is_the_default() -> None:
    config = load_config()
    assert config == NodeConfig()
    assert {setting.origin for setting in config.origins()} == {"default"}


def test_argument_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("[flush]\nthreads = 3\nrow_group_bytes = 1000\nbuffered_bytes_max = 5000\n")
    environment = {
        "STREAMINGNODE_FLUSH_THREADS": "4",
        "STREAMINGNODE_FLUSH_ROW_GROUP_BYTES": "2000",
        "HOME": "x",
    }
    config = load_config(file=file, environment=environment, arguments={"flush.threads": 5})
    assert origin(config, "flush.threads") == (5, "argument flush.threads")
    assert origin(config, "flush.row_group_bytes") == (
        2000,
        "environment STREAMINGNODE_FLUSH_ROW_GROUP_BYTES",
    )
    assert origin(config, "flush.buffered_bytes_max") == (5000, f"file {file}")
    assert origin(config, "flush.group_may_read") == (FlushOptions().group_may_read, "default")
    assert config.flush.threads == 5


@pytest.mark.parametrize(
    "given",
    [
        {"wal": WalLimits(group_bytes_max=-1)},
        {"log": RocksOptions(durability="sometimes")},  # type: ignore[arg-type]
        {"log": WalLimits()},
        {"log": RocksOptions(sync_interval_ms=0)},
        {"nonsense": WalLimits()},
    ],
)
def test_object_of_options_is_checked_as_its_settings_are(given: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        load_config(arguments=given)


def test_environment_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('durability = "os"\n')
    assert load_config(environment={"STREAMINGNODE_CONFIG": str(file)}).log.durability == "os"


def test_the_token_file_of_commands_is_no_setting_of_a_node() -> None:
    assert load_config(environment={"STREAMINGNODE_TOKEN_FILE": "token"}) == NodeConfig()


@pytest.mark.parametrize("alias", ALIASES)
def test_alias_stands_for_a_setting_that_exists(alias: str) -> None:
    assert ALIASES[alias] in {setting.key for setting in NodeConfig().origins()}


@pytest.mark.parametrize(
    "arguments",
    [
        {"cut_interval_s": 60},
        {"flush": {"schedule": {"interval_s": 60.0}}},
        {"flush.schedule.interval_s": "60"},
        {"flush.schedule": {"interval_s": 60}},
    ],
    ids=str,
)
def test_one_setting_has_several_spellings(arguments: dict[str, object]) -> None:
    assert load_config(arguments=arguments).flush.schedule.interval_s == 60.0


def test_whole_section_can_be_given_as_its_options() -> None:
    assert load_config(arguments={"flush": FlushOptions(threads=7)}).flush.threads == 7


def test_the_kind_of_log_may_be_named_and_need_not_be() -> None:
    for arguments in (
        {"log.durability": "os"},
        {"log": {"kind": "rocksdb", "durability": "os"}},
        {"log.kind": "rocksdb", "durability": "os"},
        {"log": RocksOptions(durability="os")},
    ):
        config = load_config(arguments=arguments)
        assert config.log == RocksOptions(durability="os")
        assert origin(config, "log.kind")[0] == "rocksdb"
    config = load_config(environment={"STREAMINGNODE_LOG_KIND": "rocksdb"})
    assert origin(config, "log.kind") == ("rocksdb", "environment STREAMINGNODE_LOG_KIND")


def test_what_is_no_setting_comes_with_its_section_alone() -> None:
    config = load_config(arguments={"flush": FlushOptions(gather_s=0.5), "flush.threads": 7})
    assert (config.flush.gather_s, config.flush.threads) == (0.5, 7)
    names = {setting.key for setting in config.origins()}
    assert not names & FIXED
    with pytest.raises(InvalidArgument, match="STREAMINGNODE_FLUSH_GATHER_S"):
        load_config(environment={"STREAMINGNODE_FLUSH_GATHER_S": "1"})


def test_there_are_not_more_settings_than_were_agreed_on() -> None:
    assert len(NodeConfig().origins()) <= 55


@pytest.mark.parametrize("name", sorted(FIXED))
def test_what_is_no_setting_is_an_option_of_some_part(name: str) -> None:
    attrgetter(name)(NodeConfig())


def test_nothing_can_be_said_in_text() -> None:
    config = load_config(environment={"STREAMINGNODE_CUT_INTERVAL_S": "null"})
    assert config.flush.schedule.interval_s is None


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"cut_intervall_s": 1}, "did you mean 'cut_interval_s'"),
        ({"flush": {"thread": 1}}, "did you mean 'flush.threads'"),
        ({"qqqqqq": 1}, "info config"),
        ({"threads": 1}, "did you mean 'flush.threads'"),
        ({"flush.threads": "many"}, "does not fit — give int"),
        ({"flush.threads": 1.5}, "does not fit"),
        ({"cut_interval_s": "often"}, r"does not fit — give float \| None"),
        ({"log.kind": "rocks"}, "log.kind = 'rocks' does not fit — give .*'rocksdb'"),
        ({"durability": "never"}, "does not fit — give .*'fsync', 'os'"),
        ({"segments": {"growing_bytes_low": 1 << 40}}, "is not above growing_bytes_low"),
        ({"cut_interval_s": 0}, "more than 0"),
        ({"cut_interval_s": math.nan}, "more than 0"),
        ({"retention_s": -1}, "0 or more"),
        ({"retention_s": math.inf}, f"{SECONDS_MAX} at most"),
        ({"retention_s": 1e308}, "flush.retention.min_age_s = 1e\\+308 is out of range"),
        ({"cut_interval_s": SECONDS_MAX + 1}, f"{SECONDS_MAX} at most"),
        ({"cut_interval_s": 1e308}, f"more than 0, {SECONDS_MAX} at most"),
        ({"producers.results_age_s": 1e308}, f"{SECONDS_MAX} at most"),
        ({"txn.keepalive_ms_default": SECONDS_MAX * 1000 + 1}, f"{SECONDS_MAX * 1000} at most"),
        (
            {"segments.bytes_max": WHOLE_MAX + 1},
            f"segments.bytes_max = {WHOLE_MAX + 1} is out of range",
        ),
        ({"segments.rows_max": 1 << 70}, f"0 or more, {WHOLE_MAX} at most"),
        ({"log.memtable_bytes": 1 << 62}, f"more than 0, {WHOLE_MAX} at most"),
        ({"flush.retry_first_s": 1}, "no setting .* did you mean"),
        ({"flush": {"gather_s": 1}}, "no setting"),
        ({"gather_s": 1}, "no setting"),
        ({"redo.attempts_max": 1}, "no setting"),
        ({"wal.group_bytes_max": 1 << 32}, f"{1 << 30} at most"),
        ({"flush.threads": 1 << 5000}, f"{WHOLE_MAX} at most"),
    ],
    ids=str,
)
def test_wrong_setting_says_what_would_be_right(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        load_config(arguments=arguments)


def test_largest_number_of_every_setting_is_taken() -> None:
    for key, value, _ in NodeConfig().origins():
        if isinstance(value, float):
            assert origin(load_config(arguments={key: SECONDS_MAX}), key)[0] == SECONDS_MAX
    for key in (
        "log.memtable_bytes",
        "segments.bytes_max",
        "segments.rows_max",
        "flush.schedule.bytes_max",
    ):
        assert origin(load_config(arguments={key: WHOLE_MAX}), key)[0] == WHOLE_MAX


def test_wrong_environment_variable_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(InvalidArgument, match="STREAMINGNODE_FLUSH_THREADS"):
        load_config(environment={"STREAMINGNODE_FLUSH_THREAD": "1"})


def test_what_kubernetes_says_of_services_is_no_setting_and_no_mistake_is_taken_for_it() -> None:
    of_service = {"SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "7070", "SERVICE_PORT_NODE": "7070"}
    of_service |= {
        "PORT": "tcp://10.0.0.1:7070",
        "PORT_7070_TCP": "tcp://10.0.0.1:7070",
        "PORT_7070_TCP_PROTO": "tcp",
    }
    for service in ("STREAMINGNODE", "STREAMINGNODE_ORDERS"):
        environment = {f"{service}_{name}": value for name, value in of_service.items()}
        assert load_config(environment=environment) == NodeConfig()
        for mistake in ("STREAMINGNODE_HTTP_PORT", "STREAMINGNODE_DURABILTY"):
            with pytest.raises(InvalidArgument, match=mistake):
                load_config(environment=environment | {mistake: "1"})
    with pytest.raises(InvalidArgument, match="STREAMINGNODE_PORT"):
        load_config(environment={"STREAMINGNODE_PORT": "7070"})


@pytest.mark.parametrize("content", ["[flush", "\xff"])
def test_file_that_is_not_toml_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "node.toml"
    file.write_text(content, "latin-1")
    with pytest.raises(InvalidArgument, match="not TOML"):
        load_config(file=file)


def test_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read"):
        load_config(file=tmp_path / "none.toml")
