"""Text readers: what is listed, in what order, and what is left out and counted."""

import os
from collections import Counter

import pytest

from wlb.prepare import (
    ListedDocuments,
    Skip,
    folder_documents,
    read_texts,
    stdlib_documents,
    text_documents,
)


def test_folder_is_sorted_and_counts_what_it_leaves_out(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"two\r\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.md").write_text("ä")
    (tmp_path / "a" / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"\xe4")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    documents = folder_documents(tmp_path)
    assert list(documents) == [("a/z.md", "ä"), ("b.txt", "two\r\n")]
    assert documents.names == ("a/z.md", "b.txt", "latin.txt")
    assert documents.sizes == (2, 5, 1)
    skipped = Counter()
    assert [row for row, _ in read_texts(documents, skipped=skipped)] == [0, 1]
    assert skipped == {Skip.EMPTY: 1, Skip.NOT_UTF8: 1, Skip.HIDDEN: 2, Skip.UNREADABLE: 2}


def test_file_that_goes_away_is_counted(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(name)
    documents = folder_documents(tmp_path)
    (tmp_path / "a").unlink()
    skipped = Counter()
    assert list(read_texts(documents, skipped=skipped)) == [(1, "b")]
    assert skipped == {Skip.UNREADABLE: 1}


def test_folder_without_text_is_refused(tmp_path):
    message = "the corpus has no document: no UTF-8 text in .*; give a folder with text files"
    with pytest.raises(ValueError, match=message) as error:
        folder_documents(tmp_path)
    assert str(tmp_path) in str(error.value)
    (tmp_path / "x").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"no document.*left out: {'not_utf8': 1}"):
        list(folder_documents(tmp_path))


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r'data\.corpus = ".*gone" is not a folder'):
        text_documents(str(tmp_path / "gone"))


def test_stdlib_is_python_sources_only():
    documents = stdlib_documents()
    assert len(documents) > 500
    assert "json/decoder.py" in documents.names
    assert list(documents.names) == sorted(documents.names)
    assert all(name.endswith(".py") for name in documents.names)
    assert not [n for n in documents.names if "site-packages" in n or "__pycache__" in n]
    row = documents.names.index("json/decoder.py")
    text = documents.read(row)
    assert "class JSONDecoder" in text
    assert len(text.encode()) == documents.sizes[row]
    assert text_documents("stdlib").names == documents.names


def test_listed_documents():
    documents = ListedDocuments(description="mine", items=(("a", "ä"), ("b", ""), ("c", "\ud800")))
    skipped = Counter()
    assert list(read_texts(documents, skipped=skipped)) == [(0, "ä")]
    assert documents.sizes == (2, 3)
    assert skipped == {Skip.EMPTY: 1, Skip.NOT_UTF8: 1}
    with pytest.raises(ValueError, match="mine: two documents have the name 'a'"):
        ListedDocuments(description="mine", items=(("a", "x"), ("a", "y")))
    with pytest.raises(ValueError, match="no UTF-8 text in mine"):
        ListedDocuments(description="mine", items=())
