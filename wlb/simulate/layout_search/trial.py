"""Simulate one layout with its packing and sharding on a sample of global batches.

There are four depths, each more exact and more expensive:

- `work` adds up the work of the mean pipeline rank, without bubbles. This is a lower bound.
- `even` simulates one step whose micro-batches are all equal.
- `packed` packs and simulates every step, with attention spread evenly over CP ranks.
- `sharded` packs, shards and simulates every step (`simulate_run`). This is the final result.

All depths return seconds per global batch. The flush is included, so layouts are compared on the
same documents. Two layouts share packed and sharded steps if they have equal prices of documents,
and memory allows both the same S_max and T.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wlb.cost import ProfiledWorkload, cluster_peak_tflops, workload_for
from wlb.data import ListedBatches
from wlb.memory import TokenCaps
from wlb.memory.estimate import GIB
from wlb.packing.policies import caps_of
from wlb.plan import GlobalBatch, IntArray, StepPlan, UserError, local_tokens, offsets_of
from wlb.planner import Planner
from wlb.simulate.layout_search.account import TermSeconds, account, even_terms, work_terms
from wlb.simulate.layout_search.layouts import Candidate, name_of, planned_bytes
from wlb.simulate.pass_times import LayerTimes, ShardedStep, StepPrices, layer_times, prices_of
from wlb.simulate.run import RunSimulation, collected, sharded_steps, simulate_run
from wlb.simulate.step import Simulator, chunked
from wlb.spec import Policy, RunSpec

RETRIES = 3
"""Most attempts to simulate a run so that it fits into memory.

If it exceeds the memory limit, the next attempt gives packing less memory.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchSample:
    """Global batches that every trial packs, so that layouts are compared on equal documents."""

    batches: tuple[GlobalBatch, ...]
    device: str  # "cpu" or "cuda"; `cost.profile` = "auto" chooses a profile of this device

    @property
    def num_tokens(self) -> int:
        """Tokens of all batches of the sample."""
        return sum(batch.documents.num_tokens for batch in self.batches)

    def pieces(self, window: int) -> IntArray:
        """Return the lengths of all pieces; documents above `window` tokens are cut into pieces."""
        lengths = np.concatenate([batch.documents.length for batch in self.batches])
        whole = np.full(int((lengths // window).sum()), window, np.int64)
        rest = lengths % window
        return np.concatenate([whole, rest[rest > 0]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A lower bound of a layout's time."""

    name: str  # name of the layout
    terms: TermSeconds  # seconds per global batch, by kind of work

    @property
    def time_s(self) -> float:
        """Seconds per global batch."""
        return sum(self.terms.values())


_FIGURES = (
    *("tokens_per_s", "mfu", "bubble", "imbalance", "mean_delay", "max_delay"),
    *("peak_memory_bytes", "fullest_rank"),
)
"""Names of fields of `Trial` that its JSON has under the same names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of simulating one layout, packing and sharding on the sample."""

    spec: RunSpec  # the run with this layout, packing and sharding
    is_sharded: bool  # whether the sharding strategy ran; otherwise CP ranks have equal work
    num_steps: int  # number of simulated steps, including the flush
    time_s: float  # seconds per global batch
    balanced_s: float  # seconds per global batch if micro-batches and CP ranks had equal work
    terms: TermSeconds  # seconds per global batch, by kind of work
    tokens_per_s: float  # tokens per second, all ranks together
    mfu: float  # model FLOPs utilization, from the FLOPs of the documents
    bubble: float  # mean fraction of time that pipeline ranks spend outside passes
    imbalance: float  # predicted work of each step's slowest micro-batch / mean of micro-batches
    mean_delay: float  # mean delay of a token in steps
    max_delay: int  # longest delay of a token in steps
    peak_memory_bytes: int  # peak memory of the fullest pipeline rank
    fullest_rank: int  # the pipeline rank with the most peak memory
    caps: TokenCaps  # S_max and T with which the steps were packed

    @property
    def name(self) -> str:
        """Name of the layout, packing and sharding."""
        return f"{name_of(self.spec)} {self.packing} {self.spec.sharding.strategy}"

    @property
    def layout(self) -> str:
        """Name of the layout."""
        return name_of(self.spec)

    @property
    def of_bound(self) -> float:
        """Time if micro-batches and CP ranks had equal work, over the simulated time; at best 1."""
        return self.balanced_s / self.time_s

    @property
    def fits(self) -> bool:
        """Whether the peak memory is at most the memory that plans may use."""
        return self.peak_memory_bytes <= planned_bytes(self.spec)

    @property
    def packing(self) -> str:
        """The packing as text, such as "bounded S 1.5 T 1.1": the policy, S_max and T.

        S_max is in windows and T in global batches. "M 12" follows if a step has 12 micro-batches
        rather than one for each window. With Algorithm 1 "L" follows, with its thresholds.
        """
        section, window = self.spec.packing, self.spec.data.context_window
        if not section.varies_lengths:
            is_fixed = section.policy == Policy.FIXED
            return f"fixed W {section.window_batches}" if is_fixed else str(section.policy)
        out = f"{section.policy} S {_short(self.caps.s_max / window)}"
        if self.caps.step_tokens is not None:
            out += f" T {_short(self.caps.step_tokens / self.spec.tokens_per_step)}"
        if self.spec.num_micro_batches != self.spec.num_windows:
            out += f" M {self.spec.num_micro_batches}"
        if section.policy == Policy.VAR_LEN:
            return f"{out} L {' '.join(f'{t:g}' for t in section.queue_thresholds) or '-'}"
        return out + (f" price {section.delay_price:.2g}" if section.delay_price else "")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "layout": self.layout,
            "packing": self.packing,
            "sharding": str(self.spec.sharding.strategy),
            "is_sharded": self.is_sharded,
            "s_per_batch": self.time_s,
            "balanced_s_per_batch": self.balanced_s,
            **{name: getattr(self, name) for name in _FIGURES},
            "steps": self.num_steps,
            "terms": self.terms,
            "spec": self.spec.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrialRunner:
    """Simulates layouts to which the same prices apply, and caches the steps that they share."""

    sample: BatchSample  # global batches that every trial packs
    cost: ProfiledWorkload  # prices of all these layouts
    # cache of packed steps, by packing section, S_max and T
    plans: dict[tuple[Any, ...], tuple[StepPlan, ...]] = field(
        default_factory=dict[tuple[Any, ...], tuple[StepPlan, ...]]
    )
    # cache of sharded steps, by packing section, S_max, T and sharding section
    spans: dict[tuple[Any, ...], tuple[ShardedStep, ...]] = field(
        default_factory=dict[tuple[Any, ...], tuple[ShardedStep, ...]]
    )

    @classmethod
    def of(cls, spec: RunSpec, sample: BatchSample) -> "TrialRunner":
        """Return a runner for layouts that have the same prices as `spec` (`pricing_key`)."""
        return cls(sample=sample, cost=workload_for(spec, sample.device))

    def outline(self, candidate: Candidate, is_walked: bool) -> Outline:
        """Return a lower bound on a layout's time.

        Args:
            candidate: The layout.
            is_walked: Whether to simulate one step whose micro-batches are all equal. Otherwise the
                bound is the work of a pipeline rank, added up without bubbles, which is lower.
        """
        spec = candidate.spec
        prices = _even_prices(spec, self.cost, self.sample)
        if is_walked:
            terms = even_terms(Simulator(spec=spec, cost=self.cost), prices)
        else:
            terms = work_terms(prices, self.cost)
        return Outline(name=candidate.name, terms=terms)

    def packed(self, spec: RunSpec) -> Trial | None:
        """Pack and simulate `self.sample`; None if the run does not fit into memory.

        All CP ranks are assumed to have equal work. So no sharding is computed, which saves time.
        """
        return self._within_memory(spec, is_sharded=False)

    def sharded(self, spec: RunSpec) -> Trial | None:
        """Pack, shard and simulate `self.sample`; None if the run does not fit into memory."""
        return self._within_memory(spec, is_sharded=True)

    def as_it_is(self, spec: RunSpec) -> Trial:
        """Pack, shard and simulate `self.sample`, even if the run does not fit into memory."""
        return self._try(spec, is_sharded=True)

    def _within_memory(self, spec: RunSpec, *, is_sharded: bool) -> Trial | None:
        """Simulate a run; if it does not fit into memory, lower `packing.memory_gib` and try again.

        Args:
            spec: The run.
            is_sharded: Whether to shard the packed steps. Otherwise all CP ranks get equal work.

        Returns:
            The result of the first attempt that fits; None if `RETRIES` attempts do not fit.
        """
        limit = planned_bytes(spec)
        for _ in range(RETRIES):
            try:
                trial = self._try(spec, is_sharded=is_sharded)
            except UserError:
                # Memory allows only a T that is too small to train delayed documents.
                return None
            if trial.fits:
                return trial
            if not spec.packing.memory_gib:
                return None
            # Lower packing's memory by 1.02 times the excess and another 0.01 GiB, so that the next
            # attempt is likely to fit.
            over = (trial.peak_memory_bytes - limit) / GIB
            gib = round(spec.packing.memory_gib - 1.02 * over - 0.01, 3)
            if gib <= 0:
                return None
            spec = replace(spec, packing=replace(spec.packing, memory_gib=gib))
        return None

    def _try(self, spec: RunSpec, *, is_sharded: bool) -> Trial:
        """Pack and simulate a run, whether or not it fits into memory.

        Packed steps are taken from the cache if they are in it.

        Args:
            spec: The run.
            is_sharded: Whether to shard the packed steps. Otherwise all CP ranks get equal work.
        """
        caps = effective_caps(spec)
        # The [packing] section and the memory determine S_max and T (`caps`). Packed steps depend
        # only on the resulting S_max and T, so the key has these instead of the section's values.
        key = replace(spec.packing, s_max=1.0, step_tokens=0.0, memory_gib=0.0), caps
        simulator = Simulator(spec=spec, cost=self.cost)
        if key not in self.plans:
            planner = Planner.from_spec(spec, ListedBatches(self.sample.batches), self.cost)
            self.plans[key] = tuple(planner.steps())
        if is_sharded:
            steps = self._spans(spec, key)
            run = simulate_run(spec, self.cost, self.sample.batches, steps=steps)
        else:
            run = _packed_run(simulator, self.plans[key])
        return _trial(run, caps, is_sharded=is_sharded, num_batches=len(self.sample.batches))

    def _spans(self, spec: RunSpec, packing: tuple[Any, ...]) -> tuple[ShardedStep, ...]:
        """Shard the steps of a packing as `spec` says, or return them from the cache `spans`.

        Args:
            spec: The run.
            packing: The packing's key in the cache `plans`, which has its steps.
        """
        key = (*packing, spec.sharding)
        if key not in self.spans:
            planner = Planner.from_spec(spec, ListedBatches(self.sample.batches), self.cost)
            steps = sharded_steps(planner, dp=spec.parallel.dp, plans=self.plans[packing])
            self.spans[key] = tuple(steps)
        return self.spans[key]


def pricing_key(spec: RunSpec) -> tuple[int, int, int, int, int, str, bool]:
    """Return a key that is equal for layouts of a run in which documents have equal prices."""
    p = spec.parallel
    # If weight gradients are computed in separate passes, they cannot hide all-to-alls of experts.
    hides_less = p.ep > 1 and spec.splits_backward
    return p.tp, p.cp, p.pp, p.dp, p.ep, str(spec.training.recompute), hides_less


def effective_caps(spec: RunSpec) -> TokenCaps:
    """Return the S_max and T with which a run packs: its settings, or less if memory requires it.

    For policies that pack windows, S_max is the context window and there is no T.
    """
    if spec.packing.varies_lengths:
        s_max, step_tokens = caps_of(spec)
        return TokenCaps(s_max=s_max, step_tokens=step_tokens)
    return TokenCaps(s_max=spec.data.context_window, step_tokens=None)


def _even_prices(spec: RunSpec, cost: ProfiledWorkload, sample: BatchSample) -> StepPrices:
    """Return the prices of one step of one pipeline, if all micro-batches had equal work.

    Each micro-batch has an equal share of the tokens and of the attention of the whole sample.
    """
    n, window, cp = spec.micro_batches_per_pipeline, spec.data.context_window, spec.parallel.cp
    num = len(sample.batches) * spec.num_micro_batches
    lengths, counts = np.unique(sample.pieces(window), return_counts=True)
    tokens = min(window, -(-sample.num_tokens // num))
    rows = local_tokens(tokens, cp=cp, row_multiple=spec.row_multiple) * cp
    shape = (1, 1, n, 1)

    def times(cost: ProfiledWorkload) -> LayerTimes:
        calls = cost.attention_call_ns([tokens], [tokens], np.array([0, 1]))
        forward, backward = (
            int((table.at(lengths.astype(np.float64)) * counts).sum()) // num + int(call[0])
            for table, call in zip((cost.forward_ns, cost.backward_ns), calls, strict=True)
        )
        return layer_times(
            cost,
            forward_ns=np.full(shape, forward, np.int64),
            backward_ns=np.full(shape, backward, np.int64),
        )

    return prices_of(spec, cost, tokens=np.full(shape[:3], rows, np.int64), times=times)


def packed_prices(plans: Sequence[StepPlan], spec: RunSpec, cost: ProfiledWorkload) -> StepPrices:
    """Return the prices of packed steps whose attention is spread evenly over CP ranks.

    Args:
        plans: The packed steps.
        spec: The run.
        cost: Prices.
    """
    dp, n, cp = spec.parallel.dp, spec.micro_batches_per_pipeline, spec.parallel.cp
    tokens = np.zeros((len(plans), dp, n), np.int64)
    for s, plan in enumerate(plans):
        for d in range(dp):
            tokens[s, d] = np.array(plan.local_tokens(d)) * cp

    def times(cost: ProfiledWorkload) -> LayerTimes:
        both = np.zeros((2, len(plans), dp, n, 1), np.int64)
        for s, plan in enumerate(plans):
            pieces, offsets = plan.packing.pieces.length, plan.packing.offsets
            calls = cost.attention_call_ns(pieces, pieces, offsets)
            for k, (table, call) in enumerate(
                zip((cost.forward_ns, cost.backward_ns), calls, strict=True)
            ):
                running = offsets_of(table.at(pieces.astype(np.float64)))
                of_micro_batch = running[offsets[1:]] - running[offsets[:-1]] + call
                both[k, s, :, :, 0] = of_micro_batch[plan.pipelines]
        return layer_times(cost, forward_ns=both[0], backward_ns=both[1])

    return prices_of(spec, cost, tokens=tokens, times=times)


def _packed_run(simulator: Simulator, plans: tuple[StepPlan, ...]) -> RunSimulation:
    """Simulate packed steps whose attention is spread evenly over CP ranks."""
    spec, cost = simulator.spec, simulator.cost
    parts = [simulator.run(packed_prices(chunk, spec, cost)) for chunk in chunked(plans)]
    return collected(parts, plans, tuple(plan.predicted for plan in plans))


def _trial(run: RunSimulation, caps: TokenCaps, *, is_sharded: bool, num_batches: int) -> Trial:
    spec, peak = run.simulator.spec, run.peak_memory_bytes
    terms = account(run.simulator, run.prices, run.time_s)
    return Trial(
        spec=spec,
        is_sharded=is_sharded,
        num_steps=run.step_time_s.size,
        time_s=run.time_s / num_batches,
        balanced_s=run.balanced_time_s() / num_batches,
        terms={name: seconds / num_batches for name, seconds in terms.items()},
        tokens_per_s=run.tokens_per_s,
        mfu=run.mfu(peak_tflops=cluster_peak_tflops(spec)),
        bubble=run.mean_bubble,
        imbalance=run.imbalance,
        mean_delay=run.mean_delay,
        max_delay=max(m.max_delay for m in run.metrics),
        peak_memory_bytes=int(peak.max()),
        fullest_rank=int(peak.max(axis=0).argmax()),
        caps=caps,
    )


def _short(value: float) -> str:
    """Return a number as text with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
