"""Fair shares between clients: whose prompt is read next, who gets a row, and whose slow readers are given up."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from tarnn.serving.pool import Prefill
from tarnn.serving.stream import Choice, RequestQueue

OPEN = 4  # prompts of one client that are read side by side, so that a short one needn't wait for a long one


class FairQueue:
    """Deficit round robin (Shreedhar & Varghese 1995) over clients, whose prompts are read in pieces.

    Each client in turn may have `quantum` more tokens read, however many requests it has; what a piece took beyond that, it
    lacks the next time. Used by one thread.
    """

    def __init__(self, quantum: int):
        self._quantum = quantum
        self._clients: dict[str, deque[Prefill]] = {}  # those with requests; the first one has its turn
        self._deficits: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._clients)

    def add(self, prefill: Prefill) -> None:
        client = prefill.request.client
        if client not in self._clients:
            self._clients[client], self._deficits[client] = deque(), self._quantum
        self._clients[client].append(prefill)

    def first(self, may: Callable[[str], bool]) -> Prefill | None:
        """Return the prompt to read next, of the clients for which `may` is true; None if there is none."""
        allowed = {client: may(client) for client in self._clients}
        while any(allowed.values()):
            client, prompts = next(iter(self._clients.items()))
            if allowed[client] and self._deficits[client] > 0:
                return prompts[0]
            self._next_client(self._quantum if allowed[client] else 0)
        return None

    def advance(self, prefill: Prefill, num_tokens: int) -> None:
        """Count `num_tokens` that were read of the first prompt; remove it when it is complete."""
        client = prefill.request.client
        prompts = self._clients[client]
        self._deficits[client] -= max(1, num_tokens)  # a prompt that needn't be read takes a turn too
        prompts.popleft()
        if prefill.left or not prefill.begun:
            prompts.insert(min(OPEN - 1, len(prompts)), prefill)
        if not prompts:
            self._forget(client)
        elif self._deficits[client] <= 0:
            self._next_client(self._quantum)

    def remove(self, queue: RequestQueue) -> Prefill | None:
        """Remove the prompt of a request that was cancelled, and return it; None if it isn't here."""
        client = queue.request.client
        for prefill in self._clients.get(client, ()):
            if prefill.queue is queue:
                self._clients[client].remove(prefill)
                if not self._clients[client]:
                    self._forget(client)
                return prefill
        return None

    def clear(self) -> list[Prefill]:
        """Remove all, and return them."""
        prompts = [x for of_client in self._clients.values() for x in of_client]
        self._clients.clear()
        self._deficits.clear()
        return prompts

    def _forget(self, client: str) -> None:
        del self._clients[client], self._deficits[client]

    def _next_client(self, more: int) -> None:
        """Move the first client to the end; more: tokens that it may have read when it comes again."""
        client = next(iter(self._clients))
        self._clients[client] = self._clients.pop(client)
        self._deficits[client] += more


def client_of(choice: Choice) -> str:
    client: str = choice.queue.request.client
    return client


def has_fewer_rows(client: str, running: Iterable[Choice]) -> bool:
    """Return True if another client has at least two rows more."""
    rows = Counter(map(client_of, running))
    return rows[client] + 1 < max(rows.values(), default=0)


def next_choice(ready: Sequence[Choice], running: Iterable[Choice]) -> int:
    """Return the index in `ready` of the choice that gets a row: the first one whose client has the fewest."""
    rows = Counter(map(client_of, running))
    return min(range(len(ready)), key=lambda i: rows[client_of(ready[i])])


def row_to_preempt(ready: Iterable[Choice], running: Sequence[Choice]) -> int | None:
    """Return the row to take from the client that has the most, if a client in `ready` has two fewer; else None."""
    if not any(has_fewer_rows(client, running) for client in set(map(client_of, ready))):
        return None
    rows = Counter(map(client_of, running))
    return max(range(len(running)), key=lambda row: (rows[client_of(running[row])], row))


def requests_to_end(paused: Mapping[RequestQueue, Sequence[Choice]], most: int) -> list[RequestQueue]:
    """Return paused requests to end, so that the states of the others take `most` bytes: each time the oldest of the client
    that has the most. One request alone may take more."""
    sizes = {queue: bytes_of(choices) for queue, choices in paused.items()}
    ended = []
    while len(sizes) > 1 and sum(sizes.values()) > most:
        shares: Counter[str] = Counter()
        for queue, size in sizes.items():
            shares[queue.request.client] += size
        [(client, _)] = shares.most_common(1)
        ended.append(next(x for x in sizes if x.request.client == client))
        del sizes[ended[-1]]
    return ended


def bytes_of(choices: Sequence[Choice]) -> int:
    """Return the bytes of the states at which choices stand; those of one request may share a state."""
    return sum({id(x.at): x.at.nbytes for x in choices if x.at is not None}.values())
