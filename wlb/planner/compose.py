"""The planner: composes packing, the assignment to pipelines, and sharding into step plans.

    documents --packing--> micro-batches --assign--> pipelines --sharding--> spans of CP ranks

`Planner.start()` returns the state before the first step. `next(state)` returns the next
`StepPlan`, which has the state after it, or None when everything was trained. Both are pure
functions: plans can be made ahead of training, in another process, and made anew from the state in
a checkpoint. `shard(plan, pipeline)` divides the micro-batches of one pipeline over CP ranks, so
that a node does so only for its own pipelines.

No other file combines packing and sharding. This one imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

# These rooms import their files on first use, so that planning a list of lengths loads few files.
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
"""Exchanges that make the pipelines' numbers of tokens more equal may increase the work of the
slowest pipeline by this factor."""
WORK_FOR_UNEVEN_TOKENS = 1.005
"""This factor replaces WORK_FOR_TOKENS while a pipeline has more than EVEN_TOKENS times the mean
number of tokens."""
EVEN_TOKENS = 1.05
"""Above this multiple of the mean number of tokens, a pipeline's tokens are uneven enough to accept
more work. The estimate of memory (`wlb.memory`) assumes that no pipeline has more than 1.14 times
the mean. With WORK_FOR_TOKENS alone, pipelines have up to 1.2 times the mean."""
MAX_PAIRS = 1 << 22
"""At most this many pairs of micro-batches are evaluated for exchanges. This limits the time if
pipelines have hundreds of micro-batches."""


class BatchSource(Protocol):
    """A source of global batches whose position is a state that callers keep.

    An example is `wlb.data.GlobalBatches`.
    """

    def start(self) -> dict[str, Any]:
        """Return the state before the first batch. States must be convertible to JSON."""
        ...

    def next(self, state: dict[str, Any]) -> tuple[GlobalBatch, dict[str, Any]] | None:
        """Return the batch after `state` and the state after that batch, or None at the end."""
        ...


@runtime_checkable
class TargetCounter(Protocol):
    """A source of global batches that can count the labels of pieces, as fine-tuning requires.

    An example is `wlb.data.GlobalBatches`.
    """

    @property
    def has_targets(self) -> bool:
        """Whether only some tokens have a label, as in fine-tuning."""
        ...

    def count_targets(self, pieces: Pieces) -> IntArray:
        """Return the number of tokens with a label in each piece, shape [num_pieces]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Makes the plans of training steps, for all ranks together."""

    source: BatchSource  # gives the global batches
    packer: packing.Packer  # the packing policy
    # A second packer that packs the same documents, to predict how long its steps would take. None
    # = no such prediction.
    baseline: packing.Packer | None
    cost: WorkloadModel  # predicts the work that is balanced
    strategy: str = "adaptive"  # how micro-batches are sharded (`sharding.strategy`)
    # How tokens that are left over by equal chunks of a document are assigned to CP ranks.
    remainder: Remainder = Remainder.MERGED
    exchange: ExchangeChoice = ExchangeChoice.GATHER  # how CP ranks get each other's keys
    dp: int = 1  # number of pipelines
    pipelines_per_ep_group: int = 1  # consecutive pipelines that share an EP group
    cp: int = 1  # ranks over which a micro-batch is sharded
    row_multiple: int = 1  # every rank's number of tokens is padded to a multiple of this

    def __post_init__(self) -> None:
        convert_to_ints(self, dp=1, cp=1, row_multiple=1)
        if self.packer.num_micro_batches % self.dp:
            raise UserError(
                f"num_micro_batches = {self.packer.num_micro_batches} must be a multiple of dp = "
                f"{self.dp}, so that every pipeline gets the same number; change num_micro_batches "
                "or dp"
            )
        if self.strategy not in tuple(Strategy):
            raise UserError(
                f"sharding.strategy = {self.strategy!r} is unknown; use one of "
                f"{', '.join(Strategy)}"
            )

    @classmethod
    def from_spec(cls, spec: RunSpec, source: BatchSource, cost: WorkloadModel) -> Planner:
        """Make the planner of a run.

        Args:
            spec: The run. `spec.parallel.dp` must be the number of pipelines, not 0.
            source: Source of the global batches.
            cost: Predicts the work that is balanced.
        """
        return cls(
            source=source,
            packer=packing.packer_for(spec, cost),
            baseline=packing.baseline_for(spec, cost) if spec.planner.baseline else None,
            cost=cost,
            strategy=str(spec.sharding.strategy),
            remainder=spec.sharding.remainder,
            exchange=spec.sharding.exchange,
            dp=max(1, spec.parallel.dp),
            pipelines_per_ep_group=spec.parallel.pipelines_per_ep_group,
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
        """Make a planner for documents of these lengths, packed by policy `bounded` by default.

        A step has N x C tokens on average, with N = num_micro_batches and C = context_window. In
        the plans, `Pieces.document` is a document's index in `lengths`, plus len(lengths) for each
        earlier epoch.

        Args:
            lengths: Tokens of each document in the order of training, or a source of documents. To
                train a `TokenStore`, give the store and not its lengths: plans then count the
                labels of its documents, and a state of another store is refused.
            context_window: C, tokens of the longest document that is trained whole.
            num_micro_batches: N, micro-batches of a step over all pipelines.
            cp: Ranks over which a micro-batch is sharded.
            dp: Number of pipelines.
            row_multiple: Every rank's number of tokens is padded to a multiple of this.
            cost: Predicts the time of documents: a workload model, a kernel profile (for a model of
                7B), the path of your model's config.json, "llama2_7b", "verl", or the length in
                tokens of a document whose attention costs as much as everything else. The default
                uses the ratio of attention's FLOPs to those of linear layers in LLaMA2-7B, on tiles
                of 128 queries.
            strategy: Sharding strategy (`wlb.sharding.NAMES`).
            s_max: Most tokens of a micro-batch. Defaults to 1.5 context windows.
            step_tokens: Most tokens of a step. Defaults to N x s_max.
            max_delay: Most steps that a document may wait. Not used with `queue_thresholds`.
            queue_thresholds: If given, documents are packed by Algorithm 1 instead. These are the
                lengths in tokens at which its outlier queues begin. Empty delays nothing.
            long_documents: What to do with documents longer than a window: "split" cuts them,
                "refuse" raises UserError.
            epochs: How often the documents are trained.
            shuffle: Whether documents are in a random order, a different one in each epoch.
            seed: Seed of this order.
        """
        # A cost that is no workload model yet is turned into one, which may load kernel profiles.
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
        """The packer, and the baseline's packer if there is one."""
        return tuple(packer for packer in (self.packer, self.baseline) if packer)

    def start(self) -> PlannerState:
        """Return the state before the first step."""
        packer = self.baseline or self.packer
        return PlannerState(
            carry=self.packer.start(), baseline=packer.start(), corpus=self.source.start()
        )

    def steps(self, state: PlannerState | None = None) -> Iterator[StepPlan]:
        """Yield the plans of all steps from `state` to the end of the data.

        If a run has reached the end of its data, its state can be resumed by a planner whose source
        has more epochs.

        Args:
            state: The state to begin at. None = the start of the run.

        Raises:
            UserError: If the state contradicts itself or the data (`wlb.planner.resume`).
        """
        if state is not None:
            planner.check_planner_state(state, self.source, packers=self.packers)
        at = state or self.start()
        # A state at the end of the data still has the plans of the flush. Yield these first. A run
        # that was given more epochs then continues with them.
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
        """Return the plan of step `state.next_step`, or None after the last step."""
        state = self._repacked(state)
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
            pipelines=self._pipelines(plan),
            cp=self.cp,
            row_multiple=self.row_multiple,
            baseline=baseline,
            progress=PlanProgress.of(after),
        )

    def _pipelines(self, plan: PackingPlan) -> IntArray:
        """Choose the micro-batches of each pipeline.

        Returns:
            Indices of micro-batches, shape [dp, N / dp].
        """
        if self.pipelines_per_ep_group == 1:
            return assign_micro_batches(plan.workload_ns, plan.rows, self.dp)
        work_ns = plan.workload_ns
        if isinstance(self.cost, prices.ProfiledWorkload):
            # All pipelines of an EP group finish each expert layer at the same time. So only work
            # outside of expert layers can make one pipeline slower than another; subtract the rest.
            work_ns = work_ns - self.cost.pooled_ns(plan.rows)
        return assign_rounds(work_ns, plan.rows, self.dp, self.pipelines_per_ep_group)

    def _baseline(
        self, state: PlannerState, step: int
    ) -> tuple[StepMetrics | None, tuple[StepMetrics, ...]]:
        """Choose the metrics of the baseline that are reported with a step.

        Step k of the baseline trains as many tokens as global batch k. So each step gets the
        baseline's metrics of all batches that were read since the step before, and the last step of
        the run gets all that are left.

        Args:
            state: The state before the step.
            step: Index of the step.

        Returns:
            The metrics for this step, merged into one record (None if there are none), and the
            metrics that are left for later steps.
        """
        is_last = state.exhausted and len(state.ready) == 1
        due = [m for m in state.baseline_made if is_last or m.step < state.num_batches]
        merged = reduce(merge, due, None)
        rest = state.baseline_made[len(due) :]
        return (None if merged is None else replace(merged, step=step)), rest

    def shard(self, plan: StepPlan, pipeline: int) -> PipelinePlan:
        """Divide the micro-batches of one pipeline over its CP ranks.

        Args:
            plan: The plan of the step.
            pipeline: Index of the pipeline.
        """
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

    def _repacked(self, state: PlannerState) -> PlannerState:
        """Remove the state's plans if they have another number of micro-batches than the planner.

        This happens if a run is resumed with another number of micro-batches. The pieces of the
        removed plans go back to the front of the carry, in the order of the plans, so that they are
        packed anew.
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
        # The removed plans may have been made by the flush at the end of the data. Reset
        # `exhausted`, so that the packer is told once more that the data has ended.
        return replace(state, carry=carry, ready=(), exhausted=False)

    def _push(self, state: PlannerState) -> PlannerState:
        """Read the next global batch, and pack it. If there is a baseline, its packer packs it too.

        At the end of the data, both packers are flushed.

        Returns:
            The state after the batch. It includes the new plans of the packer, and the metrics of
            the new plans of the baseline's packer.
        """
        item = self.source.next(state.corpus)
        batch, corpus = item if item is not None else (None, state.corpus)
        plans, carry = self.packer.push(batch, _adopted(state.carry, self.packer))
        # The data ends here if there is no further batch, or if this is the last batch and the
        # packer has nothing left to flush. Then the baseline is flushed too, below.
        ends = batch is None or (batch.is_last and not len(carry.pieces))
        baseline, made = state.baseline, state.baseline_made
        if self.baseline is not None:
            # If the run had no baseline until now, or another one, let it start with this batch.
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


def _adopted(carry: Carry, packer: packing.Packer) -> Carry:
    """Return a carry that `packer` can use, with the pieces of `carry`.

    The slot of a waiting piece, such as its outlier queue, has a meaning only for the policy that
    made the carry. If `packer` has another policy, all slots are set to 0.

    A policy that collects several global batches before it packs them reads pieces ahead, for steps
    after the next one. For another policy these pieces arrive at the next step.
    """
    if carry.policy == packer.policy:
        return carry
    pieces = replace(
        carry.pieces, arrival_step=np.minimum(carry.pieces.arrival_step, carry.next_step)
    )
    return replace(carry, pieces=pieces, slot=np.zeros(len(pieces), np.int64))


def counted(plan: PackingPlan, source: object) -> PackingPlan:
    """Return the plan with the number of labels filled in for each of its pieces.

    The loss of a step is divided by its number of labels. In fine-tuning only some tokens have a
    label, and only the token store knows how many a part of a document has. Packers do not read the
    store, so this function counts the labels after a step was packed.

    Args:
        plan: The packed step.
        source: The source of global batches. If it trains every token, the plan stays as it is.
    """
    if not (isinstance(source, TargetCounter) and source.has_targets):
        return plan
    pieces = replace(plan.pieces, num_targets=source.count_targets(plan.pieces))
    # In a store that marks its trained tokens, the first token of a document is never a label. So
    # no label is added where documents are joined.
    return replace(plan, pieces=pieces, num_joined_targets=0)


def _source_of(lengths: IntLike) -> data.LengthSource:
    """Return a source of documents with these lengths, but without tokens, for planning."""
    array = int_array("lengths", lengths)
    # Pass the caller's values rather than the converted integers, so that the source can refuse
    # floats that the conversion has rounded.
    given: Any = lengths if isinstance(lengths, list | tuple | np.ndarray) else array
    return data.LengthSource(name="given", lengths=given)


def assign_micro_batches(workload_ns: IntArray, tokens: IntArray, dp: int) -> IntArray:
    """Assign micro-batches to data-parallel pipelines, the same number to each.

    A step waits for the pipeline with most work, so pipelines should have equal work. The first
    stage of a pipeline needs memory for the activations of all its tokens, so they should also have
    nearly equal numbers of tokens.

    1. Assign micro-batches by descending work, each to the pipeline with least work that does not
       have N / dp of them yet.
    2. Swap micro-batches between pipelines while that lowers the work of the slowest pipeline.
    3. Swap micro-batches while that lowers the tokens of the pipeline that has most. The work of
       the slowest pipeline may grow by 0.1% for this, or by 0.5% while a pipeline has more than
       1.05 times the mean number of tokens.

    Inside a pipeline, micro-batches keep their order.
    Cost: 0.5 ms for 32 micro-batches on 8 pipelines, 30 ms for 1,024 on 64.

    Args:
        workload_ns: Predicted time of each micro-batch, shape [N].
        tokens: Tokens of each micro-batch, shape [N].
        dp: Number of pipelines.

    Returns:
        The micro-batches of each pipeline, shape [dp, N / dp].
    """
    num = workload_ns.size
    if num % dp:
        raise UserError(
            f"a step has {num} micro-batches, which is not a multiple of dp = {dp}, the number of "
            "pipelines; change num_micro_batches or dp"
        )
    if dp == 1:
        return np.arange(num).reshape(1, num)
    pipelines = _heaviest_first(workload_ns, dp)
    anything = np.iinfo(np.int64).max
    _exchange(pipelines, workload_ns, tokens, limit=anything)
    work = int(workload_ns[pipelines].sum(1).max())
    even = int(EVEN_TOKENS * int(tokens.sum()) / dp)
    _exchange(pipelines, tokens, workload_ns, limit=int(work * WORK_FOR_TOKENS))
    _exchange(pipelines, tokens, workload_ns, limit=int(work * WORK_FOR_UNEVEN_TOKENS), enough=even)
    pipelines.sort(axis=1)
    return pipelines


def _heaviest_first(workload_ns: IntArray, dp: int) -> IntArray:
    room, work = workload_ns.size // dp, np.zeros(dp, np.int64)
    pipelines, count = np.zeros((dp, room), np.int64), np.zeros(dp, np.int64)
    full = np.iinfo(np.int64).max
    for i in np.argsort(-workload_ns, kind="stable").tolist():
        d = int(np.argmin(np.where(count < room, work, full)))
        pipelines[d, count[d]] = i
        count[d] += 1
        work[d] += workload_ns[i]
    return pipelines


def _exchange(
    pipelines: IntArray, size: IntArray, other: IntArray, *, limit: int, enough: int = 0
) -> None:
    """Swap pairs of micro-batches, in place, while that lowers the largest `size` of a pipeline.

    Args:
        pipelines: Indices of each pipeline's micro-batches, shape [dp, N / dp].
        size: The quantity to make equal, such as work, for each micro-batch, shape [N].
        other: A second quantity, such as tokens, for each micro-batch, shape [N]. Swaps may not
            raise its sum in a pipeline above `limit`.
        limit: Largest permitted sum of `other` in a pipeline. If a pipeline already has more, that
            sum is the limit.
        enough: Stop once the sum of `size` is at most this in every pipeline.
    """
    rounds = max(1, MAX_PAIRS // (pipelines.size * pipelines.shape[1]))
    for _ in range(min(128, rounds)):
        sums, other_sums = size[pipelines].sum(1), other[pipelines].sum(1)
        top = int(sums.argmax())
        if sums[top] <= enough:
            return
        # For each pair of a micro-batch of the largest pipeline and one of another pipeline,
        # compute the larger `size` of the two pipelines after exchanging them.
        moved = size[pipelines[top]][:, None, None] - size[pipelines][None]
        after = np.maximum(sums[top] - moved, sums[None, :, None] + moved)
        moved_other = other[pipelines[top]][:, None, None] - other[pipelines][None]
        over = np.maximum(other_sums[top] - moved_other, other_sums[None, :, None] + moved_other)
        after[(over > limit) & (over > other_sums.max())] = np.iinfo(np.int64).max
        after[:, top] = np.iinfo(np.int64).max
        best = int(after.argmin())
        if after.flat[best] >= sums[top]:
            return
        mine, d, theirs = np.unravel_index(best, after.shape)
        pipelines[top, mine], pipelines[d, theirs] = pipelines[d, theirs], pipelines[top, mine]


def assign_rounds(
    work_ns: IntArray, tokens: IntArray, dp: int, pipelines_per_ep_group: int
) -> IntArray:
    """Assign micro-batches to pipelines if several consecutive pipelines share an EP group.

    In every layer with experts, the pipelines of an EP group wait for the slowest of them. So they
    should process micro-batches of about the same work at the same time. The i-th micro-batches of
    the pipelines of one EP group are called a round:

        pipeline 0   | 9 | 5 | 2 |     Each number is the work of a micro-batch, and each column is
        pipeline 1   | 8 | 5 | 1 |     a round. The group takes 9 + 5 + 2.

    1. Sort the micro-batches by work and cut them into rounds. This minimises the sum over rounds
       of the slowest micro-batch.
    2. Assign rounds to EP groups, as `assign_micro_batches` assigns micro-batches to pipelines.
    3. Assign the micro-batches of a round to the pipelines of the group, so that pipelines get
       nearly equal numbers of tokens. This does not change the time of the round.

    Args:
        work_ns: Predicted time of each micro-batch outside of expert layers, shape [N].
        tokens: Tokens of each micro-batch, shape [N].
        dp: Number of pipelines.
        pipelines_per_ep_group: Number of consecutive pipelines that share an EP group.

    Returns:
        The micro-batches of each pipeline, shape [dp, N / dp].
    """
    if work_ns.size % dp:
        raise UserError(
            f"the {work_ns.size} micro-batches of a step cannot be divided equally among dp = {dp} "
            "pipelines; change num_micro_batches or dp"
        )
    if dp % pipelines_per_ep_group:
        raise UserError(
            f"dp = {dp} must be a multiple of {pipelines_per_ep_group}, the number of pipelines "
            "that share an EP group; change dp or ep"
        )
    rounds = np.argsort(-work_ns, kind="stable").reshape(-1, pipelines_per_ep_group)
    slowest, together = work_ns[rounds].max(1), tokens[rounds].sum(1)
    pipelines = np.zeros((dp, work_ns.size // dp), np.int64)
    for group, chosen in enumerate(
        assign_micro_batches(slowest, together, dp // pipelines_per_ep_group)
    ):
        # Sort a group's rounds by the lowest index of their micro-batches, which keeps about the
        # order in which the packer returned them.
        members = rounds[chosen]
        members = members[np.argsort(members.min(1), kind="stable")]
        pipelines[group * pipelines_per_ep_group : (group + 1) * pipelines_per_ep_group] = _spread(
            members, tokens
        ).T
    return pipelines


def _spread(members: IntArray, tokens: IntArray) -> IntArray:
    """Assign the micro-batches of each round to the pipelines of an EP group, balancing tokens.

    A round is the i-th micro-batches of all pipelines of the group, which run at the same time.

    Args:
        members: Micro-batches of each round, shape [num_rounds, pipelines_per_ep_group].
        tokens: Tokens of each micro-batch, shape [N].

    Returns:
        The same micro-batches; column p has those of pipeline p.
    """
    held = np.zeros(members.shape[1], np.int64)
    out = np.zeros_like(members)
    # Take the most unequal rounds first, so that later rounds can even out the numbers of tokens.
    unequal = np.ptp(tokens[members], axis=1)
    for i in np.argsort(-unequal, kind="stable").tolist():
        most_first = members[i][np.argsort(-tokens[members[i]], kind="stable")]
        least_first = np.argsort(held, kind="stable")
        out[i, least_first] = most_first
        held[least_first] += tokens[most_first]
    return out
