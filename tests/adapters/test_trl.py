"""Tests the adapter of TRL's SFT: rows of each step divided by work.

Two processes train by the examples, which are tested here as a reader would start them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl")
from datasets import Dataset

from experiments.hosts.common import tiny_llama, words_tokenizer
from tests.adapters.trainer_stand_in import StandIn
from wlb.adapters.trl import BalancedStep, balanced_steps
from wlb.plan import UserError

ROOT = Path(__file__).parents[2]
OTHERS = (
    "slime_steps", "nemo_rl_steps", "openrlhf_steps", "areal_steps", "torchtitan_rl_steps",
)  # fmt: skip
LENGTHS = np.minimum(np.random.default_rng(0).lognormal(5, 0.9, 100), 1000).astype(int)


def test_every_step_trains_its_rows_once_and_balanced() -> None:
    sampler = BalancedStep(
        LENGTHS, samples_per_step=32, max_tokens=1500, num_ranks=2, accumulation_steps=4,
        cost="verl",
    )  # fmt: skip
    batches = list(sampler)
    assert len(batches) == len(sampler) == 3 * 2 * 4
    rows = [row for batch in batches for row in batch]
    assert len(set(rows)) == len(rows) == 96, "the last four rows fill no step"
    assert all(LENGTHS[batch].sum() <= 1500 for batch in batches)
    work = 24576 * LENGTHS + LENGTHS**2
    by_rank = np.array([work[batch].sum() for batch in batches]).reshape(3, 4, 2).sum(1)
    assert (by_rank.max(1) < 1.01 * by_rank.mean(1)).all(), "accelerate deals batch i to rank i % 2"
    sampler.set_epoch(1)
    again = [row for batch in sampler for row in batch]
    assert again != rows
    assert len(set(again)) == 96


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"samples_per_step": 101},
            "samples_per_step = 101 must be at most 100, the number of rows",
        ),
        ({"max_tokens": 500}, r"row \d+ has \d+ tokens.*max_tokens = 500"),
        (
            {"accumulation_steps": 1},
            "32 rows of train_dataset: .* do not fit into 1 .* raise gradient_accumulation_steps",
        ),
        ({"accumulation_steps": 0}, "gradient_accumulation_steps = 0 must be at least 1"),
    ],
)
def test_steps_that_cannot_be(options: dict[str, Any], says: str) -> None:
    given = {"samples_per_step": 32, "max_tokens": 1500, "num_ranks": 2, "accumulation_steps": 4}
    with pytest.raises(UserError, match=says):
        list(BalancedStep(LENGTHS, **(given | options)))


def test_a_step_of_too_many_rows_names_options_of_the_trainer() -> None:
    trainer = balanced_steps(StandIn)(
        world_size=2, per_device_train_batch_size=16, gradient_accumulation_steps=4, max_tokens=9
    )
    says = "per_device_train_batch_size = 16 x gradient_accumulation_steps = 4 x 2 ranks"
    with pytest.raises(UserError, match=f"takes 128 rows .{says}.*train_dataset has only 100"):
        trainer.get_train_dataloader()


@pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")
def test_one_process_trains_steps(tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        str(tmp_path), per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=2,
        use_cpu=True, bf16=False, logging_steps=1, report_to=[], save_strategy="no",
        max_length=None, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{"input_ids": [4 + i % 8] * (3 + i % 5)} for i in range(40)]
    trainer = balanced_steps(SFTTrainer)(
        model=tiny_llama(), args=args, train_dataset=Dataset.from_list(rows),
        processing_class=words_tokenizer(), max_tokens=60,
    )  # fmt: skip
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert trainer.state.global_step == len(losses) == 2
    assert losses[1] < losses[0]


def run(example: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"experiments.hosts.{example}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.nightly  # tests/adapters/test_hugging_face_processes.py trains two processes in `full`
@pytest.mark.process
@pytest.mark.dist
@pytest.mark.parametrize(("example", "what"), [("trl_sft", "loss"), ("trl_grpo", "reward")])
def test_the_examples_train_two_processes(example: str, what: str) -> None:
    ranks = re.findall(rf"rank (\d): {what} \[([^]]+)\]", run(example))
    assert sorted(rank for rank, _ in ranks) == ["0", "1"]
    assert ranks[0][1] == ranks[1][1]
    assert len(ranks[0][1].split(",")) == 3


def test_examples_have_at_most_forty_lines_of_code() -> None:
    for example in ("verl_steps", "trl_sft", "trl_grpo", *OTHERS):
        path = ROOT / "experiments" / "hosts" / f"{example}.py"
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
        assert sum(bool(line) and not line.startswith("#") for line in lines) <= 40
