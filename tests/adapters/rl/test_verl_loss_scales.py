"""Tests that each framework's own loss scale trains under our division what the batch at once does.

Formulas recorded here (verl 0.9.1, slime 0.3.1, NeMo-RL 0.6, OpenRLHF 0.11.2) are always tested,
and compared with the framework's own function where its source is at hand (`own_code`).
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.adapters.rl.own_code import (  # noqa: F401
    Own,
    nemo_rl_clipped_loss,
    openrlhf_aggregate_loss,
    slime_loss_function,
    verl_agg_loss,
)
from tests.adapters.rl.whole_step import (
    ADVANTAGES,
    CLIP,
    DIVISIONS,
    LENGTHS,
    LONGEST,
    MASKS,
    NUM,
    NUM_ROLLOUTS,
    TOKENS,
    TRAINED,
    WHOLE,
    Loss,
    Part,
    error,
    gradient,
    sequence_means,
    siblings,
    sums,
    token_mean,
    token_sum,
)


def rollout_means(part: Part) -> Tensor:
    """slime: a sample's part of the mean over all tokens of its rollout's samples."""
    tokens = [sum(float(MASKS[j].sum()) for j in siblings(i)) for i in part.samples]
    return sums(part) / torch.tensor(tokens).double()


VERL: dict[str, Loss] = {
    "token-mean": token_mean,
    "token-sum": token_sum,
    "seq-mean-token-sum": lambda p: sums(p).sum() / NUM * p.ranks,
    "seq-mean-token-sum-norm": lambda p: sums(p).sum() / NUM * p.ranks / LONGEST,
    "seq-mean-token-mean": lambda p: sequence_means(p).sum() / NUM * p.ranks,
}
OPENRLHF: dict[bool, Loss] = {
    True: token_mean,
    False: lambda p: sequence_means(p).sum() / TRAINED * p.ranks,
}
NEMO_RL = OPENRLHF
# Megatron divides by the step's tokens where slime counts them (at least one a sample), else by
# the micro-batches of a rank.
SLIME: dict[bool, Loss] = {
    True: lambda p: (p.losses * p.mask).sum() / (TOKENS + NUM - TRAINED) * p.ranks,
    False: lambda p: rollout_means(p).sum() / NUM_ROLLOUTS * p.ranks,
}
RECORDED: dict[str, Loss] = {
    **{f"verl {mode}": loss for mode, loss in VERL.items()},
    **{f"OpenRLHF, NeMo-RL token_level_loss={mode}": loss for mode, loss in OPENRLHF.items()},
    **{f"slime calculate_per_token_loss={mode}": loss for mode, loss in SLIME.items()},
}


def assert_trains_alike(loss: Loss, recorded: Loss | None = None) -> None:
    """Asserts that divisions have the whole batch's gradient, and that of the recorded formula."""
    whole = gradient(WHOLE, loss)
    assert whole.abs().max() > 1e-4
    for division in DIVISIONS.values():
        assert error(gradient(division, loss), whole) < 1e-7
    if recorded is not None:
        assert error(gradient(WHOLE, recorded), whole) < 1e-6


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_scales_train_what_the_whole_batch_does(name: str) -> None:
    loss = RECORDED[name]
    assert_trains_alike(loss)
    lost = [DIVISIONS["slots"][0], DIVISIONS["slots"][1][1:]]
    assert error(gradient(lost, loss), gradient(WHOLE, loss)) > 1e-3, "a lost micro-batch shows"


@pytest.mark.parametrize("mode", VERL)
def test_verls_own_scale(mode: str, verl_agg_loss: Own) -> None:  # noqa: F811
    def loss(part: Part) -> Tensor:
        return verl_agg_loss(
            part.losses, part.mask, mode, part.ranks, batch_num_tokens=TOKENS,
            global_batch_size=NUM, loss_scale_factor=LONGEST,
        )  # fmt: skip

    assert_trains_alike(loss, VERL[mode])


def test_verls_norm_by_the_width_of_a_micro_batch_needs_loss_scale_factor(
    verl_agg_loss: Own,  # noqa: F811
) -> None:
    def loss(part: Part) -> Tensor:
        return verl_agg_loss(
            part.losses, part.mask, "seq-mean-token-sum-norm", part.ranks, global_batch_size=NUM
        )

    assert error(gradient(DIVISIONS["slots"], loss), gradient(WHOLE, loss)) > 0.1


@pytest.mark.parametrize("is_by_token", OPENRLHF)
def test_openrlhfs_own_scale(is_by_token: bool, openrlhf_aggregate_loss: Own) -> None:  # noqa: F811
    def loss(part: Part) -> Tensor:
        return openrlhf_aggregate_loss(
            part.losses, part.mask, is_by_token, part.ranks, batch_num_tokens=TOKENS,
            global_batch_size=TRAINED,
        )  # fmt: skip

    assert_trains_alike(loss, OPENRLHF[is_by_token])


@pytest.mark.parametrize("is_by_token", SLIME)
def test_slimes_own_scale(is_by_token: bool, slime_loss_function: Own) -> None:  # noqa: F811
    args = SimpleNamespace(
        calculate_per_token_loss=is_by_token, loss_type="custom_loss", allgather_cp=False,
        custom_loss_function_path="", recompute_loss_function=False,
    )  # fmt: skip

    def loss(part: Part) -> Tensor:
        lengths = [int(LENGTHS[i]) for i in part.samples]
        batch = {
            "total_lengths": [n + 1 for n in lengths],
            "response_lengths": lengths,
            "loss_masks": [MASKS[i] for i in part.samples],
            "rollout_mask_sums": [sum(MASKS[j].sum() for j in siblings(i)) for i in part.samples],
        }
        losses = torch.cat([row[:n] for row, n in zip(part.losses, lengths, strict=True)])
        scaled, count, _ = slime_loss_function(
            part.ranks, args, batch, part.num, NUM_ROLLOUTS, losses
        )
        if not is_by_token:
            return scaled / part.num
        assert count == sum(max(1, MASKS[i].sum()) for i in part.samples)
        return scaled / (TOKENS + NUM - TRAINED) * part.ranks  # Megatron sums counts and gradients

    assert_trains_alike(loss, SLIME[is_by_token])


def nemo_rl_loss(cls: Any, **changes: Any) -> Loss:
    """Returns NeMo-RL's loss, times the ranks, by which its workers undo FSDP's mean."""
    config: dict[str, Any] = dict.fromkeys((
        "disable_ppo_ratio", "use_kl_in_reward", "use_importance_sampling_correction",
        "use_on_policy_kl_approximation", "force_on_policy_ratio",
        "sequence_level_importance_ratios", "use_cispo",
    ), False)  # fmt: skip
    config |= dict.fromkeys((
        "ratio_clip_c", "truncated_importance_sampling_type", "kl_input_clamp_value",
        "kl_output_clamp_value", "truncated_importance_sampling_ratio",
        "truncated_importance_sampling_ratio_min",
    ))  # fmt: skip
    config |= {
        "ratio_clip_min": CLIP, "ratio_clip_max": CLIP, "positive_example_nll_weight": 0.0,
        "reference_policy_kl_penalty": 0.0, "reference_policy_kl_type": "k3",
    }  # fmt: skip
    function = cls(SimpleNamespace(**(config | changes)))

    def loss(part: Part) -> Tensor:
        width = part.mask.shape[1]
        rows: dict[str, Tensor] = {
            "token_mask": part.mask,
            "advantages": ADVANTAGES[part.samples][:, None].expand(-1, width),
            "prev_logprobs": part.old,
            "generation_logprobs": part.old,
            "reference_policy_logprobs": part.old,
        }
        data = {name: torch.nn.functional.pad(rows[name], (1, 0)) for name in rows}
        data["sample_mask"] = (part.mask.sum(1) > 0).double()
        data["rewards"] = ADVANTAGES[part.samples]
        counts = torch.tensor(TRAINED), torch.tensor(TOKENS)
        return function(part.logps, data, *counts)[0] * part.ranks

    return loss


@pytest.mark.parametrize("is_by_token", NEMO_RL)
def test_nemo_rls_own_scale(is_by_token: bool, nemo_rl_clipped_loss: Own) -> None:  # noqa: F811
    loss = nemo_rl_loss(nemo_rl_clipped_loss, token_level_loss=is_by_token)
    assert_trains_alike(loss, NEMO_RL[is_by_token])
    penalised = nemo_rl_loss(
        nemo_rl_clipped_loss, token_level_loss=is_by_token, reference_policy_kl_penalty=0.1
    )
    assert_trains_alike(penalised)
    assert error(gradient(WHOLE, penalised), gradient(WHOLE, loss)) > 1e-3


def test_nemo_rls_own_loss_of_positive_examples_depends_on_the_division(
    nemo_rl_clipped_loss: Own,  # noqa: F811
) -> None:
    loss = nemo_rl_loss(
        nemo_rl_clipped_loss, token_level_loss=True, positive_example_nll_weight=0.1
    )
    assert error(gradient(DIVISIONS["slots"], loss), gradient(WHOLE, loss)) > 0.1
