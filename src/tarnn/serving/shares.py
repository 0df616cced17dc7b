"""Who of several clients gets a row next, and who makes way: none has two rows more than another one who waits."""

from collections import Counter
from collections.abc import Iterable, Sequence

from tarnn.serving.answer import Answer


def client_of(answer: Answer) -> str:
    client: str = answer.mail.request.client
    return client


def is_behind(client: str, writing: Iterable[Answer]) -> bool:
    """Whether another client has at least two rows more."""
    rows = Counter(map(client_of, writing))
    return rows[client] + 1 < max(rows.values(), default=0)


def next_of(waiting: Sequence[Answer], writing: Iterable[Answer]) -> int:
    """Which of those that wait gets a row: the first one whose client has the fewest."""
    rows = Counter(map(client_of, writing))
    return min(range(len(waiting)), key=lambda i: rows[client_of(waiting[i])])


def makes_way(waiting: Iterable[Answer], writing: Sequence[Answer]) -> int | None:
    """The row that is taken from the client who has the most, if one who waits is behind."""
    if not any(is_behind(client, writing) for client in set(map(client_of, waiting))):
        return None
    rows = Counter(map(client_of, writing))
    return max(range(len(writing)), key=lambda row: (rows[client_of(writing[row])], row))
