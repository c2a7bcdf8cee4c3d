"""Tests conversations from docstrings: a small module literally, the whole standard library."""

import json
from pathlib import Path

import pytest

from tests.prepare.documents_case import ListedDocuments
from wlb.data import TokenStore
from wlb.prepare import prepare_docstrings, write_docstring_conversations
from wlb.prepare.conversation import conversation_of
from wlb.prepare.docstrings import docstring_conversations

SOURCE = '''
"""A module."""

def area(width: int, height: int = 1, *, unit="m") -> float:
    """The area of a rectangle.

    In square units.
    """

def _hidden():
    """Not public."""

def bare():
    pass

class Box:
    """A box."""

    def __init__(self, width):
        """Made of cardboard."""

    def close(self, /, *, gently=True):
        """Close it."""

    @classmethod
    def cube(cls):
        """All sides equal."""
'''


def listed(*items: tuple[str, str]) -> ListedDocuments:
    return ListedDocuments(description="sources", items=items)


def test_a_module_literally() -> None:
    documents = listed(
        ("shapes/__init__.py", SOURCE),
        ("shapes/_private.py", SOURCE),
        ("shapes/test/test_box.py", SOURCE),
        ("shapes/broken.py", "def f(:"),
    )
    made = list(docstring_conversations(documents))
    said = [[m["content"] for m in record["messages"] if m["role"] != "system"] for record in made]
    function, box = said
    assert "`shapes.area`" in function[0]
    assert function[1:] == [
        "`shapes.area(width: int, height: int=1, *, unit='m') -> float`\n\n"
        "The area of a rectangle.\n\nIn square units."
    ]
    assert "`shapes.Box`" in box[0]
    assert box[1] == "`shapes.Box(width)`\n\nA box."
    assert "`close`" in box[2]
    assert box[3] == "`shapes.Box.close(*, gently=True)`\n\nClose it."
    assert "`cube`" in box[4]
    assert box[5] == "`shapes.Box.cube()`\n\nAll sides equal."


@pytest.mark.nightly
def test_the_standard_library(tmp_path) -> None:
    write_docstring_conversations(tmp_path / "chat.jsonl")
    lines = (tmp_path / "chat.jsonl").read_text("utf-8").splitlines()
    assert len(lines) > 1500
    talks = [conversation_of(json.loads(line)) for line in lines]
    assert sum(len(talk.messages) > 3 for talk in talks) > 300
    questions = [talk.messages[-2].content for talk in talks]
    assert sum("textwrap.fill`" in question for question in questions) == 1
    first = (tmp_path / "chat.jsonl").read_bytes()
    write_docstring_conversations(tmp_path / "chat.jsonl")
    assert (tmp_path / "chat.jsonl").read_bytes() == first
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.full
def test_stores_without_held_out_conversations(tmp_path) -> None:
    asked = {"limit": 256, "heldout_fraction": 0.0, "seed": 0}
    made = prepare_docstrings(tmp_path, vocab_size=300, **asked)
    assert (made.heldout, made.vocab_size) == ("", 300)
    assert not Path(f"{made.prefix}-heldout.idx").exists()
    info = TokenStore(made.prefix).info
    assert info is not None
    assert info.preparation["counts"]["split"] > 100
    assert made.num_documents > info.preparation["counts"]["split_documents"]
    assert info.source == f"{made.prefix}.jsonl"
    assert prepare_docstrings(tmp_path, vocab_size=300, **asked).reused
    with pytest.raises(ValueError, match=r"data.bpe_vocab_size = 258 must be at least 259"):
        prepare_docstrings(tmp_path, vocab_size=258, **asked)
