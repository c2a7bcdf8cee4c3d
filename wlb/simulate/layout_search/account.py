"""Divide the time of simulated steps into kinds of work ("terms") that add up to it.

The terms are, in this order:

1. The work of a pipeline rank, averaged over ranks, as if all micro-batches and CP ranks were
   equal (`work_terms`). This needs no simulation.
2. The pipeline bubble and the exposed collectives over the data-parallel axis, from the critical
   path of one step with equal micro-batches (`even_terms`).
3. The time that unequal micro-batches and unequal CP ranks cost (`account`).

The sum of the first two items is nearly a lower bound of the time that packing and sharding can
reach. A step whose first and last micro-batches are short can be slightly faster than this sum.
"""

from dataclasses import replace

from wlb.cost import ProfiledWorkload
from wlb.simulate.critical import NAMES
from wlb.simulate.graph import NodeKind
from wlb.simulate.pass_times import KEYS, StepPrices
from wlb.simulate.step import Simulator
from wlb.spec import Recompute

RECOMPUTE = "recompute"
"""Name of the time of recomputation."""
BUBBLE = "bubble"
"""Name of the time of the pipeline bubble."""
MICRO_BATCHES = "imbalance of micro-batches"
"""Name of the time that unequal micro-batches cost."""
CP_RANKS = "imbalance of CP ranks"
"""Name of the time that unequal CP ranks cost."""
TermSeconds = dict[str, float]
"""Seconds by kind of work ("term")."""


def work_terms(prices: StepPrices, cost: ProfiledWorkload) -> TermSeconds:
    """Return the seconds that a pipeline rank spends in passes, by kind of work.

    They are the mean over pipeline ranks.

    Args:
        prices: Times of the passes of one step of one pipeline.
        cost: The layout and the cost model that predicted these times.
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
    # The terms so far price an all-gather of keys. Correct them for the actual exchange.
    over = prices.exchange_forward_ns.sum() + prices.exchange_backward_ns.sum()
    _add(out, KEYS, float(over) * sum(prices.layers) / pp)
    _move_recompute(out, prices, cost)
    return {name: ns * 1e-9 for name, ns in out.items() if ns > 0}


def even_terms(simulator: Simulator, prices: StepPrices) -> TermSeconds:
    """Return the seconds of a step with equal micro-batches by kind of work, with the bubble.

    Args:
        simulator: Simulator of the layout.
        prices: Prices of one step of one pipeline, from `mean_prices`: all micro-batches are equal.
    """
    simulation = simulator.run(prices)
    graph = simulator.graph
    out = work_terms(prices, simulator.cost)
    work = sum(out.values())
    exposed = 0.0
    for i, _ in graph.critical_path(simulation.ends_ns, simulation.durations_ns):
        kind = graph.nodes[i].kind
        # Collectives on the critical path are exposed. The bubble is the time of the step, minus
        # that of these collectives, minus the work.
        if kind not in (NodeKind.PASS, NodeKind.MESSAGE):
            seconds = float(simulation.durations_ns[i, 0, 0]) * 1e-9
            _add(out, NAMES[kind], seconds)
            exposed += seconds
    out[BUBBLE] = float(simulation.step_time_s[0]) - work - exposed
    return out


def account(simulator: Simulator, prices: StepPrices, time_s: float) -> TermSeconds:
    """Return the seconds of simulated steps by kind of work; they add up to `time_s`.

    Args:
        simulator: Simulator of the layout.
        prices: Prices of all steps.
        time_s: Simulated seconds of all steps together.
    """
    steps = prices.shape[0]
    out = {name: s * steps for name, s in even_terms(simulator, mean_prices(prices)).items()}
    even = sum(out.values())
    # Simulate the steps with equal CP ranks. The time that this saves is the cost of unequal CP
    # ranks, and the remaining difference is the cost of unequal micro-batches.
    with_even_ranks = time_s
    if prices.shape[3] > 1:
        with_even_ranks = simulator.total_s(prices, lambda some: some.evened((3,)))
    out[MICRO_BATCHES] = with_even_ranks - even
    out[CP_RANKS] = time_s - with_even_ranks
    return out


def mean_prices(prices: StepPrices) -> StepPrices:
    """Average prices over all steps, pipelines, micro-batches and CP ranks.

    The result has the prices of one step of one pipeline, in which all micro-batches are equal.
    """
    first = (slice(1), slice(1), slice(None), slice(1))
    return prices.evened((0, 1, 2, 3)).changed(lambda x: x[first[: x.ndim]])


def _move_recompute(out: TermSeconds, prices: StepPrices, cost: ProfiledWorkload) -> None:
    """Move the time of recomputation from other kinds of work to `RECOMPUTE`.

    Args:
        out: Nanoseconds (not seconds) by kind of work, changed in place.
        prices: Times of the passes of one step of one pipeline.
        cost: The layout and the cost model that predicted these times.
    """
    if cost.recompute == Recompute.NONE:
        return
    # The time of recomputation is the amount by which the terms shrink without recompute.
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
