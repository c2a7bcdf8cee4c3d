"""One context-parallel rank's rows of a padding-free batch, made where the batch is: in a worker.

`ContextCollator` wraps the collator that a loop has. Its batch has the keys of any padding-free
batch, so a loop counts labels and divides its loss as if ranks held different data; documents are
cut by a `ShardingPlan` (Section 5) for any lengths. Labels move to the token that predicts them
before the cut, so that no boundary loses one.
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
"""The batch's key, and the argument of a model's forward, that holds `ContextRows`."""
_PER_TOKEN = ("input_ids", "position_ids", "labels", "shift_labels")
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


class ContextRows:
    """What attention needs besides a rank's tokens, on the host; travels with the batch.

    plan: the micro-batch over cp ranks. rank: whose rows these are. rows: their index arrays.
    documents: digest of the whole batch's tokens and boundaries, equal on the ranks that share it.
    No dataclass: FSDP2 and DDP would copy one field by field.
    """

    def __init__(
        self, *, plan: ShardingPlan, rank: int, rows: RankExchange, documents: int
    ) -> None:
        self.plan, self.rank, self.rows, self.documents = plan, rank, rows, documents

    @property
    def longest(self) -> int:
        """Tokens of the longest document, 0 without any."""
        return int(self.plan.lengths.max(initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSharder:
    """Turns a padding-free batch into the rows of CP rank `rank` of `cp`.

    strategy: one of `wlb.sharding.NAMES`. exchange: gather, needed or auto, as
    `sharding.exchange`. cost: prices of strategies that choose. row_multiple: a rank's rows are
    padded to a multiple of it.
    """

    cp: int
    rank: int
    strategy: str = "adaptive"
    exchange: str = "gather"
    cost: WorkloadModel = LLAMA2_7B
    row_multiple: int = 1

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
            # Attention is one call here, so it hides no exchange.
            object.__setattr__(self, "cost", replace(self.cost, overlaps=False, stages=1))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """input_ids, position_ids and, if given, labels and shift_labels, int64 [1, T_local], and
        `ROWS_KEY`. UserError for a batch that is not one row of documents with boundaries.
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
    """A collator of padding-free rows, and the cut of each batch for one CP rank."""

    collator: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
    sharder: ContextSharder

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.sharder(self.collator(features))

    def of_rank(self, rank: int) -> "ContextCollator":
        """The same cut, of another rank."""
        return replace(self, sharder=replace(self.sharder, rank=rank))


def next_labels(labels: IntArray, lengths: IntArray) -> IntArray:
    """Each token's next label within its document, IGNORE for a document's last, shape [T]."""
    out = np.full(labels.size, IGNORE, np.int64)
    out[:-1] = labels[1:]
    out[np.cumsum(lengths) - 1] = IGNORE
    return out


def _checked(batch: Mapping[str, Any]) -> dict[str, IntArray]:
    """The values per token, shape [T]; UserError with the key that cannot be cut."""
    if batch.get("attention_mask") is not None:
        raise UserError(
            "the batch has an attention_mask, which context parallelism does not read: documents "
            "are kept apart by where position_ids begin again; use a padding-free collator "
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
    """Tokens of each document: from cu_seq_lens_q, or from where position_ids begin again."""
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
