"""Makes Table 2 of the paper, row by row: imbalance and packing overhead of every method.

`python -m experiments.paper.table2 [--lengths FILE ...] [--take] [--quick]` packs the same 640
global batches of 4 windows of 128K tokens with each method, on the fitted lengths, the Python
standard library and files of lengths, and puts the paper's numbers beside ours. Solver rows run on
the first 160 batches (320 of the fitted lengths; on all with W = 1), each beside greedy on the same
windows. `--take` measures only rows that the results do not have. Constants: `constants.py`, 7B.
"""

import contextlib
import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.harness import constants
from experiments.harness.configurations import configuration
from experiments.harness.evaluation import TakingParser
from experiments.harness.pages import command_of, commit, commit_of, priced_with
from experiments.harness.streams import WINDOW, batches_of, title_of
from wlb.cost import ProfiledWorkload, workload_of
from wlb.packing import (
    BoundedPacker,
    FixedPacker,
    IlpFixedPacker,
    IlpOptions,
    IlpReport,
    OriginalPacker,
    Packer,
    PackerOptions,
    PackingSummary,
    VarLenPacker,
    WindowCut,
    measure,
)
from wlb.plan import GlobalBatch

N = 4
SPEC = configuration("7b_128k", *constants.OVERRIDES)
COST: ProfiledWorkload = workload_of(SPEC, constants.profile())
RESULTS = Path(__file__).parent / "results"
OPTIONS = PackerOptions(num_micro_batches=N, context_window=WINDOW, cost=COST)


CAPPED = {
    "the paper's": ("WLB-LLM, 2 queues", f"bounded, S_max {constants.S_MAX}, D 10"),
    "wide": ("WLB-LLM, 2 queues, T 1.5, S_max 2.0", "bounded, T 1.5, S_max 2.0, D 10"),
}
"""Rows of Algorithm 1 and of `bounded` with the same caps, S_max of the paper's fit and wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Describes a method.

    paper: its (imbalance, overhead in ms) in Table 2
    """

    label: str
    make: Callable[[], Packer]
    paper: tuple[float, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Holds a method's figures, by the names of `PackingSummary`'s fields.

    Rows of earlier results lack the fields that came later.
    """

    row: Row
    figures: dict[str, Any]
    note: str = ""


def measured(row: Row, batches: list[GlobalBatch], *, is_timed: bool = True) -> Result:
    """Packs the batches. is_timed: whether its time can be compared with other rows'."""
    figures = measure(row.make(), batches, cost=COST).summary.to_json()
    if not is_timed:
        del figures["packing_ms"]
    return Result(row=row, figures=figures)


def rows() -> list[Row]:
    """Returns every method but the solver, in the paper's order, ours last.

    The paper does not give these choices:

    - S_max is 1.1 windows; one queue begins at 0.2 windows, two at 0.2 and 0.63, three at 0.2, 0.4
      and 0.63.
    - Micro-batches of a packing window are grouped into steps by load.
    - The loader keeps long documents whole; one that cuts anywhere is shown too.
    - The solver minimises the sum of the steps' maxima.
    - Imbalance is the mean over steps of Section 7.4's degree.
    """
    whole = OriginalPacker(options=OPTIONS, cut=WindowCut.SHORT)
    out = [
        Row(label="original packing", make=lambda: whole, paper=(1.44, 0)),
        Row(label="original, cut anywhere", make=lambda: OriginalPacker(options=OPTIONS)),
    ]
    for w, paper in ((1, (1.41, 4)), (2, (1.22, 5)), (4, (1.11, 5)), (8, (1.08, 5))):
        packer = FixedPacker(options=OPTIONS, window_batches=w)
        out.append(Row(label=f"fixed greedy, W = {w}", make=lambda p=packer: p, paper=paper))
    for n, paper in ((1, (1.24, 8)), (2, (1.05, 20)), (3, (1.05, 23))):
        var_len = VarLenPacker(
            options=OPTIONS,
            s_max=int(constants.S_MAX * WINDOW),
            queue_thresholds=tuple(int(t * WINDOW) for t in constants.QUEUES[n]),
        )
        out.append(
            Row(label=f"WLB-LLM, {n} queue{'s' * (n > 1)}", make=lambda p=var_len: p, paper=paper)
        )
    # Each policy has the other's caps too, so that what wide caps give is not taken for a policy's.
    wide = VarLenPacker(
        options=OPTIONS,
        s_max=2 * WINDOW,
        step_tokens=int(1.5 * N * WINDOW),
        queue_thresholds=tuple(int(t * WINDOW) for t in constants.QUEUES[2]),
    )
    out.append(Row(label=CAPPED["wide"][0], make=lambda: wide))
    narrow = BoundedPacker(options=OPTIONS, s_max=int(constants.S_MAX * WINDOW), max_delay=10)
    out.append(Row(label=CAPPED["the paper's"][1], make=lambda: narrow))
    for s_max, step_tokens, delay in ((2.0, 1.5, 10), (1.5, 1.1, 40)):
        bounded = BoundedPacker(
            options=OPTIONS,
            s_max=int(s_max * WINDOW),
            step_tokens=int(step_tokens * N * WINDOW),
            max_delay=delay,
        )
        label = f"bounded, T {step_tokens}, S_max {s_max}, D {delay}"
        out.append(Row(label=label, make=lambda p=bounded: p))
    return out


PAPER_SOLVER = {1: (1.40, 467), 2: (1.18, 1488), 4: (1.09, 25313)}


def solver_label(window_batches: int) -> str:
    return f"solver, W = {window_batches}"


def solver_rows(
    batches: list[GlobalBatch], *, num_solved: int, time_limit_s: float
) -> list[Result]:
    """Solves Eq. 1 with HiGHS, and runs greedy on the same windows beside it."""
    out: list[Result] = []
    for w in PAPER_SOLVER:
        reports: list[IlpReport] = []
        some = batches if w == 1 else batches[:num_solved]
        greedy = measure(FixedPacker(options=OPTIONS, window_batches=w), some, cost=COST).summary
        solver = IlpFixedPacker(
            options=OPTIONS,
            window_batches=w,
            ilp=IlpOptions(time_limit_s=time_limit_s),
            on_report=reports.append,
        )
        found = measure(solver, some, cost=COST).summary
        row = Row(label=solver_label(w), make=lambda p=solver: p, paper=PAPER_SOLVER[w])
        # Windows of the flush are not compared.
        del reports[len(some) // w :]
        times = [r.time_s * 1e3 for r in reports]
        better = sum(r.objective_ns < r.greedy_objective_ns for r in reports)
        note = (
            f"{len(some)} batches; greedy there {greedy.imbalance:.3f}; better in {better} of "
            f"{len(reports)} windows; gap {np.mean([r.gap for r in reports]):.2%}, at most "
            f"{max(r.gap for r in reports):.2%}"
        )
        # Only solves are timed: a push that waits for its window to fill costs nothing.
        figures = found.to_json() | {"packing_ms": float(np.mean(times)) / w}
        out.append(Result(row=row, figures=figures, note=note))
    return out


def ratio() -> float:
    """Returns W_a / W_l of a document as long as the window, forward."""
    linear = sum(ns for name, ns in COST.ns_per_token.items() if name.endswith("_forward"))
    return int(COST.forward_latency_ns([WINDOW])[0]) / (linear * WINDOW) - 1


def table_of(title: str, results: list[Result]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in (
        "method",
        "paper",
        "ours",
        "diff",
        "p95",
        "time-w.",
        "delay",
        "max",
        "ms",
        "paper ms",
    ):
        table.add_column(name, justify="left" if name == "method" else "right")
    for result in results:
        s, paper = result.figures, result.row.paper
        table.add_row(
            result.row.label,
            f"{paper[0]:.2f}" if paper else "",
            f"{s['imbalance']:.3f}",
            f"{s['imbalance'] - paper[0]:+.3f}" if paper else "",
            f"{s['imbalance_p95']:.3f}",
            f"{s['imbalance_time_weighted']:.3f}",
            f"{s['mean_delay']:.2f}",
            f"{s['max_delay']}",
            _ms(s),
            f"{paper[1]}" if paper else "",
        )
    return table


def _ms(figures: dict[str, Any]) -> str:
    return f"{figures['packing_ms']:.2f}" if "packing_ms" in figures else ""


def write_csv(path: Path, results: list[Result]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = [field.name for field in fields(PackingSummary)]
        writer.writerow(["row", "paper_imbalance", "paper_ms", *names, "note"])
        for r in results:
            paper = r.row.paper or ("", "")
            values = (r.figures.get(name, "") for name in names)
            writer.writerow([r.row.label, *paper, *values, r.note])


def earlier(path: Path) -> dict[str, Result]:
    """Returns the rows of a written CSV by label."""
    out: dict[str, Result] = {}
    with path.open(newline="") as file:
        for cells in csv.DictReader(file):
            label, note = cells.pop("row"), cells.pop("note")
            papers = [cells.pop(name) for name in ("paper_imbalance", "paper_ms")]
            paper = (float(papers[0]), int(papers[1])) if papers[0] else None
            figures = {name: _value(text) for name, text in cells.items() if text}
            out[label] = Result(row=Row(label=label, make=_no_packer, paper=paper), figures=figures)
            out[label] = replace(out[label], note=note)
    return out


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _no_packer() -> Packer:
    raise ValueError("a row of earlier results is not packed again")


def all_rows(
    batches: list[GlobalBatch], *, num_solved: int, time_limit_s: float, known: dict[str, Result]
) -> list[Result]:
    """Returns every method's row in the paper's order; rows of `known` are taken from there.

    Rows beside known ones have no packing time, since those were timed on another day.
    """
    solvers = [known[label] for w in PAPER_SOLVER if (label := solver_label(w)) in known]
    if len(solvers) < len(PAPER_SOLVER):
        solvers = solver_rows(batches, num_solved=num_solved, time_limit_s=time_limit_s)
    results = [known.get(row.label) or measured(row, batches, is_timed=not known) for row in rows()]
    return [*results[:6], *solvers, *results[6:]]


def csv_of(name: str) -> Path:
    """Returns where the rows of a source are."""
    return RESULTS / f"{Path(title_of(name)).stem.split(' ')[0].lower()}.csv"


def taken_text(known: dict[str, Result]) -> str:
    """Says of which commit rows are that a run takes; empty if it takes none."""
    if not known:
        return ""
    new = [row.label for row in rows() if row.label not in known]
    but = f" but {' and '.join(new)} (which are not timed)" if new else ""
    commit = commit_of(RESULTS.parent)
    return f" Taken from earlier results, of commit {commit}: all rows{but}, and other draws."


def draws_of(*, steps: int, seeds: Sequence[int]) -> str:
    """Measures every method but the solver on other draws of the fitted distribution."""
    found: dict[str, list[float]] = {}
    papers = {row.label: row.paper for row in rows()}
    for seed in seeds:
        batches = batches_of("evaluation", num_micro_batches=N, num_batches=steps, seed=seed)
        for row in rows():
            imbalance = measure(row.make(), batches, cost=COST).summary.imbalance
            found.setdefault(row.label, []).append(imbalance)
    lines = [
        f"## Other draws of the fitted distribution, seeds {seeds[0]} to {seeds[-1]}",
        "",
        "| method | paper | mean | least | most |",
        "|---|---|---|---|---|",
    ]
    for label, values in found.items():
        paper = papers[label] or ("",)
        numbers = " | ".join(f"{x:.3f}" for x in (np.mean(values), min(values), max(values)))
        lines.append(f"| {label} | {paper[0]} | {numbers} |")
    return "\n".join([*lines, ""])


def markdown(title: str, results: list[Result]) -> str:
    lines = [
        f"## {title}",
        "",
        "| method | paper | ours | p95 | time-weighted | mean delay | max | ms | paper ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        s, paper = r.figures, r.row.paper or ("", "")
        lines.append(
            f"| {r.row.label} | {paper[0]} | {s['imbalance']:.3f} | {s['imbalance_p95']:.3f} | "
            f"{s['imbalance_time_weighted']:.3f} | {s['mean_delay']:.2f} | {s['max_delay']} | "
            f"{_ms(s)} | {paper[1]} |"
        )
    notes = [f"- {r.row.label}: {r.note}" for r in results if r.note]
    return "\n".join([*lines, "", *notes, ""])


def caps_text(results: list[Result]) -> str:
    """Compares Algorithm 1 and `bounded` at the same caps."""
    by_label = {r.row.label: r.figures for r in results}
    said: list[str] = []
    for name, labels in CAPPED.items():
        theirs, ours = (
            f"{by_label[label]['imbalance']:.4f} with a mean delay of "
            f"{by_label[label]['mean_delay']:.3f} steps"
            for label in labels
        )
        said.append(f"with {name} caps Algorithm 1 is at {theirs}, `bounded` at {ours}")
    return f"**Policies at the same caps** (forward imbalance): {'; '.join(said)}."


def main() -> None:
    parser = TakingParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="*", default=[], help="files of document lengths")
    parser.add_argument("--steps", type=int, default=640, help="global batches (at least 160)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--time-limit", type=float, default=10.0, help="solver's time limit per window, in seconds"
    )
    text = "measure only rows that the results do not have yet"
    parser.add_argument("--take", action="store_true", help=text)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="pack 160 batches, with 24 for the solver, and write nothing",
    )
    options = parser.parse_args()
    steps, solved = (160, 24) if options.quick else (max(160, options.steps), 160)
    console = Console(width=120)
    names = ("evaluation", "stdlib", *options.lengths)
    known = {name: earlier(csv_of(name)) if options.take else {} for name in names}
    page = [
        "# Table 2: imbalance degree and packing overhead",
        "",
        f"`{command_of(Path(__file__).parent)}` at commit {commit()}: {steps} global batches of "
        f"{N} windows of {WINDOW} tokens, seed {options.seed}, W_a / W_l = {ratio():.2f} forward "
        f"at the window, S_max {constants.S_MAX}, queues {list(constants.QUEUES.values())}; solver "
        f"HiGHS, one thread, {options.time_limit:g} s a window. Overheads are of one CPU core of a "
        f"shared machine; the paper's solver is commercial. The paper's numbers are for its own "
        f"corpus: only the fitted distribution is meant to meet them.{taken_text(known[names[0]])}",
        "",
        f"Imbalance is **predicted**: {priced_with(COST.profile)} Lengths and throughputs are "
        f"those of `experiments/harness/constants.py`, fitted to this table and to Figure 12 together.",
        "",
    ]
    for name in names:
        batches = batches_of(name, num_micro_batches=N, num_batches=steps, seed=options.seed)
        # The fitted distribution represents the paper's, so its solver rows get twice the windows.
        num_solved = solved * (2 if name == "evaluation" and not options.quick else 1)
        results = all_rows(
            batches, num_solved=num_solved, time_limit_s=options.time_limit, known=known[name]
        )
        console.print(table_of(f"Table 2, {title_of(name)}, {steps} steps", results))
        for r in results:
            if r.note:
                console.print(f"  {r.row.label}: {r.note}")
        if options.quick:
            continue
        write_csv(csv_of(name), results)
        page += [markdown(title_of(name), results)]
        if name == "evaluation":
            page += [caps_text(results), ""]
            page += [draws_of(steps=steps, seeds=range(options.seed, options.seed + 5))]
    if options.quick:
        # Committed results are of whole runs.
        return
    (RESULTS / "README.md").write_text("\n".join(page))
    console.print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
