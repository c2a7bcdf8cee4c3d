"""torchtitan: a dataloader whose micro-batches are packed rows, balanced over data parallelism.

    config.training.local_batch_size = 1
    config.dataloader = BalancedDataLoader.Config(dataset_path="books", micro_batches_per_step=4)

A micro-batch is one row {"input": [1, T], "positions": [1, T]} and labels [1, T], as torchtitan's
text loader makes them; T varies. `training.seq_len` is the window, above which documents are cut.

torchtitan accumulates gradients over `training.global_batch_size` / data-parallel ranks rows. With
a pipeline `training.local_batch_size` is the number of its micro-batches instead, each of
`parallelism.pipeline_parallel_microbatch_size` = 1 row; `equal_lengths` pads them to one length.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from wlb.adapters.versions import require

require("torchtitan>=0.3.0")

import numpy as np
import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader

from wlb.adapters.collate import FlatOptions, flatten_micro_batch
from wlb.adapters.collate.loader import PlannedLoader
from wlb.cost import WorkloadModel
from wlb.data import GlobalBatches, TokenStore
from wlb.data.reader import StoreReader
from wlb.packing import BoundedPacker, PackerOptions
from wlb.parallel.rows import TokenReader
from wlb.plan import MicroBatch, UserError, check_at_least
from wlb.planner import LLAMA2_7B, Planner

Batch = tuple[dict[str, Tensor], Tensor]


def open_store_planner(
    store: str,
    *,
    dp: int,
    micro_batches_per_step: int,
    cost: WorkloadModel,
    context_window: int,
    epochs: int,
    seed: int,
    **limits: Any,
) -> Planner:
    """A planner over the shuffled store for `dp` ranks, each with `micro_batches_per_step`.

    limits: s_max, step_tokens and max_delay of `BoundedPacker`.
    """
    options = PackerOptions(
        num_micro_batches=micro_batches_per_step * dp,
        context_window=context_window,
        cost=cost,
        seed=seed,
    )
    source = GlobalBatches(
        TokenStore(store), tokens_per_batch=options.tokens_per_step, seed=seed, epochs=epochs
    )
    packer = BoundedPacker(options=options, **limits)
    return Planner(source=source, packer=packer, baseline=None, cost=cost, dp=dp)


class BalancedDataLoader(BaseDataLoader):
    """torchtitan's dataloader protocol over a planner; `Config` goes into `Trainer.Config`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """dataset_path: prefix of a token store (`wlb prepare`)."""

        micro_batches_per_step: int = 0
        """Per data-parallel rank: accumulation steps x the pipeline's micro-batches."""

        s_max: int = 0
        """Token limit of a micro-batch; 0 = 1.5 context windows."""

        step_tokens: int = 0
        """Token limit of a step on all ranks; 0 = that of its micro-batches together."""

        max_delay: int = 10
        """Most steps that a document waits."""

        pad_to_multiple: int = 1
        """Pad T to a multiple: 2 x cp for SDPA, cp x 128 for flex attention."""

        equal_lengths: bool = False
        """Pad every micro-batch to s_max, as torch's pipelines need one shape."""

        epochs: int = 1
        """0 = endless."""

        seed: int = 0
        """Seed of the document order."""

        cost: WorkloadModel = LLAMA2_7B
        """Workload model used for balancing; `wlb.workload_of` makes one of a measured GPU."""

        num_workers: int = 0

        pin_memory: bool = False

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        tokenizer: Any = None,
        **_: Any,
    ) -> None:
        _check(config, seq_len=seq_len, local_batch_size=local_batch_size)
        s_max = config.s_max or seq_len * 3 // 2
        # These settings determine the steps, together with ranks, micro-batches, store and cost.
        self._planned: dict[str, Any] = {
            "context_window": seq_len,
            "s_max": s_max,
            "step_tokens": config.step_tokens or None,
            "max_delay": config.max_delay,
            "epochs": config.epochs,
            "seed": config.seed,
        }
        store, multiple = config.dataset_path or "", config.pad_to_multiple
        longest = -(-s_max // multiple) * multiple
        self._dp, self._num = dp_world_size, config.micro_batches_per_step
        self._loader = PlannedLoader(
            partial(
                open_store_planner,
                store,
                dp=self._dp,
                micro_batches_per_step=self._num,
                cost=config.cost,
                **self._planned,
            ),
            partial(open_reader, store),
            dp_rank=dp_rank,
            collate=partial(
                as_batch,
                multiple=longest if config.equal_lengths else multiple,
                context_window=seq_len,
            ),
            num_workers=config.num_workers,
            pin_memory=config.pin_memory,
        )
        self._before, self._given = self._loader.state_dict(), 0

    def __iter__(self) -> Iterator[Batch]:
        # If an earlier iteration stopped inside a step, the loader is already past that step.
        self._loader.load_state_dict(self._before)
        skip = self._given
        for step in self._loader:
            after = self._loader.state_dict()
            for i in range(skip, len(step.micro_batches)):
                # `state` advances before the yield, because a checkpoint is made after the
                # micro-batch was trained.
                self._given = i + 1
                if self._given == len(step.micro_batches):
                    self._before, self._given = after, 0
                yield step.micro_batches[i]
            skip = 0

    def state_dict(self) -> dict[str, Any]:
        """State after the last micro-batch that was returned; equal on all ranks."""
        state = {"before": self._before, "given": self._given}
        state |= {"dp": self._dp, "micro_batches_per_step": self._num, "planned": self._planned}
        return {"wlb": json.dumps(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after that micro-batch, possibly with more epochs.

        UserError for another dataloader's state, and for a state inside a step (which torchtitan
        does not save) if ranks, micro-batches, epochs or packing differ.
        """
        if not state_dict:
            return
        if "wlb" not in state_dict:
            raise UserError(
                f"the checkpoint's dataloader state has {sorted(state_dict)}, not wlb's: another "
                f"dataloader trained it; leave it out of the load (checkpoint.exclude_from_loading "
                f"= ['dataloader'])"
            )
        state = json.loads(state_dict["wlb"])
        if state["given"]:
            self._refuse_other_steps(state)
        self._before, self._given = state["before"], state["given"]
        self._loader.load_state_dict(self._before)

    def _refuse_other_steps(self, state: dict[str, Any]) -> None:
        # Earlier checkpoints do not hold micro_batches_per_step.
        num = state.get("micro_batches_per_step", self._num)
        planned = state.get("planned", self._planned)
        key = "dataloader.micro_batches_per_step"
        differences = [
            (f"of {state['dp']} data-parallel ranks", self._dp, state["dp"] != self._dp),
            (f"of {num} micro-batches a rank", f"{key} = {self._num}", num != self._num),
        ]
        for name, value in self._planned.items():
            made = f"that was planned with {name} = {planned[name]}"
            differences.append((made, value, planned[name] != value))
        for made, now, differs in differences:
            if differs:
                raise UserError(
                    f"the checkpoint was made inside a step {made} and cannot go on with {now}; "
                    f"use one that was made after a step"
                )


def open_reader(store: str) -> StoreReader:
    """A reader of a store's tokens and labels by the ids that plans use."""
    info = TokenStore(store).info
    return StoreReader(store, info.vocab_size if info else np.iinfo(np.int32).max)


def as_batch(
    micro_batch: MicroBatch,
    reader: TokenReader,
    *,
    multiple: int = 1,
    context_window: int | None = None,
) -> Batch:
    """A micro-batch in torchtitan's form, T a multiple of `multiple`.

    context_window: positions stay below it, those of padding too, as torchtitan's RoPE has
    `training.seq_len` of them.
    """
    options = FlatOptions(
        pad_to_multiple_of=multiple, longest_padding=context_window, next_labels=True
    )
    flat = flatten_micro_batch(micro_batch, reader, options=options)
    arrays: Any = (flat.input_ids, flat.position_ids, flat.next_labels)
    tokens, positions, labels = (torch.from_numpy(array)[None] for array in arrays)
    return {"input": tokens, "positions": positions}, labels


def _check(config: BalancedDataLoader.Config, *, seq_len: int, local_batch_size: int) -> None:
    if not config.dataset_path:
        raise UserError("dataloader.dataset_path is empty; give it a store made by `wlb prepare`")
    if local_batch_size != 1:
        raise UserError(
            f"a batch of {local_batch_size} rows of equal length cannot be balanced; set "
            f"training.local_batch_size = 1 and accumulate, or, with a pipeline, "
            f"parallelism.pipeline_parallel_microbatch_size = 1"
        )
    if config.micro_batches_per_step < 1:
        raise UserError(
            f"dataloader.micro_batches_per_step = {config.micro_batches_per_step}: torchtitan does "
            f"not tell a dataloader how many micro-batches a step has; set it to gradient "
            f"accumulation steps x the pipeline's micro-batches"
        )
    check_at_least("dataloader.pad_to_multiple", config.pad_to_multiple, 1)
