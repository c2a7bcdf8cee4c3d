"""A dataloader for torchtitan that packs documents into micro-batches of nearly equal work.

    config.training.local_batch_size = 1
    config.dataloader = BalancedDataLoader.Config(dataset_path="books", micro_batches_per_step=4)

A micro-batch is one row, {"input": [1, T], "positions": [1, T]} and labels [1, T], as torchtitan's
text loader makes it, but T varies. `training.seq_len` is the context window: a longer document is
cut into pieces of that length.

torchtitan accumulates gradients over `training.global_batch_size` / (data-parallel ranks) rows.
With a pipeline, set `training.local_batch_size` to the number of its micro-batches and
`parallelism.pipeline_parallel_microbatch_size` to 1 row; `equal_lengths` then pads all rows to one
length, as torch's pipelines need.
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
    """Return a planner that packs the documents of a token store in a shuffled order.

    Args:
        store: Path of the token store, without the extensions .bin and .idx.
        dp: Data-parallel ranks.
        micro_batches_per_step: Micro-batches of each rank in a step.
        cost: Predicts the time of a document from its length.
        context_window: Longest document that is not cut, in tokens.
        epochs: How often the store is read; 0 means without end.
        seed: Seed of the document order.
        **limits: Arguments s_max, step_tokens and max_delay of `BoundedPacker`.
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
    """A torchtitan dataloader that returns planned micro-batches one by one.

    Put its `Config` into `Trainer.Config`; torchtitan then calls the constructor.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Settings of the dataloader.

        `dataset_path` is the path of a token store made by `wlb prepare`, without extension.
        """

        micro_batches_per_step: int = 0
        """Micro-batches of a data-parallel rank in a step; must be set.

        The number is gradient accumulation steps x micro-batches of the pipeline."""

        s_max: int = 0
        """Most tokens of a micro-batch; 0 means 1.5 context windows."""

        step_tokens: int = 0
        """Most tokens of a step on all ranks; 0 means s_max times the step's micro-batches."""

        max_delay: int = 10
        """Most steps that a document may be delayed."""

        pad_to_multiple: int = 1
        """Pad T to a multiple of this; torchtitan's CP needs 2 x cp (SDPA) or cp x 128 (Flex)."""

        equal_lengths: bool = False
        """Whether to pad every micro-batch to s_max. torch's pipelines need such equal shapes."""

        epochs: int = 1
        """How often the store is read; 0 means without end."""

        seed: int = 0
        """Seed for the order of documents."""

        cost: WorkloadModel = LLAMA2_7B
        """Predicts the time of a document; `wlb.workload_of` makes a model of a measured GPU."""

        num_workers: int = 0
        """Worker processes that read and collate, as in torch's DataLoader."""

        pin_memory: bool = False
        """Whether batches are copied to pinned memory, as in torch's DataLoader."""

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
        # A state saved in the middle of a step can only be resumed if these settings are equal,
        # because they determine which documents are in the step.
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
        # The position in the data: the loader's state before the current step, and how many of the
        # step's micro-batches were returned.
        self._before, self._num_returned = self._loader.state_dict(), 0

    def __iter__(self) -> Iterator[Batch]:
        # If an earlier iteration stopped in the middle of a step, the loader is already after that
        # step, so move it back to the step's beginning.
        self._loader.load_state_dict(self._before)
        skip = self._num_returned
        for step in self._loader:
            after = self._loader.state_dict()
            for i in range(skip, len(step.micro_batches)):
                # Advance before the yield, because when torchtitan saves a checkpoint, the
                # micro-batch that is yielded here has been trained.
                self._num_returned = i + 1
                if self._num_returned == len(step.micro_batches):
                    self._before, self._num_returned = after, 0
                yield step.micro_batches[i]
            skip = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data after the micro-batch that was returned last.

        The position is equal on all ranks. torchtitan saves it in its checkpoints.
        """
        state = {"before": self._before, "given": self._num_returned}
        state |= {"dp": self._dp, "micro_batches_per_step": self._num, "planned": self._planned}
        return {"wlb": json.dumps(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume after the micro-batch at which the state was saved.

        The number of epochs may be larger than before.

        Args:
            state_dict: From `state_dict`; empty means to begin at the start of the data.

        Raises:
            UserError: The state is from another dataloader, or it was saved in the middle of a step
                (which torchtitan does not do) and the settings that determine the step differ.
        """
        if not state_dict:
            return
        if "wlb" not in state_dict:
            raise UserError(
                f"the checkpoint's dataloader state has the keys {sorted(state_dict)}, so it was "
                "not saved by wlb's dataloader; do not load it (checkpoint.exclude_from_loading = "
                "['dataloader'])"
            )
        state = json.loads(state_dict["wlb"])
        if state["given"]:
            self._refuse_other_steps(state)
        self._before, self._num_returned = state["before"], state["given"]
        self._loader.load_state_dict(self._before)

    def _refuse_other_steps(self, state: dict[str, Any]) -> None:
        # Checkpoints of earlier versions of wlb lack micro_batches_per_step.
        num = state.get("micro_batches_per_step", self._num)
        planned = state.get("planned", self._planned)
        key = "dataloader.micro_batches_per_step"
        differences = [
            (
                f"of {state['dp']} data-parallel ranks",
                f"{self._dp} data-parallel ranks",
                state["dp"] != self._dp,
            ),
            (f"of {num} micro-batches a rank", f"{key} = {self._num}", num != self._num),
        ]
        for name, value in self._planned.items():
            made = f"that was planned with {name} = {planned[name]}"
            differences.append((made, f"{name} = {value}", planned[name] != value))
        for made, now, differs in differences:
            if differs:
                raise UserError(
                    f"the checkpoint was saved in the middle of a step {made}, which cannot be "
                    f"resumed with {now}; use the checkpoint's setting, or a checkpoint that was "
                    "saved between steps"
                )


def open_reader(store: str) -> StoreReader:
    """Return a reader of the tokens and labels of a token store.

    Args:
        store: Path of the token store, without the extensions .bin and .idx.
    """
    info = TokenStore(store).info
    return StoreReader(store, info.vocab_size if info else np.iinfo(np.int32).max)


def as_batch(
    micro_batch: MicroBatch,
    reader: TokenReader,
    *,
    multiple: int = 1,
    context_window: int | None = None,
) -> Batch:
    """Return a micro-batch in the form that torchtitan's trainer expects.

    Args:
        micro_batch: The micro-batch of a plan.
        reader: Reads the documents' tokens and labels.
        multiple: The number of tokens T is padded to a multiple of this.
        context_window: Positions of padding stay below this number, because torchtitan's RoPE table
            has only `training.seq_len` rows. None means no limit.

    Returns:
        A dictionary with "input" and "positions", and the labels; each of shape [1, T]. Labels are
        already shifted: a token's label is the next token.
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
        raise UserError(
            "dataloader.dataset_path is empty; set it to the prefix of a token store made by "
            "`wlb prepare`"
        )
    if local_batch_size != 1:
        raise UserError(
            f"training.local_batch_size = {local_batch_size} makes batches of several rows of "
            "equal length, which cannot be balanced; set training.local_batch_size = 1 and "
            "accumulate gradients, or, with a pipeline, set "
            "parallelism.pipeline_parallel_microbatch_size = 1"
        )
    if config.micro_batches_per_step < 1:
        raise UserError(
            f"dataloader.micro_batches_per_step = {config.micro_batches_per_step} must be at "
            "least 1; set it to gradient accumulation steps x micro-batches of the pipeline, "
            "which torchtitan does not pass to a dataloader"
        )
    check_at_least("dataloader.pad_to_multiple", config.pad_to_multiple, 1)
