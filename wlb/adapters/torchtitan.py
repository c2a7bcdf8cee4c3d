"""torchtitan: a dataloader whose micro-batches are packed rows, balanced over data parallelism.

    config.training.local_batch_size = 1
    config.dataloader = BalancedDataLoader.Config(dataset_path="books", micro_batches_per_step=4)

A micro-batch is one row {"input": [1, T], "positions": [1, T]} and labels [1, T], as torchtitan's
text loader makes them for varlen and flex attention; T varies. `training.seq_len` is the window,
above which documents are cut. The planner's state resumes exactly on any number of ranks.
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

from wlb.adapters.collate import FlatBatch, FlatOptions, flatten_micro_batch
from wlb.adapters.collate.loader import PlannedLoader
from wlb.cost import WorkloadModel
from wlb.data import GlobalBatches, TokenStore
from wlb.data.reader import StoreReader
from wlb.packing import BoundedPacker, PackerOptions
from wlb.parallel.rows import TokenReader
from wlb.plan import MicroBatch, UserError
from wlb.planner import LLAMA2_7B, Planner

Batch = tuple[dict[str, Tensor], Tensor]

_PLANNED = ("context_window", "s_max", "step_tokens", "max_delay", "epochs", "seed")
"""Options that determine steps, besides ranks, micro-batches, store and cost."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The options of a torchtitan job's planner; picklable for loader workers."""

    store: str
    context_window: int
    dp: int
    micro_batches_per_step: int
    s_max: int
    step_tokens: int | None
    max_delay: int
    epochs: int
    seed: int
    cost: WorkloadModel

    def planner(self) -> Planner:
        """A planner over the shuffled store for `dp` ranks."""
        options = PackerOptions(
            num_micro_batches=self.micro_batches_per_step * self.dp,
            context_window=self.context_window,
            cost=self.cost,
            seed=self.seed,
        )
        return Planner(
            source=GlobalBatches(
                TokenStore(self.store),
                tokens_per_batch=options.tokens_per_step,
                seed=self.seed,
                epochs=self.epochs,
            ),
            packer=BoundedPacker(
                options=options,
                s_max=self.s_max,
                step_tokens=self.step_tokens,
                max_delay=self.max_delay,
            ),
            baseline=None,
            cost=self.cost,
            dp=self.dp,
        )


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
        packing = Packing(
            store=config.dataset_path or "",
            context_window=seq_len,
            dp=dp_world_size,
            micro_batches_per_step=config.micro_batches_per_step,
            s_max=config.s_max or seq_len * 3 // 2,
            step_tokens=config.step_tokens or None,
            max_delay=config.max_delay,
            epochs=config.epochs,
            seed=config.seed,
            cost=config.cost,
        )
        multiple = config.pad_to_multiple
        longest = -(-packing.s_max // multiple) * multiple
        self._loader = PlannedLoader(
            packing.planner,
            partial(open_reader, packing.store),
            dp_rank=dp_rank,
            collate=partial(as_batch, multiple=longest if config.equal_lengths else multiple),
            num_workers=config.num_workers,
            pin_memory=config.pin_memory,
        )
        self._dp, self._num = dp_world_size, config.micro_batches_per_step
        self._planned = {name: getattr(packing, name) for name in _PLANNED}
        self._before, self._given = self._loader.state_dict(), 0

    def __iter__(self) -> Iterator[Batch]:
        # If an earlier iteration stopped inside a step, the loader is already past that step.
        self._loader.load_state_dict(self._before)
        skip = self._given
        for step in self._loader:
            after = self._loader.state_dict()
            for i in range(skip, len(step.micro_batches)):
                # Counted before the yield: a checkpoint is made after it was trained.
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
        if state["given"] and state["dp"] != self._dp:
            raise UserError(
                f"the checkpoint was made inside a step of {state['dp']} data-parallel ranks and "
                f"cannot go on with {self._dp}; use one that was made after a step"
            )
        num = state.get("micro_batches_per_step", self._num)  # earlier checkpoints do not say
        if state["given"] and num != self._num:
            raise UserError(
                f"the checkpoint was made inside a step of {num} micro-batches a rank and cannot "
                f"go on with dataloader.micro_batches_per_step = {self._num}; use one that was "
                f"made after a step"
            )
        before = state.get("planned", self._planned)
        for name, value in self._planned.items():
            if state["given"] and before[name] != value:
                raise UserError(
                    f"the checkpoint was made inside a step that was planned with {name} = "
                    f"{before[name]} and cannot go on with {value}; use one that was made after a "
                    f"step"
                )
        self._before, self._given = state["before"], state["given"]
        self._loader.load_state_dict(self._before)


def open_reader(store: str) -> StoreReader:
    """A reader of a store's tokens and labels by the ids that plans use."""
    info = TokenStore(store).info
    return StoreReader(store, info.vocab_size if info else np.iinfo(np.int32).max)


def as_batch(micro_batch: MicroBatch, reader: TokenReader, *, multiple: int = 1) -> Batch:
    """A micro-batch in torchtitan's form, T a multiple of `multiple`."""
    options = FlatOptions(pad_to_multiple_of=multiple, next_labels=True)
    flat: FlatBatch = flatten_micro_batch(micro_batch, reader, options=options)
    inputs = {
        "input": torch.from_numpy(flat.input_ids)[None],
        "positions": torch.from_numpy(flat.position_ids)[None],
    }
    return inputs, torch.from_numpy(flat.next_labels)[None]


def _check(config: BalancedDataLoader.Config, *, seq_len: int, local_batch_size: int) -> None:
    if not config.dataset_path:
        raise UserError("dataloader.dataset_path is empty; give it a store made by `wlb prepare`")
    if local_batch_size != 1:
        raise UserError(
            f"training.local_batch_size = {local_batch_size} rows of equal length cannot be "
            f"balanced; set it to 1, a row is a micro-batch, and accumulate"
        )
    if config.micro_batches_per_step < 1:
        raise UserError(
            f"dataloader.micro_batches_per_step = {config.micro_batches_per_step}: torchtitan does "
            f"not tell a dataloader how many micro-batches a step has; set it to gradient "
            f"accumulation steps x the pipeline's micro-batches"
        )
    if config.pad_to_multiple < 1:
        raise UserError(f"dataloader.pad_to_multiple = {config.pad_to_multiple} must be at least 1")
