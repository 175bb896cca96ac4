"""Authentication and rights of clients that connect by TCP or TLS: tokens, certificates and listen
addresses.

Closed by default: an address that other machines can reach is refused unless it has both TLS and
authentication of clients. Secrets come from files, are kept as digests, and never appear in errors
or log lines.
"""

import hashlib
import hmac
import re
import ssl
import stat
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from streamingnode.errors import Unauthenticated
from streamingnode.remote.answers import Rights
from streamingnode.remote.connection import Connection
from streamingnode.remote.server import Server
from wal.address import Address, is_loopback, parse_address
from wal.errors import InvalidArgument, shown
from wal.wire_types import Hello

TOKEN_BYTES_MIN = 16
"""The minimum length of a token: shorter ones can be guessed."""


class TokenEntry(Rights, frozen=True, kw_only=True):
    """One client in the file of tokens; `sha256` is the hexadecimal digest of its token.

    `consume`, `produce` and `admin` name the collections it may read, write to and change, `*` for
    all.
    """

    sha256: str
    consume: frozenset[str] = frozenset()
    produce: frozenset[str] = frozenset()
    admin: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-fA-F]{64}", self.sha256):
            raise InvalidArgument(
                f"`sha256` of client {shown(self.name)} is not a SHA-256 digest — use the output "
                "of `sha256sum < token`"
            )


class Tokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The clients in a token file."""

    client: tuple[TokenEntry, ...] = ()

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read the clients from a TOML file that only its owner may read. Raises `InvalidArgument`;
        blocks.
        """
        _check_private(file, "token file")
        try:
            return msgspec.convert(tomllib.loads(file.read_text("utf-8")), cls)
        except (OSError, ValueError) as error:  # its text may quote a secret
            kind = type(error).__name__
            raise InvalidArgument(
                f"token file {file} cannot be read ({kind}) — see docs/operations.md for its form"
            ) from None

    def rights(self, token: str) -> Rights:
        """Return the rights of the holder of a token. Raises `Unauthenticated`."""
        if len(token.encode()) < TOKEN_BYTES_MIN:
            raise Unauthenticated("the node needs a token")
        given = hashlib.sha256(token.encode()).hexdigest()
        for entry in self.client:
            if hmac.compare_digest(given, entry.sha256.lower()):
                entry.check_time()
                return entry
        raise Unauthenticated("the node does not know this token")

    def are_those_of(self, rights: Rights) -> bool:
        """Whether the rights of an admitted client are unchanged. They are for a client without a
        token.
        """
        return not isinstance(rights, TokenEntry) or rights in self.client


@dataclass(slots=True)
class Endpoint:
    """An address to listen at, and how its clients authenticate.

    `tokens` may be replaced while it listens.
    """

    address: Address
    tokens: Tokens | None
    tls: ssl.SSLContext | None
    by_certificate: bool

    @classmethod
    def of(
        cls, url: str, *, tokens: Path | None, tls: ssl.SSLContext | None, client_ca: bool
    ) -> Self:
        """Return the endpoint of an address. Raises `InvalidArgument` for an address that anyone
        could use without authentication; blocks.
        """
        address = parse_address(url)
        if address.path:
            raise InvalidArgument(
                f"{url} is a path, and every open node listens at its own — use a tcp:// or tls:// "
                "address"
            )
        if address.tls and tls is None:
            raise InvalidArgument(f"{url} needs a certificate — add --tls-cert and --tls-key")
        if not is_loopback(address.host) and not (address.tls and (tokens or client_ca)):
            raise InvalidArgument(
                f"{url} is open to other machines — use tls:// with --tls-cert, --tls-key, and "
                "--tokens or --tls-client-ca"
            )
        known = None if tokens is None else Tokens.read(tokens)
        return cls(address, known, tls if address.tls else None, client_ca and address.tls)

    async def listen(self, server: Server) -> str:
        """Listen, and return the address for clients, with the actual port. Raises
        `InvalidArgument` when it is not available.
        """
        try:
            port = await server.listen_tcp(
                self.address.host, self.address.port, self.authenticate, self.tls
            )
        except OSError as error:
            raise InvalidArgument(
                f"{self.address} cannot be listened at: {error.strerror} — choose another"
            ) from error
        return str(self.address._replace(port=port))

    def authenticate(self, hello: Hello, connection: Connection) -> Rights:
        """Return the rights of a client. Raises `Unauthenticated`."""
        if self.tokens is not None:
            return self.tokens.rights(hello.token)
        if self.by_certificate:
            subject = dict(
                pair for part in connection.peer("peercert").get("subject", ()) for pair in part
            )
            return Rights(str(subject.get("commonName", "certificate"))[:128])
        return Rights(hello.name[:128] or "loopback")


def server_tls(
    cert: Path | None, key: Path | None, client_ca: Path | None
) -> ssl.SSLContext | None:
    """Return the TLS context for `tls://` addresses, None without a certificate. Raises
    `InvalidArgument`; blocks.
    """
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise InvalidArgument("TLS needs both --tls-cert and --tls-key — add the other one")
    _check_private(key, "key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
        _check_valid(cert, context)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        what = getattr(error, "verify_message", None) or error.strerror or error
        raise InvalidArgument(f"certificate {cert}, key {key}: {what} — correct them") from None
    return context


def _check_valid(cert: Path, context: ssl.SSLContext) -> None:
    """Raise `ssl.SSLError` for a certificate that is not valid now. Runs a handshake in memory with
    a client that trusts it.
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(cert)
    to_node = ssl.MemoryBIO()
    to_client = ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_node)
    node = context.wrap_bio(to_node, to_client, server_side=True)
    for side in (client, node, client):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()


def _check_private(file: Path, what: str) -> None:
    """Raise `InvalidArgument` for a secret that others may read."""
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise InvalidArgument(
            f"{what} {file} cannot be read: {error.strerror} — name another"
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidArgument(f"{what} {file} is readable by others — run: chmod 600 {file}")
