"""Tests that a checkpoint's tensors are those of the whole model, neither more nor fewer."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wlb.model import Llama
from wlb.plan import UserError
from wlb.spec import ExpertBalance, ExpertsSpec, ModelSpec
from wlb.train.checkpoint.folder import DamagedCheckpoint
from wlb.train.checkpoint.reading import hold_names

MODEL = ModelSpec(vocab_size=256, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2)
GEMMA = replace(MODEL, branch_norms=True, tied_embeddings=True)
HERE = Path("step-00000003")


def names_of(model: ModelSpec) -> set[str]:
    """Returns the names that a run of this model saves."""
    with torch.device("meta"):
        names = {f"model.{name}" for name in Llama(model).state_dict()}
    tied = {"model.lm_head.weight"} if model.tied_embeddings else set[str]()
    return (names - tied) | {"optimizer.state.norm.weight.exp_avg", "rng.0.cpu"}


def test_a_checkpoint_of_the_same_model_holds_its_tensors() -> None:
    for model in (MODEL, GEMMA):
        hold_names(HERE, names_of(model), model)


def test_tensors_that_the_model_lacks_are_refused_by_name() -> None:
    without = replace(GEMMA, branch_norms=False)
    message = r"has 4 tensors that this model does not have, such as .*layers\.0\..*norm\.weight"
    with pytest.raises(UserError, match=message) as caught:
        hold_names(HERE, names_of(GEMMA), without)
    # Nothing is damaged, so that no run goes back to an older checkpoint.
    assert not isinstance(caught.value, DamagedCheckpoint)


def test_tensors_that_the_checkpoint_lacks_are_refused_by_name() -> None:
    with pytest.raises(DamagedCheckpoint, match=r"it lacks 1, such as model\.norm\.weight"):
        hold_names(HERE, names_of(MODEL) - {"model.model.norm.weight"}, MODEL)


def test_the_state_of_experts_balance_may_be_another() -> None:
    experts = ExpertsSpec(num=4, per_token=2, hidden_size=8)
    models = [
        replace(MODEL, experts=replace(experts, balance=balance)) for balance in ExpertBalance
    ]
    for saved in models:
        for model in models:
            hold_names(HERE, names_of(saved), model)
