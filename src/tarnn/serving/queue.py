"""Requests that wait for their prompts to be read: bounded, and fair between clients."""

from collections import deque
from collections.abc import Callable

from tarnn.serving.reading import Reading
from tarnn.serving.stream import Mail

OPEN = 4  # prompts of one client that are read side by side, so that a short one needn't wait for a long one


class FairQueue:
    """Deficit round robin (Shreedhar & Varghese 1995) over clients, whose prompts are read in pieces.

    Each client in turn may have `quantum` more tokens read, however many requests it has; what a piece took beyond that, it
    lacks the next time. Used by one thread.
    """

    def __init__(self, quantum: int):
        self._quantum = quantum
        self._clients: dict[str, deque[Reading]] = {}  # those with requests, the one whose turn it is first
        self._deficits: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._clients)

    def add(self, reading: Reading) -> None:
        client = reading.request.client
        if client not in self._clients:
            self._clients[client], self._deficits[client] = deque(), self._quantum
        self._clients[client].append(reading)

    def first(self, may: Callable[[str], bool]) -> Reading | None:
        """Whose turn it is, of the clients that may have more read now; None where none may."""
        allowed = {client: may(client) for client in self._clients}
        while any(allowed.values()):
            client, readings = next(iter(self._clients.items()))
            if allowed[client] and self._deficits[client] > 0:
                return readings[0]
            self._next_client(self._quantum if allowed[client] else 0)
        return None

    def read(self, reading: Reading, num_tokens: int) -> None:
        """The first one has come so much further; one whose prompt is read leaves."""
        client = reading.request.client
        readings = self._clients[client]
        self._deficits[client] -= max(1, num_tokens)  # a prompt that needn't be read takes a turn too
        readings.popleft()
        if reading.left or not reading.begun:
            readings.insert(min(OPEN - 1, len(readings)), reading)
        if not readings:
            self._forget(client)
        elif self._deficits[client] <= 0:
            self._next_client(self._quantum)

    def remove(self, mail: Mail) -> Reading | None:
        """The reading of a request that was cancelled, or None where it isn't here."""
        client = mail.request.client
        for reading in self._clients.get(client, ()):
            if reading.mail is mail:
                self._clients[client].remove(reading)
                if not self._clients[client]:
                    self._forget(client)
                return reading
        return None

    def clear(self) -> list[Reading]:
        """All of them leave."""
        readings = [x for of_client in self._clients.values() for x in of_client]
        self._clients.clear()
        self._deficits.clear()
        return readings

    def _forget(self, client: str) -> None:
        del self._clients[client], self._deficits[client]

    def _next_client(self, more: int) -> None:
        """The first one goes behind the others; more: what it may have read when it comes again."""
        client = next(iter(self._clients))
        self._clients[client] = self._clients.pop(client)
        self._deficits[client] += more
