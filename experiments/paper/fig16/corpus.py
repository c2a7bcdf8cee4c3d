"""Makes the study's corpus: functions and methods of installed Python packages, each a document.

Whole files would be cut at every window of a small model. These documents are complete, and as
heavy-tailed as pre-training corpora: at a window of 2,048 a tenth of the tokens fill a window and
three quarters are in documents shorter than half of one (the paper's corpus has 15% and 78% at
128K, as fitted). The packages are the standard library and those that wlb needs, so every machine
that can run the study has the text; the checksum on the page tells whether two had the same.
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
"""The corpus has these packages beside the standard library."""
SMALL_SOURCES = ("argparse", "ast", "configparser", "datetime", "tarfile")
"""Try-outs train on these modules of the standard library."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """Holds the prefixes of the two token stores, and the checksum of the training store."""

    train: str
    heldout: str
    checksum: str


def open_stores(
    folder: Path, sources: list[Path], *, vocabulary: int, heldout_fraction: float
) -> Stores:
    """Makes the stores of these Python files in `folder`, or finds them there."""
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
    """Makes a store of the documents of each class of length and returns the prefixes.

    The prefix is None for a class without documents.
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
    """Returns the files in an order that does not depend on the file system."""
    library = stdlib_documents()
    site = Path(sysconfig.get_paths()["purelib"])
    found = [library.root / name for name in library.names]
    for package in PACKAGES:
        found += sorted((site / package).rglob("*.py"))
    return found


def source_versions() -> str:
    """Names the versions that another machine needs for the same text."""
    packages = [f"{name} {version(name)}" for name in PACKAGES]
    return ", ".join([f"Python {platform.python_version()}", *packages])


def small_sources() -> list[Path]:
    root = stdlib_documents().root
    return [root / f"{name}.py" for name in SMALL_SOURCES]


def write_definitions(path: Path, sources: list[Path]) -> None:
    """Writes one JSON record per definition; the file is complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    with open(temporary, "w", encoding="utf-8") as file:
        for source in sources:
            for text in definitions(source.read_bytes()):
                file.write(json.dumps({"text": text}) + "\n")
    os.replace(temporary, path)


def definitions(source: bytes) -> Iterator[str]:
    """Yields each top-level function, each method of a top-level class and the rest of that class.

    Decorators are included. A file that is no UTF-8 Python of this version, such as test data of
    the standard library, yields nothing.
    """
    with warnings.catch_warnings():
        # Old escapes in string literals raise warnings.
        warnings.simplefilter("ignore")
        try:
            text = source.decode("utf-8")
            body = ast.parse(text).body
        except (SyntaxError, ValueError):
            return
    # ast counts lines like this; str.splitlines would also split at a form feed.
    lines = io.StringIO(text, newline="").readlines()
    for node in body:
        if not isinstance(node, _Function | ast.ClassDef):
            continue
        first, last = _rows(node)
        rest = lines[first:last]
        methods = node.body if isinstance(node, ast.ClassDef) else []
        # The last method is removed first, so that the rows before it do not move.
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
