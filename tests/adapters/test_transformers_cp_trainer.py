"""Tests Balance's cp in transformers' and TRL's trainers, beside processes without it."""

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the extra [hf]")

from tests.adapters.context_trainer import Job, Trained, train, trainer_of
from wlb.adapters.transformers_cp import context_of_trainer
from wlb.launch.local import run_local

START: dict[str, Any] = {
    "start_group": True,
    "timeout_s": 600,
    "preload": ("tests.adapters.context_trainer",),
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average_tokens_across_devices": False}, "set average_tokens_across_devices=True"),
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor = 0\.1; set label_smoothing"),
        ({"torch_compile": True}, "torch_compile, which is not tested; set torch_compile=False"),
        ({}, "cp = 2 must divide the number of processes, which is 1"),
    ],
)
def test_options_of_a_trainer_that_do_not_go_with_cp(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    job = Job(cp=2, sft=False, options=tuple(options.items()))
    with pytest.raises(ValueError, match=message):
        trainer_of(job, str(tmp_path))


def test_balance_s_cp_goes_with_no_other_sharing_of_a_sequence() -> None:
    """Accelerate itself would start its own only on GPUs."""

    def trainer(**sizes: int) -> Any:
        given = {"tp_size": 1, "cp_size": 1, "sp_size": 1} | sizes
        return SimpleNamespace(
            args=SimpleNamespace(average_tokens_across_devices=True, label_smoothing_factor=0.0),
            accelerator=SimpleNamespace(parallelism_config=SimpleNamespace(**given)),
            get_tp_size=lambda: given["tp_size"],
            model_accepts_loss_kwargs=True,
            compute_loss_func=print if sizes.get("compute_loss_func") else None,
        )

    for sizes, message in [
        (
            {"cp_size": 2},
            "cp = 2 of Balance does not work with accelerate's cp_size = 2; set cp_siz",
        ),
        ({"sp_size": 4}, "accelerate's sp_size = 4; set sp_size = 1"),
        ({"tp_size": 2}, "accelerate's tp_size = 2; set tp_size = 1"),
        ({"compute_loss_func": 1}, "compute_loss_func, which would shift labels within one rank"),
    ]:
        with pytest.raises(ValueError, match=message):
            context_of_trainer(trainer(**sizes), cp=2)


JOBS = [
    # Two ranks that share each micro-batch, cut by workers, beside one process.
    (Job(cp=2, sft=False, options=(("dataloader_num_workers", 1),)), 2, Job(cp=1, sft=False), 1),
    # dp 2 x cp 2 with recomputed layers, beside two data-parallel processes.
    (Job(cp=2, options=(("activation_checkpointing", True),)), 4, Job(cp=1), 2),
    # The same with FSDP2, by accelerate.
    (Job(cp=2, options=(("activation_checkpointing", True),), fsdp=True), 4, Job(cp=1), 2),
]


@functools.cache
def without_cp(job: Job, num_ranks: int) -> Trained:
    """Two jobs are compared with the same run."""
    with tempfile.TemporaryDirectory() as out:
        return run_local(train, num_ranks, job, out, **START)[0]


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize(
    ("job", "num_ranks", "other", "num_others"),
    [
        pytest.param(*JOBS[0], id="Trainer", marks=pytest.mark.nightly),
        pytest.param(*JOBS[1], id="SFTTrainer"),
        pytest.param(*JOBS[2], id="FSDP2", marks=pytest.mark.nightly),
    ],
)
def test_trainers_train_what_processes_without_cp_do(
    job: Job, num_ranks: int, other: Job, num_others: int, tmp_path: Path
) -> None:
    """The other run has transformers' own attention, a whole micro-batch a process, and the same
    plan; it must give the same losses, norms and weights over steps of two micro-batches.
    """
    found = run_local(train, num_ranks, job, str(tmp_path), **START)
    expected = without_cp(other, num_others)
    assert len(expected.losses) == 3
    for each in found:
        assert each.losses == pytest.approx(expected.losses, rel=1e-5)
        assert each.norms == pytest.approx(expected.norms, rel=1e-4)
        assert each.evaluated == pytest.approx(expected.evaluated, rel=1e-4)
        assert each.said == expected.said
        assert each.is_fsdp == job.fsdp
        for name, truth in expected.weights.items():
            scale = float(truth.abs().max())
            assert float((each.weights[name] - truth).abs().max()) <= 1e-4 * scale + 1e-7, name
            assert scale > 0, name
