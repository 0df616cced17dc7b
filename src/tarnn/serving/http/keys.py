"""Keys of clients: their file, and where none are needed."""

import hashlib
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from tarnn.errors import UserError

SHORTEST = 16  # characters of a key; shorter ones can be guessed
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def tenant_of(key: str) -> str:
    """The name that a key's states go by: the same after a restart, and it doesn't tell the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def read_keys(path: Path) -> tuple[str, ...]:
    """One key a line; empty lines and those that begin with # are left out. UserError for a file that can't be that."""
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
    """Whether nobody but this machine reaches that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_proxies(proxies: Sequence[str]) -> None:
    """Raise UserError for what is no address or network."""
    for proxy in proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError as error:
            raise UserError(
                f"--trusted-proxy must be an address or a network, as 127.0.0.1 or 10.0.0.0/8; got {proxy!r}."
            ) from error


def answered_names(host: str, keys: tuple[str, ...], no_auth: bool) -> frozenset[str] | None:
    """The names in `Host` that are answered; None: all. UserError for an address of others without keys.

    Without keys a page in this machine's browser could reach us by a name of its own that leads here.
    """
    if keys or no_auth:
        return None
    if not is_loopback(host):
        raise UserError(
            f"--host {host} is open to other machines: give --api-key-file, or --no-auth to let everybody in."
        )
    return LOOPBACK | {host}
