"""What makes token stores: text, records and conversations to tokens."""

from wlb.prepare.chat import ChatEncoder, ChatTokens, TooLong, add_chat_tokens, fit
from wlb.prepare.chat_encode import ChatChoice
from wlb.prepare.chat_template import BUILT_IN, CHATML, LLAMA3, ChatTemplate, Turns
from wlb.prepare.conversation import Conversation, Message, Role, conversation_of
from wlb.prepare.docstring_store import DocstringStores, docstring_prefix, prepare_docstrings
from wlb.prepare.docstrings import (
    DocstringCounts,
    docstring_conversations,
    write_docstring_conversations,
)
from wlb.prepare.encode import (
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
from wlb.prepare.jinja_template import JinjaTemplate, load_template
from wlb.prepare.pipeline import prepare_store
from wlb.prepare.prepare import END_OF_TEXT, PreparedStores, load_tokenizer, prepare
from wlb.prepare.records import BadRecord, OnError, Record, TextUnit
from wlb.prepare.request import PrepareOptions, Status, StoreReport
from wlb.prepare.text import (
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
    "BUILT_IN",
    "CHATML",
    "END_OF_TEXT",
    "LLAMA3",
    "BadRecord",
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
    "JinjaTemplate",
    "ListedDocuments",
    "Message",
    "OnError",
    "PrepareOptions",
    "PreparedStores",
    "Record",
    "RecordEncoder",
    "Role",
    "Skip",
    "Status",
    "StoreReport",
    "TextChoice",
    "TextDocuments",
    "TextEncoderSpec",
    "TextUnit",
    "TooLong",
    "Turns",
    "Vocabulary",
    "add_chat_tokens",
    "conversation_of",
    "docstring_conversations",
    "docstring_prefix",
    "fit",
    "folder_documents",
    "load_template",
    "load_tokenizer",
    "prepare",
    "prepare_docstrings",
    "prepare_store",
    "read_texts",
    "read_vocabulary",
    "stdlib_documents",
    "text_documents",
    "write_docstring_conversations",
]
