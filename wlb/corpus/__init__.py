"""Text to tokens, token stores, length-only sources, and resumable shuffled global batches."""

from wlb.corpus.batches import (
    GlobalBatches,
    ListedBatches,
    Source,
    SourceBatches,
    State,
    TargetSource,
)
from wlb.corpus.blend import (
    BlendedBatches,
    BlendedStore,
    StoreName,
    open_batches,
    open_store,
)
from wlb.corpus.chat import ChatEncoder, ChatTokens, TooLong, add_chat_tokens, fit
from wlb.corpus.chat_encode import ChatChoice
from wlb.corpus.chat_template import BUILT_IN, CHATML, LLAMA3, ChatTemplate, Turns
from wlb.corpus.conversation import Conversation, Message, Role, conversation_of
from wlb.corpus.docstring_store import DocstringStores, docstring_prefix, prepare_docstrings
from wlb.corpus.docstrings import (
    DocstringCounts,
    docstring_conversations,
    write_docstring_conversations,
)
from wlb.corpus.encode import (
    DocumentPolicy,
    Encoded,
    EncoderChoice,
    EncoderSpec,
    RecordEncoder,
    TextChoice,
    TextEncoderSpec,
    Vocabulary,
    read_vocabulary,
)
from wlb.corpus.jinja_template import JinjaTemplate, load_template
from wlb.corpus.lengths import (
    FAMILIES,
    LengthFamily,
    LengthSource,
    lengths_of_family,
    lengths_of_file,
)
from wlb.corpus.pipeline import prepare_store
from wlb.corpus.prepare import END_OF_TEXT, PreparedStores, load_tokenizer, prepare
from wlb.corpus.records import BadRecord, OnError, Record, TextUnit
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
    "BUILT_IN",
    "CHATML",
    "END_OF_TEXT",
    "FAMILIES",
    "LLAMA3",
    "BadRecord",
    "BlendedBatches",
    "BlendedStore",
    "ChatChoice",
    "ChatEncoder",
    "ChatTemplate",
    "ChatTokens",
    "Conversation",
    "DocstringCounts",
    "DocstringStores",
    "DocumentPolicy",
    "Encoded",
    "EncoderChoice",
    "EncoderSpec",
    "FileDocuments",
    "GlobalBatches",
    "JinjaTemplate",
    "LengthFamily",
    "LengthSource",
    "ListedBatches",
    "ListedDocuments",
    "Message",
    "OnError",
    "PrepareOptions",
    "PreparedStores",
    "Record",
    "RecordEncoder",
    "Role",
    "Skip",
    "Source",
    "SourceBatches",
    "State",
    "Status",
    "StoreInfo",
    "StoreName",
    "StoreReport",
    "TargetSource",
    "TextChoice",
    "TextDocuments",
    "TextEncoderSpec",
    "TextUnit",
    "TokenArray",
    "TokenStore",
    "TokenStoreWriter",
    "TooLong",
    "Turns",
    "Vocabulary",
    "add_chat_tokens",
    "conversation_of",
    "docstring_conversations",
    "docstring_prefix",
    "fit",
    "folder_documents",
    "lengths_of_family",
    "lengths_of_file",
    "load_template",
    "load_tokenizer",
    "open_batches",
    "open_store",
    "permute",
    "prepare",
    "prepare_docstrings",
    "prepare_store",
    "read_texts",
    "read_vocabulary",
    "stdlib_documents",
    "text_documents",
    "verify_store",
    "write_docstring_conversations",
]
