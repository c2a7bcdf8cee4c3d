"""Make conversations from the docstrings of Python's standard library, for `data.corpus`.

The docstring of a public function is the answer to a question about it. A class becomes a
conversation of several turns: first the class, then its methods in the order of the source. Sources
are parsed and never imported. The wording of a question depends on a hash of the name, so equal
sources give equal conversations. The tokenizer is a byte-level BPE trained on the conversations,
with the two special tokens of ChatML.
Cost: 2 to 4 s for the whole library.
"""

import ast
import hashlib
import json
import platform
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from wlb.data.store import TokenStore, store_path
from wlb.plan import UserError, digest
from wlb.prepare.chat_encode import ChatChoice
from wlb.prepare.encode import BPE
from wlb.prepare.files import find_or_make, write_text
from wlb.prepare.pipeline import prepare_store
from wlb.prepare.request import PrepareOptions, StoreReport, report_of
from wlb.prepare.text import Skip, TextDocuments, stdlib_documents

# Wordings of the questions that conversations ask.
_ABOUT_FUNCTION = (
    "What does `{name}` do?",
    "How do I use `{name}`?",
    "Explain `{name}` to me.",
    "I found a call of `{name}` in a program. What is it for?",
    "What does the documentation say about `{name}`?",
    "Please describe `{name}` and what it takes.",
)
_ABOUT_CLASS = (
    "What is `{name}`?",
    "What is the class `{name}` for?",
    "Tell me about `{name}`.",
    "When would I use `{name}`?",
)
_ABOUT_METHOD = (
    "And what does its method `{method}` do?",
    "What about `{method}`?",
    "How is `{method}` used?",
    "Explain `{method}` too, please.",
)
_SYSTEM = "You answer questions about Python's standard library from its documentation."
# One in this many conversations starts with the system message.
_SYSTEM_SHARE = 4

# Increase this when the conversations change, so that old stores are not reused.
_FORMAT = 4
# The vocabulary must be larger than this, because 256 bytes and three special tokens need 259 ids.
_LEAST_VOCAB = 258

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def docstring_conversations(documents: TextDocuments | None = None) -> Iterator[dict[str, Any]]:
    """Yield a conversation about each public function and class that has a docstring.

    Tests, private modules and files that this Python cannot parse are left out.

    Args:
        documents: Python sources with their paths as names. None means the standard library.

    Yields:
        Records {"messages": [...]}, in the order of the files.
    """
    documents = documents or stdlib_documents()
    for row, name in enumerate(documents.names):
        module = _module_of(name)
        text = documents.read(row) if module else Skip.HIDDEN
        tree = None if isinstance(text, Skip) else _parse(text)
        if module is None or tree is None:
            continue
        for node in tree.body:
            turns = _turns(module, node)
            if turns:
                yield {"messages": _messages(turns)}


def write_docstring_conversations(path: str | Path, documents: TextDocuments | None = None) -> None:
    """Write conversations about Python sources to a JSONL file, atomically.

    Args:
        path: The JSONL file.
        documents: Python sources with their paths as names. None = the standard library.
    """
    records = docstring_conversations(documents)
    write_text(Path(path), "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))


def _module_of(path: str) -> str | None:
    """Return the name of the module in a file, or None for a private module or a test.

    Tests are recognised by their names, so the modules unittest and doctest count as tests too.

    Args:
        path: Path of the file relative to the library's folder.
    """
    parts = path.removesuffix(".py").split("/")
    if parts[-1] == "__init__":
        parts.pop()
    is_public = all(part.isidentifier() and not part.startswith("_") for part in parts)
    is_test = any(part.startswith("test") or part.endswith(("test", "tests")) for part in parts)
    return ".".join(parts) if parts and is_public and not is_test else None


def _parse(text: str) -> ast.Module | None:
    with warnings.catch_warnings():
        # Some sources have invalid escapes in string literals, which only cause warnings.
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError):
            return None


def _turns(module: str, node: ast.stmt) -> list[tuple[str, str]]:
    """Return (question, answer) pairs about a public function or class with a docstring.

    Args:
        module: Name of the module.
        node: A statement of the module. Statements that define nothing public give no pairs.
    """
    if isinstance(node, _Function):
        return _about_function(f"{module}.{node.name}", node, _ABOUT_FUNCTION)
    if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
        return []
    name = f"{module}.{node.name}"
    methods = [item for item in node.body if isinstance(item, _Function)]
    text = ast.get_docstring(node)
    turns: list[tuple[str, str]] = []
    if text and text.strip():
        made = next((item for item in methods if item.name == "__init__"), None)
        call = f"{name}({_arguments(made, bound=True)})" if made else name
        turns.append((_chosen(_ABOUT_CLASS, name).format(name=name), f"`{call}`\n\n{text}"))
    for method in methods:
        forms = _ABOUT_METHOD if turns else _ABOUT_FUNCTION
        turns += _about_function(f"{name}.{method.name}", method, forms, bound=True)
    return turns


def _about_function(
    name: str, node: _Function, forms: Sequence[str], *, bound: bool = False
) -> list[tuple[str, str]]:
    text = ast.get_docstring(node)
    if node.name.startswith("_") or not text or not text.strip():
        return []
    question = _chosen(forms, name).format(name=name, method=node.name)
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return [(question, f"`{name}({_arguments(node, bound=bound)}){result}`\n\n{text}")]


def _arguments(node: _Function, *, bound: bool) -> str:
    """Return the parameters of a function's signature as source text.

    Args:
        node: The function.
        bound: Whether it is a method, so that self or cls is left out.
    """
    text = ast.unparse(node.args)
    first = (node.args.posonlyargs + node.args.args)[:1]
    if bound and first and first[0].arg in ("self", "cls"):
        text = text.partition(",")[2].lstrip()
        text = text.removeprefix("/, ") if text != "/" else ""
    return text


def _messages(turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    out: list[dict[str, str]] = []
    if _hash(turns[0][0]) % _SYSTEM_SHARE == 0:
        out.append({"role": "system", "content": _SYSTEM})
    for question, answer in turns:
        out.append({"role": "user", "content": question})
        out.append({"role": "assistant", "content": answer})
    return out


def _chosen(forms: Sequence[str], name: str) -> str:
    return forms[_hash(name) % len(forms)]


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")


def prepare_docstrings(
    folder: str | Path, *, vocab_size: int, limit: int, heldout_fraction: float, seed: int
) -> StoreReport:
    """Make stores of the docstring conversations in `folder`, unless they exist already.

    A JSONL file with the conversations is written beside the stores.

    Args:
        folder: Folder of the stores.
        vocab_size: Vocabulary size of the BPE, including its special tokens.
        limit: The most tokens of a document. Longer conversations are split.
        heldout_fraction: Share of the conversations that are held out.
        seed: Decides which conversations are held out.
    """
    if vocab_size <= _LEAST_VOCAB:
        raise UserError(
            f"data.bpe_vocab_size = {vocab_size} must be at least {_LEAST_VOCAB + 1}, for 256 "
            f"bytes and three special tokens"
        )
    prefix = docstring_prefix(
        folder, vocab_size=vocab_size, limit=limit, heldout_fraction=heldout_fraction, seed=seed
    )
    conversations = store_path(prefix, ".jsonl")
    options = PrepareOptions(
        inputs=(str(conversations),),
        out=str(prefix),
        tokenizer=BPE,
        vocab_size=vocab_size,
        heldout_fraction=heldout_fraction,
        seed=seed,
        # `make` writes the JSONL file anew, so parts of an interrupted call do not match the file.
        # Remove them instead of raising an error.
        overwrite=True,
    )

    def make() -> None:
        write_docstring_conversations(conversations)
        prepare_store(options, encoder=ChatChoice(template="chatml", limit=limit))

    lock = store_path(prefix, ".jsonl.lock")
    return find_or_make(lock, lambda: _find(prefix, heldout_fraction), make)


def docstring_prefix(
    folder: str | Path, *, vocab_size: int, limit: int, heldout_fraction: float, seed: int
) -> Path:
    """Return the prefix of the stores that `prepare_docstrings` makes with these arguments.

    The prefix contains a hash of the arguments and of the version of Python.
    """
    mark = digest(
        _FORMAT, platform.python_version(), vocab_size, limit, str(heldout_fraction), seed
    )
    return Path(folder) / f"docstrings-bpe{vocab_size}-{mark % 16**6:06x}"


def _find(prefix: Path, heldout_fraction: float) -> StoreReport | None:
    """Return the report of the stores, or None if they do not exist or are incomplete.

    Args:
        prefix: Prefix of the training store.
        heldout_fraction: Share of the conversations that are held out. With 0 there is no held-out
            store.
    """
    try:
        train = TokenStore(prefix)
        heldout = TokenStore(f"{prefix}-heldout") if heldout_fraction else None
    except (UserError, OSError):
        return None
    conversations = store_path(prefix, ".jsonl")
    num_bytes = conversations.stat().st_size if conversations.exists() else 0
    return report_of(train, heldout, num_files=1, num_bytes=num_bytes)
