"""Measures a policy on a stream of global batches: balance, delay, tokens and packing time.

The imbalance of a step is the slowest micro-batch over the mean. It is computed for the predicted
forward latency (Section 7.4), for attention alone (Section 3.3), and for both passes. In the usual
mean over steps, a step that takes long counts no more than a fast step. So a time-weighted mean is
computed too, in which steps count in proportion to their work.

The delay of a token is counted in steps. It is the index of the step that trains the token, minus
the index of the step that was next when its global batch arrived. If this is negative, the token
has no delay, but counts in `mean_advance`.

Steps of the flush are left out of imbalance. A long run has only few of them, but in a sample of a
few batches they would count for much.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from wlb.cost import WorkloadModel
from wlb.packing.base import Packer
from wlb.plan import (
    FloatArray,
    GlobalBatch,
    IntArray,
    Layout,
    PackingPlan,
    Pieces,
    UserError,
    int_array,
    offsets_of,
)

DELAY_BINS = 1024
"""Number of bins in the histogram of delays. Bin d counts tokens that were delayed by d steps, and
the last bin counts all longer delays."""
LONGEST = 0.1
"""For `PackingSummary.long_weight`, the longest documents are those that together have this share
of all labels."""
DEAR = 1.6
"""`PackingSummary.imbalance_dear` assumes that attention takes its predicted time times this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingSummary:
    """How well a policy packed a stream of global batches. Delays are counted in steps."""

    label: str  # name of the packing, in the first column of tables
    policy: str  # name of the policy
    num_steps: int  # steps, without the flush
    num_documents: int  # documents that were trained
    num_tokens: int  # tokens that were trained, without padding

    # Imbalance of predicted forward latency, over steps.
    imbalance: float  # unweighted mean over steps
    imbalance_p95: float  # 95th percentile over steps
    imbalance_max: float  # largest imbalance of a step
    imbalance_time_weighted: float  # mean over steps, weighted by their work

    # Imbalance of attention alone, over steps.
    imbalance_attention: float  # unweighted mean over steps
    attention_p95: float  # 95th percentile over steps
    attention_time_weighted: float  # mean over steps, weighted by their work

    # Imbalance of forward and backward together, over steps.
    imbalance_step: float  # unweighted mean over steps
    step_time_weighted: float  # mean over steps, weighted by their work
    # unweighted mean over steps, if attention takes DEAR times as long as predicted
    imbalance_dear: float

    lower_bound: float  # least `imbalance` of any packing of the same documents in the same steps

    mean_delay: float  # mean delay of a token
    p99_delay: int  # 99th percentile of the delay of tokens
    max_delay: int  # longest delay of a token
    # By how many steps a token is trained before the step from which its delay is counted (mostly
    # the step that is next when its global batch arrives). Mean over all tokens; a token that is
    # not trained earlier counts as 0.
    mean_advance: float
    num_overdue: int  # pieces that were trained later than the policy's maximum delay

    tokens_per_step: float  # mean number of tokens of a step
    tokens_cv: float  # standard deviation of the tokens of a step, divided by their mean
    longest_micro_batch: int  # tokens of the longest micro-batch
    longest_step: int  # tokens of the longest step
    held_tokens: float  # tokens that wait after a step, on average
    flushed_tokens: int  # tokens trained after the end of the data
    flush_steps: int  # steps made after the end of the data
    cut_documents: int  # documents that were trained in more than one piece

    # Mean weight (`label_weights`) of the labels of the longest documents, without the flush.
    # With `training.loss_normalizer` = "constant" every label would have weight 1.
    long_weight: float
    packing_ms: float  # mean time in ms to pack a global batch

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, for `json.dumps`."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackingRun:
    """The results of a policy on a stream of global batches: a summary, and data for plots."""

    summary: PackingSummary
    imbalance: FloatArray  # forward imbalance of each step, shape [num_steps]
    tokens: IntArray  # tokens of each step, shape [num_steps]
    # delay_tokens[d] is the number of tokens that were delayed by d steps, up to the longest delay.
    # There are at most DELAY_BINS entries; longer delays are counted in the last one.
    delay_tokens: IntArray


class StepLoads:
    """Collects the work of each step's micro-batches, and computes the imbalance of steps."""

    def __init__(self) -> None:
        self._slowest_and_sum: list[tuple[int, int]] = []
        self._num = 1

    def add(self, work_ns: IntArray) -> float:
        """Add a step, and return the mean work of its micro-batches.

        Args:
            work_ns: Work of each micro-batch of the step.
        """
        self._num = work_ns.size
        self._slowest_and_sum.append((int(work_ns.max()), int(work_ns.sum())))
        return self._slowest_and_sum[-1][1] / self._num

    @property
    def imbalance(self) -> FloatArray:
        """Slowest micro-batch over the mean, for each step, shape [num_steps].

        The value is 1 for a step without work. If there is no step, the array has a single 1.
        """
        pairs = self._slowest_and_sum or [(0, 0)]
        return np.array([a * self._num / b if b else 1.0 for a, b in pairs])

    @property
    def time_weighted(self) -> float:
        """Mean imbalance of all steps, weighted by their work.

        It is the work of the slowest micro-batch of each step, summed over steps, divided by the
        mean work of a micro-batch of each step, also summed over steps.
        """
        slowest, total = (sum(pair[i] for pair in self._slowest_and_sum) for i in (0, 1))
        return slowest * self._num / total if total else 1.0


def measure(
    packer: Packer, batches: Iterable[GlobalBatch], *, cost: WorkloadModel, label: str = ""
) -> PackingRun:
    """Pack a stream of global batches to its end, and measure the plans that were made.

    Args:
        packer: The policy to measure.
        batches: The stream of global batches.
        cost: Workload model that predicts latencies.
        label: Name of the result in a comparison. Defaults to the policy's name.

    Raises:
        UserError: If there are no documents to pack.
    """
    stream: list[PackingPlan] = []
    times: list[float] = []
    carry = packer.start()
    for batch in batches:
        # Hide from the policy that a batch is the last one. Otherwise `bounded` would train the
        # waiting documents together with this batch. Results leave out the flush, which is only
        # possible if it has its own steps, as with the other policies.
        usual = replace(batch, is_last=False)
        began = time.perf_counter()
        plans, carry = packer.push(usual, carry)
        times.append(time.perf_counter() - began)
        stream += plans
    flush = list(packer.push(None, carry)[0])
    pieces = Pieces.concat(*(plan.pieces for plan in (*stream, *flush)))
    if not len(pieces):
        raise UserError(
            "there are no documents to pack, because the corpus or the list of lengths is empty; "
            "give at least one document"
        )
    forward, of_loads = _balance(stream, cost)
    delay_tokens, of_delay = _delay([*stream, *flush], pieces)
    document = _documents(pieces)
    tokens = int_array("tokens", [plan.num_tokens for plan in stream])
    some_tokens = tokens if tokens.size else np.zeros(1)
    mean_tokens = float(some_tokens.mean())
    summary = PackingSummary(
        **of_loads,
        **of_delay,
        label=label or packer.policy,
        policy=packer.policy,
        num_steps=len(stream),
        num_documents=int(document.max()) + 1,
        num_tokens=pieces.num_tokens,
        num_overdue=sum(plan.num_overdue for plan in (*stream, *flush)),
        tokens_per_step=mean_tokens,
        tokens_cv=float(some_tokens.std() / mean_tokens) if mean_tokens else 0.0,
        longest_micro_batch=max(int(plan.tokens.max()) for plan in (*stream, *flush)),
        longest_step=max(plan.num_tokens for plan in (*stream, *flush)),
        held_tokens=float(np.mean([plan.num_held_tokens for plan in stream] or [0])),
        flushed_tokens=sum(plan.num_tokens for plan in flush),
        flush_steps=len(flush),
        cut_documents=int(np.count_nonzero(np.bincount(document) > 1)),
        long_weight=_long_weight(stream, pieces, document),
        packing_ms=float(np.mean(times)) * 1e3 if times else 0.0,
    )
    return PackingRun(
        summary=summary, imbalance=forward.imbalance, tokens=tokens, delay_tokens=delay_tokens
    )


def label_weights(labels: IntArray) -> FloatArray:
    """Return, for each step, the weight that one of its labels has in training.

    The loss of a step is assumed to be the mean over its labels. So a label weighs more in a step
    with few labels than in a step with many. The mean weight of all labels is 1.

    Args:
        labels: Number of labels of each step, shape [num_steps].

    Returns:
        Weights, shape [num_steps].
    """
    even = labels.sum() / max(1, np.count_nonzero(labels))
    return even / np.maximum(1, labels)


def _balance(
    stream: Sequence[PackingPlan], cost: WorkloadModel
) -> tuple[StepLoads, dict[str, float]]:
    """Compute the balance of all steps.

    Args:
        stream: The plans of the steps.
        cost: Workload model that predicts times.

    Returns:
        The predicted forward times of all steps, and the fields of `PackingSummary` about balance
        by name.
    """
    forward, attention, both, dear = StepLoads(), StepLoads(), StepLoads(), StepLoads()
    bounds: list[float] = []
    for plan in stream:
        lengths, offsets = _segments(plan)
        mean = forward.add(_of_micro_batches(cost.forward_latency_ns(lengths), offsets))
        of_attention = _of_micro_batches(cost.attention_ns(lengths), offsets)
        attention.add(of_attention)
        both.add(plan.workload_ns)
        more = np.rint((DEAR - 1) * of_attention).astype(np.int64)
        dear.add(plan.workload_ns + more)
        # No packing makes a step faster than its longest piece alone. This lower bound leaves out
        # padding and attention between joined documents, because another packing might need less.
        tallest = int(cost.forward_latency_ns(plan.pieces.length).max(initial=0))
        bounds.append(max(1.0, tallest / mean if mean else 1.0))
    return forward, {
        "imbalance": float(forward.imbalance.mean()),
        "imbalance_p95": float(np.percentile(forward.imbalance, 95)),
        "imbalance_max": float(forward.imbalance.max()),
        "imbalance_time_weighted": forward.time_weighted,
        "imbalance_attention": float(attention.imbalance.mean()),
        "attention_p95": float(np.percentile(attention.imbalance, 95)),
        "attention_time_weighted": attention.time_weighted,
        "imbalance_step": float(both.imbalance.mean()),
        "step_time_weighted": both.time_weighted,
        "imbalance_dear": float(dear.imbalance.mean()),
        "lower_bound": float(np.mean(bounds or [1.0])),
    }


def _delay(plans: Sequence[PackingPlan], pieces: Pieces) -> tuple[IntArray, dict[str, Any]]:
    """Compute the delays of all tokens.

    Args:
        plans: The plans of all steps.
        pieces: The pieces of these plans, in the same order.

    Returns:
        The number of tokens with each delay (0, 1, ... steps), and the fields of `PackingSummary`
        about delay by name.
    """
    step = np.repeat([plan.step for plan in plans], [len(plan.pieces) for plan in plans])
    late = step - pieces.arrival_step
    delay, length = np.maximum(late, 0), pieces.length
    max_delay = int(delay.max())
    bins = np.minimum(delay, DELAY_BINS - 1)
    delay_tokens = np.bincount(bins, length, min(DELAY_BINS, max_delay + 1)).astype(np.int64)
    running = offsets_of(delay_tokens)
    most = 0.99 * float(running[-1])
    return delay_tokens, {
        "mean_delay": int(delay @ length) / pieces.num_tokens,
        "p99_delay": max(0, int(np.searchsorted(running, most)) - 1),
        "max_delay": max_delay,
        "mean_advance": int((delay - late) @ length) / pieces.num_tokens,
    }


def _long_weight(stream: Sequence[PackingPlan], pieces: Pieces, of_document: IntArray) -> float:
    """Return the mean weight in the loss that a label of the longest documents has.

    The longest documents are those that together have the share LONGEST of all labels. A label
    weighs more in a step with few labels (`label_weights`).

    Args:
        stream: The plans before the flush.
        pieces: The pieces of these plans, followed by those of the flush.
        of_document: Index of each piece's document, shape [num_pieces].
    """
    # The flush is left out: it may have few labels, which would then have a large weight.
    of_step = [len(plan.pieces) for plan in stream]
    num = sum(of_step)
    targets, document = pieces.num_targets[:num], of_document[:num]
    labels = np.bincount(document, targets, of_document.max() + 1)
    longest = np.argsort(-np.bincount(of_document, pieces.length), kind="stable")
    before = np.cumsum(labels[longest]) - labels[longest]
    is_long = np.zeros(labels.size, np.bool_)
    is_long[longest[before < LONGEST * labels.sum()]] = True
    labels_of_steps = int_array("labels", [plan.num_targets for plan in stream])
    weight = np.repeat(label_weights(labels_of_steps), of_step)
    mine = targets * is_long[document]
    return float(mine @ weight / mine.sum()) if mine.any() else 1.0


def _documents(pieces: Pieces) -> IntArray:
    """Number the documents from 0, and return the number of each piece's document, [num_pieces].

    `Pieces.document` is not enough, because two sources may have documents with equal ids.
    """
    order = np.lexsort((pieces.document, pieces.source))
    keys = np.stack([pieces.source, pieces.document])[:, order]
    out = np.empty(len(pieces), np.int64)
    out[order] = np.cumsum((np.diff(keys, prepend=keys[:, :1]) != 0).any(axis=0))
    return out


def _segments(plan: PackingPlan) -> tuple[IntArray, IntArray]:
    """Return the attention segments of a plan's micro-batches.

    Returns:
        The lengths of all segments, shape [n], and offsets of shape [num_micro_batches + 1].
        Micro-batch i has the segments from offsets[i] to offsets[i + 1].
    """
    if plan.layout == Layout.SEPARATE:
        return plan.pieces.length, plan.offsets
    segments = [micro_batch.lengths for micro_batch in plan.micro_batches]
    return np.concatenate(segments), offsets_of([each.size for each in segments])


def _of_micro_batches(work: IntArray, offsets: IntArray) -> IntArray:
    """Return the work of each micro-batch: the sum over its attention segments.

    Args:
        work: Work of each segment, in the order of micro-batches, shape [n].
        offsets: Micro-batch i has the segments from offsets[i] to offsets[i + 1].
    """
    running = offsets_of(work)
    return running[offsets[1:]] - running[offsets[:-1]]
