"""Tests tied embeddings over a pipeline: both copies stay equal, and checkpoints hold one."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.parity.body import run_step, whole
from tests.parity.case import Case, spec_of
from tests.sets import nightly
from tests.train.case import Run, relaid, small_spec, train, write_corpus
from wlb.launch.local import run_local
from wlb.model.llama import EMBEDDING, HEAD
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World, rank_device
from wlb.spec import RunSpec, Schedule
from wlb.train.optimizer import Optimizers

pytestmark = pytest.mark.dist

PARTS = {"tied_embeddings": True, "qk_norm": True, "qkv_bias": True, "head_dim": 16}


def ends(world: World, case: Case) -> dict[str, torch.Tensor]:
    """Returns this rank's ends of the model after three steps of AdamW."""
    spec = spec_of(case)
    mesh = build_mesh(spec.parallel, rank_device(world, "cpu"))
    executor = Executor(spec, mesh)
    optimizers = Optimizers(spec, dict(executor.stages))
    for step in range(3):
        run_step(executor, case, shift=step)
        optimizers.step(step, norm=1.0)
    named = executor.named_parameters()
    return {name: whole(named[name].detach()) for name in (EMBEDDING, HEAD) if name in named}


@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, schedule=Schedule.ONE_F_ONE_B, parts=("tied_embeddings",)),
        *nightly(Case(tp=2, pp=2, dp=2, v=2, num_micro_batches=8, parts=("tied_embeddings",))),
    ],
    ids=str,
)
def test_both_copies_stay_equal_to_the_bit(case: Case) -> None:
    found = run_local(ends, case.world, case, start_group=True, timeout_s=600)
    held = [value for rank in found for value in rank.values()]
    assert {name for rank in found for name in rank} == {EMBEDDING, HEAD}
    assert all(torch.equal(value, held[0]) for value in held)
    start = spec_of(case)
    assert not torch.equal(held[0], torch.zeros_like(held[0]))
    assert held[0].shape == (start.model.padded_vocab_size, start.model.hidden_size)


def spec_for(folder: Path, corpus: Path, **sections: Any) -> RunSpec:
    # At a rate of 0.02 rounding grows by a factor of ten a step.
    training = {"learning_rate": 0.005, **sections.pop("training", {})}
    saved = {"interval": 3}
    return small_spec(folder, corpus, model=PARTS, checkpoint=saved, training=training, **sections)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("tied") / "corpus")


@pytest.fixture(scope="module")
def whole_runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        layout: train(relaid(spec_for(folder, corpus, run={"name": layout}), layout))[0]
        for layout in ("one", "tp2-pp2-v2")
    }


@pytest.mark.full
def test_losses_do_not_depend_on_the_layout(whole_runs: dict[str, Run]) -> None:
    one, other = whole_runs.values()
    assert other.losses == pytest.approx(one.losses, rel=1e-4)
    norms = [[s["measured"]["grad_norm"] for s in run.steps] for run in (one, other)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize(("saved", "resumed"), [("one", "tp2-pp2-v2"), ("tp2-pp2-v2", "one")])
def test_a_checkpoint_has_one_copy_and_loads_into_another_layout(
    whole_runs: dict[str, Run], corpus: Path, tmp_path: Path, saved: str, resumed: str
) -> None:
    begun = whole_runs[saved].folder / "checkpoints" / "step-00000003"
    names: list[str] = []
    for path in begun.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names += file.keys()
    assert any(EMBEDDING in name for name in names)
    assert not any(HEAD in name for name in names)
    spec = relaid(spec_for(tmp_path, corpus), resumed)
    shutil.copytree(begun, tmp_path / "runs" / "small" / "checkpoints" / begun.name)
    again, _ = train(spec, resume=True)
    assert again.losses == pytest.approx(whole_runs[saved].losses[3:], rel=1e-4)


def test_another_model_is_refused(corpus: Path, tmp_path: Path) -> None:
    """Parts of a model are shapes of its checkpoint."""
    first, _ = train(spec_for(tmp_path, corpus, training={"steps": 1}, eval={"steps": 0}))
    spec = small_spec(tmp_path, corpus, run={"name": "second"}, model=PARTS | {"qk_norm": False})
    begun = replace(spec.checkpoint, init_from=str(first.folder))
    with pytest.raises(
        ValueError, match=r"has model\.qk_norm = True, but this run has model\.qk_norm = False"
    ):
        train(replace(spec, checkpoint=begun))
