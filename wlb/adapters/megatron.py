"""Packed (THD) micro-batches from a planner's steps, and a balanced scheduler, for Megatron-Core.

    steps = PackedSteps(planner, reader, dp_rank=dp_rank, cp=cp, tp=tp, config=config)
    data_iterator, num_microbatches, tokens, squares = steps.next()

`next` returns what Megatron's `wrap_data_iterator` returns. Every rank plans the same steps, so
ranks gather no lengths and send no samples. Transformer Engine (TE) shards every document over CP
ranks by its own rule, head and tail; wlb balances only micro-batches and data-parallel ranks here.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

from wlb.adapters.versions import require

require("megatron-core>=0.16")

import numpy as np
import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from wlb.adapters.collate import FlatOptions, flatten_micro_batch
from wlb.adapters.collate.loader import PlannedRank, micro_batches_of
from wlb.cost import WorkloadModel
from wlb.packing import place
from wlb.packing.bounded import refine
from wlb.parallel.rows import TokenReader
from wlb.plan import IGNORE, IntArray, MicroBatch, StepPlan, UserError, offsets_of, ranges
from wlb.planner import LLAMA2_7B, Planner

Shape = tuple[int, int, int]


def check_loss(config: ModelParallelConfig) -> None:
    """Raise UserError where Megatron would average the losses of micro-batches.

    Balanced micro-batches have different numbers of tokens, so their average would weigh tokens
    unequally.
    """
    if getattr(config, "calculate_per_token_loss", None) is False:
        raise UserError(
            "config.calculate_per_token_loss = False divides each micro-batch's loss by that "
            "micro-batch's tokens, so tokens of short micro-batches would weigh more; set it to "
            "True (--calculate-per-token-loss) and let loss_func return (sum of losses, tokens, "
            "report)"
        )


def padded_lengths(lengths: IntArray, *, cp: int, tp: int = 1) -> IntArray:
    """Return the padded length of each document, a multiple of 2 x cp (of 1 for cp = 1).

    The last document gets more padding, so that each rank's rows are a multiple of tp.

    Args:
        lengths: Tokens of each document, shape [num_documents].
        cp: Context-parallel ranks.
        tp: Tensor-parallel ranks, which divide the rows where sequence parallelism is on.
    """
    multiple = 2 * cp if cp > 1 else 1
    out = -(-lengths // multiple) * multiple
    all_ranks = multiple * tp
    out[-1] += -int(out.sum()) % all_ranks
    return out


def thd_batch(
    micro_batch: MicroBatch, reader: TokenReader, *, cp: int, tp: int = 1, pad_token_id: int = 0
) -> dict[str, Tensor]:
    """Return a micro-batch for all CP ranks, with the keys of Megatron's packed batches.

    T counts padding. An empty micro-batch becomes one document of padding.

    Args:
        micro_batch: The documents.
        reader: Reads tokens and labels.
        cp: Context-parallel ranks, which decide the padding.
        tp: Tensor-parallel ranks, which decide the padding as well.
        pad_token_id: Token of the padding.

    Returns:
        tokens, labels, position_ids: int64 [1, T].
        loss_mask: float32 [1, T], 0 on padding and on tokens that are not trained.
        cu_seqlens, cu_seqlens_padded: int32 [num_documents + 1], without and with padding.
        max_seqlen: int32 [1], the longest document with its padding.
    """
    flat = flatten_micro_batch(micro_batch, reader, options=FlatOptions(next_labels=True))
    # `flatten_micro_batch` makes one document of padding out of an empty micro-batch.
    lengths = np.diff(flat.cu_seqlens).astype(np.int64)
    padded = padded_lengths(lengths, cp=cp, tp=tp)
    starts = offsets_of(padded)
    rows = ranges(starts[:-1], starts[:-1] + lengths)
    labels = cast(IntArray, flat.next_labels)
    columns = {
        "tokens": np.full(starts[-1], pad_token_id, np.int64),
        "labels": np.zeros(starts[-1], np.int64),
        "position_ids": ranges(np.zeros_like(padded), padded),
        "loss_mask": np.zeros(starts[-1], np.float32),
    }
    columns["tokens"][rows] = flat.input_ids
    columns["labels"][rows] = np.where(labels == IGNORE, 0, labels)
    columns["loss_mask"][rows] = labels != IGNORE
    return {
        **{name: torch.from_numpy(column)[None] for name, column in columns.items()},
        "cu_seqlens": torch.from_numpy(offsets_of(lengths)).int(),
        "cu_seqlens_padded": torch.from_numpy(starts).int(),
        "max_seqlen": torch.tensor([int(padded.max())], dtype=torch.int32),
    }


def cp_rows(cu_seqlens_padded: IntArray, *, cp: int, rank: int) -> IntArray:
    """Return the rows of a CP rank: chunks `rank` and 2 * cp - 1 - rank of every document.

    TE's `thd_get_partitioned_indices` gives the same rows.

    Args:
        cu_seqlens_padded: Offsets of the documents with padding, shape [num_documents + 1].
        cp: Context-parallel ranks.
        rank: This rank among them.
    """
    starts, lengths = cu_seqlens_padded[:-1], np.diff(cu_seqlens_padded)
    if cp == 1:
        return ranges(starts, starts + lengths)
    chunk = lengths // (2 * cp)
    first = np.stack([starts + rank * chunk, starts + (2 * cp - 1 - rank) * chunk], 1).ravel()
    return ranges(first, first + np.repeat(chunk, 2))


def on_cp_rank(batch: dict[str, Tensor], *, cp: int, rank: int) -> dict[str, Tensor]:
    """Return the batch with only the rows of a CP rank.

    cu_seqlens still describe whole documents, as TE expects.
    """
    starts = batch["cu_seqlens_padded"].numpy().astype(np.int64)
    rows = torch.from_numpy(cp_rows(starts, cp=cp, rank=rank))
    cut = ("tokens", "labels", "loss_mask", "position_ids")
    return {name: x[:, rows] if name in cut else x for name, x in batch.items()}


def packed_seq_params(batch: dict[str, Tensor]) -> PackedSeqParams:
    """Return Megatron's parameters of attention and RoPE for THD; equal on all CP ranks."""
    longest = int(batch["max_seqlen"])
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch["cu_seqlens"],
        cu_seqlens_kv=batch["cu_seqlens"],
        cu_seqlens_q_padded=batch["cu_seqlens_padded"],
        cu_seqlens_kv_padded=batch["cu_seqlens_padded"],
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


class PackedSteps(PlannedRank):
    """One data-parallel rank's micro-batches of each global step.

    The saved state is the planner's and equal on all ranks, so a run resumes exactly on any number
    of ranks.

    Args:
        planner: A planner with dp = the data-parallel ranks, and cp = 1 because TE shards.
        reader: Reads tokens and labels.
        dp_rank: This data-parallel rank.
        cp: Context-parallel ranks.
        tp: Tensor-parallel ranks.
        pad_token_id: Token of the padding.
        config: Megatron's. If given, `calculate_per_token_loss` must be True, because micro-batches
            have different numbers of tokens and Megatron's default weighs them equally. `loss_func`
            then returns (sum of losses, tokens, report).
    """

    def __init__(
        self,
        planner: Planner,
        reader: TokenReader,
        *,
        dp_rank: int,
        cp: int = 1,
        tp: int = 1,
        pad_token_id: int = 0,
        config: ModelParallelConfig | None = None,
    ) -> None:
        if config is not None:
            check_loss(config)
        super().__init__(planner, dp_rank)
        self.reader, self.cp, self.tp, self.pad_token_id = reader, cp, tp, pad_token_id
        # The step of the last `next`, whose shapes `shapes` gives.
        self._plan = cast(StepPlan | None, None)

    def next(self) -> tuple[Iterator[dict[str, Tensor]], int, float, float]:
        """Return the next step's micro-batches of this rank.

        Returns:
            An iterator over THD batches in execution order, their number, the tokens of the step on
            all ranks, and the sum of squared document lengths, from which Megatron computes FLOPs.

        Raises:
            StopIteration: The data has ended.
        """
        plan = self.planner.next(self._state)
        if plan is None:
            raise StopIteration("the planner's data has ended; give it more epochs")
        self._plan, self._state = plan, plan.state
        lengths = plan.packing.pieces.length.astype(np.float64)
        batches = (
            thd_batch(m, self.reader, cp=self.cp, tp=self.tp, pad_token_id=self.pad_token_id)
            for m in micro_batches_of(plan, self.dp_rank)
        )
        return batches, plan.pipelines.shape[1], float(lengths.sum()), float((lengths**2).sum())

    def shapes(self, *, hidden_size: int, sequence_parallel: bool = False) -> list[Shape]:
        """Return the activations' shapes between stages in the last step, for `PlannedP2P.begin`.

        Args:
            hidden_size: Width of the activations.
            sequence_parallel: Whether TP ranks divide the rows.

        Returns:
            One [rows, 1, hidden_size] per micro-batch, in execution order.
        """
        if self._plan is None:
            raise RuntimeError("there is no step to give shapes of; call next first")
        parts = self.cp * (self.tp if sequence_parallel else 1)
        out: list[Shape] = []
        for m in micro_batches_of(self._plan, self.dp_rank):
            lengths = m.lengths if m.lengths.size else np.ones(1, np.int64)
            rows = int(padded_lengths(lengths, cp=self.cp, tp=self.tp).sum())
            out.append((rows // parts, 1, hidden_size))
        return out


class PlannedP2P(P2PCommunicator):
    """Megatron's pipeline communicator that takes receive shapes from the plan.

    Ranks do not exchange shapes, which saves a round trip per message. It is for 1F1B without
    virtual stages and with `config.variable_seq_lengths = True`. Call `begin` before every
    forward-backward with the shapes of all its micro-batches. Receiving more raises RuntimeError at
    once; receiving fewer raises it in the next `begin`.
    """

    _shapes: Sequence[Shape] = ()
    _num_received: Sequence[int] = (0, 0)  # micro-batches received so far: forward, backward

    def begin(self, shapes: Sequence[Shape]) -> None:
        """Announce the next forward-backward.

        Args:
            shapes: Activation shape of each of this pipeline's micro-batches, in execution order.
        """
        check_loss(self.config)
        if not self.config.variable_seq_lengths:
            raise UserError(
                "config.variable_seq_lengths = False assumes that every micro-batch has seq_length "
                "tokens; set it to True"
            )
        if self.virtual_pipeline_model_parallel_size is not None:
            raise UserError(
                f"virtual_pipeline_model_parallel_size = "
                f"{self.virtual_pipeline_model_parallel_size}: stages receive in another order; "
                f"use Megatron's P2PCommunicator, which exchanges shapes"
            )
        for received in self._num_received:
            if 0 < received < len(self._shapes):
                raise RuntimeError(
                    f"only {received} of the last step's {len(self._shapes)} micro-batches were "
                    f"received; give PlannedP2P.begin the shapes of the micro-batches that run"
                )
        self._shapes, self._num_received = list(shapes), [0, 0]

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Return the shapes to receive forward and backward; [0, 0, 0] where nothing is received.

        This replaces Megatron's exchange of shapes between neighbouring stages.
        """
        return self._known(0, receives=recv_prev), self._known(1, receives=recv_next)

    def _known(self, direction: int, *, receives: bool) -> list[int]:
        """Return the next shape to receive.

        Args:
            direction: 0 for forward, 1 for backward.
            receives: Whether anything is received.
        """
        if not receives:
            return [0, 0, 0]
        at = self._num_received[direction]
        if at >= len(self._shapes):
            raise RuntimeError(
                "more micro-batches are received than PlannedP2P.begin got shapes for; call it "
                "before every forward-backward with the shapes of all its micro-batches"
            )
        self._num_received = [n + (i == direction) for i, n in enumerate(self._num_received)]
        return list(self._shapes[at])


class BalancedScheduler:
    """Drop-in replacement for Megatron's schedulers of packed samples that balances work.

    It is for loops that keep Megatron's sampling and must train each step's samples in that step.
    As it delays no sample, one that has more work than a rank's share makes the other ranks wait.

    Args:
        dp: Data-parallel ranks.
        cp: Context-parallel ranks.
        max_tokens: Most tokens of a micro-batch over all its CP ranks.
        cost: Workload model that prices the samples.
    """

    def __init__(
        self, *, dp: int, cp: int = 1, max_tokens: int, cost: WorkloadModel = LLAMA2_7B
    ) -> None:
        self.dp, self.cp, self.max_tokens, self.cost = dp, cp, max_tokens, cost

    def get_groups_and_subsamples(
        self, sample_id_seqlens: Sequence[tuple[int, int]], config: Any = None
    ) -> Any:
        """Divide the samples of a step into micro-batches; there are as few as balance allows.

        Args:
            sample_id_seqlens: Id and tokens of each sample of the step.
            config: Megatron-Core 0.16 passes its configuration, and expects the groups twice.

        Returns:
            groups[i][r]: ids of the samples of rank r (of dp x cp) in its i-th micro-batch, never
            empty. Ranks of a CP group have the same samples. With a config: (groups, groups).

        Raises:
            UserError: A sample is longer than max_tokens, or there are fewer samples than
                micro-batches.
        """
        ids, lengths = np.array(sample_id_seqlens, np.int64).reshape(-1, 2).T
        if lengths.size and lengths.max() > self.max_tokens:
            bad = int(lengths.argmax())
            raise UserError(
                f"sample {ids[bad]} has {lengths[bad]} tokens, more than a micro-batch may have "
                f"(max_tokens = {self.max_tokens}); cut the sample or raise max_tokens"
            )
        work = self.cost.workload_ns(lengths).tolist()
        parts = self._parts(lengths.tolist(), work)
        fill_empty([part for rank in parts for part in rank], work)
        groups = [
            [ids[part].tolist() for part in slot for _ in range(self.cp)]
            for slot in zip(*parts, strict=True)
        ]
        return groups if config is None else (groups, groups)

    def _parts(self, lengths: list[int], work: list[int]) -> list[list[list[int]]]:
        """Return indices into `lengths` by rank and micro-batch, with as few micro-batches as fit.

        Samples are balanced over ranks first and within a rank second, because ranks wait for each
        other once per step.
        """
        every = list(range(len(lengths)))
        fewest = -(-sum(lengths) // (self.max_tokens * self.dp))
        # Retry with one more micro-batch until the samples of every rank fit.
        for num in itertools.count(max(1, fewest)):
            ranks = spread(every, lengths, work, num=self.dp, most=num * self.max_tokens)
            made = (spread(r, lengths, work, num=num, most=self.max_tokens) for r in ranks or ())
            parts = [part for part in made if part is not None]
            if len(parts) == self.dp:
                return parts
        raise AssertionError("with one micro-batch per sample all samples fit")


def spread(
    members: Sequence[int], lengths: list[int], work: list[int], *, num: int, most: int
) -> list[list[int]] | None:
    """Place samples in bins of at most `most` tokens with nearly equal work.

    Algorithm 1's greedy placement, then exchanges between bins.

    Args:
        members: Indices of the samples to place.
        lengths: Tokens of all samples.
        work: Predicted time of all samples.
        num: Number of bins.
        most: Most tokens of a bin.

    Returns:
        Indices of samples by bin; None if a sample fits into no bin.
    """
    order = sorted(members, key=lambda i: (-work[i], i))
    tokens, costs = [lengths[i] for i in order], [work[i] for i in order]
    rows, left = place(tokens, costs, num_micro_batches=num, s_max=most)
    if left:
        return None
    bins = [[order[row] for row in placed] for placed in rows]
    return refine(bins, lengths, work, s_max=most) if order else bins


def fill_empty(parts: list[list[int]], work: list[int]) -> None:
    """Move the lightest sample of the fullest part into each empty part, in place."""
    if sum(map(len, parts)) < len(parts):
        raise UserError(
            f"{sum(map(len, parts))} samples cannot fill {len(parts)} micro-batches, and Megatron "
            f"runs no empty one; give a step more samples, or fewer ranks"
        )
    for part in parts:
        if not part:
            giver = max(parts, key=len)
            lightest = min(giver, key=lambda i: (work[i], i))
            giver.remove(lightest)
            part.append(lightest)
