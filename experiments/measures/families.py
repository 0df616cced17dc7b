"""Families of sequences, by the words that they share."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations

WORD, SHARE, COMMON = 6, 0.1, 50


def families(sequences: Sequence[str]) -> list[list[int]]:
    """The numbers of sequences, in groups: two are linked that share a tenth of the shorter one's words of six letters.

    A group is all that is linked, over several links too. Words of more than 50 sequences say nothing and count for none: of
    twenty letters there are 64 million such words, so ten thousand sequences of 300 share some by chance, and repeats many.
    Largest groups first.
    """
    words = [words_of(x) for x in sequences]
    holders = defaultdict(list)
    for number, found in enumerate(words):
        for word in found:
            holders[word].append(number)
    shared: Counter[tuple[int, int]] = Counter()
    for numbers in holders.values():
        if 1 < len(numbers) <= COMMON:
            shared.update(combinations(numbers, 2))
    parent = list(range(len(sequences)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for (i, j), count in shared.items():
        if count >= SHARE * min(len(words[i]), len(words[j])):
            parent[root(i)] = root(j)
    groups = defaultdict(list)
    for i in range(len(sequences)):
        groups[root(i)].append(i)
    return sorted(groups.values(), key=lambda group: (-len(group), group))


def words_of(sequence: str) -> set[str]:
    return {sequence[i : i + WORD] for i in range(len(sequence) - WORD + 1)}
