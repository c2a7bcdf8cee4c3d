"""The critical path of a step: the chain of events whose durations add up to the step's time.

The path is found backwards from the end of the step: before each event on the path comes the event
for which it waited. The time of a pass is divided into terms: the mean attention time of its CP
ranks, the additional attention time of the slowest CP rank, and the other kinds of work.
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
"""Name of the time that a pass loses because it gathers parameters and reduces gradients."""
CP_IMBALANCE = "attention, slowest CP rank"
"""Name of the time by which attention of the slowest CP rank exceeds the mean over CP ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a simulated step: a node of the graph on one pipeline, with its times."""

    node: Node  # node of the graph: a pass, a message or a collective
    pipeline: int  # index of the pipeline
    start_s: float  # seconds after the start of the step
    stop_s: float  # seconds after the start of the step
    cp_rank: int  # slowest CP rank of a pass with attention; -1 for other events
    terms_s: dict[str, float]  # seconds by kind of work; they add up to the duration

    @property
    def duration_s(self) -> float:
        """Duration in seconds."""
        return self.stop_s - self.start_s

    @property
    def micro_batch(self) -> int:
        """Micro-batch of a pass or message; -1 for other events."""
        return -1 if self.node.action is None else self.node.action.micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """The chain of events whose durations add up to the time of a step."""

    events: tuple[Event, ...]  # events in order of time, without those that take no time
    step_time_s: float  # seconds of the step

    @property
    def by_term(self) -> dict[str, float]:
        """Seconds of each kind of work on the critical path, largest first."""
        return _summed(item for event in self.events for item in event.terms_s.items())

    @property
    def by_micro_batch(self) -> dict[tuple[int, int], float]:
        """Seconds on the critical path by (pipeline, micro-batch), largest first.

        They are the seconds of the micro-batch's passes and messages.
        """
        events = (e for e in self.events if e.micro_batch >= 0)
        return _summed(((e.pipeline, e.micro_batch), e.duration_s) for e in events)

    @property
    def by_rank(self) -> dict[tuple[int, int], float]:
        """Seconds of passes on the critical path by (pipeline, pipeline rank), largest first."""
        events = (e for e in self.events if e.node.kind == NodeKind.PASS)
        return _summed(((e.pipeline, e.node.rank), e.duration_s) for e in events)

    @property
    def main_pipeline(self) -> int:
        """Index of the pipeline with the most time in passes on the critical path; 0 if none."""
        return next(iter(_summed((rank[0], s) for rank, s in self.by_rank.items())), 0)

    def describe(self) -> tuple[str, ...]:
        """Return lines of text about the critical path.

        The lines name the micro-batch with the most time on the path, this micro-batch's longest
        event, and the kinds of work with the most time.
        """
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
                f"longest event of this micro-batch: {where}, {slowest.duration_s * 1e3:.1f} ms, "
                f"of which {part / slowest.duration_s:.0%} is {term}"
            )
        shares = [f"{term} {seconds / total:.0%}" for term, seconds in self.by_term.items()]
        lines.append("shares of the critical path by kind of work: " + ", ".join(shares[:8]))
        return tuple(lines)


def critical_path(simulation: Simulation, *, step: int = 0) -> CriticalPath:
    """Return the critical path of one simulated step; `step` is its index in the simulation."""
    path = simulation.simulator.graph.critical_path(
        simulation.ends_ns, simulation.durations_ns, step=step
    )
    events = (event_of(simulation, i, step=step, pipeline=pipeline) for i, pipeline in path)
    return CriticalPath(
        events=tuple(event for event in events if event.duration_s),
        step_time_s=float(simulation.step_time_s[step]),
    )


def event_of(simulation: Simulation, index: int, *, step: int, pipeline: int) -> Event:
    """Return an event of a simulated step, such as a pass, with its times.

    Args:
        simulation: The simulated steps.
        index: Index of the event's node in the graph of a step.
        step: Index of the step.
        pipeline: Index of the pipeline.
    """
    node = simulation.simulator.graph.nodes[index]
    stop, duration = (
        int(x[index, step, pipeline]) for x in (simulation.ends_ns, simulation.durations_ns)
    )
    terms, cp_rank = _terms(node, simulation.prices, step, pipeline, duration)
    # The terms so far leave out FSDP's collectives that are part of the pass. These collectives
    # take the rest of the duration.
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
    """Return an event's seconds by kind of work, and its CP rank with the most attention time.

    The CP rank is -1 unless the event is a pass with attention.

    Args:
        node: The event's node in the graph of a step.
        prices: Prices of the passes.
        step: Index of the step.
        pipeline: Index of the pipeline.
        duration_ns: Duration of the event, used only if it is not a pass.
    """
    if node.kind != NodeKind.PASS or node.action is None:
        return {NAMES[node.kind]: duration_ns * 1e-9}, -1
    stage, kind, i = node.action
    tokens = int(prices.tokens[step, pipeline, i])
    out: dict[str, float] = {}
    cp_rank = -1
    if kind != PassKind.BACKWARD_WEIGHT and prices.layers[stage]:
        ranks = prices.attention_ns(kind, stage)[step, pipeline, i]
        cp_rank = int(ranks.argmax())
        # A pass takes as long as its slowest CP rank. The time by which this rank exceeds the mean
        # over CP ranks is a separate term.
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
"""Name of the time of each kind of node except passes."""


def _summed(parts: Iterable[tuple[K, float]]) -> dict[K, float]:
    """Add up the seconds of (key, seconds) pairs by key, and return the sums, largest first."""
    out: dict[K, float] = {}
    for key, seconds in parts:
        out[key] = out.get(key, 0.0) + seconds
    return dict(sorted(out.items(), key=lambda item: -item[1]))
