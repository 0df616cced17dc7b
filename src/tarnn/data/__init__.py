"""Text sources and tokenizers; images. What needs torch is in `windows` and `image_batches`."""

from tarnn.data.corpora import CORPORA
from tarnn.data.corpus import Corpus, prepare
from tarnn.data.images import Images, read_images
from tarnn.data.sources import Document, read_documents
from tarnn.data.tokenizers import byte_tokenizer, decode_bytes, encode, token_bytes, train_bpe

__all__ = [
    "CORPORA",
    "Corpus",
    "Document",
    "Images",
    "byte_tokenizer",
    "decode_bytes",
    "encode",
    "prepare",
    "read_documents",
    "read_images",
    "token_bytes",
    "train_bpe",
]
