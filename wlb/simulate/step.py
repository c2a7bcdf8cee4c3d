"""The simulator of training steps: it prices the events of a step and computes when each ends.

All prices come from the kernel profile; nothing is measured. wlb/simulate/README.md lists what the
simulator leaves out.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

import numpy as np

from wlb.cost import ProfiledWorkload
from wlb.plan import FloatArray, IntArray, StepMetrics, UserError
from wlb.simulate.graph import Graph, NodeKind
from wlb.simulate.order import Action, Order, PassKind
from wlb.simulate.pass_times import (
    CALLS,
    ShardedStep,
    StepPrices,
    TermPrices,
    message_scope,
    step_prices,
)
from wlb.simulate.peak_memory import peak_held_bytes, rest_bytes, stage_bytes, stage_gradients
from wlb.simulate.program import Wires, step_graph
from wlb.simulate.shards import WLB_FSDP, FsdpExecution, ShardCosts, shard_costs
from wlb.spec import RunSpec, check

T = TypeVar("T")
COMMUNICATION = ("tp_comm", "cp_comm", "ep_comm")
"""Names of the parts of a time that are collectives, which `compute_s` leaves out."""
CHUNK = 64
"""Number of steps that are simulated in one walk over the graph.

A walk takes about as long for one step as for a few, so it is faster to simulate many steps at
once. But the times of all these steps must fit into memory.
"""


def chunked(steps: Iterable[T]) -> Iterator[tuple[T, ...]]:
    """Yield steps in groups of at most CHUNK."""
    coming = iter(steps)
    while chunk := tuple(islice(coming, CHUNK)):
        yield chunk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulator:
    """Simulates steps of one run's layout."""

    spec: RunSpec  # the run; `spec.parallel.dp` must be set
    cost: ProfiledWorkload  # prices of the run's model and layout
    # Which sends and receives share a communicator. LINKS (each link between two pipeline ranks has
    # its own) is what wlb does. ONE is for other trainers.
    wires: Wires = Wires.LINKS
    fsdp: FsdpExecution = WLB_FSDP  # how the trainer gathers, reduces and updates parameters
    order: Order = field(init=False)  # passes of each pipeline rank
    graph: Graph = field(init=False, repr=False)  # the events of a step
    # Prices of FSDP's collectives, the gradient norm and the optimiser.
    shards: ShardCosts = field(init=False)

    def __post_init__(self) -> None:
        check(self.spec)
        if self.spec.model.vocab_size < 1:
            raise UserError(
                "model.vocab_size is 0; set it to the number of tokens in the tokenizer's "
                "vocabulary"
            )
        if self.spec.parallel.dp < 1:
            raise UserError(
                f"parallel.dp = {self.spec.parallel.dp} stands for all available ranks, which a "
                "simulation does not have; set parallel.dp to the number of pipelines to simulate"
            )
        if self.cost.parallel != self.spec.parallel or self.cost.model != self.spec.model:
            raise ValueError(
                "`cost` was made for another model or layout than `spec`; make it from the same "
                "RunSpec, for example with workload_for(spec, device)"
            )
        order, graph = step_graph(
            self.spec.pp,
            pp=self.spec.parallel.pp,
            num_micro_batches=self.spec.micro_batches_per_pipeline,
            has_fsdp=self.spec.parallel.fsdp_size > 1,
            wires=self.wires,
        )
        object.__setattr__(self, "order", order)
        with_experts = enumerate(self.spec.stage_expert_layers)
        # Pipelines that share an EP group start the passes of stages with experts together.
        grouped = replace(
            graph,
            pipelines_per_ep_group=self.spec.parallel.pipelines_per_ep_group,
            stages_with_experts=frozenset(stage for stage, layers in with_experts if layers),
        )
        object.__setattr__(self, "graph", grouped)
        object.__setattr__(self, "shards", shard_costs(self.spec, self.cost, self.fsdp))

    def price(self, steps: Sequence[ShardedStep]) -> StepPrices:
        """Return the prices of all passes of some sharded steps."""
        return step_prices(steps, self.spec, self.cost)

    def run(self, prices: StepPrices) -> "Simulation":
        """Simulate the steps whose passes have these prices."""
        durations = self._durations(prices)
        return Simulation(
            simulator=self,
            prices=prices,
            durations_ns=durations,
            ends_ns=self.graph.ends(durations),
        )

    def total_s(self, prices: StepPrices, change: Callable[[StepPrices], StepPrices]) -> float:
        """Return the seconds that all steps take together if their prices are changed.

        Args:
            prices: Prices of the steps.
            change: Returns changed prices, for example `StepPrices.balanced`.
        """
        starts = range(0, prices.shape[0], CHUNK)
        changed = (change(prices.select(slice(i, i + CHUNK))) for i in starts)
        return sum(float(self.run(part).step_time_s.sum()) for part in changed)

    def _sharded(self, computes_ns: IntArray, action: Action) -> IntArray:
        """Return the duration of a pass with the FSDP collectives that are part of it.

        Args:
            computes_ns: Duration of the pass without these collectives, [steps, dp].
            action: The pass.
        """
        if not self.shards.reshards:
            return computes_ns
        is_last = action.micro_batch == self.spec.micro_batches_per_pipeline - 1
        # If backward is split, only the weight-gradient pass makes gradients to reduce.
        makes = (PassKind.BACKWARD, PassKind.BACKWARD_WEIGHT)
        return self.shards.pass_ns(
            computes_ns,
            action.stage,
            action.kind,
            reduces=action.kind in makes and (is_last or self.fsdp.reduces_every_pass),
        )

    def _durations(self, prices: StepPrices) -> IntArray:
        """Return the duration of each node of the graph in ns, [nodes, steps, dp]."""
        steps, dp, _, _ = prices.shape
        out = np.zeros((len(self.graph.nodes), steps, dp), np.int64)
        messages = {scope: prices.message_ns(scope) for scope in prices.message}
        known: dict[tuple[object, ...], IntArray] = {}
        # Time that a pipeline rank spends in passes, as a mean over all pipeline ranks. The
        # overhead at the end of a step is a fraction of this time.
        busy = np.zeros(steps)
        for i, node in enumerate(self.graph.nodes):
            if node.kind == NodeKind.OVERHEAD:
                out[i] = np.rint(busy * self.spec.cluster.overhead)[:, None]
                continue
            if node.action is None:
                out[i] = self.shards.of(node)
                continue
            stage, kind, micro_batch = node.action
            if node.kind == NodeKind.MESSAGE:
                scope = message_scope(
                    self.spec.parallel,
                    stage % self.spec.parallel.pp,
                    node.rank,
                    node=self.cost.profile.ranks_per_node,
                )
                out[i] = messages[scope][:, :, micro_batch]
                continue
            # Many stages have equal prices, so these are computed only once.
            key = (kind, *prices.stage_key(stage))
            if key not in known:
                known[key] = prices.pass_ns(kind, stage)
            out[i] = self._sharded(known[key][:, :, micro_batch], node.action)
            busy += out[i].mean(axis=1) / self.spec.parallel.pp
        return out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """Durations and ends of all events of simulated steps, and the figures derived from them."""

    simulator: Simulator  # the simulator that simulated the steps
    prices: StepPrices  # prices of the passes
    durations_ns: IntArray  # duration of each node, [nodes, steps, dp]
    ends_ns: IntArray  # end of each node, counted from the start of its step, [nodes, steps, dp]

    @property
    def num_steps(self) -> int:
        """Number of simulated steps."""
        return self.durations_ns.shape[1]

    @property
    def step_time_s(self) -> FloatArray:
        """Time of each step in seconds, shape [steps]."""
        return self.ends_ns.max(axis=(0, 2)) * 1e-9

    @property
    def busy_s(self) -> FloatArray:
        """Seconds that each pipeline rank spends in passes, [steps, dp, pp].

        A pass counts with the time of its slowest CP rank.
        """
        graph = self.simulator.graph
        steps, dp = self.durations_ns.shape[1:]
        out = np.zeros((steps, dp, self.simulator.spec.parallel.pp))
        for i in graph.indices(NodeKind.PASS):
            out[:, :, graph.nodes[i].rank] += self.durations_ns[i] * 1e-9
        return out

    @property
    def bubble(self) -> FloatArray:
        """Fraction of the step that each pipeline rank spends outside passes, [steps, dp, pp]."""
        return 1 - self.busy_s / self.step_time_s[:, None, None]

    @property
    def attention_s(self) -> FloatArray:
        """Seconds of attention kernels on each rank, forward and backward, [steps, dp, pp, cp]."""
        steps, dp, _, cp = self.prices.shape
        out = np.zeros((steps, dp, self.simulator.spec.parallel.pp, cp))
        for stage in range(len(self.prices.layers)):
            for kind in (PassKind.FORWARD, PassKind.BACKWARD):
                times = self.prices.attention_ns(kind, stage).sum(axis=2)
                out[:, :, stage % out.shape[2]] += times * 1e-9
        return out

    @property
    def compute_s(self) -> FloatArray:
        """Seconds of all kernels on each rank, without collectives and launches.

        The shape is [steps, dp, pp, cp]. All TP ranks have equal times.
        """
        spec, prices = self.simulator.spec, self.prices
        out = self.attention_s
        for rank in range(spec.parallel.pp):
            for stage in spec.stages_of(rank):
                for terms in prices.terms(stage):
                    out[:, :, rank] += self._kernels_s(terms)[..., None]
        return out

    def _kernels_s(self, terms: TermPrices) -> FloatArray:
        """Return the seconds of kernels in all micro-batches of each pipeline, [steps, dp].

        Args:
            terms: Prices. Terms of collectives and of launches are left out.
        """
        skipped = (*COMMUNICATION, CALLS)
        token_ns = sum(ns for name, ns in terms.per_token.items() if name not in skipped)
        call_ns = sum(ns for name, ns in terms.per_call.items() if name not in skipped)
        n = self.prices.tokens.shape[2]
        return (self.prices.tokens.sum(axis=2) * token_ns + n * call_ns) * 1e-9

    @property
    def peak_activation_bytes(self) -> IntArray:
        """Peak bytes of activations on each pipeline rank, shape [steps, pp].

        It is the maximum over pipelines, taken for each pipeline rank separately.
        """
        return self._peaks(None)

    def _peaks(self, gradients: list[int] | None) -> IntArray:
        """Return the peak bytes of activations and gradients on each pipeline rank, [steps, pp].

        Args:
            gradients: Bytes of each stage's gradients; None means that gradients do not count.
        """
        held = stage_bytes(self.simulator.spec, self.prices.tokens)
        peaks = [
            peak_held_bytes(passes, held, gradients).max(axis=1) for passes in self.simulator.order
        ]
        return np.stack(peaks, axis=1)

    @property
    def peak_memory_bytes(self) -> IntArray:
        """Peak bytes of all tensors on each pipeline rank, shape [steps, pp].

        It is the maximum over pipelines, taken for each pipeline rank separately. Activations and
        gradients are counted pass by pass. All other memory is estimated by `wlb.memory` for the
        step's longest micro-batch.
        """
        spec = self.simulator.spec
        # If every pass reduces its gradients layer by layer, the unsharded gradients of a whole
        # stage never exist.
        shards_only = self.simulator.shards.reshards and self.simulator.fsdp.reduces_every_pass
        out = self._peaks(stage_gradients(spec, shards_only=shards_only))
        for s, longest in enumerate(self.prices.tokens.max(axis=(1, 2)).tolist()):
            for rank in range(spec.parallel.pp):
                out[s, rank] += rest_bytes(spec, pp_rank=rank, longest=longest)
        return out

    def metrics(self, steps: Sequence[ShardedStep]) -> tuple[StepMetrics, ...]:
        """Return the metrics of each step: the planner's predictions, and what was simulated.

        Args:
            steps: The simulated steps, in order.
        """
        times = self.step_time_s.tolist()
        return tuple(
            replace(
                step.plan.predicted,
                step_time_s=times[s],
                cp_imbalance=self._cp_imbalance(s),
                sharding_counts=tuple(
                    sorted(Counter(x.strategy for p in step.pipelines for x in p.shardings).items())
                ),
            )
            for s, step in enumerate(steps)
        )

    def _cp_imbalance(self, step: int) -> float:
        """Return the imbalance of attention between the CP ranks of a step.

        This is the time of each micro-batch's slowest CP rank, divided by the mean over its CP
        ranks. Both times are added up over all micro-batches before the division.
        """
        both = self.prices.attention_forward_ns[step] + self.prices.attention_backward_ns[step]
        mean = float(both.mean(axis=2).sum())
        return float(both.max(axis=2).sum()) / mean if mean else 1.0
