"""Makes simulations with given times: a test sets the forward time, and backward takes twice it."""

from collections.abc import Sequence

import numpy as np

from wlb.cost import Scope, workload_for
from wlb.simulate import NodeKind, Simulation, Simulator, StepPrices
from wlb.simulate.order import PassKind
from wlb.simulate.pass_times import TermPrices
from wlb.spec import RunSpec, load

MS = 1_000_000
FREE = TermPrices(per_token={}, per_call={})


def spec_of(*, pp: int, n: int, v: int = 1, dp: int = 1, cp: int = 1) -> RunSpec:
    layout = {"tp": 1, "cp": cp, "pp": pp, "dp": dp}
    return load(
        "demo",
        [
            *(f"parallel.{name}={size}" for name, size in layout.items()),
            f"pp.virtual_stages={v}",
            f"data.num_windows={n * dp}",
            f"model.num_layers={pp * v}",
            "model.vocab_size=512",
            "data.context_window=1024",
            "kernels.attention=sdpa",
        ],
    )


def simulation_of(
    forward_ms: Sequence[Sequence[Sequence[int]]],
    *,
    pp: int,
    v: int = 1,
    message_ms: int = 0,
    other_ms: int = 0,
) -> Simulation:
    """Returns a simulation with given times.

    Args:
        forward_ms: Forward time on one stage, indexed by step, pipeline and micro-batch.
        pp: Pipeline ranks.
        v: Virtual stages of a rank.
        message_ms: Time of a message between stages.
        other_ms: Time of each collective and of the optimiser.
    """
    forward = np.array(forward_ms, np.int64)[..., None] * MS
    _, dp, n, _ = forward.shape
    spec = spec_of(pp=pp, n=n, v=v, dp=dp)
    simulator = Simulator(spec=spec, cost=workload_for(spec, "cpu"))
    prices = StepPrices(
        tokens=np.ones_like(forward[..., 0]),
        attention_forward_ns=forward,
        attention_backward_ns=2 * forward,
        exchange_forward_ns=np.zeros_like(forward[..., 0]),
        exchange_backward_ns=np.zeros_like(forward[..., 0]),
        linear=({PassKind.FORWARD: FREE, PassKind.BACKWARD: FREE},),
        ends={},
        message=dict.fromkeys(Scope, TermPrices(per_token={}, per_call={"calls": message_ms * MS})),
        kind_layers=((1,) * spec.num_stages,),
    )
    durations = simulator.run(prices).durations_ns
    for i, node in enumerate(simulator.graph.nodes):
        if node.kind not in (NodeKind.PASS, NodeKind.MESSAGE, NodeKind.OVERHEAD):
            durations[i] = other_ms * MS
    ends = simulator.graph.ends(durations)
    return Simulation(simulator=simulator, prices=prices, durations_ns=durations, ends_ns=ends)
