"""Take one context-parallel rank's tokens out of a padding-free batch, in the data worker.

`ContextCollator` wraps the training loop's collator. The result has the keys of a usual
padding-free batch, so the loop counts labels and divides its loss as in data parallelism.

A `ShardingPlan` (Section 5 of the paper) says which tokens each CP rank computes. Labels are
shifted before the batch is divided, because afterwards a token's successor may be on another rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wlb.adapters.collate.boundaries import lengths_from_cu_seqlens, lengths_from_position_ids
from wlb.cost import ProfiledWorkload, WorkloadModel
from wlb.parallel.context.rows import RankExchange, rank_exchange
from wlb.plan import (
    IGNORE,
    IntArray,
    ShardingPlan,
    UserError,
    check_at_least,
    digest,
    exchange_of,
    local_tokens,
)
from wlb.planner import LLAMA2_7B
from wlb.sharding import NAMES, shard
from wlb.spec import ExchangeChoice

ROWS_KEY = "wlb_context"
"""Key of the batch, and keyword argument of the model's forward, for a `ContextRows`."""
_PER_TOKEN = ("input_ids", "position_ids", "labels", "shift_labels")
"""Keys of a batch with one value per token, which are divided over CP ranks."""
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keys of a batch with its document boundaries, which the sharding plan replaces."""


class ContextRows:
    """What attention over CP ranks needs to know of a micro-batch besides this rank's tokens.

    The batch contains this object as a value, in CPU memory. The class is not a dataclass, because
    FSDP2 and DDP would copy a dataclass field by field.

    Args:
        plan: Which tokens of the micro-batch each CP rank computes.
        rank: CP rank to which the batch belongs.
        rows: Index arrays that say which keys and values this rank sends, receives and reads.
        documents: Hash of the tokens and document boundaries of the whole micro-batch. The ranks of
            a CP group compare it.
    """

    def __init__(
        self, *, plan: ShardingPlan, rank: int, rows: RankExchange, documents: int
    ) -> None:
        self.plan, self.rank, self.rows, self.documents = plan, rank, rows, documents

    @property
    def longest(self) -> int:
        """Return the length of the longest document in tokens; 0 if there are none."""
        return int(self.plan.lengths.max(initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSharder:
    """Takes one CP rank's tokens out of a padding-free batch."""

    cp: int  # number of CP ranks
    rank: int  # this rank within the CP group, 0 to cp - 1
    strategy: str = "adaptive"  # sharding strategy, one of `wlb.sharding.NAMES`
    # How CP ranks exchange keys and values: "gather" sends every row to every rank, "needed" only
    # rows that are read, and "auto" takes the faster of both.
    exchange: str = "gather"
    cost: WorkloadModel = LLAMA2_7B  # predicts times, for strategies that compare them
    row_multiple: int = 1  # the number of tokens of a rank is padded to a multiple of this

    def __post_init__(self) -> None:
        check_at_least("cp", self.cp, 1)
        check_at_least("row_multiple", self.row_multiple, 1)
        if not 0 <= self.rank < self.cp:
            raise UserError(
                f"rank = {self.rank} must be a rank of the CP group, 0 to {self.cp - 1} (cp = "
                f"{self.cp}), not the global rank"
            )
        if self.strategy not in NAMES:
            raise UserError(f"strategy = {self.strategy!r}, but must be one of {', '.join(NAMES)}")
        if self.exchange not in set(ExchangeChoice):
            known = ", ".join(ExchangeChoice)
            raise UserError(f"exchange = {self.exchange!r}, but must be one of {known}")
        if isinstance(self.cost, ProfiledWorkload) and self.cost.overlaps:
            # Here attention starts after the whole exchange, so predict times without overlap.
            object.__setattr__(self, "cost", replace(self.cost, overlaps=False, stages=1))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a batch that consists of one packed row.

        Args:
            batch: Output of a padding-free collator.

        Raises:
            UserError: The batch is not one row of documents with boundaries.

        Returns:
            input_ids and position_ids, and labels and shift_labels if the batch has labels, each
            int64 [1, T_local]; and a `ContextRows` under the key `ROWS_KEY`.
        """
        import torch

        packed = _checked(batch)
        lengths = _lengths(batch, packed)
        plan = shard(
            lengths, cp=self.cp, strategy=self.strategy, cost=self.cost, exchange=self.exchange
        )
        num_rows = local_tokens(plan.num_tokens, cp=self.cp, row_multiple=self.row_multiple)
        rows = rank_exchange(exchange_of(plan, local_tokens=num_rows), self.rank)
        documents = digest(lengths, packed["input_ids"])
        if "labels" in packed and "shift_labels" not in packed:
            packed["shift_labels"] = next_labels(packed["labels"], lengths)
        index = plan.for_rank(self.rank).token_index
        out: dict[str, Any] = {}
        for name, values in packed.items():
            mine = np.full(num_rows, IGNORE if "labels" in name else 0, np.int64)
            mine[: index.size] = values[index]
            if name == "position_ids":
                mine[index.size :] = rows.positions[index.size :]
            out[name] = torch.from_numpy(mine)[None]
        out.setdefault("position_ids", torch.from_numpy(rows.positions)[None])
        out[ROWS_KEY] = ContextRows(plan=plan, rank=self.rank, rows=rows, documents=documents)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCollator:
    """A padding-free collator that returns only one CP rank's tokens."""

    # Makes one padding-free row of examples.
    collator: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
    sharder: ContextSharder  # takes this rank's tokens out of the row

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate examples to one row, and return this rank's part of it."""
        return self.sharder(self.collator(features))

    def of_rank(self, rank: int) -> "ContextCollator":
        """Return a copy of this collator for another CP rank."""
        return replace(self, sharder=replace(self.sharder, rank=rank))


def next_labels(labels: IntArray, lengths: IntArray) -> IntArray:
    """Shift labels: return at each token the label of its document's next token, shape [T].

    The last token of a document gets IGNORE.

    Args:
        labels: Unshifted labels of the row, shape [T].
        lengths: Tokens of each document of the row.
    """
    out = np.full(labels.size, IGNORE, np.int64)
    out[:-1] = labels[1:]
    out[np.cumsum(lengths) - 1] = IGNORE
    return out


def _checked(batch: Mapping[str, Any]) -> dict[str, IntArray]:
    """Return the batch's arrays with one value per token, shape [T], by key.

    Raises:
        UserError: A key of the batch cannot be divided over CP ranks.
    """
    if batch.get("attention_mask") is not None:
        raise UserError(
            "the batch has an attention_mask, which context parallelism does not read; use a "
            "padding-free collator (PaddingFreeCollator) and remove the mask; documents are then "
            "found from position_ids"
        )
    if batch.get("input_ids") is None:
        raise UserError(
            f"the batch has the keys {sorted(batch)}, but no input_ids; tokenize the data first"
        )
    known = (*_PER_TOKEN, *_BOUNDARIES, "attention_mask")
    for name in batch:
        if name not in known:
            raise UserError(
                f"the batch has the key {name}, which cannot be divided over CP ranks; remove "
                f"{name} (known keys: {', '.join(known[:-1])})"
            )
    out: dict[str, IntArray] = {}
    for name in _PER_TOKEN:
        if batch.get(name) is not None:
            out[name] = _row(name, batch[name], out.get("input_ids"))
    return out


def _row(name: str, values: Any, tokens: IntArray | None) -> IntArray:
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1 or (tokens is not None and array.size != tokens.size):
        wanted = "[1, T]" if tokens is None else f"[1, {tokens.size}], as input_ids"
        raise UserError(
            f"{name} have shape {tuple(np.shape(values))}, but must have shape {wanted}; use a "
            "padding-free collator, which makes one row of documents for each micro-batch"
        )
    return array.astype(np.int64)


def _lengths(batch: Mapping[str, Any], packed: Mapping[str, IntArray]) -> IntArray:
    """Return the length of each document, from cu_seq_lens_q or where position_ids restart.

    Args:
        batch: The batch.
        packed: The batch's arrays with one value per token, from `_checked`.
    """
    num_tokens = packed["input_ids"].size
    if batch.get("cu_seq_lens_q") is not None:
        lengths = lengths_from_cu_seqlens(np.asarray(batch["cu_seq_lens_q"]))
        if int(lengths.sum()) != num_tokens:
            raise UserError(
                f"cu_seq_lens_q ends with {lengths.sum()}, but input_ids has {num_tokens} tokens; "
                "give offsets whose last entry is the number of tokens"
            )
        return lengths
    if "position_ids" not in packed:
        raise UserError(
            "the batch has neither position_ids nor cu_seq_lens_q, so documents cannot be found; "
            "let the collator return position_ids (return_position_ids=True) or cu_seq_lens_q"
        )
    ids = packed["position_ids"]
    return lengths_from_position_ids(ids, start=int(ids[0]) if ids.size else 0)
