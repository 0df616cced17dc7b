"""Text sources, tokenizers, and windows over ids."""

from tarnn.data.corpora import CORPORA
from tarnn.data.corpus import Corpus, prepare
from tarnn.data.sources import Document, read_documents
from tarnn.data.tokenizers import byte_tokenizer, decode_bytes, encode, token_bytes, train_bpe
from tarnn.data.windows import ValidationBatches, Windows, WindowSampler, collate

__all__ = [
    "CORPORA", "Corpus", "Document", "ValidationBatches", "WindowSampler", "Windows", "byte_tokenizer",
    "collate", "decode_bytes", "encode", "prepare", "read_documents", "token_bytes", "train_bpe",
]  # fmt: skip
