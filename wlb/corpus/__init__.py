"""Text to tokens, token stores, length-only sources, and resumable shuffled global batches."""

from wlb.corpus.batches import GlobalBatches, ListedBatches, Source, State
from wlb.corpus.lengths import (
    FAMILIES,
    LengthFamily,
    LengthSource,
    lengths_of_family,
    lengths_of_file,
)
from wlb.corpus.prepare import END_OF_TEXT, PreparedStores, load_tokenizer, prepare
from wlb.corpus.shuffle import permute
from wlb.corpus.store import StoreInfo, TokenArray, TokenStore, TokenStoreWriter
from wlb.corpus.text import (
    FileDocuments,
    ListedDocuments,
    Skip,
    TextDocuments,
    folder_documents,
    read_texts,
    stdlib_documents,
    text_documents,
)

__all__ = [
    "END_OF_TEXT",
    "FAMILIES",
    "FileDocuments",
    "GlobalBatches",
    "LengthFamily",
    "LengthSource",
    "ListedBatches",
    "ListedDocuments",
    "PreparedStores",
    "Skip",
    "Source",
    "State",
    "StoreInfo",
    "TextDocuments",
    "TokenArray",
    "TokenStore",
    "TokenStoreWriter",
    "folder_documents",
    "lengths_of_family",
    "lengths_of_file",
    "load_tokenizer",
    "permute",
    "prepare",
    "read_texts",
    "stdlib_documents",
    "text_documents",
]
