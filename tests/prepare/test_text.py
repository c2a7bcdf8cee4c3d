"""Tests text readers: what is listed, in what order, and what is left out and counted."""

import os

import pytest

from wlb.prepare import Skip, folder_documents, stdlib_documents, text_documents


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
    assert documents.names == ("a/z.md", "b.txt", "latin.txt")
    assert documents.sizes == (2, 5, 1)
    assert [documents.read(row) for row in range(3)] == ["ä", "two\r\n", Skip.NOT_UTF8]
    assert documents.skipped == {Skip.EMPTY: 1, Skip.HIDDEN: 2, Skip.UNREADABLE: 2}
    assert documents.examples == (
        f"{tmp_path}/broken (a link to {tmp_path}/nowhere, which does not exist)",
        f"{tmp_path}/pipe (neither a file nor a folder)",
    )


def test_file_that_goes_away_is_counted(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(name)
    documents = folder_documents(tmp_path)
    (tmp_path / "a").unlink()
    assert [documents.read(row) for row in range(2)] == [Skip.UNREADABLE, "b"]


def test_folder_without_text_is_refused(tmp_path):
    message = (
        "the corpus has no document, as there is no UTF-8 text in .*; give a folder with text files"
    )
    with pytest.raises(ValueError, match=message) as error:
        folder_documents(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_folder_with_nothing_but_a_dangling_link_names_it(tmp_path):
    (tmp_path / "a").symlink_to("gone")
    with pytest.raises(ValueError, match=r"not read: .*/a \(a link to gone, which does not"):
        folder_documents(tmp_path)


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r'data\.corpus = ".*gone" is not a folder'):
        text_documents(str(tmp_path / "gone"))


def test_stdlib_is_python_sources_only():
    documents = stdlib_documents()
    assert len(documents.names) > 500
    assert "json/decoder.py" in documents.names
    assert list(documents.names) == sorted(documents.names)
    assert all(name.endswith(".py") for name in documents.names)
    assert not [n for n in documents.names if "site-packages" in n or "__pycache__" in n]
    row = documents.names.index("json/decoder.py")
    text = documents.read(row)
    assert "class JSONDecoder" in text
    assert len(text.encode()) == documents.sizes[row]
    assert text_documents("stdlib").names == documents.names
