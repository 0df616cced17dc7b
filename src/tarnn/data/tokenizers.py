"""From bytes to ids and back: the byte tokenizer, BPE trained on the spot, and the bytes of each id.

Both are `PreTrainedTokenizerFast`, so they are saved with a model and load with `AutoTokenizer`. Both work on
bytes underneath: every text has ids, and ids have an exact size in bytes, which makes bits per byte exact.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tarnn.data.proteins import AMINO_ACIDS, OTHERS
from tarnn.data.saved_tokenizer import open_saved_tokenizer
from tarnn.errors import UserError
from tarnn.extras import needed_for

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT, MASK = "<|endoftext|>", "<|mask|>"
LARGEST_VOCABULARY = 1_000_000
PIECE = 1 << 16  # bytes of text given to a tokenizer at a time, cut at the end of a line


def byte_characters() -> list[str]:
    """The printable character by which byte-level tokenizers write each byte, as GPT-2 chose them."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """Ids 0–255 are the bytes themselves; 256 is <|endoftext|>, which separates documents, ends and pads."""
    return wrapped(byte_backend())


def amino_tokenizer() -> "PreTrainedTokenizerFast":
    """Ids 0–19 are the amino acids, 20–25 the letters that stand for others; then <|endoftext|> and <|mask|>.

    A letter that is none of these becomes X, any amino acid, in a prompt; `encode` refuses it.
    """
    return tokenizer_of({letter: i for i, letter in enumerate(AMINO_ACIDS + OTHERS)}, "X", mask_token=MASK)


@needed_for("a tokenizer")
def backend_of(vocab: dict[str, int], unknown: str | None = None) -> "Tokenizer":
    """A byte-level tokenizer whose tokens are single characters, without special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_backend() -> "Tokenizer":
    """Ids 0–255 are the bytes themselves, and there are no others."""
    return backend_of({character: byte for byte, character in enumerate(byte_characters())})


def tokenizer_of(vocab: dict[str, int], unknown: str | None = None, **special: str) -> "PreTrainedTokenizerFast":
    """A byte-level tokenizer whose tokens are single characters. special: names and texts of more special tokens."""
    return wrapped(backend_of(vocab, unknown), **special)


FIXED = {"bytes": byte_tokenizer, "amino-acids": amino_tokenizer}  # tokenizers that need no training


@needed_for("a tokenizer")
def train_bpe(texts: Iterable[bytes], vocab_size: int) -> "PreTrainedTokenizerFast":
    """A byte-level BPE of at most `vocab_size` ids, the 256 bytes and <|endoftext|> among them.

    Fewer ids come out where the texts have no more pairs to merge. Deterministic. Raises UserError for a
    text that is not UTF-8 and for a size below 258 (nothing would be merged).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 258:
        raise UserError(f"a BPE vocabulary of {vocab_size} leaves nothing to merge; expected at least 258.")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # <|endoftext|> takes the last id
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return wrapped(backend)


def bpe_size(tokenizer: str) -> int | None:
    """N of "bpe:N", None for one that needs no training; UserError for anything else."""
    kind, _, size = tokenizer.partition(":")
    if tokenizer in FIXED or is_folder(tokenizer):
        return None
    if kind == "bpe" and size.isdecimal():
        if len(size) > 12 or int(size) > LARGEST_VOCABULARY:
            raise UserError(f"a BPE vocabulary of {size} is too large; expected at most {LARGEST_VOCABULARY:,}.")
        return int(size)
    raise UserError(
        f"no tokenizer is called {tokenizer!r}; expected {', '.join(map(repr, FIXED))}, 'bpe:N' with N ids, such as "
        "'bpe:4096', or the folder of a tokenizer."
    )


def make_tokenizer(name: str, texts: Iterable[bytes]) -> "PreTrainedTokenizerFast":
    """The tokenizer of that name; "bpe:N" is trained on the texts."""
    vocab_size = bpe_size(name)
    return ready_tokenizer(name) if vocab_size is None else train_bpe(texts, vocab_size)


def is_folder(tokenizer: str) -> bool:
    """Whether it is the folder of a tokenizer, and not the name of one."""
    return tokenizer not in FIXED and Path(tokenizer).expanduser().is_dir()


def ready_tokenizer(name: str) -> "PreTrainedTokenizerFast":
    """One that needs no training: by its name, or from its folder.

    UserError for a folder's tokenizer that does not work on bytes: then its tokens have no exact number of bytes.
    """
    if name in FIXED:
        return FIXED[name]()
    tokenizer = open_saved_tokenizer(Path(name).expanduser())
    try:
        if tokenizer.eos_token_id is None:
            tokenizer.add_special_tokens({"eos_token": END_OF_TEXT})
        token_bytes(tokenizer)
    except (KeyError, AttributeError) as error:
        raise UserError(
            f"the tokenizer in {name} is not byte-level (as those of GPT-2, Llama 3 and tarnn are), so its tokens have no exact "
            "number of bytes; give another, or --tokenizer bpe:N."
        ) from error
    return tokenizer


@needed_for("a tokenizer")
def wrapped(backend, **more: str) -> "PreTrainedTokenizerFast":
    """The Hugging Face tokenizer around a `tokenizers` one; <|endoftext|> gets the next free id, then `more` special ones."""
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT, **more}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, padding_side="left", clean_up_tokenization_spaces=False, **special
    )


def ids_of_bytes(tokenizer: "PreTrainedTokenizerFast") -> np.ndarray | None:
    """(256,): the id of each byte, −1 where it has none. None for a tokenizer whose tokens are longer than a byte."""
    backend = tokenizer.backend_tokenizer
    if backend.get_vocab_size(with_added_tokens=False) > 256:
        return None
    vocab = backend.get_vocab(with_added_tokens=False)
    ids = np.array([vocab.get(character, -1) for character in byte_characters()])
    whole = len(vocab) == 256 or all(token.isascii() for token in vocab)
    return ids if (ids >= 0).sum() == len(vocab) and whole else None


def token_bytes(tokenizer: "PreTrainedTokenizerFast") -> list[bytes]:
    """Return the bytes of each id of a byte-level tokenizer; special tokens have none."""
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    special = set(tokenizer.all_special_ids)
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return [b"" if i in special else bytes(byte_of[c] for c in token) for i, token in enumerate(tokens)]


def encode(tokenizer: "PreTrainedTokenizerFast", data: bytes, name: str = "the text") -> np.ndarray:
    """The ids of `data`, int64; `<|endoftext|>` written in it is text like any other.

    The byte tokenizer takes any bytes, that of amino acids its letters, others UTF-8: UserError with the place of the
    first byte that is none of them.
    """
    backend, table = tokenizer.backend_tokenizer, ids_of_bytes(tokenizer)
    if table is not None:
        ids = table[np.frombuffer(data, dtype=np.uint8)]
        if len(unknown := np.flatnonzero(ids < 0)):
            letters = bytes(np.argsort(table)[(table < 0).sum() :].tolist()).decode()
            raise UserError(
                f"{name} has {data[unknown[0] : unknown[0] + 1]!r} at position {unknown[0]:,}, which this tokenizer does "
                f"not know; expected {letters}."
            )
        return ids
    before = backend.encode_special_tokens
    backend.encode_special_tokens = True  # no token is special in a text
    try:
        encodings = backend.encode_batch_fast(list(pieces(data, name)), add_special_tokens=False)
    finally:
        backend.encode_special_tokens = before
    return np.concatenate([np.zeros(0, np.int64), *(np.asarray(e.ids, np.int64) for e in encodings)])


def decode_bytes(tokenizer: "PreTrainedTokenizerFast", ids: Iterable[int]) -> bytes:
    """The exact bytes that `ids` stand for: `encode` undone, <|endoftext|> left out."""
    table = token_bytes(tokenizer)
    return b"".join(table[i] for i in ids)


def pieces(data: bytes, name: str = "the text") -> Iterator[str]:
    """`data` as text, cut at line ends into pieces of about 64 KB: a large file is never one huge string.

    Raises UserError with the place of the first byte that is not UTF-8.
    """
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + PIECE)
        end = len(data) if end < 0 else end + 1
        try:
            yield data[start:end].decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name} is not UTF-8: byte {data[start + error.start]:#04x} at position "
                f"{start + error.start:,}. A BPE tokenizer takes UTF-8 only; convert the text, or use a "
                "model with --tokenizer bytes, which takes any bytes."
            ) from None
        start = end
