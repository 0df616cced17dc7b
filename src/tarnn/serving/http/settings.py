"""Settings of a server: its limits, the keys of clients, and the names that it answers to."""

import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tarnn.errors import UserError

SHORTEST = 16  # characters of a key; shorter ones can be guessed
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class ServerSettings:
    """keys: of clients, each of which is a tenant; without any, all clients are the tenant "". The first may read /metrics.

    hosts: names in the header `Host` that are answered; None: all. cors: origins of pages that may use this server.
    max_body: bytes of a request. max_prompt: tokens of one prompt. max_choices: texts that one request writes.
    max_gathered: tokens and logprobs of an answer that is not streamed.
    body_seconds: the time for a request's body to arrive. ping_seconds: a stream that is silent for so long gets a comment,
    so that no proxy takes it for dead.
    """

    keys: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None
    cors: tuple[str, ...] = ()
    max_body: int = 8 * 2**20
    max_prompt: int = 2**20
    max_choices: int = 128
    max_gathered: int = 2**18
    body_seconds: float = 30.0
    ping_seconds: float = 15.0


def tenant_of(key: str) -> str:
    """Return the name of a key's states: the same after a restart, and no hint of the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys of a file, one per line, without empty lines and comments (#). Raises UserError for a bad file."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(f"the keys can't be read from {path}: {reason}. Give a file with one key a line.") from error
    keys = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not keys:
        raise UserError(f"{path} holds no key. Write one into each line; `openssl rand -hex 32` makes one.")
    for number, line in enumerate(lines, 1):
        if line in keys and (len(line) < SHORTEST or not line.isascii() or not line.isprintable() or " " in line):
            raise UserError(
                f"{path}, line {number}: a key has at least {SHORTEST} characters, of ASCII and without spaces. "
                "`openssl rand -hex 32` makes one."
            )
    return keys


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_proxies(proxies: Sequence[str]) -> None:
    """Raise UserError for anything but addresses and networks."""
    for proxy in proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError as error:
            raise UserError(
                f"--trusted-proxy must be an address or a network, as 127.0.0.1 or 10.0.0.0/8; got {proxy!r}."
            ) from error


def answered_names(host: str, keys: tuple[str, ...], no_auth: bool) -> frozenset[str] | None:
    """Return the names in `Host` that are answered; None: all. Raises UserError for a public address without keys.

    Without keys a page in this machine's browser could reach the server by a name of its own that leads here.
    """
    if keys or no_auth:
        return None
    if not is_loopback(host):
        raise UserError(
            f"--host {host} is open to other machines: give --api-key-file, or --no-auth to let everybody in."
        )
    return LOOPBACK | {host}
