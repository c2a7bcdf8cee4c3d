"""Simulate one layout with its packing and sharding on a sample of global batches.

There are four depths, each more exact and more expensive:

- `work`: work of the mean pipeline rank, without a graph; a lower bound.
- `even`: one mean step through the graph.
- `packed`: every step is packed, and attention is spread evenly over CP ranks.
- `sharded`: every step is packed and sharded (`simulate_run`); the result that counts.

All give seconds per global batch with the flush included, so layouts are compared on the same
documents. Layouts with equal degrees and recompute share plans and spans if memory gives them equal
S_max and T.
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
"""Attempts of a trial; each has less memory for packing if the one before exceeded the limit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchSample:
    """Global batches that every trial packs."""

    batches: tuple[GlobalBatch, ...]  # the global batches
    device: str  # "cpu" or "cuda", whose profile is used if `cost.profile` is "auto"

    @property
    def num_tokens(self) -> int:
        """Tokens of all batches."""
        return sum(batch.documents.num_tokens for batch in self.batches)

    def pieces(self, window: int) -> IntArray:
        """Return the lengths of all documents, cut at the window as packing does."""
        lengths = np.concatenate([batch.documents.length for batch in self.batches])
        whole = np.full(int((lengths // window).sum()), window, np.int64)
        rest = lengths % window
        return np.concatenate([whole, rest[rest > 0]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A lower bound of a layout's time."""

    name: str  # name of the layout
    terms: TermSeconds  # seconds per global batch, by term

    @property
    def time_s(self) -> float:
        """Seconds per global batch."""
        return sum(self.terms.values())


_FIGURES = (
    *("tokens_per_s", "mfu", "bubble", "imbalance", "mean_delay", "max_delay"),
    *("peak_memory_bytes", "fullest_rank"),
)
"""Fields of a trial that its JSON has under their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A layout simulated on the sample."""

    spec: RunSpec  # the run with this layout, packing and sharding
    is_sharded: bool  # False: CP ranks were assumed even
    num_steps: int  # simulated steps, with the flush
    time_s: float  # seconds per global batch
    balanced_s: float  # seconds per global batch under perfect balance
    terms: TermSeconds  # seconds per global batch, by term
    tokens_per_s: float
    mfu: float
    bubble: float  # mean fraction of time outside passes
    imbalance: float
    mean_delay: float  # mean delay of a token in steps
    max_delay: int  # longest delay of a token in steps
    peak_memory_bytes: int  # peak memory of the fullest rank
    fullest_rank: int  # the pipeline rank with the highest peak
    caps: TokenCaps  # S_max and T of the packing

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
        """Perfectly balanced time over simulated time."""
        return self.balanced_s / self.time_s

    @property
    def fits(self) -> bool:
        """Whether the peak is within the memory that plans may use."""
        return self.peak_memory_bytes <= planned_bytes(self.spec)

    @property
    def packing(self) -> str:
        """The policy with its caps, such as "bounded S 1.5 T 1.1".

        "M 12" follows if there are 12 micro-batches instead of one per window.
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
        """Return the result as JSON values."""
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
    """Runs trials of layouts with equal prices, and caches the plans and spans that they share."""

    sample: BatchSample  # global batches
    cost: ProfiledWorkload  # prices of the layouts
    # packed steps, by packing section and caps
    plans: dict[tuple[Any, ...], tuple[StepPlan, ...]] = field(
        default_factory=dict[tuple[Any, ...], tuple[StepPlan, ...]]
    )
    # sharded steps, by packing section, caps and sharding section
    spans: dict[tuple[Any, ...], tuple[ShardedStep, ...]] = field(
        default_factory=dict[tuple[Any, ...], tuple[ShardedStep, ...]]
    )

    @classmethod
    def of(cls, spec: RunSpec, sample: BatchSample) -> "TrialRunner":
        """Return a runner for layouts with the prices of `spec`."""
        return cls(sample=sample, cost=workload_for(spec, sample.device))

    def outline(self, candidate: Candidate, is_walked: bool) -> Outline:
        """Return the bound `even` (if `is_walked`: through the graph) or `work`."""
        spec = candidate.spec
        prices = _even_prices(spec, self.cost, self.sample)
        if is_walked:
            terms = even_terms(Simulator(spec=spec, cost=self.cost), prices)
        else:
            terms = work_terms(prices, self.cost)
        return Outline(name=candidate.name, terms=terms)

    def packed(self, spec: RunSpec) -> Trial | None:
        """Run a `packed` trial; None if packing does not fit into memory."""
        return self._within_memory(spec, is_sharded=False)

    def sharded(self, spec: RunSpec) -> Trial | None:
        """Run a `sharded` trial; None if packing does not fit into memory."""
        return self._within_memory(spec, is_sharded=True)

    def as_it_is(self, spec: RunSpec) -> Trial:
        """Run a `sharded` trial without a memory limit."""
        return self._try(spec, is_sharded=True)

    def _within_memory(self, spec: RunSpec, *, is_sharded: bool) -> Trial | None:
        """Run a trial; if it exceeds the memory limit, retry with less memory for packing.

        Returns None if packing never fits.
        """
        limit = planned_bytes(spec)
        for _ in range(RETRIES):
            try:
                trial = self._try(spec, is_sharded=is_sharded)
            except UserError:
                # Memory leaves no tokens with which packing could catch up.
                return None
            if trial.fits:
                return trial
            if not spec.packing.memory_gib:
                return None
            # Packing gets less memory: by the excess, and 2% of it more.
            over = (trial.peak_memory_bytes - limit) / GIB
            gib = round(spec.packing.memory_gib - 1.02 * over - 0.01, 3)
            if gib <= 0:
                return None
            spec = replace(spec, packing=replace(spec.packing, memory_gib=gib))
        return None

    def _try(self, spec: RunSpec, *, is_sharded: bool) -> Trial:
        """Run a trial; it packs only if no earlier trial had equal packing."""
        caps = effective_caps(spec)
        # Plans depend on the effective caps, so the section's caps and memory are not part of the
        # key.
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
        """Shard the steps of a packing, or return them from the cache."""
        key = (*packing, spec.sharding)
        if key not in self.spans:
            planner = Planner.from_spec(spec, ListedBatches(self.sample.batches), self.cost)
            steps = sharded_steps(planner, dp=spec.parallel.dp, plans=self.plans[packing])
            self.spans[key] = tuple(steps)
        return self.spans[key]


def pricing_key(spec: RunSpec) -> tuple[int, int, int, int, int, str, bool]:
    """Return a key that is equal for runs that give documents equal prices."""
    p = spec.parallel
    # Weight gradients in separate passes cannot hide transfers of experts' rows.
    hides_less = p.ep > 1 and spec.splits_backward
    return p.tp, p.cp, p.pp, p.dp, p.ep, str(spec.training.recompute), hides_less


def effective_caps(spec: RunSpec) -> TokenCaps:
    """Return S_max and T of a run's packing; S_max is the window for policies that pack windows."""
    if spec.packing.varies_lengths:
        s_max, step_tokens = caps_of(spec)
        return TokenCaps(s_max=s_max, step_tokens=step_tokens)
    return TokenCaps(s_max=spec.data.context_window, step_tokens=None)


def _even_prices(spec: RunSpec, cost: ProfiledWorkload, sample: BatchSample) -> StepPrices:
    """Return the prices of one mean step of one pipeline."""
    n, window, cp = spec.micro_batches_per_pipeline, spec.data.context_window, spec.parallel.cp
    # Tokens and attention of the whole sample are divided evenly over the micro-batches.
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
    """Return the prices of packed steps if attention is spread evenly over CP ranks."""
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
    """Simulate packed steps without sharding."""
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
    """Return a number with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
