"""Tests which stores a run refuses before its ranks start, without starting any."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.train.case import small_spec, write_store
from wlb.data import TokenStoreWriter, store
from wlb.spec import ExpertsSpec, ModelSpec, RopeScaling, Scoring, to_dict
from wlb.spec.keys import REMOVED, RemovedKeyWarning
from wlb.train import refuse, refuse_inputs
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.refuse_inputs import SHAPES, check_stores


def made(prefix: Path, *, tokenizer: str | None = None, **options: Any) -> str:
    """Writes a store of one document, as `wlb prepare` would with a tokenizer of that checksum."""
    about = {} if tokenizer is None else {"tokenizer_checksum": tokenizer}
    options = {"vocab_size": 320, **options}
    with TokenStoreWriter(prefix, preparation=about, **options) as writer:
        writer.add([1, 2, 3, 4])
    return str(prefix)


@pytest.mark.parametrize(
    ("train", "heldout", "differing"),
    [
        ({"tokenizer": "aaaa"}, {"tokenizer": "bbbb"}, "tokenizer aaaa and bbbb"),
        ({"vocab_size": 320}, {"vocab_size": 300}, "vocab_size 320 and 300"),
        ({"eos_id": 0}, {"eos_id": 2}, "eos_id 0 and 2"),
    ],
)
def test_a_heldout_store_of_another_tokenizer_is_refused(
    tmp_path: Path, train: dict[str, Any], heldout: dict[str, Any], differing: str
) -> None:
    ours, theirs = made(tmp_path / "ours", **train), made(tmp_path / "theirs", **heldout)
    evaluated = small_spec(tmp_path, tmp_path, model={"vocab_size": 512})
    message = rf"ours and .*theirs of data\.store and data\.heldout_store .*\({differing}\)"
    with pytest.raises(ValueError, match=message):
        check_stores(evaluated, train=ours, heldout=theirs)
    blend = (f"{ours}:1", f"{made(tmp_path / 'more', **train)}:1")
    with pytest.raises(ValueError, match=r"of data\.blend and data\.heldout_store have different"):
        check_stores(evaluated, train=blend, heldout=theirs)
    never = small_spec(tmp_path, tmp_path, model={"vocab_size": 512}, eval={"steps": 0})
    check_stores(never, train=ours, heldout=theirs)


def test_stores_that_do_not_name_a_tokenizer_may_be_held_out(tmp_path: Path) -> None:
    known = made(tmp_path / "known", tokenizer="aaaa", eos_id=0)
    unnamed = made(tmp_path / "unnamed")
    foreign = made(tmp_path / "foreign")
    store.store_path(foreign, ".json").unlink()
    spec = small_spec(tmp_path, tmp_path, model={"vocab_size": 320})
    for train, heldout in [(known, unnamed), (unnamed, known), (known, foreign), (foreign, known)]:
        check_stores(spec, train=train, heldout=heldout)


def test_a_heldout_store_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    """The training store says nothing of its vocabulary, so model.vocab_size was set by hand."""
    foreign, heldout = made(tmp_path / "foreign"), write_store(tmp_path / "heldout", [5])
    store.store_path(foreign, ".json").unlink()
    spec = small_spec(tmp_path, tmp_path, model={"vocab_size": 319})
    message = (
        r"model\.vocab_size = 319 is smaller than the vocabulary of "
        r"the held-out store .*heldout, which has 320 entries"
    )
    with pytest.raises(ValueError, match=message):
        check_stores(spec, train=foreign, heldout=heldout)


HARMLESS = {
    "init_std": "drawn weights are replaced by the checkpoint's",
    "experts.balance": "its state begins anew; `check_weights` refuses a change from bias",
    "experts.aux_coefficient": "of training alone",
    "experts.z_loss": "of training alone",
}
"""Keys of a model that may differ from a checkpoint's without a word, and why."""


def test_each_key_of_a_model_is_refused_told_or_known_to_be_harmless() -> None:
    keys = {f.name for f in fields(ModelSpec)} - {"rope_scaling", "experts"}
    keys |= {f"rope_scaling.{f.name}" for f in fields(RopeScaling)}
    keys |= {f"experts.{f.name}" for f in fields(ExpertsSpec)}
    held = {name.replace("head_size", "head_dim") for name in SHAPES}
    scaling = {name for name in keys if name.startswith("rope_scaling.")}
    told = {*refuse.MEANING, *scaling}
    assert held | told | HARMLESS.keys() == keys
    assert len(held) + len(told) + len(HARMLESS) == len(keys)  # each key is in one of them


def test_another_choice_of_experts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(ModelSpec(), experts=ExpertsSpec(num=8, per_token=2))
    monkeypatch.setattr(refuse, "model_of", lambda _: model)
    assert refuse.model_change(model, Path("saved")) == ""
    others: dict[str, Any] = {"per_token": 4, "scoring": Scoring.SIGMOID, "normalised": False}
    said = refuse.model_change(
        replace(model, experts=replace(model.experts, **others)), Path("saved")
    )
    assert said == (
        "the run continues the weights of saved with a changed model: "
        "model.experts.per_token = 4 instead of 2, "
        "model.experts.scoring = sigmoid instead of softmax, "
        "model.experts.normalised = False instead of True"
    )
    # Keys of experts that a model does not have change nothing.
    dense = replace(model, experts=ExpertsSpec())
    monkeypatch.setattr(refuse, "model_of", lambda _: dense)
    assert refuse.model_change(replace(dense, experts=ExpertsSpec(per_token=1)), Path("s")) == ""


def test_the_model_of_a_checkpoint_of_before_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sections have keys that were removed since, which are named with their section."""
    saved = to_dict(ModelSpec(num_layers=6))
    saved["experts"]["bias_rate"] = REMOVED["model.experts.bias_rate"].value
    monkeypatch.setattr(checkpoint, "read_run", lambda folder: {"spec": {"model": saved}})
    assert refuse_inputs.model_of(tmp_path) == ModelSpec(num_layers=6)
    saved["experts"]["bias_rate"] = 0.5
    with pytest.warns(RemovedKeyWarning, match=r"model\.experts\.bias_rate"):
        refuse_inputs.model_of(tmp_path)
