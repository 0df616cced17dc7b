"""Philox4x32-10: random numbers that are a function of a key and a counter, so no generator has a state to keep.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (SC11).
"""

WORD = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random words of 32 bits."""
    a, b, c, d = counter
    left, right = key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = second >> 32 ^ b ^ left, second & WORD, first >> 32 ^ d ^ right, first & WORD
        left, right = left + 0x9E3779B9 & WORD, right + 0xBB67AE85 & WORD
    return a, b, c, d


def uniform(seed: int, choice: int, position: int) -> float:
    """A number from [0, 1) of 53 bits. The key is the seed; the counter is the position and, above it, the choice.

    seed, choice, position: 64 bits each; negative numbers are those with the same bits.
    """
    a, b, _, _ = philox((*_words(position), *_words(choice)), _words(seed))
    return ((a >> 5) * 2**26 + (b >> 6)) * 2.0**-53


def _words(number: int) -> tuple[int, int]:
    """The lower and the upper half of 64 bits."""
    return number & WORD, number >> 32 & WORD
