"""Tests that a checkpoint's tensors are those of the whole model, and that its files are whole."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.train.checkpoint.test_headers import part
from wlb.launch.local import run_local
from wlb.model import Llama
from wlb.parallel.world import World
from wlb.plan import UserError
from wlb.spec import ExpertBalance, ExpertsSpec, ModelSpec
from wlb.train.checkpoint import saver
from wlb.train.checkpoint.folder import DamagedCheckpoint, write_manifest
from wlb.train.checkpoint.reading import check_headers, check_names

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
        check_names(HERE, names_of(model), model)


def test_tensors_that_the_model_lacks_are_refused_by_name() -> None:
    without = replace(GEMMA, branch_norms=False)
    message = (
        r"has 4 tensors that the run's model does not have, such as .*layers\.0\..*norm\.weight"
    )
    with pytest.raises(UserError, match=message) as caught:
        check_names(HERE, names_of(GEMMA), without)
    # Nothing is damaged, so that no run goes back to an older checkpoint.
    assert not isinstance(caught.value, DamagedCheckpoint)


def test_tensors_that_the_checkpoint_lacks_are_refused_by_name() -> None:
    with pytest.raises(
        DamagedCheckpoint, match=r"lacks 1 tensors of the run's model, such as model\.norm\.weight"
    ):
        check_names(HERE, names_of(MODEL) - {"model.model.norm.weight"}, MODEL)


def test_the_state_of_experts_balance_may_be_another() -> None:
    experts = ExpertsSpec(num=4, per_token=2, hidden_size=8)
    models = [
        replace(MODEL, experts=replace(experts, balance=balance)) for balance in ExpertBalance
    ]
    for saved in models:
        for model in models:
            check_names(HERE, names_of(saved), model)


def loading_fails(world: World, folder: Path) -> tuple[type[Exception], str, int]:
    """Returns the error of this rank, and how often it read the headers of all files."""
    reads: list[Path] = []

    def counted(saved_in: Path) -> None:
        reads.append(saved_in)
        check_headers(saved_in)

    mesh: Any = SimpleNamespace(rank=world.rank, world_size=world.world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "check_headers", counted)
        with pytest.raises(UserError) as caught:
            saver.load(folder, mesh, stages={}, optimizers=mesh)
    return type(caught.value), str(caught.value), len(reads)


@pytest.mark.dist
def test_rank_0_alone_holds_the_headers_and_all_ranks_refuse_what_it_found(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000003"
    folder.mkdir()
    for i in range(2):
        part(folder / f"{i}.safetensors", [2, 4], [0, 0])
    (folder / "run.json").write_text("{}", "utf-8")
    write_manifest(folder)
    found = run_local(loading_fails, 2, folder, start_group=True, timeout_s=600)
    for error, said, _ in found:
        assert error is DamagedCheckpoint
        assert "w is saved more than once in the files of the checkpoint" in said
    assert [reads for *_, reads in found] == [1, 0]
