"""Addresses of nodes, a socket or a host and port, and the options of clients. No I/O except token
files.

An address is written as a URL: `unix:data/node.sock`, `tcp://127.0.0.1:7070`,
`tls://orders.example:7070`.
"""

import ipaddress
import os
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from wal.errors import InvalidArgument, Unreachable

SOCKET_NAME = "node.sock"
"""The name of the socket in the directory of an open node."""
SOCKET_PATH_BYTES_MAX = 107
"""The system calls take no longer path."""
CONNECT_S_MAX = 10.0
"""The time within which a node must accept a connection and welcome its client."""
PING_S = 5.0
SILENT_S_MAX = 20.0
"""The interval of a client's pings on a quiet connection, and how long the node may be silent."""


class Address(NamedTuple):
    """The address of a node: the `path` of a Unix socket, or host and port."""

    path: str = ""
    host: str = ""
    port: int = 0
    tls: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (
            f"unix:{self.path}"
            if self.path
            else f"{'tls' if self.tls else 'tcp'}://{host}:{self.port}"
        )


def parse_address(url: str) -> Address:
    """Return the address of `unix:data/node.sock`, `tcp://host:port` or `tls://host:port`. Raises
    `InvalidArgument`.
    """
    with suppress(ValueError, TypeError, AttributeError):
        if (
            url.startswith("unix:")
            and (path := url.removeprefix("unix:").removeprefix("//"))
            and "\0" not in path
        ):
            # absolute: a program may change its directory while it is connected
            absolute = str(Path(path).absolute())
            return Address(
                path=absolute if len(os.fsencode(absolute)) <= SOCKET_PATH_BYTES_MAX else path
            )
        parts = urlsplit(url)
        alone = (
            parts.path in {"", "/"}
            and "@" not in parts.netloc
            and not (parts.query or parts.fragment)
        )
        if (
            parts.scheme in {"tcp", "tls"}
            and parts.port
            and alone
            and (host := parts.hostname or "").encode("idna")
        ):
            return Address(host=host, port=parts.port, tls=parts.scheme == "tls")
    raise InvalidArgument(
        f"{url!r} is no address — give unix:PATH, tcp://HOST:PORT or tls://HOST:PORT"
    )


def is_loopback(host: str) -> bool:
    """Return whether a host is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """The options of a client. `give_up_s` is how long calls wait for a lost connection; `token` is
    a token, or the path of its file.
    """

    name: str = ""
    token: str | Path = ""
    tls: ssl.SSLContext | None = None
    give_up_s: float = 30.0

    def read_token(self) -> str:
        """Return the token; reads its file each time. Blocks. Raises `InvalidArgument`."""
        if isinstance(self.token, str):
            return self.token
        try:
            return self.token.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(
                f"token file {self.token} cannot be read: {error} — name another"
            ) from error


def unreachable(address: Address, error: OSError) -> Unreachable:
    """Return the error for a failed attempt to connect, including failures of TLS and timeouts."""
    what = str(error) or f"no answer within {CONNECT_S_MAX:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        what += " — name the authority of its certificate, with tls= or --tls-ca"
    elif isinstance(error, PermissionError):
        what += " — connect as the user who runs the node, or where it listens for others"
    return Unreachable(f"no node answers at {address}: {what}")
