"""Simulates Figure 14: speed-up over Plain-4D on the 7B model as the context window grows.

`python -m experiments.paper.fig14 [--steps 160] [--seed 1] [--quick]` simulates windows of 32K to
160K tokens. The layout is that of 7B-128K for all windows, and document lengths scale with the
window. Everything is simulated with the prices of FlashAttention-2 and of FlashAttention-3.
"""

from itertools import product
from pathlib import Path
from typing import Any

from experiments.harness import constants
from experiments.harness.constants import FLASH_2, KERNELS
from experiments.harness.drawing import COLOURS, LINES, MARKERS, new_figure
from experiments.harness.evaluation import NAMES, SYSTEMS, arguments, compared, outcomes, steps_of
from experiments.harness.pages import Against, How, Picture, Table, show, write_results

FOLDER = Path(__file__).parent
CONFIG = "7b_128k"
WINDOWS = (32, 64, 96, 128, 160)
COMPARED = ("plain_4d", *(name for name in NAMES if name in SYSTEMS))
PAPER = {160: 1.40, 128: 1.33}
"""WLB-LLM's speed-ups by window, as far as the paper's text has them (128K is from Figure 13)."""


def draw(rows: dict[int, dict[str, float]]) -> Any:
    figure, (axes,) = new_figure(height=3.8)
    for i, (name, label) in enumerate(NAMES.items()):
        axes.plot(
            list(rows),
            [row[name] for row in rows.values()],
            color=COLOURS[i],
            marker=MARKERS[i],
            linestyle=LINES[i],
            label=label,
        )
    axes.scatter(list(PAPER), list(PAPER.values()), marker="*", s=120, color="#000000", zorder=4)
    axes.annotate("paper", (160, PAPER[160]), xytext=(-34, 8), textcoords="offset points")
    axes.set(xlabel="context window (K tokens)", ylabel="speed-up over Plain-4D")
    axes.set_xticks(WINDOWS)
    axes.legend(frameon=False)
    return figure


def simulated(*, steps: int, seed: int) -> dict[str, dict[int, dict[str, float]]]:
    """Returns speed-ups over Plain-4D by kernel, window and system.

    The system "bound" stands for ours under perfect balance.
    """
    keys = [(k, window, name) for k in KERNELS for window in WINDOWS for name in COMPARED]
    results = outcomes(
        [
            compared(
                name,
                CONFIG,
                f"data.context_window={window * 1024}",
                steps=steps,
                seed=seed,
                kernel=k,
            )
            for k, window, name in keys
        ]
    )
    made = dict(zip(keys, results, strict=True))
    rows: dict[str, dict[int, dict[str, float]]] = {k: {} for k in KERNELS}
    for kernel, window in product(KERNELS, WINDOWS):
        plain, ours = made[kernel, window, "plain_4d"], made[kernel, window, "wlb"]
        gains = {n: made[kernel, window, n].over(plain) for n in COMPARED if n != "plain_4d"}
        rows[kernel][window] = gains | {"bound": plain.time_s / ours.bound_s}
    return rows


def table_of(rows: dict[str, dict[int, dict[str, float]]]) -> Table:
    body = [
        [KERNELS[k], f"{w}K", *(row[name] for name in NAMES)]
        for k, by_window in rows.items()
        for w, row in by_window.items()
    ]
    return Table(
        name="windows",
        title="7B, speed-up over Plain-4D",
        columns=["kernel", "window", *NAMES.values()],
        rows=body,
        formats=dict.fromkeys(NAMES.values(), ".3f"),
        note=constants.worth_of_prices(),
    )


def main() -> None:
    options = arguments(__doc__).parse_args()
    at = simulated(steps=steps_of(options), seed=options.seed)
    rows, table = at[FLASH_2], table_of(at)
    against = [
        Against(what=f"WLB-LLM, {w}K", paper=PAPER[w], ours=round(rows[w]["paper"], 3))
        for w in sorted(PAPER)
    ]
    show(table, against=against)
    if options.quick:
        return
    write_results(
        FOLDER,
        title="Figure 14: speed-up by context window, 7B",
        how=How.SIMULATED,
        profile=constants.profile(),
        seed=options.seed,
        text=(
            "LLaMA2-7B with the layout of 7B-128K at every window. Lengths are of the fitted "
            "family, which scales with the window: a longer window brings longer outliers. "
            "Documents of more than 128K tokens are priced beyond the attention table's last key, "
            "at its throughput. Figures beside the paper's and the picture are FlashAttention-2's."
        ),
        against=against,
        tables=[table],
        figures=[
            Picture(
                name="windows",
                caption="Speed-up over Plain-4D by context window (FlashAttention-2); "
                "stars are the paper's WLB-LLM.",
                figure=draw(rows),
            )
        ],
    )


if __name__ == "__main__":
    main()
