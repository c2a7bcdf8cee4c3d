"""TRL's GRPO with completions of similar length in each micro-batch, which saves padding.

    trainer = balanced_grpo(GRPOTrainer)(...)

In this file, a slice is a micro-batch: the completions that one forward and backward pass computes.
"""

import importlib
from collections.abc import Mapping
from typing import Any, cast

from wlb.adapters.versions import require

require("trl>=1.16", "transformers>=5.23", "accelerate>=1.15")

import numpy as np
from torch import Tensor

from wlb.balance.mini_batches import choose
from wlb.plan import IntArray, IntLike, UserError

GRPO = "trl.trainer.grpo_trainer"
COMPLETION = ("completion_ids", "completion_mask")
PROMPT = ("prompt_ids", "prompt_mask")
BOTH = ("token_type_ids", "mm_token_type_ids")
"""Tensors of a slice with one column per prompt token, followed by one per completion token."""
BY_TOKEN = (
    "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "tool_mask",
    "importance_sampling_ratio", "advantages",
)  # fmt: skip
"""Tensors of a slice that may have one column per completion token."""


class BalancedCompletions:
    """Mixin that balances the micro-batches of TRL's GRPOTrainer; see `balanced_grpo`.

    Put it before the trainer in a class definition. TRL shuffles the completions of a rank, divides
    them into micro-batches, and pads all of these to the same length. With this mixin, all
    optimiser steps have nearly the same mix of lengths. Within a step, every rank computes its
    micro-batches from long to short, so ranks take nearly equal time. Columns that are only padding
    are removed.

    Every micro-batch still has per_device_train_batch_size completions. So losses that divide by
    the number of completions, by a constant or by the tokens of the step keep their values.
    Settings whose result depends on the tokens of a micro-batch raise UserError.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check_slices(self)

    def _prepare_inputs(self: Any, generation_batch: Any) -> Any:
        module: Any = importlib.import_module(GRPO)
        theirs = module.shuffle_sequence_dict
        module.shuffle_sequence_dict = self._by_length
        try:
            inputs = cast(Any, super())._prepare_inputs(generation_batch)
        finally:
            module.shuffle_sequence_dict = theirs
        return without_padding(inputs)

    def _by_length(self: Any, completions: dict[str, Any]) -> dict[str, Any]:
        lengths = sum(completions[name].sum(1).cpu() for name in ("prompt_mask", "completion_mask"))
        slices, accumulated = self.args.steps_per_generation, self.args.gradient_accumulation_steps
        steps = max(1, slices // accumulated)
        order = by_length(cast(Tensor, lengths).numpy(), steps=steps)
        return {name: _reordered(value, order) for name, value in completions.items()}


def balanced_grpo(trainer: type[Any]) -> type[Any]:
    """Return a subclass of TRL's GRPOTrainer with balanced micro-batches that have less padding."""
    made: Any = type(f"Balanced{trainer.__name__}", (BalancedCompletions, trainer), {})
    return made


def _check_slices(trainer: Any) -> None:
    """Raise UserError for settings that depend on which completions share a micro-batch."""
    args = trainer.args
    # GRPOConfig checks cp_size and sp_size as well, but not if `accelerate launch` sets them.
    for name, size in (("cp_size", trainer.get_cp_size()), ("sp_size", trainer.get_sp_size())):
        if size > 1:
            raise UserError(
                f"accelerate's {name} = {size} divides rows over ranks, which TRL's GRPOTrainer "
                f"does not support; set {name} = 1"
            )
    generated, accumulated = args.steps_per_generation, args.gradient_accumulation_steps
    if generated % accumulated and accumulated % generated:
        raise UserError(
            f"steps_per_generation = {generated} and gradient_accumulation_steps = {accumulated} "
            "would give optimiser steps different numbers of micro-batches; make one a multiple "
            "of the other"
        )
    if min(generated, accumulated) == 1:
        # Completions are sorted by length among the micro-batches that one step trains of the same
        # generation. Here this is only one micro-batch, so nothing depends on the sorting.
        return
    one_slice = "or set gradient_accumulation_steps = 1"
    if args.loss_type == "bnpo":
        raise UserError(
            "loss_type = 'bnpo' divides by the tokens of a micro-batch, so tokens of short "
            "micro-batches would weigh more; set loss_type = 'dapo', which divides by the tokens "
            f"of the step, {one_slice}"
        )
    if trainer._entropy_bonus_enabled:
        raise UserError(
            "the entropy bonus is a mean over the tokens of a micro-batch, so tokens of short "
            "micro-batches would weigh more; set entropy_coef = 0 and use_adaptive_entropy = "
            f"False, {one_slice}"
        )
    if trainer.top_entropy_quantile < 1.0:
        raise UserError(
            f"top_entropy_quantile = {trainer.top_entropy_quantile} selects tokens by comparing "
            "them with the other tokens of their micro-batch, so the selection would depend on how "
            f"completions are balanced; set top_entropy_quantile = 1.0, {one_slice}"
        )


def by_length(lengths: IntLike, *, steps: int) -> IntArray:
    """Return the indices of completions in the order in which they are trained.

    All steps get nearly equal sums of tokens. Within a step, long completions come first.

    Args:
        lengths: Tokens of each completion.
        steps: Number of optimiser steps. The number of completions must be a multiple of it.
    """
    tokens = np.asarray(lengths, np.int64)
    if tokens.size % steps:
        raise UserError(
            f"{tokens.size} completions cannot be divided equally among steps = {steps} optimiser "
            f"steps; choose steps so that it divides the number of completions"
        )
    step = choose(tokens.astype(np.float64), np.ones(tokens.size), steps, equal_counts=True)
    return np.lexsort((-tokens, step))


def without_padding(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the columns of a micro-batch that are padding in all of its rows.

    Prompts are padded at the beginning, completions at the end.

    Args:
        inputs: Tensors of the micro-batch by name, as TRL makes them.
    """
    out: dict[str, Any] = dict(inputs)
    prompt, width = out["prompt_mask"].shape[1], out["completion_mask"].shape[1]
    first = prompt - max(1, int(out["prompt_mask"].sum(1).max()))
    used = max(1, int(out["completion_mask"].sum(1).max()))
    # The mask of a truncated completion may be zero everywhere, even at image tokens. Keep the
    # columns of image tokens nevertheless.
    for kinds in (out[name][:, prompt:] for name in BOTH if out.get(name) is not None):
        used = max([used, *(kinds.any(0).nonzero().flatten() + 1).tolist()])
    # For each tensor by name: its number of columns, and which of them to keep.
    kept = dict.fromkeys((*COMPLETION, *BY_TOKEN), (width, slice(0, used)))
    kept |= dict.fromkeys(PROMPT, (prompt, slice(first, None)))
    kept |= dict.fromkeys(BOTH, (prompt + width, slice(first, prompt + used)))
    for name, (columns, part) in kept.items():
        value: Any = out.get(name)
        if isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == columns:
            out[name] = value[:, part]
    return out


def _reordered(value: Any, order: IntArray) -> Any:
    """Return a tensor or list with its entries in the given order; other values are unchanged."""
    if isinstance(value, Tensor):
        return value[order] if value.ndim else value
    return [value[i] for i in order.tolist()] if isinstance(value, list) else value
