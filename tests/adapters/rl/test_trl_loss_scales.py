"""Tests TRL's own losses (1.16) on slices by length beside each rank's and all completions at once.

`GRPOTrainer._compute_loss` and `SFTTrainer.compute_loss` themselves are called, on stand-ins for
the trainers whose models have run.
"""

import itertools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
from trl import GRPOTrainer, SFTTrainer

from tests.adapters.rl.whole_step import (
    ADVANTAGES,
    CLIP,
    DIVISIONS,
    LENGTHS,
    LONGEST,
    MASKS,
    NUM,
    TOKENS,
    WHOLE,
    Division,
    Loss,
    Part,
    error,
    gradient,
    sequence_means,
    sums,
    token_mean,
)
from tests.adapters.trainer_stand_in import StandIn
from wlb.adapters.rl.trl import balanced_grpo, by_length
from wlb.adapters.trl import balanced_steps
from wlb.plan import UserError

SLICES = 4
# TRL averages gradients over ranks, and its losses over a rank's slices of equally many.
RECORDED: dict[str, Loss] = {
    "grpo": lambda p: sequence_means(p).sum() / NUM * p.ranks,
    "dr_grpo": lambda p: sums(p).sum() / (NUM * LONGEST) * p.ranks,
    "luspo": lambda p: sums(p).sum() / NUM * p.ranks,
    "dapo": token_mean,
}
"""Losses whose tokens are clipped alike; the others are reduced like one of these."""


def by_slices() -> Division:
    """Each rank keeps its completions, and takes them in the adapter's order."""
    division: list[list[list[int]]] = []
    for rank in range(2):
        mine = np.arange(rank, NUM, 2)
        order = mine[by_length(LENGTHS[mine], steps=1)]
        division.append(order.reshape(SLICES, -1).tolist())
    return division


def trls_loss(loss_type: str, **changes: Any) -> Loss:
    def loss(part: Part) -> Tensor:
        trainer = SimpleNamespace(
            loss_type=loss_type, aux_loss_enabled=False, top_entropy_quantile=1.0, beta=0.0,
            off_policy_mask_threshold=None, importance_sampling_level="token", use_vllm=False,
            epsilon_low=CLIP, epsilon_high=CLIP, model=SimpleNamespace(training=True),
            max_completion_length=LONGEST, current_gradient_accumulation_steps=part.num,
            get_gamma_weights=GRPOTrainer.get_gamma_weights, _entropy_bonus_enabled=False,
            _metrics={"train": defaultdict(list)}, use_adaptive_entropy=False,
        )  # fmt: skip
        trainer.args = SimpleNamespace(
            delta=None, steps_per_generation=part.num, sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0,
            vespo_lambda_neg=2.0, use_bias_correction_kl=False,
        )  # fmt: skip
        trainer.accelerator = SimpleNamespace(
            num_processes=part.ranks, gather=lambda x: x, reduce=lambda x, reduction: x,
            sync_gradients=False,
        )  # fmt: skip
        vars(trainer).update(changes)
        ran = (part.logps, -part.logps, None)
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: ran
        ids = torch.zeros_like(part.mask)
        inputs = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
            "completion_mask": part.mask, "advantages": ADVANTAGES[part.samples],
            "old_per_token_logps": part.old, "num_items_in_batch": torch.tensor(TOKENS),
        }  # fmt: skip
        function: Any = GRPOTrainer._compute_loss
        return function(trainer, None, inputs)

    return loss


@pytest.mark.parametrize("loss_type", RECORDED)
def test_recorded_losses_of_slices_are_those_of_the_whole_batch(loss_type: str) -> None:
    loss = RECORDED[loss_type]
    assert error(gradient(by_slices(), loss), gradient(WHOLE, loss)) < 1e-7


@pytest.mark.parametrize("loss_type", [*RECORDED, "cispo", "sapo", "vespo"])
def test_trls_own_losses_of_slices_are_those_of_the_whole_batch(loss_type: str) -> None:
    loss = trls_loss(loss_type)
    whole = gradient(WHOLE, loss)
    assert whole.abs().max() > 1e-4
    assert error(gradient(by_slices(), loss), whole) < 1e-7
    if loss_type in RECORDED:
        assert error(gradient(WHOLE, RECORDED[loss_type]), whole) < 1e-6


BY_SLICE: dict[str, dict[str, Any]] = {
    "loss_type = 'bnpo'": {"loss_type": "bnpo"},
    "entropy_coef = 1": {"loss_type": "grpo", "_entropy_bonus_enabled": True, "entropy_coef": 1.0},
}


@pytest.mark.parametrize("setting", BY_SLICE)
def test_means_over_a_slices_tokens_weigh_slices_by_length_otherwise(setting: str) -> None:
    loss = trls_loss(**BY_SLICE[setting])
    each_rank_at_once = [[list(itertools.chain(*rank))] for rank in by_slices()]
    assert error(gradient(by_slices(), loss), gradient(each_rank_at_once, loss)) > 0.1


class Trainer:
    """Stands for a GRPOTrainer that has read its arguments."""

    top_entropy_quantile = 1.0
    _entropy_bonus_enabled = False

    def __init__(self, **args: Any) -> None:
        given = {"loss_type": "dapo", "steps_per_generation": 4, "gradient_accumulation_steps": 2}
        self.args = SimpleNamespace(**(given | args))
        for name in ("top_entropy_quantile", "_entropy_bonus_enabled"):
            setattr(self, name, args.get(name, getattr(self, name)))
        self.get_cp_size = lambda: args.get("cp_size", 1)
        self.get_sp_size = lambda: args.get("sp_size", 1)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"loss_type": "bnpo"}, "loss_type = 'bnpo' .* set loss_type = 'dapo'"),
        ({"_entropy_bonus_enabled": True}, "entropy bonus .* entropy_coef = 0"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile = 0.2 .* 1.0"),
        ({"cp_size": 2}, "cp_size = 2 divides rows .* set cp_size = 1"),
        ({"sp_size": 4}, "sp_size = 4 divides rows .* set sp_size = 1"),
        ({"gradient_accumulation_steps": 3}, "steps_per_generation = 4 .* = 3 .* multiple"),
    ],
)
def test_settings_that_do_not_go_with_slices_are_refused(args: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        balanced_grpo(Trainer)(**args)


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"loss_type": "bnpo", "gradient_accumulation_steps": 1},
        {"loss_type": "bnpo", "steps_per_generation": 1},
        {"steps_per_generation": 2, "gradient_accumulation_steps": 4},
    ],
)
def test_settings_with_one_slice_a_step_are_taken(args: dict[str, Any]) -> None:
    assert balanced_grpo(Trainer)(**args).args.loss_type in ("dapo", "bnpo")


def sft_loss(loss_type: str, tokens: float | None) -> Loss:
    """Returns TRL's SFT loss; tokens: of the step on all ranks, None for a rank's own."""

    def loss(part: Part) -> Tensor:
        def model(**_: Any) -> Any:
            masked = part.logps * part.mask
            return SimpleNamespace(
                log_probs=masked, label_mask=part.mask, entropy=masked, is_top1=masked
            )

        model.training = True
        trainer = SimpleNamespace(
            model=model, aux_loss_enabled=False, compute_loss_func=None, label_smoother=None,
            get_tp_size=lambda: 1, _metrics={"train": defaultdict(list)}, _total_train_tokens=0,
            _tp_size=1,
        )  # fmt: skip
        trainer.args = SimpleNamespace(
            loss_type=loss_type, average_tokens_across_devices=tokens is not None
        )
        trainer.accelerator = SimpleNamespace(
            parallelism_config=None, num_processes=part.ranks, gather_for_metrics=lambda x: x
        )
        num = tokens or sum(float(MASKS[i].sum()) for i in part.rank)
        function: Any = SFTTrainer.compute_loss
        inputs = {"attention_mask": part.mask}
        return function(trainer, model, inputs, num_items_in_batch=num)

    return loss


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
@pytest.mark.parametrize("division", DIVISIONS)
def test_trls_own_sft_losses_are_those_of_the_whole_batch(loss_type: str, division: str) -> None:
    loss = sft_loss(loss_type, TOKENS)
    whole = gradient(WHOLE, loss)
    assert whole.abs().max() > 1e-4
    assert error(gradient(DIVISIONS[division], loss), whole) < 1e-7


def test_sft_losses_over_a_ranks_own_tokens_are_refused() -> None:
    loss = sft_loss("nll", None)
    assert error(gradient(DIVISIONS["slots"], loss), gradient(WHOLE, loss)) > 1e-3

    trainer = balanced_steps(StandIn)(
        world_size=2, average_tokens_across_devices=False, max_tokens=100
    )
    with pytest.raises(UserError, match=r"average_tokens_across_devices = False .* = True"):
        trainer.get_train_dataloader()
