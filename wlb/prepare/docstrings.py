"""Conversations about the Python standard library from its docstrings: real text on any machine.

A public function's docstring answers a question about it; a class is a conversation in several
turns, the class first and then its methods in source order. Sources are parsed, never imported. A
hash of the name chooses the words of a question, so equal sources give equal conversations. They
are for trying fine-tuning out; lengths are heavy-tailed, as those of real conversations are.
Cost: parsing takes 2 to 4 s; one file is held at a time.
"""

import ast
import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wlb.data.store import temporary_name
from wlb.prepare.text import Skip, TextDocuments, stdlib_documents

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
_SYSTEM_SHARE = 4
"""One conversation in so many has the system message."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class DocstringCounts:
    """num_unparsed: files that are no Python of this version, or no text, left out."""

    num_conversations: int
    num_messages: int
    num_unparsed: int


def docstring_conversations(
    documents: TextDocuments | None = None, *, unparsed: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """{"messages": [...]} of every documented public function and class, in order of the files.

    documents: Python sources by path, the standard library by default; tests and private modules
    are left out. unparsed: collects the names of files that could not be read as Python.
    """
    documents = documents or stdlib_documents()
    for row, name in enumerate(documents.names):
        module = _module_of(name)
        if module is None:
            continue
        text = documents.read(row)
        tree = None if isinstance(text, Skip) else _parse(text)
        if tree is None:
            if unparsed is not None:
                unparsed.append(name)
            continue
        for node in tree.body:
            turns = _turns(module, node)
            if turns:
                yield {"messages": _messages(turns)}


def write_docstring_conversations(
    path: str | Path, documents: TextDocuments | None = None
) -> DocstringCounts:
    """Writes them as JSONL; the file is complete or absent."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    unparsed: list[str] = []
    num = num_messages = 0
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            for record in docstring_conversations(documents, unparsed=unparsed):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                num += 1
                num_messages += len(record["messages"])
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return DocstringCounts(
        num_conversations=num, num_messages=num_messages, num_unparsed=len(unparsed)
    )


def _module_of(path: str) -> str | None:
    """The module's name; None for tests (by name, so unittest and doctest among them), private
    modules and what cannot be imported."""
    parts = path.removesuffix(".py").split("/")
    if parts[-1] == "__init__":
        parts.pop()
    is_public = all(part.isidentifier() and not part.startswith("_") for part in parts)
    is_test = any(part.startswith("test") or part.endswith(("test", "tests")) for part in parts)
    return ".".join(parts) if parts and is_public and not is_test else None


def _parse(text: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old escapes in string literals
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError):
            return None


def _turns(module: str, node: ast.stmt) -> list[tuple[str, str]]:
    """(question, answer) of a conversation about a statement of a module; none where it is no
    documented public function or class."""
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
    """As a caller gives them: without self."""
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
