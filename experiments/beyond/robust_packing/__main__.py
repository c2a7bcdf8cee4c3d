"""Measures balance and delay where attention's price is wrong.

`python -m experiments.beyond.robust_packing [--lengths FILE ...] [--quick]` packs
the same global batches of N windows of 128K tokens (7B, profile `h100`, D 10) with Algorithm 1 (two
queues, same caps) and `bounded`, each at one price and over a range of prices. N counts the
micro-batches of all pipelines: 4 is one pipeline of 4, 64 one of 64 or 16 of 4, 256 64 of 4. The
table has the imbalance of the forward pass, of forward + backward (F+B), and of F+B if attention
costs 0.7 to 1.6 times its price, beside the delay.
"""

from pathlib import Path

from experiments.beyond.robust_packing.cases import (
    CAPS,
    FACTORS,
    POLICIES,
    PROFILE,
    STREAMS,
    batches_of,
    measure,
    title_of,
)
from experiments.harness.arguments import experiment_parser
from experiments.harness.pages import How, Table, show, write_results

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
