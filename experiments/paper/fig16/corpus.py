"""Makes the study's corpus: each function or method of installed Python packages is a document.

Whole files would be longer than the window of a small model. Functions are complete documents, and
their lengths have as heavy a tail as a pre-training corpus: at a window of 2,048 tokens, a tenth of
the tokens are in documents as long as the window, and three quarters in documents shorter than half
of it. In the paper's corpus at 128K it is 15% and 78%, as fitted.

The packages are the standard library and packages that wlb needs, so every machine that can run the
study has the text. The checksum on the page shows whether two machines had the same text.
"""

import ast
import io
import json
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from experiments.paper.fig16.bookkeeping import CLASS_NAMES, class_of
from wlb.data import TokenStore, TokenStoreWriter
from wlb.data.store import store_path, temporary_name
from wlb.prepare import PrepareOptions, prepare_store
from wlb.prepare.text import stdlib_documents

PACKAGES = ("numpy", "scipy")
"""Packages of the corpus besides the standard library."""
SMALL_SOURCES = ("argparse", "ast", "configparser", "datetime", "tarfile")
"""Modules of the standard library that quick runs train on."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """The two token stores of a corpus."""

    train: str  # prefix of the training store
    heldout: str  # prefix of the held-out store
    checksum: str  # checksum of the training store


def open_stores(
    folder: Path, sources: list[Path], *, vocabulary: int, heldout_fraction: float
) -> Stores:
    """Makes token stores from Python files in `folder`, unless they exist."""
    texts = folder / "definitions.jsonl"
    if not texts.exists():
        write_definitions(texts, sources)
    report = prepare_store(
        PrepareOptions(
            inputs=(str(texts),),
            out=str(folder / "definitions"),
            vocab_size=vocabulary,
            heldout_fraction=heldout_fraction,
            seed=0,
        )
    )
    return Stores(train=report.prefix, heldout=report.heldout, checksum=report.checksum)


def split_store(heldout: str, prefix: str, *, window: int) -> list[str | None]:
    """Divides a held-out store into one store for each class of document length.

    Args:
        heldout: Prefix of the held-out store.
        prefix: Beginning of the new stores' prefixes.
        window: Context window; the limits of the classes are multiples of it.

    Returns:
        Prefix of each class's store, or None for a class without documents.
    """
    store = TokenStore(heldout)
    assert store.info is not None
    cls = class_of(store.lengths, window)
    made: list[str | None] = []
    for i in range(len(CLASS_NAMES)):
        rows: list[int] = np.flatnonzero(cls == i).tolist()
        made.append(f"{prefix}-{i}" if rows else None)
        if rows and not store_path(f"{prefix}-{i}", ".json").exists():
            with TokenStoreWriter(f"{prefix}-{i}", vocab_size=store.info.vocab_size) as writer:
                for row in rows:
                    writer.add(store.read(row))
    return made


def source_files() -> list[Path]:
    """Returns the Python files of the corpus, in an order that is the same on every machine."""
    library = stdlib_documents()
    site = Path(sysconfig.get_paths()["purelib"])
    found = [library.root / name for name in library.names]
    for package in PACKAGES:
        found += sorted((site / package).rglob("*.py"))
    return found


def source_versions() -> str:
    """Returns the versions of Python and the packages, which determine the text of the corpus."""
    packages = [f"{name} {version(name)}" for name in PACKAGES]
    return ", ".join([f"Python {platform.python_version()}", *packages])


def small_sources() -> list[Path]:
    root = stdlib_documents().root
    return [root / f"{name}.py" for name in SMALL_SOURCES]


def write_definitions(path: Path, sources: list[Path]) -> None:
    """Writes a JSONL file with a record for each definition; a crash leaves no partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    with open(temporary, "w", encoding="utf-8") as file:
        for source in sources:
            for text in definitions(source.read_bytes()):
                file.write(json.dumps({"text": text}) + "\n")
    os.replace(temporary, path)


def definitions(source: bytes) -> Iterator[str]:
    """Yields the text of each function, of each method, and of each class without its methods.

    Only top-level functions and classes count. Decorators are included. A file that this version of
    Python cannot parse, such as test data of the standard library, yields nothing.
    """
    with warnings.catch_warnings():
        # Invalid escapes in string literals cause warnings.
        warnings.simplefilter("ignore")
        try:
            text = source.decode("utf-8")
            body = ast.parse(text).body
        except (SyntaxError, ValueError):
            return
    # Count lines as ast does. str.splitlines would also split at form feeds.
    lines = io.StringIO(text, newline="").readlines()
    for node in body:
        if not isinstance(node, _Function | ast.ClassDef):
            continue
        first, last = _rows(node)
        rest = lines[first:last]
        methods = node.body if isinstance(node, ast.ClassDef) else []
        # Remove methods from the last to the first, so that line numbers before them stay valid.
        for method in reversed(methods):
            if isinstance(method, _Function):
                begin, end = _rows(method)
                yield "".join(lines[begin:end])
                del rest[begin - first : end - first]
        yield "".join(rest)


def _rows(node: "_Function | ast.ClassDef") -> tuple[int, int]:
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    assert node.end_lineno is not None
    return first - 1, node.end_lineno
