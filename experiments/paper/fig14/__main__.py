"""Simulates Figure 14: speed-up over Plain-4D on the 7B model as the context window grows.

`python -m experiments.paper.fig14 [--steps 160] [--seed 1] [--take] [--quick]` takes windows of 32K
to 160K tokens, the layout of 7B-128K throughout, and lengths scaled with the window. `--take`
writes the page again from its table.
"""

from pathlib import Path
from typing import Any

from experiments.harness import constants
from experiments.harness.drawing import COLOURS, LINES, MARKERS, new_figure
from experiments.harness.evaluation import (
    AGAIN,
    EARLIER_GIB,
    NAMES,
    SYSTEMS,
    arguments,
    compared,
    outcomes,
    steps_of,
)
from experiments.harness.pages import (
    Against,
    How,
    Picture,
    Table,
    commit_of,
    read_table,
    show,
    write_results,
)

FOLDER = Path(__file__).parent
CONFIG = "7b_128k"
WINDOWS = (32, 64, 96, 128, 160)
COMPARED = ("plain_4d", *(name for name in NAMES if name in SYSTEMS))
PAPER = {160: 1.40, 128: 1.33}
"""The text prints these numbers, 160K here and 128K with Figure 13; other bars have none."""


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


def simulated(*, steps: int, seed: int) -> dict[int, dict[str, float]]:
    """Returns speed-ups over Plain-4D by window, and our steps' bound."""
    pairs = [(window, name) for window in WINDOWS for name in COMPARED]
    results = outcomes(
        [
            compared(
                name,
                CONFIG,
                f"data.context_window={w * 1024}",
                gib=EARLIER_GIB,
                steps=steps,
                seed=seed,
            )
            for w, name in pairs
        ]
    )
    rows: dict[int, dict[str, float]] = {}
    for (window, name), found in zip(pairs, results, strict=True):
        if name == "plain_4d":
            plain = found
            rows[window] = {}
            continue
        rows[window][name] = found.over(plain)
        if name == "wlb":
            rows[window]["bound"] = plain.time_s / found.bound_s
    return rows


def main() -> None:
    parser = arguments(__doc__, takes=AGAIN)
    options = parser.parse_args()
    said: dict[str, Any] = {
        "title": "7B, speed-up over Plain-4D",
        "formats": dict.fromkeys(NAMES.values(), ".3f"),
    }
    if options.take:
        table = read_table(FOLDER, "windows", **said)
        rows = {
            w: dict(zip(NAMES, row[1:], strict=True))
            for w, row in zip(WINDOWS, table.rows, strict=True)
        }
    else:
        rows = simulated(steps=steps_of(options), seed=options.seed)
        body = [[f"{w}K", *(row[name] for name in NAMES)] for w, row in rows.items()]
        columns = ["window", *NAMES.values()]
        table = Table(name="windows", columns=columns, rows=body, **said)
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
            f"at its throughput. Ours plans with {EARLIER_GIB:g} of a GPU's 80 GiB, as a run did "
            f"when this was simulated."
        ),
        against=against,
        tables=[table],
        figures=[
            Picture(
                name="windows",
                caption="Speed-up over Plain-4D by context window; stars are the paper's WLB-LLM.",
                figure=draw(rows),
            )
        ],
        figures_of=commit_of(FOLDER) if options.take else "",
    )


if __name__ == "__main__":
    main()
