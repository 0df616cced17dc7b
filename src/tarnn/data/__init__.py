"""Text sources, tables and tokenizers: what several tasks read. What one task alone reads is in its own folder."""

import importlib

from tarnn.data.corpora import CORPORA
from tarnn.data.sources import Document, read_documents
from tarnn.data.tokenizers import byte_tokenizer, decode_bytes, encode, token_bytes, train_bpe

__all__ = [
    "CORPORA",
    "Document",
    "byte_tokenizer",
    "decode_bytes",
    "encode",
    "read_documents",
    "token_bytes",
    "train_bpe",
]


def __getattr__(name: str):
    if name in ("Images", "read_images"):  # as docs once showed it
        return getattr(importlib.import_module("tarnn.tasks.images"), name)
    raise AttributeError(f"module 'tarnn.data' has no attribute {name!r}; it has {', '.join(__all__)}")
