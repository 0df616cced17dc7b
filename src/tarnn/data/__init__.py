"""Text sources, tables and tokenizers: what several tasks read. What one task alone reads is in its own folder."""

from tarnn.data.sources import CORPORA, Document, read_documents
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
