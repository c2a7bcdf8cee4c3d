"""Text to train on: Python's own sources, or the files of a folder.

Documents are listed first, in sorted order, and read one by one later. The standard library is the
default corpus because it is real, heavy-tailed and on every machine: some 1,700 documents of up to
200K tokens, half of all tokens in documents above 16K.
"""

import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from wlb.plan import UserError

STDLIB = "stdlib"
MOST_EXAMPLES = 3
"""Most of the files or records left out for a reason that are named."""


class Skip(StrEnum):
    """Why a file, line or row is not a document."""

    EMPTY = "empty"
    UNREADABLE = "unreadable"
    NOT_UTF8 = "not_utf8"
    HIDDEN = "hidden"
    BLANK_LINE = "blank_line"
    NOT_JSON = "not_json"
    NOT_AN_OBJECT = "not_an_object"
    NO_TEXT = "no_text"
    NOT_TEXT = "not_text"
    SPECIAL_TOKEN = "special_token"
    NOT_A_CONVERSATION = "not_a_conversation"
    NOT_RENDERED = "not_rendered"
    UNTRAINED = "untrained"
    TOO_LONG = "too_long"


class TextDocuments(Protocol):
    """Documents that are listed now and read later.

    names: unique, shape [n]. sizes: bytes, at least 1, shape [n]. skipped: files that the listing
    left out, by reason.
    """

    @property
    def description(self) -> str: ...
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def sizes(self) -> Sequence[int]: ...
    @property
    def skipped(self) -> Mapping[Skip, int]: ...
    def read(self, row: int) -> str | Skip: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDocuments:
    """Files under `root`, one document each.

    examples: the first files and folders that cannot be read, each with the reason.
    """

    description: str
    root: Path
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    skipped: Mapping[Skip, int]
    examples: tuple[str, ...] = ()

    def read(self, row: int) -> str | Skip:
        try:
            data = (self.root / self.names[row]).read_bytes()
        except OSError:
            return Skip.UNREADABLE
        try:
            return data.decode("utf-8") or Skip.EMPTY
        except UnicodeDecodeError:
            return Skip.NOT_UTF8


def text_documents(corpus: str) -> FileDocuments:
    """The documents that `data.corpus` names: "stdlib" or a folder."""
    return stdlib_documents() if corpus == STDLIB else folder_documents(corpus)


def stdlib_documents() -> FileDocuments:
    """The `.py` files of the standard library, tests included, installed packages excluded."""
    root = Path(sysconfig.get_paths()["stdlib"])
    without = {"site-packages", "dist-packages", "__pycache__"}
    about = "the Python standard library"
    return _not_empty(list_folder(root, description=about, suffix=".py", without=without))


def folder_documents(path: str | Path) -> FileDocuments:
    """The files of `list_folder`; UserError for what is no folder or has no file to read."""
    root = Path(path)
    if not root.is_dir():
        raise UserError(
            f'data.corpus = "{path}" is not a folder; give a folder of text files, or "{STDLIB}"'
        )
    return _not_empty(list_folder(root, description=str(path)))


def list_folder(
    root: Path, *, description: str, suffix: str = "", without: set[str] | None = None
) -> FileDocuments:
    """All files under a folder; names that start with a dot are counted and left out.

    Links to files are followed, links to folders are not. suffix: that names must end with.
    without: names of folders that are left out and not counted.
    """
    skipped: Counter[Skip] = Counter()
    examples: list[str] = []
    found: list[tuple[str, int]] = []

    def leave_out(path: str | Path, error: OSError) -> None:
        skipped[Skip.UNREADABLE] += 1
        if len(examples) < MOST_EXAMPLES:
            examples.append(f"{path} ({reason_of(path, error)})")

    for folder, subfolders, files in os.walk(
        root, onerror=lambda error: leave_out(error.filename, error)
    ):
        shown = [name for name in subfolders if not name.startswith(".")]
        skipped[Skip.HIDDEN] += len(subfolders) - len(shown)
        subfolders[:] = sorted(set(shown) - (without or set()))
        for name in sorted(files):
            if name.startswith("."):
                skipped[Skip.HIDDEN] += 1
            elif name.endswith(suffix):
                path = Path(folder, name)
                try:
                    size = size_of(path)
                except OSError as error:
                    leave_out(path, error)
                else:
                    if size:
                        found.append((path.relative_to(root).as_posix(), size))
                    else:
                        skipped[Skip.EMPTY] += 1
    found.sort()
    return FileDocuments(
        description=description,
        root=root,
        names=tuple(name for name, _ in found),
        sizes=tuple(size for _, size in found),
        skipped=+skipped,
        examples=tuple(examples),
    )


def _not_empty(documents: FileDocuments) -> FileDocuments:
    """The same documents; UserError for none."""
    if not documents.names:
        raise UserError(
            describe_empty(documents.description, documents.skipped, documents.examples)
        )
    return documents


def size_of(path: Path) -> int:
    """Bytes of a regular file; OSError for pipes and devices too, which would block the reader."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("neither a file nor a folder")
    return status.st_size


def reason_of(path: str | Path, error: OSError) -> str:
    """Why a path cannot be read; of a link that leads nowhere, where it leads."""
    if isinstance(error, FileNotFoundError) and os.path.islink(path):
        return f"a link to {os.readlink(path)}, which does not exist"
    return error.strerror or str(error)


def describe_empty(
    description: str, skipped: Mapping[Skip, int] | Mapping[str, int], examples: Sequence[str] = ()
) -> str:
    """The message for documents without any UTF-8 text."""
    counts = {str(reason): count for reason, count in skipped.items() if count}
    shown = f"; not read: {', '.join(examples)}" if examples else ""
    reasons = f" (left out: {counts}{shown})" if counts else ""
    return (
        f"the corpus has no document: no UTF-8 text in {description}{reasons}; give a folder "
        f'with text files as data.corpus, or "{STDLIB}"'
    )
