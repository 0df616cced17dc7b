"""The bytes of each token of a byte-level tokenizer, as a table: what it takes to decode a stream without the tokenizer."""

from collections.abc import Iterable
from typing import Any

from tarnn.data.tokenizers import byte_characters


class ByteTable(dict[int, tuple[bytes, str | None]]):
    """A table of each token's bytes, and of its text where these are whole characters; filled as tokens come.

    Call it with ids, as a tokenizer's `decode`. Special tokens stand for nothing, and neither do ids without a token.
    """

    def __init__(self, backend: Any):
        self._token = backend.id_to_token
        self._special = {x.content for x in backend.get_added_tokens_decoder().values() if x.special}
        self._byte_of = {character: byte for byte, character in enumerate(byte_characters())}

    def __missing__(self, token: int) -> tuple[bytes, str | None]:
        name = self._token(token)
        if name is None or name in self._special:
            name = ""
        # an added token may be written in other characters: those are meant as they stand
        data = bytes(map(self._byte_of.__getitem__, name)) if self._byte_of.keys() >= set(name) else name.encode()
        try:
            self[token] = data, data.decode()
        except UnicodeDecodeError:
            self[token] = data, None
        return self[token]

    def __call__(self, ids: Iterable[int]) -> str:
        return b"".join([self[token][0] for token in ids]).decode("utf-8", "replace")


def byte_table(tokenizer: Any) -> ByteTable | None:
    """The table of a tokenizer whose tokens are bytes and nothing else (GPT-2's, Llama 3's, Qwen's, tarnn's); else None."""
    from tokenizers.decoders import ByteLevel

    backend = tokenizer.backend_tokenizer
    return ByteTable(backend) if isinstance(backend.decoder, ByteLevel) else None
