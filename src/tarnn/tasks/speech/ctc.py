"""Transcripts from the logits of a CTC model: the best path, a beam of prefixes, and a stream; and how wrong they are.

A path gives each place of the input a symbol or the blank (number 0); its transcript drops repeats, then blanks (Graves et
al. 2006, section 3).
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np


def best_path(logits: np.ndarray, before: int = 0) -> list[int]:
    """The transcript of the most likely path, logits (places, symbols). before: the symbol in the place before these."""
    path = [before, *logits.argmax(-1).tolist()]
    return [b for a, b in zip(path, path[1:]) if b not in (0, a)]


def beam_search(log_probs: np.ndarray, beam_size: int = 16) -> list[int]:
    """The most likely transcript, over all of its paths, that a beam of prefixes finds; log_probs (places, symbols).

    A prefix has two scores: of its paths that end in the blank, and of those that end in its last symbol. Hannun et al. 2014
    (arXiv 1408.2873), algorithm 1, without a language model.
    """
    beam: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -np.inf)}
    for row in log_probs:
        likely = [int(i) for i in np.argsort(row)[::-1][: beam_size + 1] if i]
        after: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [-np.inf, -np.inf])
        for prefix, (blank, symbol) in beam.items():
            either = np.logaddexp(blank, symbol)
            stays = after[prefix]
            stays[0] = float(np.logaddexp(stays[0], either + row[0]))
            if prefix:
                stays[1] = float(np.logaddexp(stays[1], symbol + row[prefix[-1]]))
            for i in likely:  # a repeat is a new symbol only after a blank
                grown = after[(*prefix, i)]
                reached = blank if prefix and prefix[-1] == i else either
                grown[1] = float(np.logaddexp(grown[1], reached + row[i]))
        scores = {prefix: (two[0], two[1]) for prefix, two in after.items()}
        beam = dict(sorted(scores.items(), key=total, reverse=True)[:beam_size])
    return list(max(beam.items(), key=total)[0])


def total(one: tuple[tuple[int, ...], tuple[float, float]]) -> float:
    """The score of a prefix by both kinds of paths."""
    return float(np.logaddexp(one[1][0], one[1][1]))


def places_needed(ids: Sequence[int] | np.ndarray) -> int:
    """The fewest places of a path that spells these symbols: one for each, and a blank between two that are alike."""
    return len(ids) + sum(a == b for a, b in zip(ids, ids[1:]))


def edits(found: Sequence, wanted: Sequence) -> int:
    """The fewest insertions, deletions and replacements that make one of the other (Levenshtein)."""
    row = list(range(len(wanted) + 1))
    for i, a in enumerate(found, start=1):
        corner, row[0] = row[0], i
        for j, b in enumerate(wanted, start=1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (a != b))
    return row[-1]


def error_rate(pairs: Sequence[tuple[Sequence, Sequence]]) -> float:
    """Edits per wanted symbol, in per cent, over all pairs (found, wanted)."""
    return 100 * sum(edits(a, b) for a, b in pairs) / max(1, sum(len(b) for _, b in pairs))
