"""Divide the time of simulated steps into terms that add up to it.

The terms are, in this order:

1. Work of the mean pipeline rank, if every micro-batch and CP rank is at the mean (`work_terms`;
   needs no graph).
2. The pipeline bubble and exposed collectives over the data-parallel axis, from the critical path
   of one mean step (`even_terms`).
3. The imbalance of micro-batches and of CP ranks (`account`).

The first two are nearly a lower bound of what packing and sharding can reach. A step whose short
micro-batches come first and last can be slightly faster.
"""

from dataclasses import replace

from wlb.cost import ProfiledWorkload
from wlb.simulate.critical import NAMES
from wlb.simulate.graph import NodeKind
from wlb.simulate.pass_times import KEYS, StepPrices
from wlb.simulate.step import Simulator
from wlb.spec import Recompute

RECOMPUTE = "recompute"
"""Term of recomputation."""
BUBBLE = "bubble"
"""Term of the pipeline bubble."""
MICRO_BATCHES = "imbalance of micro-batches"
"""Term of the time that unequal micro-batches cost."""
CP_RANKS = "imbalance of CP ranks"
"""Term of the time that unequal CP ranks cost."""
TermSeconds = dict[str, float]
"""Seconds by term."""


def work_terms(prices: StepPrices, cost: ProfiledWorkload) -> TermSeconds:
    """Return the seconds in passes of the mean pipeline rank.

    `prices` must have one step and one pipeline.
    """
    tokens, n = float(prices.tokens.sum()), prices.tokens.shape[-1]
    attention = prices.attention_forward_ns.sum() + prices.attention_backward_ns.sum()
    pp = cost.parallel.pp
    out = {"attention": float(attention) * sum(prices.layers) / pp}
    for stage in range(len(prices.layers)):
        for terms in prices.terms(stage):
            for name, ns in terms.per_token.items():
                _add(out, name, ns * tokens / pp)
            for name, ns in terms.per_call.items():
                _add(out, name, ns * n / pp)
    # The terms price all-gathers of keys; the plan's exchange may take more or less.
    over = prices.exchange_forward_ns.sum() + prices.exchange_backward_ns.sum()
    _add(out, KEYS, float(over) * sum(prices.layers) / pp)
    _move_recompute(out, prices, cost)
    return {name: ns * 1e-9 for name, ns in out.items() if ns > 0}


def even_terms(simulator: Simulator, prices: StepPrices) -> TermSeconds:
    """Return seconds by term of a step whose micro-batches are equal.

    `prices` must have one step and one pipeline.
    """
    simulation = simulator.run(prices)
    graph = simulator.graph
    out = work_terms(prices, simulator.cost)
    work = sum(out.values())
    exposed = 0.0
    for i, _ in graph.critical_path(simulation.ends_ns, simulation.durations_ns):
        kind = graph.nodes[i].kind
        # Collectives on the critical path are exposed. The remaining time is the bubble.
        if kind not in (NodeKind.PASS, NodeKind.MESSAGE):
            seconds = float(simulation.durations_ns[i, 0, 0]) * 1e-9
            _add(out, NAMES[kind], seconds)
            exposed += seconds
    out[BUBBLE] = float(simulation.step_time_s[0]) - work - exposed
    return out


def account(simulator: Simulator, prices: StepPrices, time_s: float) -> TermSeconds:
    """Return seconds by term of all steps of `prices`, which took `time_s` in total."""
    steps = prices.shape[0]
    out = {name: s * steps for name, s in even_terms(simulator, mean_prices(prices)).items()}
    even = sum(out.values())
    # Simulate with even CP ranks: the time saved is their imbalance, and the rest is that of
    # micro-batches.
    with_even_ranks = time_s
    if prices.shape[3] > 1:
        with_even_ranks = simulator.total_s(prices, lambda some: some.evened((3,)))
    out[MICRO_BATCHES] = with_even_ranks - even
    out[CP_RANKS] = time_s - with_even_ranks
    return out


def mean_prices(prices: StepPrices) -> StepPrices:
    """Return prices of one step of one pipeline whose micro-batches are the mean of all."""
    first = (slice(1), slice(1), slice(None), slice(1))
    return prices.evened((0, 1, 2, 3)).changed(lambda x: x[first[: x.ndim]])


def _move_recompute(out: TermSeconds, prices: StepPrices, cost: ProfiledWorkload) -> None:
    """Move the time of recomputation from the terms of backward to `RECOMPUTE`."""
    if cost.recompute == Recompute.NONE:
        return
    # The recomputed part is the difference from prices without recompute.
    plain = replace(cost.linear, recompute=Recompute.NONE)
    tokens, n = float(prices.tokens.sum()), prices.tokens.shape[-1]
    layers = sum(prices.layers) / cost.parallel.pp
    share = layers / cost.num_layers_per_rank
    for name, ns in cost.linear.ns_per_token.items():
        term, _, one_pass = name.rpartition("_")
        if one_pass == "backward":
            recomputed = (ns - plain.ns_per_token[name]) * tokens * share
            _add(out, term, -recomputed)
            _add(out, RECOMPUTE, recomputed)
    calls = (cost.linear.call_ns[1] - plain.call_ns[1]) * n * share
    attention = float(prices.attention_forward_ns.sum()) * layers
    attention *= cost.linear.recomputed_work.attention
    for term, recomputed in (("calls", calls), ("attention", attention)):
        _add(out, term, -recomputed)
        _add(out, RECOMPUTE, recomputed)


def _add(terms: TermSeconds, name: str, value: float) -> None:
    terms[name] = terms.get(name, 0.0) + value
