"""TRL: the samples of each optimiser step balanced, without delay, in SFT and GRPO.

    class Mine(BalancedSteps, SFTTrainer): ...   # or balanced_steps(SFTTrainer)(..., max_tokens=n)
    trainer = balanced_grpo(GRPOTrainer)(...)

SFT: padding-free micro-batches; for steps that may delay rows, `hugging_face.balanced` is closer to
equal. GRPO: each rank's completions are sliced by length and slices lose their common padding.
"""

import functools
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

from wlb.adapters.versions import require

require("trl>=1.16", "transformers>=5.23", "accelerate>=1.15")

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from wlb.adapters.trainers import PlannedTrainer, lengths_of
from wlb.balance import Cost, StepBalance, balance_step
from wlb.balance.mini_batches import choose
from wlb.plan import IntArray, IntLike, UserError, check_at_least, int_array
from wlb.planner import LLAMA2_7B

GRPO = "trl.trainer.grpo_trainer"
COMPLETION = ("completion_ids", "completion_mask")
PROMPT = ("prompt_ids", "prompt_mask")
BOTH = ("token_type_ids", "mm_token_type_ids")
"""Tensors of a slice that have a column for each token of a prompt, then of a completion."""
BY_TOKEN = (
    "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "tool_mask",
    "importance_sampling_ratio", "advantages",
)  # fmt: skip
"""Tensors of a slice that may have a column for each token of a completion."""


class BalancedStep(Sampler[list[int]]):
    """Micro-batches of all ranks, step after step, as lists of dataset rows.

    Each step trains the next samples_per_step rows of a shuffled epoch; micro-batch i belongs to
    rank i % num_ranks, as accelerate deals them, and every rank has accumulation_steps a step. The
    last rows of an epoch that fill no step are left out, as a Trainer with drop_last does.

    lengths: tokens of each row. max_tokens: of a micro-batch. wait: see `balance_step`. UserError
    for a row above max_tokens, and in the iteration for a step that does not fit.
    """

    batch_size = None  # accelerate's BatchSamplerShard requires None for varying sizes
    drop_last = False

    def __init__(
        self,
        lengths: IntLike,
        *,
        samples_per_step: int,
        max_tokens: int,
        num_ranks: int,
        accumulation_steps: int = 1,
        cost: Cost = LLAMA2_7B,
        wait: str = "step",
        seed: int = 0,
    ) -> None:
        self.lengths = int_array("lengths", lengths)
        for name, value in (
            ("samples_per_step", samples_per_step),
            ("num_ranks", num_ranks),
            ("gradient_accumulation_steps", accumulation_steps),
        ):
            check_at_least(name, value, 1)
        if samples_per_step > self.lengths.size:
            raise UserError(
                f"samples_per_step = {samples_per_step} is more than the dataset's "
                f"{self.lengths.size} rows; lower it"
            )
        if self.lengths.max() > max_tokens:
            row = int(self.lengths.argmax())
            raise UserError(
                f"row {row} has {self.lengths[row]} tokens, and a micro-batch at most max_tokens = "
                f"{max_tokens}; raise max_tokens, or truncate rows (max_length of SFTConfig)"
            )
        self.samples_per_step, self.num_ranks, self.seed = samples_per_step, num_ranks, seed
        self.accumulation_steps, self.epoch = accumulation_steps, 0
        self._balance = functools.partial(
            balance_step, num_ranks=num_ranks, max_tokens=max_tokens, cost=cost, wait=wait,
            num_micro_batches=accumulation_steps,
        )  # fmt: skip

    @property
    def sampler(self) -> "BalancedStep":
        """Itself; accelerate's loaders look for `set_epoch` here."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate next; each has its own order."""
        self.epoch = epoch

    @property
    def num_steps(self) -> int:
        """Steps of an epoch."""
        return self.lengths.size // self.samples_per_step

    def __len__(self) -> int:
        """Micro-batches of an epoch on all ranks."""
        return self.num_steps * self.num_ranks * self.accumulation_steps

    def steps(self) -> Iterator[tuple[IntArray, StepBalance]]:
        """Rows of each step of the epoch, and how they are divided (indices into those rows)."""
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.lengths.size)
        for step in range(self.num_steps):
            rows = order[step * self.samples_per_step :][: self.samples_per_step]
            try:
                yield rows, self._balance(self.lengths[rows])
            except UserError as error:
                told = str(error).replace("num_micro_batches", "gradient_accumulation_steps")
                raise UserError(f"a step of {rows.size} rows of train_dataset: {told}") from None

    def __iter__(self) -> Iterator[list[int]]:
        for rows, balance in self.steps():
            for m in range(self.accumulation_steps):
                for rank in range(self.num_ranks):
                    yield rows[balance.samples(0, rank, m)].tolist()


class BalancedSteps(PlannedTrainer):
    """A mixin left of TRL's SFTTrainer; see `balanced_steps`.

    A step trains as many rows as the arguments say (per_device_train_batch_size x
    gradient_accumulation_steps x ranks), divided by work instead of by number. data_collator,
    check_documents: as `PlannedTrainer` takes them.
    """

    def __init__(self, *args: Any, max_tokens: int, cost: Cost = LLAMA2_7B, **kwargs: Any) -> None:
        self.max_tokens, self.cost = max_tokens, cost
        super().__init__(*args, **kwargs)

    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        """TRL's DataLoader over balanced steps, prepared by its accelerator. UserError for settings
        that would undo them, and for losses that are not a mean over a step's tokens."""
        args = self.args
        num_ranks, accumulated = self._num_ranks(), args.gradient_accumulation_steps
        collator = self._collator()
        rows = self._rows(collator)
        wanted = args.per_device_train_batch_size * accumulated * num_ranks
        if wanted > len(rows):
            raise UserError(
                f"a step takes per_device_train_batch_size = {args.per_device_train_batch_size} x "
                f"gradient_accumulation_steps = {accumulated} x {num_ranks} ranks = {wanted} "
                f"rows, more than the {len(rows)} of train_dataset; lower one of them"
            )
        batches = BalancedStep(
            lengths_of(rows),
            samples_per_step=wanted,
            max_tokens=self.max_tokens,
            num_ranks=num_ranks,
            accumulation_steps=accumulated,
            cost=self.cost,
            seed=args.seed,
        )
        return self._loader(rows, batches, collator)


def balanced_steps(trainer: type[Any]) -> type[Any]:
    """A subclass of TRL's SFTTrainer that takes `max_tokens=` and trains balanced steps."""
    made: Any = type(f"Stepwise{trainer.__name__}", (BalancedSteps, trainer), {})
    return made


class BalancedCompletions:
    """A mixin left of TRL's GRPOTrainer; see `balanced_grpo`.

    TRL shuffles a rank's completions, slices them, and computes each slice at the padded length of
    all. Here optimiser steps get completions of the same lengths, slices of a step go from long to
    short on every rank at once, and a slice has no column of padding only. Every slice still has
    per_device_train_batch_size completions, so losses that divide by completions, by a constant or
    by the step's tokens are what they were. UserError for settings that look at a slice's tokens.
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
        return {name: _taken(value, order) for name, value in completions.items()}


def balanced_grpo(trainer: type[Any]) -> type[Any]:
    """A subclass of TRL's GRPOTrainer whose slices are balanced over ranks and lose padding."""
    made: Any = type(f"Balanced{trainer.__name__}", (BalancedCompletions, trainer), {})
    return made


def _check_slices(trainer: Any) -> None:
    args = trainer.args
    # GRPOConfig refuses these too, but does not see those that `accelerate launch` sets.
    for name, size in (("cp_size", trainer.get_cp_size()), ("sp_size", trainer.get_sp_size())):
        if size > 1:
            raise UserError(
                f"accelerate's {name} = {size} cuts rows over ranks, which TRL's GRPOTrainer does "
                f"not support, with balanced slices or without; leave {name} at 1"
            )
    generated, accumulated = args.steps_per_generation, args.gradient_accumulation_steps
    if generated % accumulated and accumulated % generated:
        raise UserError(
            f"steps_per_generation = {generated} and gradient_accumulation_steps = {accumulated} "
            f"give optimiser steps unlike lengths; make one a multiple of the other"
        )
    if min(generated, accumulated) == 1:
        return  # one slice of a generation in each step, so that none is long and none short
    one_slice = "or gradient_accumulation_steps = 1"
    if args.loss_type == "bnpo":
        raise UserError(
            f"loss_type = 'bnpo' divides by the tokens of a slice, so tokens of short slices would "
            f"count more than those of long ones; take 'dapo', which divides by the step's, "
            f"{one_slice}"
        )
    if trainer._entropy_bonus_enabled:
        raise UserError(
            f"the entropy bonus is a mean over the tokens of a slice, so tokens of short slices "
            f"would count more than those of long ones; set entropy_coef = 0 and "
            f"use_adaptive_entropy = False, {one_slice}"
        )
    if trainer.top_entropy_quantile < 1.0:
        raise UserError(
            f"top_entropy_quantile = {trainer.top_entropy_quantile} compares tokens of a slice, "
            f"and slices differ in length; set it to 1.0, {one_slice}"
        )


def by_length(lengths: IntLike, *, steps: int) -> IntArray:
    """An order of completions: step after step of the same lengths, long to short in each.

    UserError for completions that are no multiple of `steps`.
    """
    tokens = np.asarray(lengths, np.int64)
    if tokens.size % steps:
        raise UserError(f"{tokens.size} completions are no multiple of {steps} optimiser steps")
    step = choose(tokens.astype(np.float64), np.ones(tokens.size), steps, equal_counts=True)
    return np.lexsort((-tokens, step))


def without_padding(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A slice without the columns that are padding in all of its rows: the first of prompts, the
    last of completions."""
    out: dict[str, Any] = dict(inputs)
    prompt, width = out["prompt_mask"].shape[1], out["completion_mask"].shape[1]
    first = prompt - max(1, int(out["prompt_mask"].sum(1).max()))
    used = max(1, int(out["completion_mask"].sum(1).max()))
    # A truncated completion may be masked as a whole, and yet its images need their tokens.
    for kinds in (out[name][:, prompt:] for name in BOTH if out.get(name) is not None):
        used = max([used, *(kinds.any(0).nonzero().flatten() + 1).tolist()])
    kept = dict.fromkeys((*COMPLETION, *BY_TOKEN), (width, slice(0, used)))
    kept |= dict.fromkeys(PROMPT, (prompt, slice(first, None)))
    kept |= dict.fromkeys(BOTH, (prompt + width, slice(first, prompt + used)))
    for name, (columns, part) in kept.items():
        value: Any = out.get(name)
        if isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == columns:
            out[name] = value[:, part]
    return out


def _taken(value: Any, order: IntArray) -> Any:
    if isinstance(value, Tensor):
        return value[order] if value.ndim else value
    return [value[i] for i in order.tolist()] if isinstance(value, list) else value
