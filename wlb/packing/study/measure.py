"""How a policy does on a stream of global batches: balance, delay, tokens, time.

Imbalance is slowest x number / total of predicted forward latency (Section 7.4), attention
(Section 3.3), or both passes, of the segments that a plan's layout makes; a time-weighted ratio
stands beside the mean, which flatters policies whose slow steps are long. Delay is per token, from
the step that was next when its batch came; early tokens count as 0 (`mean_advance` has them).
Steps of the flush are left out of imbalance, so that holding back cannot look like a gain.
"""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from wlb.cost import WorkloadModel
from wlb.cost.flops import FloatArray
from wlb.packing.base import Packer
from wlb.plan import (
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
"""Delays from here on share a bin of the histogram; the maximum is exact."""
LONGEST = 0.1
"""Share of labels that count as those of the longest documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingSummary:
    """One row of a comparison. Delays are in iterations, tokens are real tokens, times ms.

    label: the row's name; policy: the packer's. num_documents and num_tokens: that were trained.
    imbalance, imbalance_p95, imbalance_max and imbalance_time_weighted are of forward latency:
    mean, 95th percentile, maximum and time-weighted over steps; lower_bound: what the mean could
    not go below with the same documents in the same steps; imbalance_step and step_time_weighted
    are of forward + backward; imbalance_attention, attention_p95 and attention_time_weighted of
    attention alone. num_steps: without the flush. mean_delay, p99_delay, max_delay: of a token.
    mean_advance: of tokens trained before the step that was next when they came. num_overdue:
    pieces trained later than the policy's maximum. tokens_per_step: mean; tokens_cv: standard
    deviation / mean. longest_micro_batch and longest_step: in tokens. held_tokens: waiting after a
    step, on average. flushed_tokens, in flush_steps: trained when the data had ended, and left out
    of imbalance. cut_documents: trained in more than one piece. long_weight: what a label of the
    longest documents (which hold a tenth of the labels) counts in the loss if every step's is the
    mean of its labels, where 1 is as if all labels counted the same, as they do with
    `training.loss_normalizer` = constant; without the flush. packing_ms: mean time of a push, so
    that policies which pack several batches at once pay for each of them.
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
    """A policy's summary and what plots need.

    imbalance, tokens: of each step, shape [num_steps]. delay_tokens: tokens by delay in iterations,
    shape [max_delay + 1] (at most DELAY_BINS).
    """

    summary: PackingSummary
    imbalance: FloatArray
    tokens: IntArray
    delay_tokens: IntArray


@dataclass(slots=True)
class PackingTally:
    """Sums over plans: `add` takes each plan once."""

    cost: WorkloadModel
    forward: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    attention: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    step: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    bound: list[float] = field(default_factory=list[float])
    tokens: list[int] = field(default_factory=list[int])
    held: list[int] = field(default_factory=list[int])
    num_micro_batches: int = 1
    longest_micro_batch: int = 0
    delay: IntArray = field(default_factory=lambda: np.zeros(DELAY_BINS, np.int64))
    delay_sum: int = 0
    longest_step: int = 0
    advance: int = 0
    max_delay: int = 0
    num_overdue: int = 0
    num_tokens: int = 0
    flushed_tokens: int = 0
    flush_steps: int = 0
    labels: list[int] = field(default_factory=list[int])
    pieces: list[Pieces] = field(default_factory=list[Pieces])

    def add(self, plan: PackingPlan, *, is_flush: bool) -> None:
        pieces = plan.pieces
        late = plan.step - pieces.arrival_step
        self.advance += int(np.where(late < 0, -late, 0) @ pieces.length)
        bins = np.clip(late, 0, DELAY_BINS - 1)
        self.delay += np.bincount(bins, pieces.length, DELAY_BINS).astype(np.int64)
        self.delay_sum += int(np.maximum(late, 0) @ pieces.length)
        self.longest_step = max(self.longest_step, plan.num_tokens)
        self.max_delay = max(self.max_delay, int(late.max(initial=0)))
        self.num_overdue += plan.num_overdue
        self.num_tokens += plan.num_tokens
        self.longest_micro_batch = max(self.longest_micro_batch, int(plan.tokens.max()))
        self.pieces.append(pieces)
        if is_flush:
            self.flushed_tokens += plan.num_tokens
            self.flush_steps += 1
            return
        self.num_micro_batches = plan.num_micro_batches
        self.tokens.append(plan.num_tokens)
        self.labels.append(plan.num_targets)
        self.held.append(plan.num_held_tokens)
        lengths, offsets = _segments(plan)
        self.forward.append(_slowest_and_total(self.cost.forward_latency_ns(lengths), offsets))
        self.attention.append(_slowest_and_total(self.cost.attention_ns(lengths), offsets))
        self.step.append((int(plan.workload_ns.max()), int(plan.workload_ns.sum())))
        mean = self.forward[-1][1] / plan.num_micro_batches
        # Of a piece in any layout: another packing could join it to less, or pad it less.
        tallest = int(self.cost.forward_latency_ns(pieces.length).max(initial=0))
        self.bound.append(max(1.0, tallest / mean if mean else 1.0))

    def ratios(self, pairs: list[tuple[int, int]]) -> FloatArray:
        """Imbalance of each step; 1 where a step has no work."""
        return np.array([a * self.num_micro_batches / b if b else 1.0 for a, b in pairs])

    def long_weight(self, pieces: Pieces, of_document: IntArray) -> float:
        """pieces: all n, in the order of plans; of_document: number of the document of each."""
        # A flush is not a step of the stream: what is left in it can be few labels of much weight.
        of_step = [len(each) for each in self.pieces[: len(self.labels)]]
        num = sum(of_step)
        targets, document = pieces.num_targets[:num], of_document[:num]
        labels = np.bincount(document, targets, of_document.max() + 1)
        longest = np.argsort(-np.bincount(of_document, pieces.length), kind="stable")
        before = np.cumsum(labels[longest]) - labels[longest]
        is_long = np.zeros(labels.size, np.bool_)
        is_long[longest[before < LONGEST * labels.sum()]] = True
        weight = np.repeat(label_weights(int_array("labels", self.labels)), of_step)
        mine = targets * is_long[document]
        return float(mine @ weight / mine.sum()) if mine.any() else 1.0

    def p99_delay(self) -> int:
        running = offsets_of(self.delay)
        most = 0.99 * float(running[-1])
        return max(0, int(np.searchsorted(running, most)) - 1)


def measure(
    packer: Packer, batches: Iterable[GlobalBatch], *, cost: WorkloadModel, label: str = ""
) -> PackingRun:
    """`packer` on `batches` and the flush after them; UserError if there is nothing to train."""
    tally = PackingTally(cost)
    times: list[float] = []
    carry = packer.start()
    for batch in batches:
        began = time.perf_counter()
        plans, carry = packer.push(batch, carry)
        times.append(time.perf_counter() - began)
        for plan in plans:
            tally.add(plan, is_flush=False)
    for plan in packer.push(None, carry)[0]:
        tally.add(plan, is_flush=True)
    if not tally.num_tokens:
        raise UserError("there are no documents to pack; check the lengths or the corpus")
    forward = tally.ratios(tally.forward) if tally.forward else np.ones(1)
    return PackingRun(
        summary=_summary(tally, forward, times, label or packer.policy, packer.policy),
        imbalance=forward,
        tokens=int_array("tokens", tally.tokens),
        delay_tokens=tally.delay[: min(DELAY_BINS, tally.max_delay + 1)],
    )


def label_weights(labels: IntArray) -> FloatArray:
    """What a label of each step counts in the loss if every step's is the mean of its labels, where
    1 is as if all labels counted the same. labels: of each step; both of shape [num_steps]."""
    even = labels.sum() / max(1, np.count_nonzero(labels))
    return even / np.maximum(1, labels)


def _summary(
    tally: PackingTally, forward: FloatArray, times: list[float], label: str, policy: str
) -> PackingSummary:
    tokens = np.array(tally.tokens or [0], np.float64)
    attention = tally.ratios(tally.attention)
    pieces = Pieces.concat(*tally.pieces)
    of_document = _documents(pieces)
    return PackingSummary(
        label=label,
        policy=policy,
        num_steps=len(tally.tokens),
        num_documents=int(of_document.max()) + 1,
        num_tokens=tally.num_tokens,
        imbalance=float(forward.mean()),
        imbalance_p95=float(np.percentile(forward, 95)),
        imbalance_max=float(forward.max()),
        imbalance_time_weighted=_time_weighted(tally.forward, tally.num_micro_batches),
        imbalance_attention=_mean(attention),
        attention_p95=float(np.percentile(attention, 95)) if attention.size else 1.0,
        attention_time_weighted=_time_weighted(tally.attention, tally.num_micro_batches),
        imbalance_step=_mean(tally.ratios(tally.step)),
        step_time_weighted=_time_weighted(tally.step, tally.num_micro_batches),
        lower_bound=_mean(np.array(tally.bound)),
        mean_delay=tally.delay_sum / tally.num_tokens,
        p99_delay=tally.p99_delay(),
        max_delay=tally.max_delay,
        mean_advance=tally.advance / tally.num_tokens,
        num_overdue=tally.num_overdue,
        tokens_per_step=float(tokens.mean()),
        tokens_cv=float(tokens.std() / tokens.mean()) if tokens.mean() else 0.0,
        longest_micro_batch=tally.longest_micro_batch,
        longest_step=tally.longest_step,
        held_tokens=float(np.mean(tally.held or [0])),
        flushed_tokens=tally.flushed_tokens,
        flush_steps=tally.flush_steps,
        cut_documents=int(np.count_nonzero(np.bincount(of_document) > 1)),
        long_weight=tally.long_weight(pieces, of_document),
        packing_ms=float(np.mean(times)) * 1e3 if times else 0.0,
    )


def _documents(pieces: Pieces) -> IntArray:
    """A number for each piece's document, from 0: ids are of a source. Shape [n]."""
    order = np.lexsort((pieces.document, pieces.source))
    source, document = pieces.source[order], pieces.document[order]
    is_next = (np.diff(source, prepend=source[:1]) != 0) | (
        np.diff(document, prepend=document[:1]) != 0
    )
    out = np.empty(len(pieces), np.int64)
    out[order] = np.cumsum(is_next)
    return out


def _time_weighted(pairs: list[tuple[int, int]], num_micro_batches: int) -> float:
    """Sum of the slowest over sum of the means."""
    total = sum(b for _, b in pairs)
    return sum(a for a, _ in pairs) * num_micro_batches / total if total else 1.0


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if values.size else 1.0


def _segments(plan: PackingPlan) -> tuple[IntArray, IntArray]:
    """Rows of every segment, and which are a micro-batch's: shapes [n], [num_micro_batches + 1]."""
    if plan.layout == Layout.SEPARATE:
        return plan.pieces.length, plan.offsets
    segments = [micro_batch.lengths for micro_batch in plan.micro_batches]
    return np.concatenate(segments), offsets_of([each.size for each in segments])


def _slowest_and_total(work: IntArray, offsets: IntArray) -> tuple[int, int]:
    """(most, sum) of the micro-batches' work; work: of each segment in plan order."""
    running = np.concatenate([[0], np.cumsum(work)])
    each = running[offsets[1:]] - running[offsets[:-1]]
    return int(each.max()), int(each.sum())
