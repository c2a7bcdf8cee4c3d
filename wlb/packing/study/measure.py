"""Measures a policy on a stream of global batches: balance, delay, tokens, time.

Imbalance is slowest x number / total of predicted forward latency (Section 7.4), attention
(Section 3.3), or both passes, of the segments that a plan's layout makes; a time-weighted ratio
stands beside the mean, which flatters policies whose slow steps are long. Delay is per token, from
the step that was next when its batch came; early tokens count as 0 (`mean_advance` has them).
Steps of the flush are left out of imbalance, so that holding back cannot look like a gain.
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
"""Delays of at least this many iterations share a bin of the histogram; `max_delay` is exact."""
LONGEST = 0.1
"""Share of labels that count as those of the longest documents."""
DEAR = 1.6
"""Factor of attention's price in `PackingSummary.imbalance_dear`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingSummary:
    """One row of a comparison. Delays are in iterations, tokens are real tokens, times ms.

    label: the row's name; policy: the packer's. num_documents and num_tokens: that were trained.
    imbalance, imbalance_p95, imbalance_max and imbalance_time_weighted are of forward latency:
    mean, 95th percentile, maximum and time-weighted over steps; lower_bound: of the mean imbalance,
    for the same documents in the same steps; imbalance_step and step_time_weighted are of forward +
    backward; imbalance_dear: imbalance_step of the same plans if attention takes DEAR times its
    price, so that a policy's dependence on prices shows; imbalance_attention, attention_p95 and
    attention_time_weighted of attention alone.
    num_steps: without the flush. mean_delay, p99_delay, max_delay: of a token. mean_advance: of
    tokens trained before the step that was next when they came. num_overdue: pieces trained later
    than the policy's maximum. tokens_per_step: mean; tokens_cv: standard deviation / mean.
    longest_micro_batch and longest_step: in tokens. held_tokens: waiting after a step, on average.
    flushed_tokens, in flush_steps: trained when the data had ended, and left out of imbalance.
    cut_documents: trained in more than one piece. long_weight: mean weight (`label_weights`) of the
    labels of the longest documents, which hold a tenth of all labels; `training.loss_normalizer` =
    constant would make it 1; without the flush. packing_ms: mean time of a push, so that policies
    which pack several batches at once pay for each of them.
    """

    label: str
    policy: str
    num_steps: int
    num_documents: int
    num_tokens: int
    imbalance: float
    imbalance_p95: float
    imbalance_max: float
    imbalance_time_weighted: float
    imbalance_attention: float
    attention_p95: float
    attention_time_weighted: float
    imbalance_step: float
    step_time_weighted: float
    imbalance_dear: float
    lower_bound: float
    mean_delay: float
    p99_delay: int
    max_delay: int
    mean_advance: float
    num_overdue: int
    tokens_per_step: float
    tokens_cv: float
    longest_micro_batch: int
    longest_step: int
    held_tokens: float
    flushed_tokens: int
    flush_steps: int
    cut_documents: int
    long_weight: float
    packing_ms: float

    def to_json(self) -> dict[str, Any]:
        """Fields by name, for `json.dumps`."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackingRun:
    """A policy's summary and the data of plots.

    imbalance, tokens: of each step, shape [num_steps]. delay_tokens: tokens by delay in iterations,
    shape [max_delay + 1] (at most DELAY_BINS).
    """

    summary: PackingSummary
    imbalance: FloatArray
    tokens: IntArray
    delay_tokens: IntArray


class StepLoads:
    """Work of the slowest micro-batch of each step, and of all its micro-batches together."""

    def __init__(self) -> None:
        self._slowest_and_sum: list[tuple[int, int]] = []
        self._num = 1

    def add(self, work_ns: IntArray) -> float:
        """Adds a step, with work_ns of each micro-batch; returns their mean."""
        self._num = work_ns.size
        self._slowest_and_sum.append((int(work_ns.max()), int(work_ns.sum())))
        return self._slowest_and_sum[-1][1] / self._num

    @property
    def imbalance(self) -> FloatArray:
        """Imbalance of each step: 1 where it has no work, and a single 1 without a step."""
        pairs = self._slowest_and_sum or [(0, 0)]
        return np.array([a * self._num / b if b else 1.0 for a, b in pairs])

    @property
    def time_weighted(self) -> float:
        """Sum of the slowest over sum of the means."""
        slowest, total = (sum(pair[i] for pair in self._slowest_and_sum) for i in (0, 1))
        return slowest * self._num / total if total else 1.0


def measure(
    packer: Packer, batches: Iterable[GlobalBatch], *, cost: WorkloadModel, label: str = ""
) -> PackingRun:
    """Run `packer` on `batches` and the flush after them; UserError if there is nothing to
    train.
    """
    stream: list[PackingPlan] = []
    times: list[float] = []
    carry = packer.start()
    for batch in batches:
        # What ends the data is flushed and counted apart, whatever the source knows of its end.
        usual = replace(batch, is_last=False)
        began = time.perf_counter()
        plans, carry = packer.push(usual, carry)
        times.append(time.perf_counter() - began)
        stream += plans
    flush = list(packer.push(None, carry)[0])
    pieces = Pieces.concat(*(plan.pieces for plan in (*stream, *flush)))
    if not len(pieces):
        raise UserError("there are no documents to pack; check the lengths or the corpus")
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
    """Weight of a label of each step if a step's loss is the mean over its labels.

    1 is the weight that a label has if all labels count the same. labels: number of labels of each
    step; both of shape [num_steps].
    """
    even = labels.sum() / max(1, np.count_nonzero(labels))
    return even / np.maximum(1, labels)


def _balance(
    stream: Sequence[PackingPlan], cost: WorkloadModel
) -> tuple[StepLoads, dict[str, float]]:
    """Forward loads of the steps of the stream, and the summary's fields about balance."""
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
        # The bound is of the longest piece alone, in every layout: another packing could join it to
        # fewer documents or pad it less.
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
    """`PackingRun.delay_tokens` of the pieces of all plans, and the summary's fields of delay."""
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
    """`PackingSummary.long_weight`. pieces: of the stream and the flush; of_document: index of the
    document of each.
    """
    # The flush is left out: it may hold few labels, which would then have a large weight.
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
    """A number for each piece's document, from 0: ids are of a source. Shape [n]."""
    order = np.lexsort((pieces.document, pieces.source))
    keys = np.stack([pieces.source, pieces.document])[:, order]
    out = np.empty(len(pieces), np.int64)
    out[order] = np.cumsum((np.diff(keys, prepend=keys[:, :1]) != 0).any(axis=0))
    return out


def _segments(plan: PackingPlan) -> tuple[IntArray, IntArray]:
    """Lengths of all segments, shape [n], and offsets by micro-batch, [num_micro_batches + 1]."""
    if plan.layout == Layout.SEPARATE:
        return plan.pieces.length, plan.offsets
    segments = [micro_batch.lengths for micro_batch in plan.micro_batches]
    return np.concatenate(segments), offsets_of([each.size for each in segments])


def _of_micro_batches(work: IntArray, offsets: IntArray) -> IntArray:
    """Work of each micro-batch; work: of each segment in plan order."""
    running = offsets_of(work)
    return running[offsets[1:]] - running[offsets[:-1]]
