"""Cut a padding-free batch to the rows of one context-parallel rank, in the data worker.

`ContextCollator` wraps the loop's collator. The cut batch has the keys of any padding-free batch,
so the loop counts labels and divides its loss as if the ranks had different data.

A `ShardingPlan` (Section 5) cuts documents of any lengths. Labels are shifted to the token that
predicts them before the cut; after it, the next token may be on another rank.
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
"""Key of the batch, and argument of the model's forward, whose value is a `ContextRows`."""
_PER_TOKEN = ("input_ids", "position_ids", "labels", "shift_labels")
"""Keys with one value per token, which are cut."""
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keys with the boundaries of the whole row, which the plan replaces."""


class ContextRows:
    """What attention needs besides a rank's tokens; travels with the batch and stays on the host.

    This is no dataclass, because FSDP2 and DDP would copy a dataclass field by field.

    Args:
        plan: Which tokens of the micro-batch each CP rank has.
        rank: The rank whose rows these are.
        rows: Index arrays of these rows and of their exchange.
        documents: Digest of the tokens and boundaries of the whole batch. Ranks that share a batch
            compare it.
    """

    def __init__(
        self, *, plan: ShardingPlan, rank: int, rows: RankExchange, documents: int
    ) -> None:
        self.plan, self.rank, self.rows, self.documents = plan, rank, rows, documents

    @property
    def longest(self) -> int:
        """Return the tokens of the longest document; 0 without any."""
        return int(self.plan.lengths.max(initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSharder:
    """Cuts a padding-free batch to the rows of CP rank `rank` of `cp`."""

    cp: int
    rank: int
    strategy: str = "adaptive"  # sharding strategy, one of `wlb.sharding.NAMES`
    # "gather", "needed" or "auto", the values of the key `sharding.exchange`.
    exchange: str = "gather"
    cost: WorkloadModel = LLAMA2_7B  # prices for strategies that choose by predicted time
    row_multiple: int = 1  # the rank's rows are padded to a multiple of this

    def __post_init__(self) -> None:
        check_at_least("cp", self.cp, 1)
        check_at_least("row_multiple", self.row_multiple, 1)
        if not 0 <= self.rank < self.cp:
            raise UserError(f"rank = {self.rank} is not one of the {self.cp} CP ranks")
        if self.strategy not in NAMES:
            raise UserError(f"strategy = {self.strategy!r} is not one of {', '.join(NAMES)}")
        if self.exchange not in set(ExchangeChoice):
            known = ", ".join(ExchangeChoice)
            raise UserError(f"exchange = {self.exchange!r} is not one of {known}")
        if isinstance(self.cost, ProfiledWorkload) and self.cost.overlaps:
            # Attention is a single call here, so no exchange overlaps with it.
            object.__setattr__(self, "cost", replace(self.cost, overlaps=False, stages=1))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rank's part of a batch of one packed row.

        Raises:
            UserError: The batch is not one row of documents with boundaries.

        Returns:
            input_ids, position_ids and, where given, labels and shift_labels, int64 [1, T_local];
            and `ContextRows` under `ROWS_KEY`.
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
    """A collator of padding-free rows, followed by the cut for one CP rank."""

    # Makes a padding-free row of examples.
    collator: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
    sharder: ContextSharder  # cuts it

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the rank's part of the batch of these examples."""
        return self.sharder(self.collator(features))

    def of_rank(self, rank: int) -> "ContextCollator":
        """Return the same collator for another rank."""
        return replace(self, sharder=replace(self.sharder, rank=rank))


def next_labels(labels: IntArray, lengths: IntArray) -> IntArray:
    """Return each token's next label in its document, shape [T]; IGNORE at the last token."""
    out = np.full(labels.size, IGNORE, np.int64)
    out[:-1] = labels[1:]
    out[np.cumsum(lengths) - 1] = IGNORE
    return out


def _checked(batch: Mapping[str, Any]) -> dict[str, IntArray]:
    """Return the arrays per token, shape [T]; raise UserError for a key that cannot be cut."""
    if batch.get("attention_mask") is not None:
        raise UserError(
            "the batch has an attention_mask, which context parallelism does not read: it finds "
            "documents by where position_ids restart; use a padding-free collator "
            "(PaddingFreeCollator) and leave the mask out"
        )
    if batch.get("input_ids") is None:
        raise UserError(f"the batch has {sorted(batch)}, but no input_ids; tokenize it first")
    known = (*_PER_TOKEN, *_BOUNDARIES, "attention_mask")
    for name in batch:
        if name not in known:
            raise UserError(
                f"the batch has {name}, and nothing says how to cut it over CP ranks; leave it out "
                f"(known: {', '.join(known[:-1])})"
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
            f"{name} have shape {tuple(np.shape(values))}, not {wanted}; context parallelism takes "
            f"one row of documents a micro-batch, from a padding-free collator"
        )
    return array.astype(np.int64)


def _lengths(batch: Mapping[str, Any], packed: Mapping[str, IntArray]) -> IntArray:
    """Return the tokens of each document, from cu_seq_lens_q or from restarts of position_ids."""
    num_tokens = packed["input_ids"].size
    if batch.get("cu_seq_lens_q") is not None:
        lengths = lengths_from_cu_seqlens(np.asarray(batch["cu_seq_lens_q"]))
        if int(lengths.sum()) != num_tokens:
            raise UserError(f"cu_seq_lens_q end at {lengths.sum()}, input_ids at {num_tokens}")
        return lengths
    if "position_ids" not in packed:
        raise UserError(
            "the batch has no position_ids, so nothing says where its documents begin; let the "
            "collator return them (return_position_ids=True), or cu_seq_lens_q"
        )
    ids = packed["position_ids"]
    return lengths_from_position_ids(ids, start=int(ids[0]) if ids.size else 0)
