"""Tests that a run ends, or does not begin, if its stores are not what they say or were."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.sets import full
from tests.train.case import Run, small_spec, train, write_store
from wlb.data import TokenStore
from wlb.plan import UserError
from wlb.spec import RunSpec
from wlb.train.faults import verify

pytestmark = pytest.mark.process

LENGTHS = [40, 64, 200, 5, 64, 30, 90, 2, 33, 7, 48, 21, 128] * 4


def spec_of(folder: Path, store: str, **sections: Any) -> RunSpec:
    data = {"store": store, "context_window": 64, "heldout_store": store}
    saved = {"interval": 2, "keep": 9}
    return small_spec(folder, folder / "none", data=data, checkpoint=saved, **sections)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return write_store(tmp_path / "store", LENGTHS)


def flip(store: str, at: int = -2) -> None:
    """Changes one bit of a token that stays in the vocabulary."""
    path = Path(f"{store}.bin")
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def said_by(capsys: pytest.CaptureFixture[str], shown: str) -> str:
    return " ".join((shown + capsys.readouterr().out).split())


def test_a_changed_bit_ends_the_run(tmp_path: Path, store: str) -> None:
    flip(store)
    spec = spec_of(tmp_path, store, training={"steps": 400})
    with pytest.raises(
        UserError, match=r"token stores: .*store\.bin has checksum .* may have used damaged data"
    ):
        train(spec)
    assert len(Run(spec).steps) < 400


@pytest.mark.full
def test_what_was_read_once_is_read_again_only_if_it_changed(
    tmp_path: Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, shown = train(spec_of(tmp_path, store, training={"steps": 2}))
    told = said_by(capsys, shown)
    assert "token stores: checking" in told
    assert "token stores: all are read, and none is damaged" in told
    record = json.loads((run.folder / "stores.json").read_text())
    assert sorted(record) == ["held-out", "train"]
    assert record["train"]["tokens"] == TokenStore(store).info.checksum  # type: ignore[union-attr]
    _, shown = train(spec_of(tmp_path, store, training={"steps": 4}), resume=True)
    assert "token stores: the train store is unchanged since it was last read" in said_by(
        capsys, shown
    )
    flip(store)
    with pytest.raises(UserError, match=r"token stores: .*store\.bin has checksum"):
        train(spec_of(tmp_path, store, training={"steps": 6}), resume=True)


def test_other_tokens_without_a_description_are_noticed_on_resume(
    tmp_path: Path, store: str
) -> None:
    """Nothing but the run's own record tells them apart: lengths are the same."""
    Path(f"{store}.json").unlink()
    model = {"vocab_size": 320}
    train(spec_of(tmp_path, store, training={"steps": 2}, model=model))
    flip(store)
    with pytest.raises(UserError, match=r"changed since the run began"):
        train(spec_of(tmp_path, store, training={"steps": 4}, model=model), resume=True)


@pytest.mark.parametrize("key", ["eos_id", *full("tokenizer_checksum", "checksum")])
def test_another_tokenizer_or_corpus_is_refused_on_resume(
    tmp_path: Path, store: str, key: str
) -> None:
    train(spec_of(tmp_path, store, training={"steps": 2}))
    path = Path(f"{store}.json")
    about = json.loads(path.read_text())
    if key == "tokenizer_checksum":
        about["preparation"][key] = "0" * 64
    else:
        about[key] = {"eos_id": 7, "checksum": "0" * 64}[key]
    path.write_text(json.dumps(about))
    with pytest.raises(
        UserError, match="token store or its tokenizer is not the one of the checkpoint"
    ):
        train(spec_of(tmp_path, store, training={"steps": 4}), resume=True)


def test_a_damaged_record_is_refused(tmp_path: Path, store: str) -> None:
    record = tmp_path / "stores.json"
    stores = verify.uses_of(store, "")
    verify.StoreCheck(stores, record).run()
    for text in ("[]", "{", '{"train": {}}', '{"train": {"tokens": 1, "stamps": {}}}'):
        record.write_text(text)
        with pytest.raises(
            UserError, match=r"stores\.json.*so that the stores are read and checked again"
        ):
            verify.StoreCheck(stores, record)


def test_a_blend_has_a_record_for_each_of_its_stores(tmp_path: Path, store: str) -> None:
    other = write_store(tmp_path / "other", [3, 4])
    check = verify.StoreCheck(
        verify.uses_of((f"{store}:1", f"{other}:2"), store), tmp_path / "stores.json"
    )
    check.run()
    assert sorted(check.known) == ["held-out", "train 0", "train 1"]
    assert check.done_bytes == check.total_bytes


def test_a_run_that_ends_does_not_wait_for_the_rest_of_a_large_store(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reader is held up until the run closes."""
    closing = threading.Event()
    monkeypatch.setattr(verify, "_AWAITED_BYTES", -1)
    close = verify.VerifyStores.close
    count = verify.VerifyStores._end_if_closed

    def held_up(hook: verify.VerifyStores) -> None:
        closing.wait()
        count(hook)

    def closed(hook: verify.VerifyStores) -> None:
        hook._closed.set()
        closing.set()
        close(hook)

    monkeypatch.setattr(verify.VerifyStores, "_end_if_closed", held_up)
    monkeypatch.setattr(verify.VerifyStores, "close", closed)
    run, shown = train(spec_of(tmp_path, store))
    assert len(run.steps) == 6
    assert "token stores: training ended after only" in said_by(capsys, shown)
    assert not (run.folder / "stores.json").exists()
