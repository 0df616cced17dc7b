"""What single tokens stand for: their bytes, and a text that tells them apart."""

import re
from collections.abc import Iterable
from functools import cached_property
from math import isnan
from typing import Any

from tarnn.data.tokenizers import byte_characters
from tarnn.serving.request import TokenLogprob

FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # how SentencePiece writes a byte that has no token of its own
SPACE = "▁"
LEAST = -9999.0  # stands for the logarithm of 0, which JSON has no number for


def as_json(logprob: float) -> float | None:
    """A logarithm of a probability; None for NaN, of a token with nothing before it."""
    return None if isnan(logprob) else max(logprob, LEAST)


class Vocabulary:
    """The tokens of a saved tokenizer, one by one."""

    def __init__(self, tokenizer: Any):
        self._backend = tokenizer.backend_tokenizer
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """Of a special token the bytes of its name."""
        if token not in self._known:
            self._known[token] = self._bytes_of(token)
        return self._known[token]

    def text_of(self, token: int) -> str:
        r"""Where the bytes are no whole characters: "bytes:\xe2\x82"."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def width_of(self, token: int) -> int:
        """Characters that begin in it."""
        return sum(byte & 0xC0 != 0x80 for byte in self.bytes_of(token))

    def described(self, rows: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
        """Tokens and their logarithms as chats and responses have them."""

        def entry(token: int, logprob: float) -> dict[str, Any]:
            return {"token": self.text_of(token), "logprob": as_json(logprob), "bytes": list(self.bytes_of(token))}

        return [entry(x.token, x.logprob) | {"top_logprobs": [entry(*likely) for likely in x.likeliest]} for x in rows]

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """Of byte-level tokenizers; empty for others."""
        level = type(self._backend.decoder).__name__ == "ByteLevel"
        return {character: byte for byte, character in enumerate(byte_characters())} if level else {}

    @cached_property
    def _special(self) -> set[int]:
        return set(self._backend.get_added_tokens_decoder())

    def _bytes_of(self, token: int) -> bytes:
        name = self._backend.id_to_token(token)
        if name is None:  # the model's vocabulary is larger than the tokenizer's
            return b""
        if token in self._special:
            return name.encode()
        if self._byte_of and all(character in self._byte_of for character in name):
            return bytes(self._byte_of[character] for character in name)
        if fallback := FALLBACK.fullmatch(name):
            return bytes([int(fallback[1], 16)])
        return name.replace(SPACE, " ").encode()
