"""Balanced packed (THD) micro-batches for Megatron-Core, in three levels of integration.

    steps = PackedSteps(planner, reader, dp_rank=dp_rank, cp=cp, tp=tp, config=config)
    data_iterator, num_microbatches, tokens, squares = steps.next()

`PackedSteps` plans the micro-batches; `next` returns what Megatron's `wrap_data_iterator` returns.
`squares` is the sum of squared document lengths, from which Megatron computes attention FLOPs.
Every rank plans the same steps, so ranks need not exchange lengths or samples. `PlannedP2P` takes
the shapes of pipeline messages from the plan. `BalancedScheduler` is for loops that keep Megatron's
own sampling.

Transformer Engine (TE) divides each document over CP ranks by its own rule: every rank gets one
chunk from the first half and the mirrored chunk from the second half. So wlb balances only
micro-batches and data-parallel ranks here.
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
    """Raise UserError if Megatron would average the losses of micro-batches.

    Balanced micro-batches have different numbers of tokens, so tokens of short micro-batches would
    weigh more.

    Args:
        config: Megatron's configuration; `calculate_per_token_loss` must be True.
    """
    if getattr(config, "calculate_per_token_loss", None) is False:
        raise UserError(
            "config.calculate_per_token_loss = False divides the loss of each micro-batch by its "
            "own number of tokens, so tokens of short micro-batches would weigh more; set "
            "calculate_per_token_loss to True (--calculate-per-token-loss) and let loss_func "
            "return (sum of losses, tokens, report)"
        )


def padded_lengths(lengths: IntArray, *, cp: int, tp: int = 1) -> IntArray:
    """Return the padded length of each document, a multiple of 2 x cp (no padding for cp = 1).

    TE divides each document into 2 x cp equal chunks. The last document gets more padding, so that
    the tokens of each CP rank can be divided by tp.

    Args:
        lengths: Tokens of each document, shape [num_documents].
        cp: Context-parallel ranks.
        tp: Tensor-parallel ranks, among which sequence parallelism divides a CP rank's tokens.
    """
    multiple = 2 * cp if cp > 1 else 1
    out = -(-lengths // multiple) * multiple
    all_ranks = multiple * tp
    out[-1] += -int(out.sum()) % all_ranks
    return out


def thd_batch(
    micro_batch: MicroBatch, reader: TokenReader, *, cp: int, tp: int = 1, pad_token_id: int = 0
) -> dict[str, Tensor]:
    """Return a whole micro-batch, before it is divided over CP ranks, as a Megatron packed batch.

    T is the number of tokens with padding. An empty micro-batch becomes one document of padding.

    Args:
        micro_batch: The micro-batch of the plan.
        reader: Reads the documents' tokens and labels.
        cp: Context-parallel ranks; lengths are padded for them (`padded_lengths`).
        tp: Tensor-parallel ranks; lengths are padded for them as well.
        pad_token_id: Token that is used as padding.

    Returns:
        tokens, labels, position_ids: int64 [1, T].
        loss_mask: float32 [1, T], 0 on padding and on tokens that are not trained.
        cu_seqlens, cu_seqlens_padded: int32 [num_documents + 1], document offsets without and with
        padding.
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
    """Return the indices of the tokens that a CP rank computes.

    Each document has 2 * cp equal chunks; a rank gets the chunks `rank` and 2 * cp - 1 - rank. TE's
    `thd_get_partitioned_indices` returns the same indices.

    Args:
        cu_seqlens_padded: Offsets of the documents with padding, shape [num_documents + 1].
        cp: Context-parallel ranks.
        rank: Rank within the CP group.
    """
    starts, lengths = cu_seqlens_padded[:-1], np.diff(cu_seqlens_padded)
    if cp == 1:
        return ranges(starts, starts + lengths)
    chunk = lengths // (2 * cp)
    first = np.stack([starts + rank * chunk, starts + (2 * cp - 1 - rank) * chunk], 1).ravel()
    return ranges(first, first + np.repeat(chunk, 2))


def on_cp_rank(batch: dict[str, Tensor], *, cp: int, rank: int) -> dict[str, Tensor]:
    """Return the part of a whole micro-batch that one CP rank computes.

    cu_seqlens still describe whole documents, as TE expects.

    Args:
        batch: The whole micro-batch, from `thd_batch`.
        cp: Context-parallel ranks.
        rank: Rank within the CP group.
    """
    starts = batch["cu_seqlens_padded"].numpy().astype(np.int64)
    rows = torch.from_numpy(cp_rows(starts, cp=cp, rank=rank))
    cut = ("tokens", "labels", "loss_mask", "position_ids")
    return {name: x[:, rows] if name in cut else x for name, x in batch.items()}


def packed_seq_params(batch: dict[str, Tensor]) -> PackedSeqParams:
    """Return Megatron's description of the packed documents for attention and RoPE.

    It is the same on all CP ranks.

    Args:
        batch: A batch from `thd_batch` or `on_cp_rank`.
    """
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
    """Plans every step and returns this data-parallel rank's micro-batches of it.

    `state_dict` is equal on all ranks and does not depend on their number, so a run can resume
    exactly on any number of ranks.

    Args:
        planner: A planner with dp = the number of data-parallel ranks. Its cp must be 1, because TE
            divides documents over CP ranks, not the planner.
        reader: Reads tokens and labels.
        dp_rank: This data-parallel rank.
        cp: Context-parallel ranks.
        tp: Tensor-parallel ranks.
        pad_token_id: Token that is used as padding.
        config: Megatron's configuration, which is only checked: `calculate_per_token_loss` must be
            True, because micro-batches have different numbers of tokens and Megatron's default
            weighs micro-batches equally. `loss_func` must then return (sum of losses, tokens,
            report).
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
        # The step that `next` returned most recently; `shapes` describes it.
        self._plan = cast(StepPlan | None, None)

    def next(self) -> tuple[Iterator[dict[str, Tensor]], int, float, float]:
        """Return the next step's micro-batches of this rank.

        Returns:
            An iterator over this rank's THD batches in execution order; their number; the number of
            tokens of the step on all ranks; and the sum of squared document lengths on all ranks,
            from which Megatron computes attention FLOPs.

        Raises:
            StopIteration: The data has ended.
        """
        plan = self.planner.next(self._state)
        if plan is None:
            raise StopIteration("the planner's data has ended; set more epochs to train longer")
        self._plan, self._state = plan, plan.state
        lengths = plan.packing.pieces.length.astype(np.float64)
        batches = (
            thd_batch(m, self.reader, cp=self.cp, tp=self.tp, pad_token_id=self.pad_token_id)
            for m in micro_batches_of(plan, self.dp_rank)
        )
        return batches, plan.pipelines.shape[1], float(lengths.sum()), float((lengths**2).sum())

    def shapes(self, *, hidden_size: int, sequence_parallel: bool = False) -> list[Shape]:
        """Return the shapes of pipeline activations in the step that `next` returned most recently.

        Pass them to `PlannedP2P.begin`.

        Args:
            hidden_size: Width of the activations.
            sequence_parallel: Whether tokens are divided over TP ranks.

        Returns:
            For each micro-batch of this rank, in execution order: (tokens of one rank, 1,
            hidden_size).
        """
        if self._plan is None:
            raise RuntimeError(
                "no step was planned yet, so there are no shapes; call next before shapes"
            )
        parts = self.cp * (self.tp if sequence_parallel else 1)
        out: list[Shape] = []
        for m in micro_batches_of(self._plan, self.dp_rank):
            lengths = m.lengths if m.lengths.size else np.ones(1, np.int64)
            rows = int(padded_lengths(lengths, cp=self.cp, tp=self.tp).sum())
            out.append((rows // parts, 1, hidden_size))
        return out


class PlannedP2P(P2PCommunicator):
    """Megatron's pipeline communicator, changed to take the shapes of messages from the plan.

    Stages then need not send shapes to each other, which saves a round trip per message. The
    schedule must be 1F1B without virtual stages, and `config.variable_seq_lengths` must be True.
    Call `begin` before every forward-backward call with the shapes of all its micro-batches. If
    more micro-batches are received than announced, RuntimeError is raised at once; if fewer are
    received, the next `begin` raises it.
    """

    _shapes: Sequence[Shape] = ()
    _num_received: Sequence[int] = (0, 0)  # micro-batches received in forward and in backward

    def begin(self, shapes: Sequence[Shape]) -> None:
        """Announce the micro-batches of Megatron's next forward-backward call.

        Args:
            shapes: Activation shape of each of this pipeline's micro-batches, in execution order.
        """
        check_loss(self.config)
        if not self.config.variable_seq_lengths:
            raise UserError(
                "config.variable_seq_lengths = False makes Megatron expect seq_length tokens in "
                "every micro-batch, but balanced micro-batches have different lengths; set "
                "variable_seq_lengths to True"
            )
        if self.virtual_pipeline_model_parallel_size is not None:
            raise UserError(
                "virtual_pipeline_model_parallel_size = "
                f"{self.virtual_pipeline_model_parallel_size} is not supported by PlannedP2P, "
                "which expects the order of 1F1B without virtual stages; use Megatron's "
                "P2PCommunicator, which exchanges shapes"
            )
        for received in self._num_received:
            if 0 < received < len(self._shapes):
                raise RuntimeError(
                    f"only {received} of the previous step's {len(self._shapes)} micro-batches "
                    "were received; give PlannedP2P.begin exactly the shapes of the "
                    "micro-batches that run"
                )
        self._shapes, self._num_received = list(shapes), [0, 0]

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Return the shapes of the next activation and the next gradient to receive.

        A shape is [0, 0, 0] if nothing is received in that direction. This overrides Megatron's
        method, which exchanges shapes with the neighbouring stages.
        """
        return self._known(0, receives=recv_prev), self._known(1, receives=recv_next)

    def _known(self, direction: int, *, receives: bool) -> list[int]:
        """Return the shape of the next message to receive in one direction.

        Args:
            direction: 0 for forward (activations), 1 for backward (gradients).
            receives: Whether a message is received; if not, the result is [0, 0, 0].
        """
        if not receives:
            return [0, 0, 0]
        at = self._num_received[direction]
        if at >= len(self._shapes):
            raise RuntimeError(
                "more micro-batches were received than PlannedP2P.begin got shapes for; call "
                "begin before every forward-backward with the shapes of all its micro-batches"
            )
        self._num_received = [n + (i == direction) for i, n in enumerate(self._num_received)]
        return list(self._shapes[at])


class BalancedScheduler:
    """Replaces Megatron's schedulers of packed samples; balances work instead of tokens.

    Use it if each step must train exactly the samples that Megatron draws for it. Because no sample
    is delayed to a later step, a sample with more work than the mean of all ranks makes the other
    ranks wait.

    Args:
        dp: Data-parallel ranks.
        cp: Context-parallel ranks.
        max_tokens: Most tokens of a micro-batch, counted over all its CP ranks.
        cost: Predicts the time of a sample from its length.
    """

    def __init__(
        self, *, dp: int, cp: int = 1, max_tokens: int, cost: WorkloadModel = LLAMA2_7B
    ) -> None:
        self.dp, self.cp, self.max_tokens, self.cost = dp, cp, max_tokens, cost

    def get_groups_and_subsamples(
        self, sample_id_seqlens: Sequence[tuple[int, int]], config: Any = None
    ) -> Any:
        """Divide the samples of a step into micro-batches, as few as max_tokens allows.

        Args:
            sample_id_seqlens: Id and tokens of each sample of the step.
            config: Megatron's configuration, which Megatron-Core 0.16 passes. If it is given, the
                result is the groups twice, as that version expects.

        Returns:
            groups, where groups[i][r] lists the ids of the samples (at least one) in the i-th
            micro-batch of rank r; r counts all dp x cp ranks. Ranks of a CP group have the same
            samples. If `config` is given, the result is (groups, groups).

        Raises:
            UserError: A sample is longer than max_tokens, or there are fewer samples than
                micro-batches.
        """
        ids, lengths = np.array(sample_id_seqlens, np.int64).reshape(-1, 2).T
        if lengths.size and lengths.max() > self.max_tokens:
            bad = int(lengths.argmax())
            raise UserError(
                f"sample {ids[bad]} has {lengths[bad]} tokens, more than max_tokens = "
                f"{self.max_tokens} of a micro-batch; truncate the sample or raise max_tokens"
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
        """Return the samples of each micro-batch of each rank, in as few micro-batches as possible.

        Samples are balanced over ranks first and then within each rank, because data-parallel ranks
        wait for each other only once per step.

        Args:
            lengths: Tokens of each sample.
            work: Predicted time of each sample.

        Returns:
            parts[rank][i]: indices into `lengths` of the rank's i-th micro-batch.
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
    """Divide samples into `num` bins of nearly equal work and at most `most` tokens each.

    Samples are placed as in the paper's Algorithm 1: by descending work, each into the bin with the
    least work. Afterwards samples are moved and swapped between bins to improve the balance.

    Args:
        members: Indices of the samples to place.
        lengths: Tokens of each sample, also of samples that are not placed.
        work: Predicted time of each sample, also of samples that are not placed.
        num: Number of bins.
        most: Most tokens of a bin.

    Returns:
        Indices of the samples in each bin; None if the samples do not fit.
    """
    order = sorted(members, key=lambda i: (-work[i], i))
    tokens, costs = [lengths[i] for i in order], [work[i] for i in order]
    rows, left = place(tokens, costs, num_micro_batches=num, s_max=most)
    if left:
        return None
    bins = [[order[row] for row in placed] for placed in rows]
    return refine(bins, lengths, work, s_max=most) if order else bins


def fill_empty(parts: list[list[int]], work: list[int]) -> None:
    """Move a sample into each empty micro-batch, in place.

    The sample comes from the micro-batch with the most samples, and is the one with the least work
    there.

    Args:
        parts: Indices of the samples of each micro-batch.
        work: Predicted time of each sample.

    Raises:
        UserError: There are fewer samples than micro-batches.
    """
    if sum(map(len, parts)) < len(parts):
        raise UserError(
            f"a step of {sum(map(len, parts))} samples cannot fill {len(parts)} micro-batches, "
            "and Megatron runs no empty micro-batch; give each step more samples, or use fewer "
            "ranks"
        )
    for part in parts:
        if not part:
            giver = max(parts, key=len)
            lightest = min(giver, key=lambda i: (work[i], i))
            giver.remove(lightest)
            part.append(lightest)
