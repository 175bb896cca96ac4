"""`--node` in place of the directory, and what else it takes to connect: one place for all commands
that speak to a node.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from streamingnode.cli.command import NodeUrl
from tests.parsed_command import COMMANDS, options_of, parsed
from wal.address import SOCKET_NAME
from wal.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.streamingnode.cli.conftest import Place, Printed

    Run = Callable[..., Printed]


def test_the_option_takes_the_place_of_the_directory_and_leaves_the_other_arguments() -> None:
    for words in (
        ["partition", "create", "data", "orders", "eu"],
        ["partition", "create", "--node", "data", "orders", "eu"],
        ["partition", "create", "--node=data", "orders", "eu"],
        ["partition", "create", "orders", "--node=data", "eu"],
        ["partition", "create", "orders", "eu", "--node", "data"],
    ):
        found = parsed(words).params
        assert found == {"place": Path("data"), "collection": "orders", "partition": "eu"}, words
    with_file = parsed(["insert", "--node", "unix:x", "orders", "rows.jsonl"]).params
    assert (with_file["place"], with_file["collection"], with_file["file"]) == (
        "unix:x",
        "orders",
        "rows.jsonl",
    )
    assert isinstance(with_file["place"], NodeUrl)


@pytest.mark.parametrize("path", [f"data/{SOCKET_NAME}", SOCKET_NAME, f"unix:data/{SOCKET_NAME}"])
def test_the_path_of_a_socket_is_the_address_of_whoever_has_the_node_open(path: str) -> None:
    for words in (["collection", "ls", path], ["collection", "ls", "--node", path]):
        place = parsed(words).params["place"]
        assert isinstance(place, NodeUrl)
        assert place == f"unix:{path.removeprefix('unix:')}"


def test_a_check_of_the_socket_of_a_service_that_is_down_opens_no_node_in_its_place(
    data: Path, run: "Run"
) -> None:
    for words in (
        ["check", data / SOCKET_NAME],
        ["collection", "ls", "--node", data / SOCKET_NAME],
        ["serve", data / SOCKET_NAME],
    ):
        assert run(*words).code in {2, 4}
    assert not (data / SOCKET_NAME).exists()


@pytest.mark.parametrize(
    "words", [["serve", "http://host/data"], ["ingest", "unix:data/node.sock", "--tables", "t"]]
)
def test_where_a_path_is_meant_an_address_is_refused(
    words: list[str], run: "Run", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = run(*words)
    assert refused.code == 2
    assert " is an address — give a path on a disk of this machine" in refused.err
    assert not list(tmp_path.iterdir())


def test_an_address_of_another_kind_is_refused_as_it_was_given(run: "Run") -> None:
    assert run("collection", "ls", "http://host:1").err.startswith(
        "INVALID_ARGUMENT: 'http://host:1' is no address — give unix:PATH"
    )


def test_after_two_dashes_a_word_is_no_option() -> None:
    found = parsed(["partition", "create", "data", "orders", "--", "--node"]).params
    assert (found["place"], found["partition"]) == (Path("data"), "--node")


@pytest.mark.parametrize(
    "command, words",
    [
        ("collection ls", []),
        ("collection ls", ["--node"]),
        ("collection ls", ["--node", "a", "b"]),
        ("tail", ["orders"]),
    ],
)
def test_no_node_or_two_are_wrong_use(run: "Run", command: str, words: list[str]) -> None:
    refused = run(*command.split(), *words)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.endswith(f" — see streamingnode {command} --help\n")


def test_every_command_that_speaks_to_a_node_takes_the_option() -> None:
    silent = {"completion", "demo", "doctor", "info config", "ingest", "restore", "serve"}
    speaking = {name for name, command in COMMANDS.items() if command.speaks}
    assert speaking == COMMANDS.keys() - silent
    for name in speaking:
        assert "--node" in options_of(COMMANDS[name])


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
def test_a_token_is_taken_from_the_option_before_the_environment(
    place: "Place", run: "Run", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url, _, token = place.arguments
    assert run("collection", "ls", "--node", url).err.startswith("UNAUTHENTICATED")
    monkeypatch.setenv("STREAMINGNODE_TOKEN_FILE", token)
    assert run("collection", "ls", "--node", url).code == 0
    assert run("collection", "ls", url).code == 0
    assert run("collection", "ls", "--node", url, "--token-file", tmp_path / "none").code == 2


def test_files_for_tls_are_used_and_refused_by_name(tmp_path: Path) -> None:
    url = NodeUrl("tls://host:1")
    url.tls_ca = url.tls_cert = url.tls_key = None
    assert url.tls() is None
    (tmp_path / "no.pem").write_text("nothing")
    for name in ("tls_ca", "tls_cert", "tls_key"):
        for file in ("no.pem", "absent.pem"):
            url.tls_ca = url.tls_cert = url.tls_key = None
            setattr(url, name, tmp_path / file)
            with pytest.raises(
                InvalidArgument,
                match=r"--tls-ca, --tls-cert or --tls-key cannot be used: .* — correct them",
            ):
                url.tls()


def test_bench_measures_a_node_that_is_there_and_drops_its_collection(
    place: "Place", run: "Run"
) -> None:
    measured = run(
        "bench",
        *place.arguments,
        "--seconds",
        "0.1",
        "--outstanding",
        "4",
        "--size",
        "50",
        "--json",
    )
    assert measured.code == 0, measured.err
    assert measured.document["size"] == 50
    with place.open() as node:
        assert not [each for each in node.collections() if each.name.startswith("bench-")]


@pytest.mark.parametrize("place", ["closed"], indirect=True)
def test_bench_ends_with_what_the_node_refuses(place: "Place", run: "Run") -> None:
    refused = run(
        "bench", *place.arguments, "--seconds", "0.1", "--outstanding", "2", "--size", "5000000"
    )
    assert (refused.code, refused.err.partition(":")[0]) == (2, "TOO_LARGE")


def test_a_node_is_verified_wherever_it_is_and_a_running_one_takes_no_pace(
    place: "Place", run: "Run"
) -> None:
    verified = run("verify", *place.arguments, "--json")
    document: Any = verified.document
    assert (verified.code, document["verdict"]) == (0, "sound")
    assert document["checked"]["log entries"] > 0
    assert run("verify", *place.arguments, "--pace", "1000").code == (
        0 if place.way == "closed" else 2
    )
