"""What a server is told when it starts, and the bounds of what it takes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """keys: of clients, each of which is a tenant; none: everybody is the tenant "". The first one may read /metrics.

    hosts: names in the header `Host` that are answered; None: all. cors: origins of pages that may use this server.
    max_body: bytes of a request. max_prompt: tokens of one prompt. max_choices: texts that one request writes.
    max_gathered: tokens, and logarithms told beside each, of an answer that is not streamed.
    body_seconds: within which a request's body must be here. ping_seconds: after which a silent stream gets a comment, so that
    no proxy takes it for dead.
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
