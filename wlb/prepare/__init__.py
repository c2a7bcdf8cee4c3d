"""Text, records and conversations to token stores."""

from wlb.prepare.chat import ChatEncoder, TooLong, add_chat_tokens
from wlb.prepare.chat_encode import ChatChoice
from wlb.prepare.chat_template import Turns
from wlb.prepare.docstring_store import docstring_prefix, prepare_docstrings
from wlb.prepare.docstrings import write_docstring_conversations
from wlb.prepare.encode import (
    DocumentPolicy,
    Encoded,
    EncoderChoice,
    RecordEncoder,
    load_tokenizer,
)
from wlb.prepare.jinja_template import load_template
from wlb.prepare.pipeline import prepare_store
from wlb.prepare.records import BadRecord, OnError, Record, TextUnit
from wlb.prepare.request import PrepareOptions, Status, StoreReport
from wlb.prepare.text import Skip, folder_documents, stdlib_documents, text_documents
from wlb.prepare.text_store import prepare

__all__ = [
    "BadRecord",
    "ChatChoice",
    "ChatEncoder",
    "DocumentPolicy",
    "Encoded",
    "EncoderChoice",
    "OnError",
    "PrepareOptions",
    "Record",
    "RecordEncoder",
    "Skip",
    "Status",
    "StoreReport",
    "TextUnit",
    "TooLong",
    "Turns",
    "add_chat_tokens",
    "docstring_prefix",
    "folder_documents",
    "load_template",
    "load_tokenizer",
    "prepare",
    "prepare_docstrings",
    "prepare_store",
    "stdlib_documents",
    "text_documents",
    "write_docstring_conversations",
]
