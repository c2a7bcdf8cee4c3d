"""torchtitan: a dataloader whose micro-batches are packed rows, balanced over data parallelism.

    from wlb.adapters.torchtitan import BalancedDataLoader

    config.dataloader = BalancedDataLoader.Config(
        dataset_path="data/books", micro_batches_per_step=4, pad_to_multiple=2 * cp
    )
    config.training.local_batch_size = 1

A micro-batch is one row of documents, {"input": [1, T], "positions": [1, T]} and labels [1, T]: the
form of torchtitan's own text loader, from which its varlen and flex attention make their masks; T
varies. Documents come from a token store (`wlb prepare`), those above `seq_len` are cut, labels are
those of the documents wherever they are cut. `training.seq_len` is the context window.

The state in torchtitan's checkpoint is the planner's, the same on every rank: a run resumes
exactly, also on another number of data-parallel ranks, with the documents that were held back.
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
from wlb.plan import MicroBatch
from wlb.planner import LLAMA2_7B, Planner

Batch = tuple[dict[str, Tensor], Tensor]

_PLANNED = ("context_window", "s_max", "step_tokens", "max_delay", "epochs", "seed")
"""What a step follows from, besides ranks, micro-batches, the store and the cost."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What a planner of torchtitan's job is made of; picklable, for loader workers."""

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
        """Over the store, shuffled; micro-batches dealt to `dp` ranks."""
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
        """Of a data-parallel rank: gradient accumulation steps x the pipeline's micro-batches."""

        s_max: int = 0
        """Most tokens of a micro-batch; 0 = 1.5 context windows."""

        step_tokens: int = 0
        """Most tokens of a step on all ranks; 0 = as many as its micro-batches may have."""

        max_delay: int = 10
        """Most steps that a document is held back."""

        pad_to_multiple: int = 1
        """Padding up to a multiple of it: 2 x cp for SDPA, cp x 128 for flex attention."""

        equal_lengths: bool = False
        """Padding up to s_max in every micro-batch: torch's pipelines take one shape only."""

        epochs: int = 1
        """0 = without end."""

        seed: int = 0
        """Of the order of documents."""

        cost: WorkloadModel = LLAMA2_7B
        """What is balanced: LLaMA2-7B's ratio of attention to linear FLOPs; `wlb.workload_of` makes
        one of a measured GPU."""

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
        # An iteration that was left inside a step has moved the loader past it.
        self._loader.load_state_dict(self._before)
        skip = self._given
        for step in self._loader:
            after = self._loader.state_dict()
            for i in range(skip, len(step.micro_batches)):
                # Before it is given out: a checkpoint is made after it was trained.
                self._given = i + 1
                if self._given == len(step.micro_batches):
                    self._before, self._given = after, 0
                yield step.micro_batches[i]
            skip = 0

    def state_dict(self) -> dict[str, Any]:
        """After the micro-batch that was given last; the same on all ranks."""
        state = {"before": self._before, "given": self._given}
        state |= {"dp": self._dp, "micro_batches_per_step": self._num, "planned": self._planned}
        return {"wlb": json.dumps(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on after it, with more epochs or not. ValueError for another dataloader's, and for a
        part of a step (which torchtitan does not save) where the rest of it would be another: with
        other ranks, micro-batches, epochs or packing."""
        if not state_dict:
            return
        if "wlb" not in state_dict:
            raise ValueError(
                f"the checkpoint's dataloader state has {sorted(state_dict)}, not wlb's: another "
                f"dataloader trained it; leave it out of the load (checkpoint.exclude_from_loading "
                f"= ['dataloader'])"
            )
        state = json.loads(state_dict["wlb"])
        if state["given"] and state["dp"] != self._dp:
            raise ValueError(
                f"the checkpoint was made inside a step of {state['dp']} data-parallel ranks and "
                f"cannot go on with {self._dp}; use one that was made after a step"
            )
        num = state.get("micro_batches_per_step", self._num)  # earlier checkpoints do not say
        if state["given"] and num != self._num:
            raise ValueError(
                f"the checkpoint was made inside a step of {num} micro-batches a rank and cannot "
                f"go on with dataloader.micro_batches_per_step = {self._num}; use one that was "
                f"made after a step"
            )
        before = state.get("planned", self._planned)
        for name, value in self._planned.items():
            if state["given"] and before[name] != value:
                raise ValueError(
                    f"the checkpoint was made inside a step that was planned with {name} = "
                    f"{before[name]} and cannot go on with {value}; use one that was made after a "
                    f"step"
                )
        self._before, self._given = state["before"], state["given"]
        self._loader.load_state_dict(self._before)


def open_reader(store: str) -> StoreReader:
    """Of a store's tokens and labels, by the ids that plans use."""
    info = TokenStore(store).info
    return StoreReader(store, info.vocab_size if info else np.iinfo(np.int32).max)


def as_batch(micro_batch: MicroBatch, reader: TokenReader, *, multiple: int = 1) -> Batch:
    """A micro-batch as torchtitan takes it; T a multiple of `multiple`."""
    options = FlatOptions(pad_to_multiple_of=multiple, next_labels=True)
    flat: FlatBatch = flatten_micro_batch(micro_batch, reader, options=options)
    inputs = {
        "input": torch.from_numpy(flat.input_ids)[None],
        "positions": torch.from_numpy(flat.position_ids)[None],
    }
    return inputs, torch.from_numpy(flat.next_labels)[None]


def _check(config: BalancedDataLoader.Config, *, seq_len: int, local_batch_size: int) -> None:
    if not config.dataset_path:
        raise ValueError("dataloader.dataset_path is empty; give it a store made by `wlb prepare`")
    if local_batch_size != 1:
        raise ValueError(
            f"training.local_batch_size = {local_batch_size} rows of equal length cannot be "
            f"balanced; set it to 1, a row is a micro-batch, and accumulate"
        )
    if config.micro_batches_per_step < 1:
        raise ValueError(
            f"dataloader.micro_batches_per_step = {config.micro_batches_per_step}: torchtitan does "
            f"not tell a dataloader how many micro-batches a step has; set it to gradient "
            f"accumulation steps x the pipeline's micro-batches"
        )
    if config.pad_to_multiple < 1:
        raise ValueError(
            f"dataloader.pad_to_multiple = {config.pad_to_multiple} must be at least 1"
        )
