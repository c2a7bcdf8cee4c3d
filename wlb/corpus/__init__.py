"""Text to tokens, token stores, length-only sources, and resumable shuffled global batches."""

from wlb.corpus.batches import GlobalBatches, ListedBatches, Source, State, TargetSource
from wlb.corpus.blend import (
    BlendedBatches,
    BlendedStore,
    StoreName,
    open_batches,
    open_store,
)
from wlb.corpus.encode import (
    DocumentPolicy,
    Encoded,
    EncoderChoice,
    EncoderSpec,
    RecordEncoder,
    TextEncoderSpec,
    Vocabulary,
    read_vocabulary,
)
from wlb.corpus.lengths import (
    FAMILIES,
    LengthFamily,
    LengthSource,
    lengths_of_family,
    lengths_of_file,
)
from wlb.corpus.parts import OnError
from wlb.corpus.pipeline import prepare_store
from wlb.corpus.prepare import END_OF_TEXT, PreparedStores, load_tokenizer, prepare
from wlb.corpus.records import BadRecord, Record, TextUnit
from wlb.corpus.request import PrepareOptions, Status, StoreReport
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
from wlb.corpus.verify import verify_store

__all__ = [
    "END_OF_TEXT",
    "FAMILIES",
    "BadRecord",
    "BlendedBatches",
    "BlendedStore",
    "DocumentPolicy",
    "Encoded",
    "EncoderChoice",
    "EncoderSpec",
    "FileDocuments",
    "GlobalBatches",
    "LengthFamily",
    "LengthSource",
    "ListedBatches",
    "ListedDocuments",
    "OnError",
    "PrepareOptions",
    "PreparedStores",
    "Record",
    "RecordEncoder",
    "Skip",
    "Source",
    "State",
    "Status",
    "StoreInfo",
    "StoreName",
    "StoreReport",
    "TargetSource",
    "TextDocuments",
    "TextEncoderSpec",
    "TextUnit",
    "TokenArray",
    "TokenStore",
    "TokenStoreWriter",
    "Vocabulary",
    "folder_documents",
    "lengths_of_family",
    "lengths_of_file",
    "load_tokenizer",
    "open_batches",
    "open_store",
    "permute",
    "prepare",
    "prepare_store",
    "read_texts",
    "read_vocabulary",
    "stdlib_documents",
    "text_documents",
    "verify_store",
]
