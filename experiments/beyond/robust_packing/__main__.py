"""Measures balance and delay of packing if attention costs more or less than its price.

`python -m experiments.beyond.robust_packing [--lengths FILE ...] [--quick]` packs the same global
batches with Algorithm 1 (two queues) and with `bounded`, under the same caps. Each policy balances
either at one price of attention or over a range of prices. The model is 7B, priced by profile
`h100`; a global batch has N windows of 128K tokens, and D is 10.

N counts the micro-batches of all pipelines: 4 is one pipeline with 4; 64 is one pipeline with 64,
or 16 with 4 each; 256 is 64 pipelines with 4 each. The table has the delay, and the imbalance of
the forward pass, of forward and backward together (F+B), and of F+B if attention costs 0.7 to 1.6
times its price.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, pairwise
from pathlib import Path

import numpy as np

from experiments.harness import constants
from experiments.harness.arguments import experiment_parser
from experiments.harness.constants import configuration
from experiments.harness.pages import How, Table, show, write_results
from experiments.harness.streams import WINDOW, source_of
from wlb.cost import load_profile, workload_of
from wlb.data import GlobalBatches, LengthSource
from wlb.packing import BoundedPacker, Packer, PackerOptions, PriceRange, VarLenPacker
from wlb.plan import FloatArray, GlobalBatch, IntArray, PackingPlan

PROFILE = load_profile("h100")
COST = workload_of(configuration("7b_128k"), PROFILE)
FACTORS = (0.7, 0.8, 1.0, 1.25, 1.6)
"""Factors by which the true cost of attention differs from its price, in both passes."""
STREAMS = ("fitted", "tail 2", "chunked", "library")
ONE_PRICE, NARROW, WIDE_RANGE = (
    PriceRange(low=low, high=high) for low, high in ((1.0, 1.0), (0.7, 1.25), (0.7, 1.6))
)
BEFORE = 0.15
"""Price of delay, times sqrt(N), of `bounded` at one price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """Caps on the tokens of a step and of a micro-batch."""

    step_tokens: float  # T, as a multiple of the global batch
    s_max: float  # S_max, as a multiple of the context window


CAPS = (Caps(step_tokens=1.5, s_max=2.0), Caps(step_tokens=1.1, s_max=1.5))
Make = Callable[[Caps, int], Packer]


def options(n: int) -> PackerOptions:
    return PackerOptions(num_micro_batches=n, context_window=WINDOW, cost=COST)


def bounded(caps: Caps, n: int, prices: PriceRange, price: float | None = None) -> BoundedPacker:
    """Returns a packer with policy `bounded`.

    Args:
        caps: Caps on tokens.
        n: N, the micro-batches of a step.
        prices: Range of attention's price over which it balances.
        price: Price of delay times sqrt(N). Defaults to the packer's.
    """
    return BoundedPacker(
        options=options(n),
        s_max=int(caps.s_max * WINDOW),
        step_tokens=int(caps.step_tokens * n * WINDOW),
        delay_price=None if price is None else price / n**0.5,
        price_range=prices,
    )


def algorithm_1(caps: Caps, n: int, prices: PriceRange) -> VarLenPacker:
    """Returns a packer with Algorithm 1 and two queues, under the same caps as `bounded`."""
    return VarLenPacker(
        options=options(n),
        s_max=int(caps.s_max * WINDOW),
        step_tokens=int(caps.step_tokens * n * WINDOW),
        queue_thresholds=tuple(int(level * WINDOW) for level in constants.QUEUES[2]),
        price_range=prices,
    )


POLICIES: dict[str, Make] = {
    "Algorithm 1": lambda caps, n: algorithm_1(caps, n, ONE_PRICE),
    "Algorithm 1, robust placement": lambda caps, n: algorithm_1(caps, n, WIDE_RANGE),
    "bounded, one price (default)": lambda caps, n: bounded(caps, n, ONE_PRICE, BEFORE),
    "bounded, 0.7 to 1.25": lambda caps, n: bounded(caps, n, NARROW),
    "bounded, 0.7 to 1.6": lambda caps, n: bounded(caps, n, WIDE_RANGE),
}


def source(name: str, *, num_tokens: int, seed: int) -> LengthSource:
    """Returns the documents of a stream.

    Args:
        name: "fitted" (the lengths of the evaluation), "tail 2" (a Pareto tail with twice the
            exponent), "chunked" (the fitted stream, cut every 128K tokens wherever that is in a
            document), "library" (Python's standard library), or a file of lengths.
        num_tokens: Tokens that are needed.
        seed: Seed of the draw.
    """
    if name == "library":
        return source_of("stdlib", num_tokens=num_tokens, seed=seed)
    if name not in STREAMS:
        return source_of(name, num_tokens=num_tokens, seed=seed)
    family = constants.FAMILY
    if name == "tail 2":
        family = replace(family, tail_exponent=2.0)
    mean = int(family.sample(4096, window=WINDOW, seed=seed).mean())
    lengths = family.sample(num_tokens * 5 // 4 // mean, window=WINDOW, seed=seed)
    if name == "chunked":
        ends = np.cumsum(lengths)
        cuts = np.union1d(ends, np.arange(WINDOW, ends[-1], WINDOW))
        lengths = np.diff(cuts, prepend=0)
    return LengthSource(name=name, lengths=lengths)


@cache
def batches_of(name: str, n: int, steps: int, seed: int) -> tuple[GlobalBatch, ...]:
    stream = GlobalBatches(
        source(name, num_tokens=n * WINDOW * steps, seed=seed),
        tokens_per_batch=n * WINDOW,
        seed=seed,
    )
    return tuple(batch for batch, _ in islice(stream.iterate(), steps))


def title_of(name: str) -> str:
    return name if name in STREAMS else Path(name).stem


def loads(plan: PackingPlan, work: FloatArray | IntArray) -> FloatArray:
    """Returns the work of each micro-batch, the sum of its pieces' work."""
    return np.array([work[a:b].sum() for a, b in pairwise(plan.offsets.tolist())], float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Balance of a policy, as means over the steps before the flush, and its delay in steps."""

    forward: float  # imbalance of the forward pass
    mispriced: dict[float, float]  # imbalance of both passes, by the factor of attention's cost
    mean_delay: float  # mean over all tokens, including the flush
    max_delay: int  # longest delay, including the flush

    @property
    def step(self) -> float:
        """Returns the imbalance of both passes if attention costs its price."""
        return self.mispriced[1.0]


def measure(packer: Packer, batches: tuple[GlobalBatch, ...]) -> Measured:
    """Packs the batches and returns the balance under every factor, and the delay."""
    carry, plans = packer.start(), list[PackingPlan]()
    for batch in batches:
        made, carry = packer.push(batch, carry)
        plans += made
    flushed = packer.push(None, carry)[0]
    ratios: dict[float, list[float]] = {factor: [] for factor in (0.0, *FACTORS)}
    for plan in plans:
        length = plan.pieces.length
        attention, work = COST.attention_ns(length), COST.workload_ns(length)
        scenarios = {factor: work + (factor - 1) * attention for factor in FACTORS}
        for key, priced in ({0.0: COST.forward_latency_ns(length)} | scenarios).items():
            load = loads(plan, priced)
            ratios[key].append(float(load.max() / load.mean()))
    tokens, delay, longest = 0, 0, 0
    for plan in (*plans, *flushed):
        late = np.maximum(0, plan.step - plan.pieces.arrival_step)
        tokens, delay = tokens + plan.num_tokens, delay + int(late @ plan.pieces.length)
        longest = max(longest, int(late.max(initial=0)))
    means = {key: float(np.mean(values)) for key, values in ratios.items()}
    return Measured(
        forward=means.pop(0.0), mispriced=means, mean_delay=delay / tokens, max_delay=longest
    )


SEED = 1
STEPS = {4: 640, 16: 120, 64: 30, 256: 12}
NUMBERS = ("forward", *(f"F+B x {factor:g}" for factor in FACTORS), "mean delay")
FORMATS = dict.fromkeys(NUMBERS, ".4f") | {"mean delay": ".3f"}


def prices_table(streams: list[str], steps: dict[int, int]) -> Table:
    rows: list[list[object]] = []
    for n, num in steps.items():
        for name in streams:
            batches = batches_of(name, n, num, SEED)
            for caps in CAPS:
                for label, make in POLICIES.items():
                    m = measure(make(caps, n), batches)
                    numbers = [m.forward, *m.mispriced.values(), m.mean_delay, m.max_delay]
                    rows.append([title_of(name), n, caps.step_tokens, label, *numbers])
    columns = ("stream", "N", "T", "policy", *NUMBERS, "max delay")
    title = "Imbalance by price, and delay in steps"
    return Table(
        name="prices", title=title, columns=columns, rows=rows, formats=FORMATS, most_rows=400
    )


def main() -> None:
    options = experiment_parser(__doc__, quick="pack a tenth", lengths=True).parse_args()
    shrink = 10 if options.quick else 1
    steps = {n: max(8, num // shrink) for n, num in STEPS.items()}
    table = prices_table([*STREAMS, *options.lengths], steps)
    show(table, width=170)
    if options.quick:
        return
    write_results(
        Path(__file__).parent,
        title="Balance over a range of prices",
        how=How.PREDICTED,
        profile=PROFILE,
        seed=SEED,
        text=__doc__ or "",
        tables=[table],
    )


if __name__ == "__main__":
    main()
