"""List and read text documents: Python's standard library, or the files of a folder.

Documents are listed first, in sorted order, and read one by one later. The standard library is the
default corpus because it is on every machine and its lengths have a long tail: about 1,700
documents of up to 200K tokens, with half of all tokens in documents above 16K.
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
"""The most skipped files or records that a report names as examples for each reason."""


class Skip(StrEnum):
    """Why a file or record is not a document. Reports count such records by these reasons."""

    EMPTY = "empty"
    UNREADABLE = "unreadable"
    NOT_UTF8 = "not_utf8"
    HIDDEN = "hidden"  # the name of the file starts with a dot
    BLANK_LINE = "blank_line"
    NOT_JSON = "not_json"
    NOT_AN_OBJECT = "not_an_object"
    NO_TEXT = "no_text"  # the record does not have the key of the text, or its value is null
    NOT_TEXT = "not_text"  # the value under the key of the text is not text that wlb can train
    SPECIAL_TOKEN = "special_token"  # the text would become a special token
    NOT_A_CONVERSATION = "not_a_conversation"
    NOT_RENDERED = "not_rendered"  # the chat template refuses the conversation
    UNTRAINED = "untrained"  # no token of the conversation is trained
    TOO_LONG = "too_long"


class TextDocuments(Protocol):
    """A list of documents with their sizes. Their text is read later, one document at a time."""

    @property
    def description(self) -> str:
        """What the documents are, in words for error messages."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """A unique name of each document, shape [num_documents]."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each document, at least 1, shape [num_documents]."""
        ...

    @property
    def skipped(self) -> Mapping[Skip, int]:
        """Number of files that were skipped when the documents were listed, by reason."""
        ...

    def read(self, row: int) -> str | Skip:
        """Return the text of document number `row`, or the reason why it has none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDocuments:
    """Text files under a folder, each of which is one document."""

    description: str  # what the files are, in words for error messages
    root: Path  # the folder that contains the files
    names: tuple[str, ...]  # paths relative to `root`
    sizes: tuple[int, ...]  # bytes of each file
    skipped: Mapping[Skip, int]  # number of files that were skipped, by reason
    examples: tuple[str, ...] = ()  # the first paths that cannot be read, each with the reason

    def read(self, row: int) -> str | Skip:
        """Return the text of file number `row`, or the reason why it is not a document."""
        try:
            data = (self.root / self.names[row]).read_bytes()
        except OSError:
            return Skip.UNREADABLE
        try:
            return data.decode("utf-8") or Skip.EMPTY
        except UnicodeDecodeError:
            return Skip.NOT_UTF8


def text_documents(corpus: str) -> FileDocuments:
    """List the documents of `data.corpus`, which is "stdlib" or a folder."""
    return stdlib_documents() if corpus == STDLIB else folder_documents(corpus)


def stdlib_documents() -> FileDocuments:
    """List the `.py` files of Python's standard library and its tests (no installed packages)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    without = {"site-packages", "dist-packages", "__pycache__"}
    about = "the Python standard library"
    return _not_empty(list_folder(root, description=about, suffix=".py", without=without))


def folder_documents(path: str | Path) -> FileDocuments:
    """List the files of a folder; raise UserError if it is not a folder or has no text file."""
    root = Path(path)
    if not root.is_dir():
        raise UserError(
            f'data.corpus = "{path}" is not a folder; give a folder of text files, or "{STDLIB}" '
            f"for the source code of Python's standard library"
        )
    return _not_empty(list_folder(root, description=str(path)))


def list_folder(
    root: Path, *, description: str, suffix: str = "", without: set[str] | None = None
) -> FileDocuments:
    """List all files under a folder, sorted by path.

    Files and folders whose names start with a dot are counted and left out. Links to files are
    followed, links to folders are not.

    Args:
        root: The folder.
        description: What the files are, for messages.
        suffix: List only files whose names end with this.
        without: Names of folders to leave out without counting them. None = no such folders.
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
    """Return the documents; raise UserError if there are none."""
    if not documents.names:
        raise UserError(
            describe_empty(documents.description, documents.skipped, documents.examples)
        )
    return documents


def size_of(path: Path) -> int:
    """Return the size of a regular file in bytes.

    Raises:
        OSError: The file cannot be read, or is a pipe or device, which could block the reader.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("neither a file nor a folder")
    return status.st_size


def reason_of(path: str | Path, error: OSError) -> str:
    """Describe why a path cannot be read. For a broken link, say where the link points."""
    if isinstance(error, FileNotFoundError) and os.path.islink(path):
        return f"a link to {os.readlink(path)}, which does not exist"
    return error.strerror or str(error)


def describe_empty(
    description: str, skipped: Mapping[Skip, int] | Mapping[str, int], examples: Sequence[str] = ()
) -> str:
    """Return the error message for a corpus without any UTF-8 text.

    Args:
        description: What the documents are, in words.
        skipped: Number of files that were skipped, by reason.
        examples: The first files that cannot be read, each with the reason.
    """
    counts = {str(reason): count for reason, count in skipped.items() if count}
    shown = f"; not read: {', '.join(examples)}" if examples else ""
    reasons = f" (left out: {counts}{shown})" if counts else ""
    return (
        f"the corpus has no document, as there is no UTF-8 text in {description}{reasons}; give a "
        f'folder with text files as data.corpus, or "{STDLIB}"'
    )
