"""Planner: packing, dealing and sharding composed into StepPlans. The only composer, torch-free.

`start()` gives the state before the first step; `next(state)` the next StepPlan, which carries the
state after it, or None when everything was flushed. Both are pure, so plans can be made ahead, in
another process, and again from the state that a checkpoint stored. `shard(plan, pipeline)` adds the
spans of one pipeline, lazily. A plan's labels are counted when `next` returns it (`counted`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

# Names of these rooms are imported when they are used: a list of lengths needs few of them.
from wlb import cost as prices
from wlb import data, packing, planner, sharding
from wlb.cost import LLAMA2_7B, WorkloadModel
from wlb.plan import (
    Carry,
    GlobalBatch,
    IntArray,
    IntLike,
    PackingPlan,
    Pieces,
    PipelinePlan,
    PlannerState,
    PlanProgress,
    StepMetrics,
    StepPlan,
    UserError,
    convert_to_ints,
    int_array,
    merge,
    predict,
)
from wlb.spec import ExchangeChoice, Remainder, RunSpec, Strategy

WORK_FOR_TOKENS = 1.001
WORK_FOR_UNEVEN_TOKENS = 1.005
EVEN_TOKENS = 1.05
"""Memory is planned for pipelines of at most 1 / UNEVEN_TOKENS = 1.14 times the mean's tokens
(`wlb.memory`); 0.1% of work alone leaves up to 1.2."""
MAX_PAIRS = 1 << 22
"""Most exchanges that are evaluated; bounds the time if pipelines have hundreds of
micro-batches."""


class BatchSource(Protocol):
    """Global batches with explicit state (`wlb.data.GlobalBatches`)."""

    def start(self) -> dict[str, Any]: ...

    def next(self, state: dict[str, Any]) -> tuple[GlobalBatch, dict[str, Any]] | None: ...


@runtime_checkable
class TargetCounter(Protocol):
    """A source of global batches that can count labels (`wlb.data.GlobalBatches`)."""

    @property
    def has_targets(self) -> bool: ...

    def count_targets(self, pieces: Pieces) -> IntArray: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Makes global step plans.

    source: of global batches. packer: the policy. cost: workload model used for balancing.
    strategy: `sharding.strategy`. remainder: `sharding.remainder`, the treatment of tokens left
    over by equal chunks. exchange: `sharding.exchange`. dp: pipelines that the micro-batches are
    dealt to. meets: neighbouring ones of them whose ranks meet in layers with experts. cp: ranks
    that a micro-batch is sharded over. row_multiple: a rank's rows are a multiple of it. baseline:
    a second packer on the same stream, which only predicts, or None.
    """

    source: BatchSource
    packer: packing.Packer
    baseline: packing.Packer | None
    cost: WorkloadModel
    strategy: str = "adaptive"
    remainder: Remainder = Remainder.MERGED
    exchange: ExchangeChoice = ExchangeChoice.GATHER
    dp: int = 1
    meets: int = 1
    cp: int = 1
    row_multiple: int = 1

    def __post_init__(self) -> None:
        convert_to_ints(self, dp=1, cp=1, row_multiple=1)
        if self.packer.num_micro_batches % self.dp:
            raise UserError(
                f"{self.packer.num_micro_batches} micro-batches cannot be dealt to dp = {self.dp} "
                f"pipelines equally; use a multiple of {self.dp}"
            )
        if self.strategy not in tuple(Strategy):
            raise UserError(
                f"unknown sharding strategy {self.strategy!r}; known: {', '.join(Strategy)}"
            )

    @classmethod
    def from_spec(cls, spec: RunSpec, source: BatchSource, cost: WorkloadModel) -> Planner:
        """The planner of a run; `spec.parallel.dp` must be filled in."""
        return cls(
            source=source,
            packer=packing.packer_for(spec, cost),
            baseline=packing.baseline_for(spec, cost) if spec.planner.baseline else None,
            cost=cost,
            strategy=str(spec.sharding.strategy),
            remainder=spec.sharding.remainder,
            exchange=spec.sharding.exchange,
            dp=max(1, spec.parallel.dp),
            meets=spec.parallel.pipelines_per_ep_group,
            cp=spec.parallel.cp,
            row_multiple=spec.row_multiple,
        )

    @classmethod
    def for_lengths(
        cls,
        lengths: IntLike | data.Source,
        *,
        context_window: int,
        num_micro_batches: int,
        cp: int = 1,
        dp: int = 1,
        row_multiple: int = 1,
        cost: prices.Cost = LLAMA2_7B,
        strategy: str = "adaptive",
        s_max: int | None = None,
        step_tokens: int | None = None,
        max_delay: int = 10,
        queue_thresholds: tuple[int, ...] | None = None,
        long_documents: str = "split",
        epochs: int = 1,
        shuffle: bool = False,
        seed: int = 0,
    ) -> Planner:
        """A planner over documents of these lengths (tokens), in this order; see README.

        lengths: or their source. Give a `TokenStore` itself, not its lengths, wherever its tokens
        are read: states then know its tokens, and plans count the labels that it trains.
        A piece's document is its place in `lengths`, plus their number for every epoch before.
        Steps take N x C tokens each, N micro-batches and C = context_window; the last ones flush.
        cost: a form of `balance_step`'s that prices pieces, such as the path of your model's
        config.json; the default is the ratio of attention
        to linear FLOPs of LLaMA2-7B, on a GPU's tiles of 128 queries. Packing is
        `bounded`: s_max tokens of the longest micro-batch (1.5 windows by default), step_tokens of
        a step (N x s_max), max_delay steps. With queue_thresholds (tokens; may be empty) it is
        Algorithm 1 with those queues, and max_delay is not used. long_documents: "split" or
        "refuse" those above a window. shuffle: another order every epoch, of `seed`.
        """
        # Forms of a cost that are no workload are read with kernel profiles at hand.
        is_model = hasattr(cost, "workload_ns")
        model = cast(WorkloadModel, cost) if is_model else prices.workload_model(cost)
        options = packing.PackerOptions(
            num_micro_batches=num_micro_batches,
            context_window=context_window,
            cost=model,
            long_documents=long_documents,
            seed=seed,
        )
        caps: dict[str, Any] = {
            "options": options,
            "s_max": context_window * 3 // 2 if s_max is None else s_max,
            "step_tokens": step_tokens,
        }
        if queue_thresholds is None:
            packer = packing.BoundedPacker(**caps, max_delay=max_delay)
        else:
            thresholds = tuple(int_array("queue_thresholds", queue_thresholds).tolist())
            packer = packing.VarLenPacker(**caps, queue_thresholds=thresholds)
        source = data.GlobalBatches(
            lengths if isinstance(lengths, data.Source) else _source_of(lengths),
            tokens_per_batch=options.tokens_per_step,
            seed=seed,
            epochs=epochs,
            shuffle=shuffle,
        )
        return cls(
            source=source,
            packer=packer,
            baseline=packing.OriginalPacker(options=options),
            cost=model,
            strategy=strategy,
            dp=dp,
            cp=cp,
            row_multiple=row_multiple,
        )

    @property
    def packers(self) -> tuple[packing.Packer, ...]:
        """Those of the steps and of their baseline."""
        return tuple(packer for packer in (self.packer, self.baseline) if packer)

    def start(self) -> PlannerState:
        """The state before the first step."""
        packer = self.baseline or self.packer
        return PlannerState(
            carry=self.packer.start(), baseline=packer.start(), corpus=self.source.start()
        )

    def steps(self, state: PlannerState | None = None) -> Iterator[StepPlan]:
        """Plans from `state` (default: the start) to the end of data.

        A state whose data had ended goes on if the planner has more epochs now. UserError for a
        state that contradicts itself or the data (`wlb.planner.resume`).
        """
        if state is not None:
            planner.hold_state(state, self.source, own=self.packers)
        at = state or self.start()
        # What the state has planned comes first: its plans are those of the run that ended.
        had_ended = at.exhausted
        while True:
            plan = self.next(at)
            if plan is not None:
                yield plan
                at = plan.state
            elif had_ended:
                at, had_ended = at.reopened(), False
            else:
                return

    def next(self, state: PlannerState) -> StepPlan | None:
        """The plan of step `state.next_step`; None after the last one."""
        state = self._split_again(state)
        while not state.ready and not state.exhausted:
            state = self._push(state)
        if not state.ready:
            return None
        plan = counted(state.ready[0], self.source)
        baseline, rest = self._baseline(state, plan.step)
        after = replace(
            state,
            ready=state.ready[1:],
            baseline_made=rest,
            num_tokens=state.num_tokens + plan.num_tokens,
        )
        return StepPlan(
            packing=plan,
            pipelines=self._dealt(plan),
            cp=self.cp,
            row_multiple=self.row_multiple,
            baseline=baseline,
            progress=PlanProgress.of(after),
        )

    def _dealt(self, plan: PackingPlan) -> IntArray:
        """The micro-batches of each pipeline, [dp, N / dp]."""
        if self.meets == 1:
            return deal(plan.workload_ns, plan.rows, self.dp)
        work_ns = plan.workload_ns
        if isinstance(self.cost, prices.ProfiledWorkload):
            work_ns = work_ns - self.cost.pooled_ns(plan.rows)
        return deal_rounds(work_ns, plan.rows, self.dp, self.meets)

    def _baseline(
        self, state: PlannerState, step: int
    ) -> tuple[StepMetrics | None, tuple[StepMetrics, ...]]:
        """Metrics of the baseline on the batches since our last step, and of its later steps.

        Its step k trains the k-th N x C tokens, so it belongs to global batch k. At the end of data
        the rest of it belongs to our last step.
        """
        is_last = state.exhausted and len(state.ready) == 1
        due = [m for m in state.baseline_made if is_last or m.step < state.num_batches]
        merged = reduce(merge, due, None)
        rest = state.baseline_made[len(due) :]
        return (None if merged is None else replace(merged, step=step)), rest

    def shard(self, plan: StepPlan, pipeline: int) -> PipelinePlan:
        """The spans of one pipeline's micro-batches."""
        how: dict[str, Any] = {
            "strategy": self.strategy,
            "remainder": self.remainder,
            "exchange": self.exchange,
        }
        members = plan.pipelines[pipeline].tolist()
        micro_batches = tuple(plan.packing.micro_batch(i) for i in members)
        return PipelinePlan(
            step=plan.step,
            pipeline=pipeline,
            micro_batches=micro_batches,
            shardings=tuple(
                sharding.shard(m.lengths, cp=self.cp, cost=self.cost, **how) for m in micro_batches
            ),
            local_tokens=plan.local_tokens(pipeline),
            step_rows=int(plan.packing.rows.sum()),
        )

    def _split_again(self, state: PlannerState) -> PlannerState:
        """Return the state with plans of another number of micro-batches moved back to the carry,
        in order.
        """
        if not state.ready or state.ready[0].num_micro_batches == self.packer.num_micro_batches:
            return state
        planned = Pieces.concat(*(plan.pieces for plan in state.ready))
        carry = Carry(
            policy=state.carry.policy,
            pieces=Pieces.concat(planned, state.carry.pieces),
            slot=np.concatenate([np.zeros(len(planned), np.int64), state.carry.slot]),
            next_step=state.next_step,
        )
        # `exhausted` is reset so that the data's end is pushed again: its flush was part of those
        # plans.
        return replace(state, carry=carry, ready=(), exhausted=False)

    def _push(self, state: PlannerState) -> PlannerState:
        item = self.source.next(state.corpus)
        batch, corpus = item if item is not None else (None, state.corpus)
        plans, carry = self.packer.push(batch, _taken_over(state.carry, self.packer))
        # With nothing left to flush the data ends here, and the last of these steps gets what the
        # baseline still has.
        ends = batch is None or (batch.is_last and not len(carry.pieces))
        baseline, made = state.baseline, state.baseline_made
        if self.baseline is not None:
            # The baseline was off until now.
            if baseline.policy != self.baseline.policy:
                baseline = replace(self.baseline.start(), next_step=state.num_batches)
            for pushed in (batch,) if batch is None or not ends else (batch, None):
                also, baseline = self.baseline.push(pushed, baseline)
                made += tuple(predict(counted(plan, self.source)) for plan in also)
        return PlannerState(
            carry=carry,
            baseline=baseline,
            corpus=corpus,
            ready=state.ready + plans,
            baseline_made=made,
            num_batches=state.num_batches + (batch is not None),
            exhausted=ends,
            num_tokens=state.num_tokens,
        )


def _taken_over(carry: Carry, packer: packing.Packer) -> Carry:
    """What waits, for `packer`: slots and steps ahead are those of the policy that chose them."""
    if carry.policy == packer.policy:
        return carry
    pieces = replace(
        carry.pieces, arrival_step=np.minimum(carry.pieces.arrival_step, carry.next_step)
    )
    return replace(carry, pieces=pieces, slot=np.zeros(len(pieces), np.int64))


def counted(plan: PackingPlan, source: object) -> PackingPlan:
    """Return the plan with its pieces' labels counted; unchanged if `source` trains every token.

    The loss of a step is divided by its labels. Where only some tokens are trained, only the store
    knows the labels of a part of a document, so pieces are UNCOUNTED until their plan leaves.
    """
    if not (isinstance(source, TargetCounter) and source.has_targets):
        return plan
    pieces = replace(plan.pieces, num_targets=source.count_targets(plan.pieces))
    # A store with `.targets` never trains a document's first token, even where documents are
    # joined.
    return replace(plan, pieces=pieces, num_joined_targets=0)


def _source_of(lengths: IntLike) -> data.LengthSource:
    """A source that knows lengths alone."""
    array = int_array("lengths", lengths)
    # What was given says more than the integers: a float may have been rounded.
    given: Any = lengths if isinstance(lengths, list | tuple | np.ndarray) else array
    return data.LengthSource(name="given", lengths=given)


def deal(workload_ns: IntArray, tokens: IntArray, dp: int) -> IntArray:
    """Deal micro-batches to data-parallel pipelines, equally many to each.

    A step waits for the pipeline with most work, and a pipeline's first stage holds the activations
    of all its tokens. (1) Heaviest first, to the pipeline with the least work that has room; (2)
    exchanges that lower the most work of a pipeline; (3) exchanges that lower the most tokens of
    one without raising the most work by more than 0.1%, or 0.5% while it has more than 1.05 times
    the mean's. Micro-batches keep their order in a pipeline.
    Cost: 0.5 ms for 32 micro-batches on 8 pipelines, 30 ms for 1,024 on 64.

    Args:
        workload_ns: Predicted time of each micro-batch, shape [N].
        tokens: Its tokens, shape [N].
        dp: Pipelines.

    Returns:
        The micro-batches of each pipeline, shape [dp, N / dp].
    """
    num = workload_ns.size
    if num % dp:
        raise UserError(f"{num} micro-batches cannot be dealt to {dp} pipelines equally")
    if dp == 1:
        return np.arange(num).reshape(1, num)
    dealt = _heaviest_first(workload_ns, dp)
    anything = np.iinfo(np.int64).max
    _exchange(dealt, workload_ns, tokens, limit=anything)
    work = int(workload_ns[dealt].sum(1).max())
    even = int(EVEN_TOKENS * int(tokens.sum()) / dp)
    _exchange(dealt, tokens, workload_ns, limit=int(work * WORK_FOR_TOKENS))
    _exchange(dealt, tokens, workload_ns, limit=int(work * WORK_FOR_UNEVEN_TOKENS), enough=even)
    dealt.sort(axis=1)
    return dealt


def _heaviest_first(workload_ns: IntArray, dp: int) -> IntArray:
    room, work = workload_ns.size // dp, np.zeros(dp, np.int64)
    dealt, count = np.zeros((dp, room), np.int64), np.zeros(dp, np.int64)
    full = np.iinfo(np.int64).max
    for i in np.argsort(-workload_ns, kind="stable").tolist():
        d = int(np.argmin(np.where(count < room, work, full)))
        dealt[d, count[d]] = i
        count[d] += 1
        work[d] += workload_ns[i]
    return dealt


def _exchange(
    dealt: IntArray, size: IntArray, other: IntArray, *, limit: int, enough: int = 0
) -> None:
    """Swap pairs of micro-batches, in place, while that lowers the largest pipeline's `size`.

    limit: no pipeline's sum of `other` may grow above it. enough: stop once no `size` is larger.
    """
    rounds = max(1, MAX_PAIRS // (dealt.size * dealt.shape[1]))
    for _ in range(min(128, rounds)):
        sums, other_sums = size[dealt].sum(1), other[dealt].sum(1)
        top = int(sums.argmax())
        if sums[top] <= enough:
            return
        # For each pair of a micro-batch of the largest pipeline and one of any pipeline: the larger
        # `size` of the two pipelines after exchanging them.
        moved = size[dealt[top]][:, None, None] - size[dealt][None]
        after = np.maximum(sums[top] - moved, sums[None, :, None] + moved)
        moved_other = other[dealt[top]][:, None, None] - other[dealt][None]
        over = np.maximum(other_sums[top] - moved_other, other_sums[None, :, None] + moved_other)
        after[(over > limit) & (over > other_sums.max())] = np.iinfo(np.int64).max
        after[:, top] = np.iinfo(np.int64).max
        best = int(after.argmin())
        if after.flat[best] >= sums[top]:
            return
        mine, d, theirs = np.unravel_index(best, after.shape)
        dealt[top, mine], dealt[d, theirs] = dealt[d, theirs], dealt[top, mine]


def deal_rounds(work_ns: IntArray, tokens: IntArray, dp: int, meets: int) -> IntArray:
    """Deal where ranks of `meets` neighbouring pipelines meet in layers with experts.

    In an EP group of several pipelines a layer waits for its slowest member, so that what counts is
    which micro-batches run at the same place of their pipelines: a round. Sorted by work and cut,
    rounds have the least sum of their slowest work. Groups of pipelines that meet are then dealt
    whole rounds as single micro-batches are; within a round all take equally long, so that its
    micro-batches go where fewest tokens are.

    Returns:
        The micro-batches of each pipeline, shape [dp, N / dp]; place i of `meets` neighbouring
        pipelines is a round. work_ns, tokens: shape [N]; what a rank computes between meetings.
    """
    if work_ns.size % dp or dp % meets:
        raise UserError(
            f"{work_ns.size} micro-batches cannot be dealt to {dp} pipelines, of which {meets} meet"
        )
    rounds = np.argsort(-work_ns, kind="stable").reshape(-1, meets)
    slowest, together = work_ns[rounds].max(1), tokens[rounds].sum(1)
    dealt = np.zeros((dp, work_ns.size // dp), np.int64)
    for group, chosen in enumerate(deal(slowest, together, dp // meets)):
        # Rounds come in the order of their first micro-batches.
        members = rounds[chosen]
        members = members[np.argsort(members.min(1), kind="stable")]
        dealt[group * meets : (group + 1) * meets] = _spread(members, tokens).T
    return dealt


def _spread(members: IntArray, tokens: IntArray) -> IntArray:
    """Order within each round, [rounds, meets], so that pipelines have about equal tokens."""
    held = np.zeros(members.shape[1], np.int64)
    out = np.zeros_like(members)
    unequal = np.ptp(tokens[members], axis=1)
    for i in np.argsort(-unequal, kind="stable").tolist():
        most_first = members[i][np.argsort(-tokens[members[i]], kind="stable")]
        least_first = np.argsort(held, kind="stable")
        out[i, least_first] = most_first
        held[least_first] += tokens[most_first]
    return out
