"""Tests a run's folder: what it must not hold when it is about to be moved aside."""

from pathlib import Path

import pytest

from tests.train.case import small_spec, train, write_corpus, write_store


@pytest.mark.parametrize("key", ["store", "heldout_store", "blend", "corpus", "packs", "profile"])
def test_inputs_in_a_run_that_would_be_moved_aside_are_refused(tmp_path: Path, key: str) -> None:
    folder = tmp_path / "runs" / "small"
    inside = str(folder / "inputs" / "store")
    own = write_store(tmp_path / "own", [30, 70, 50] * 9)
    made = write_store(folder / "inputs" / "store", [30, 70, 50] * 9)
    corpus = write_corpus(folder / "texts" if key == "corpus" else tmp_path / "texts")
    sections: dict[str, dict[str, object]] = {
        "store": {"data": {"store": made}},
        "heldout_store": {"data": {"store": own, "heldout_store": made}},
        "blend": {"data": {"blend": [f"{own}:0.5", f"{made}:0.5"]}},
        "corpus": {},
        "packs": {"data": {"store": own}, "packing": {"packs": inside}},
        "profile": {"cost": {"profile": f"{inside}.json"}},
    }
    spec = small_spec(tmp_path, corpus, **sections[key])
    with pytest.raises(
        ValueError, match=rf"{key} = .* is inside .*small, the folder of an older run of th"
    ):
        train(spec)
    assert Path(f"{made}.bin").exists()
    assert not folder.with_name("small.1").exists()
