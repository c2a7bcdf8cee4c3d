"""Tests that a run says how many empty documents a store of another program has."""

from pathlib import Path

from rich.console import Console

from tests.data.test_store import index_bytes, raw_store
from tests.train.case import small_spec, write_store
from wlb.train.stores import open_stores


def test_empty_documents_of_a_foreign_store_are_reported(tmp_path: Path) -> None:
    """Megatron's tools write them for lines without text."""
    foreign = raw_store(tmp_path, idx=index_bytes([3, 0, 1], [0, 6, 6], [0, 0, 1, 2, 3]))
    ours = write_store(tmp_path / "ours", [5, 6])
    for data, note in (
        ({"store": str(foreign)}, "2 documents, 4 tokens, 2 empty documents left out"),
        ({"blend": [f"{foreign}:1", f"{ours}:1"]}, "tokens, 2 empty documents left out; "),
        ({"store": ours}, "2 documents, 11 tokens"),
    ):
        spec = small_spec(tmp_path, tmp_path, data=data, model={"vocab_size": 1 << 16})
        told = open_stores(spec, Console(quiet=True)).note
        assert note in told
        assert ("left out" in told) == ("left out" in note)
