"""Balanced optimiser steps for TRL's SFTTrainer that do not delay any row to a later step.

    class Mine(BalancedSteps, SFTTrainer): ...   # or balanced_steps(SFTTrainer)(..., max_tokens=n)

Every step trains as many rows as without wlb, in a random order. Only the division of a step's rows
into micro-batches and over ranks changes, and micro-batches have no padding. If rows may be delayed
to later steps (`hugging_face.balanced`), the balance is better. For GRPO see `wlb.adapters.rl.trl`.
"""

import functools
from collections.abc import Iterator
from typing import Any

from wlb.adapters.versions import require

require("trl>=1.16", "transformers>=5.23", "accelerate>=1.15")

import numpy as np
from torch.utils.data import DataLoader, Sampler

from wlb.adapters.trainers import PlannedTrainer, lengths_of
from wlb.balance import Cost, StepBalance, balance_step
from wlb.plan import IntArray, IntLike, UserError, check_at_least, int_array
from wlb.planner import LLAMA2_7B


class BalancedStep(Sampler[list[int]]):
    """Batch sampler that yields the micro-batches of all ranks, as lists of dataset rows.

    Each step trains the next `samples_per_step` rows of the shuffled epoch. Micro-batch i belongs
    to rank i % num_ranks, which is accelerate's order. The last rows of an epoch are not trained if
    they do not fill a step, as in a Trainer with drop_last. Iterating raises UserError if the rows
    of a step do not fit into its micro-batches.

    Args:
        lengths: Tokens of each dataset row.
        samples_per_step: Number of rows of a step, summed over all ranks.
        max_tokens: Most tokens of a micro-batch. A longer row raises UserError.
        num_ranks: Data-parallel ranks.
        accumulation_steps: Micro-batches of each rank in a step.
        cost: Predicts the time of a row from its length.
        wait: When ranks wait for each other: once per step ("step") or in every micro-batch; see
            `balance_step`.
        seed: Seed of the shuffle.
    """

    # None tells accelerate's BatchSamplerShard that batches have different numbers of rows.
    batch_size = None
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
                f"samples_per_step = {samples_per_step} must be at most {self.lengths.size}, the "
                "number of rows of the dataset; lower samples_per_step"
            )
        if self.lengths.max() > max_tokens:
            row = int(self.lengths.argmax())
            raise UserError(
                f"row {row} has {self.lengths[row]} tokens, more than max_tokens = {max_tokens} "
                "of a micro-batch; raise max_tokens, or truncate rows (max_length of SFTConfig)"
            )
        self.samples_per_step, self.num_ranks, self.seed = samples_per_step, num_ranks, seed
        self.accumulation_steps, self.epoch = accumulation_steps, 0
        self._balance = functools.partial(
            balance_step, num_ranks=num_ranks, max_tokens=max_tokens, cost=cost, wait=wait,
            num_micro_batches=accumulation_steps,
        )  # fmt: skip

    @property
    def sampler(self) -> "BalancedStep":
        """Return this sampler itself, because accelerate looks for `set_epoch` here."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate next. Each epoch has its own order of rows."""
        self.epoch = epoch

    @property
    def num_steps(self) -> int:
        """Return the number of steps of an epoch."""
        return self.lengths.size // self.samples_per_step

    def __len__(self) -> int:
        """Return the number of micro-batches of an epoch, summed over all ranks."""
        return self.num_steps * self.num_ranks * self.accumulation_steps

    def steps(self) -> Iterator[tuple[IntArray, StepBalance]]:
        """Yield each step of the epoch: its dataset rows, and their division into micro-batches.

        The `StepBalance` contains indices into the step's rows, not dataset rows.
        """
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.lengths.size)
        for step in range(self.num_steps):
            rows = order[step * self.samples_per_step :][: self.samples_per_step]
            try:
                yield rows, self._balance(self.lengths[rows])
            except UserError as error:
                # The user knows this number as an option of the Trainer, so name that option.
                message = str(error).replace("num_micro_batches", "gradient_accumulation_steps")
                raise UserError(
                    f"in a step of {rows.size} rows of train_dataset: {message}"
                ) from None

    def __iter__(self) -> Iterator[list[int]]:
        for rows, balance in self.steps():
            for m in range(self.accumulation_steps):
                for rank in range(self.num_ranks):
                    yield rows[balance.samples(0, rank, m)].tolist()


class BalancedSteps(PlannedTrainer):
    """Mixin that makes TRL's SFTTrainer train balanced steps; see `balanced_steps`.

    Put it before the trainer: `class Mine(BalancedSteps, SFTTrainer)`. A step trains
    per_device_train_batch_size x gradient_accumulation_steps x ranks rows, as without this mixin,
    but micro-batches have nearly equal work instead of equal numbers of rows.

    Args:
        *args: Arguments of the trainer.
        max_tokens: Most tokens of a micro-batch.
        cost: Predicts the time of a row from its length.
        **kwargs: Arguments of the trainer and of `PlannedTrainer`.
    """

    def __init__(self, *args: Any, max_tokens: int, cost: Cost = LLAMA2_7B, **kwargs: Any) -> None:
        self.max_tokens, self.cost = max_tokens, cost
        super().__init__(*args, **kwargs)

    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        """Return TRL's DataLoader over balanced steps, prepared by its accelerator.

        Raises:
            UserError: A setting of the trainer would divide batches by another rule, or the loss is
                not a mean over the tokens of a step.
        """
        args = self.args
        num_ranks, accumulated = self._num_ranks(), args.gradient_accumulation_steps
        collator = self._collator()
        rows = self._rows(collator)
        wanted = args.per_device_train_batch_size * accumulated * num_ranks
        if wanted > len(rows):
            raise UserError(
                f"a step takes {wanted} rows (per_device_train_batch_size = "
                f"{args.per_device_train_batch_size} x gradient_accumulation_steps = "
                f"{accumulated} x {num_ranks} ranks), but train_dataset has only {len(rows)}; "
                "lower per_device_train_batch_size or gradient_accumulation_steps"
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
    """Return a subclass of TRL's SFTTrainer that takes `max_tokens=` and trains balanced steps."""
    made: Any = type(f"Stepwise{trainer.__name__}", (BalancedSteps, trainer), {})
    return made
