"""The critical path of a step: the chain of events whose durations add up to the step's time.

The path is followed from the step's end to its start; each event is the one that the next waited
for. A pass divides into attention of an even CP group, the excess of the slowest CP rank, and the
terms of its linear part.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from wlb.simulate.graph import Node, NodeKind
from wlb.simulate.order import PassKind
from wlb.simulate.pass_times import KEYS, StepPrices
from wlb.simulate.step import Simulation

K = TypeVar("K", bound=Hashable)

SHARDS = "sharded parameters"
"""Term of what a pass takes longer because it gathers and reduces parameters itself."""
CP_IMBALANCE = "attention, slowest CP rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A node's run on `pipeline`. terms_s: its duration by term. cp_rank: the slowest CP rank of a
    pass with attention, else -1.
    """

    node: Node
    pipeline: int
    start_s: float
    stop_s: float
    cp_rank: int
    terms_s: dict[str, float]

    @property
    def duration_s(self) -> float:
        return self.stop_s - self.start_s

    @property
    def micro_batch(self) -> int:
        return -1 if self.node.action is None else self.node.action.micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """Events in the order of time; those without a duration are left out."""

    events: tuple[Event, ...]
    step_time_s: float

    @property
    def by_term(self) -> dict[str, float]:
        """Seconds of each term, largest first."""
        return _summed(item for event in self.events for item in event.terms_s.items())

    @property
    def by_micro_batch(self) -> dict[tuple[int, int], float]:
        """Seconds of each (pipeline, micro-batch), passes and messages, largest first."""
        events = (e for e in self.events if e.micro_batch >= 0)
        return _summed(((e.pipeline, e.micro_batch), e.duration_s) for e in events)

    @property
    def by_rank(self) -> dict[tuple[int, int], float]:
        """Seconds of passes on each (pipeline, pipeline rank), largest first."""
        events = (e for e in self.events if e.node.kind == NodeKind.PASS)
        return _summed(((e.pipeline, e.node.rank), e.duration_s) for e in events)

    @property
    def main_pipeline(self) -> int:
        """The pipeline with most pass time on the path; 0 without passes."""
        return next(iter(_summed((rank[0], s) for rank, s in self.by_rank.items())), 0)

    def describe(self) -> tuple[str, ...]:
        """The slowest micro-batch, its longest event and the largest terms, as lines of text."""
        lines: list[str] = []
        total = self.step_time_s
        if self.by_micro_batch:
            (pipeline, i), seconds = next(iter(self.by_micro_batch.items()))
            share = f"{seconds / total:.0%} of the critical path"
            lines.append(f"micro-batch {i} of pipeline {pipeline}: {share}")
            own = [e for e in self.events if (e.pipeline, e.micro_batch) == (pipeline, i)]
            slowest = max(own, key=lambda e: e.duration_s)
            where = f"pass {slowest.node.action} on pipeline rank {slowest.node.rank}"
            if slowest.cp_rank >= 0:
                where += f", CP rank {slowest.cp_rank}"
            term, part = max(slowest.terms_s.items(), key=lambda item: item[1])
            lines.append(
                f"its longest event: {where}, {slowest.duration_s * 1e3:.1f} ms, {term} "
                f"{part / slowest.duration_s:.0%} of it"
            )
        shares = [f"{term} {seconds / total:.0%}" for term, seconds in self.by_term.items()]
        lines.append("by term: " + ", ".join(shares[:8]))
        return tuple(lines)


def critical_path(simulation: Simulation, *, step: int = 0) -> CriticalPath:
    """The critical path of one of the simulated steps."""
    path = simulation.simulator.graph.critical_path(
        simulation.ends_ns, simulation.durations_ns, step=step
    )
    events = (event_of(simulation, i, step=step, pipeline=pipeline) for i, pipeline in path)
    return CriticalPath(
        events=tuple(event for event in events if event.duration_s),
        step_time_s=float(simulation.step_time_s[step]),
    )


def event_of(simulation: Simulation, index: int, *, step: int, pipeline: int) -> Event:
    """The times of the graph's node `index` and its duration by term."""
    node = simulation.simulator.graph.nodes[index]
    stop, duration = (
        int(x[index, step, pipeline]) for x in (simulation.ends_ns, simulation.durations_ns)
    )
    terms, cp_rank = _terms(node, simulation.prices, step, pipeline, duration)
    if simulation.simulator.shards.reshards and node.kind == NodeKind.PASS:
        terms[SHARDS] = duration * 1e-9 - sum(terms.values())
    return Event(
        node=node,
        pipeline=pipeline,
        start_s=(stop - duration) * 1e-9,
        stop_s=stop * 1e-9,
        cp_rank=cp_rank,
        terms_s=terms,
    )


def _terms(
    node: Node, prices: StepPrices, step: int, pipeline: int, duration_ns: int
) -> tuple[dict[str, float], int]:
    """Seconds by term, and the slowest CP rank of a pass with attention."""
    if node.kind != NodeKind.PASS or node.action is None:
        return {NAMES[node.kind]: duration_ns * 1e-9}, -1
    stage, kind, i = node.action
    tokens = int(prices.tokens[step, pipeline, i])
    out: dict[str, float] = {}
    cp_rank = -1
    if kind != PassKind.BACKWARD_WEIGHT and prices.layers[stage]:
        ranks = prices.attention_ns(kind, stage)[step, pipeline, i]
        cp_rank = int(ranks.argmax())
        out["attention"] = float(ranks.mean()) * 1e-9
        out[CP_IMBALANCE] = float(ranks.max() - ranks.mean()) * 1e-9
    out[KEYS] = float(prices.exchange_ns(kind, stage)[step, pipeline, i]) * 1e-9
    for terms in prices.terms(stage, kind):
        for name, ns in terms.per_token.items():
            out[name] = out.get(name, 0.0) + ns * tokens * 1e-9
        for name, ns in terms.per_call.items():
            out[name] = out.get(name, 0.0) + ns * 1e-9
    return {name: seconds for name, seconds in out.items() if seconds}, cp_rank


NAMES = {
    NodeKind.MESSAGE: "p2p",
    NodeKind.GATHER: "parameter gather",
    NodeKind.PREFETCH: "parameter gather",
    NodeKind.REDUCE_AHEAD: "gradient reduction",
    NodeKind.REDUCE: "gradient reduction",
    NodeKind.NORM: "gradient norm",
    NodeKind.OPTIMIZER: "optimizer",
    NodeKind.OVERHEAD: "overhead",
}


def _summed(parts: Iterable[tuple[K, float]]) -> dict[K, float]:
    """Sums of equal keys, largest first."""
    out: dict[K, float] = {}
    for key, seconds in parts:
        out[key] = out.get(key, 0.0) + seconds
    return dict(sorted(out.items(), key=lambda item: -item[1]))
