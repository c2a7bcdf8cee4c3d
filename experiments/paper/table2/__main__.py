"""Makes Table 2 of the paper, row by row: imbalance and packing overhead of every method.

`python -m experiments.paper.table2 [--lengths FILE ...] [--take] [--untimed] [--quick]` packs the
same 640 global batches of 4 windows of 128K tokens with each method, and puts the paper's numbers
beside ours. Documents have the fitted lengths, those of the Python standard library, or those in
files. The model is 7B; lengths and prices are those of `constants.py`.

The solver is slow, so it packs only the fitted lengths, and only the first 320 batches unless W
is 1. Greedy packing of the same windows stands beside it.

`--take` measures only rows that are not in the results yet, and `--untimed` leaves out times.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness import constants
from experiments.harness.arguments import experiment_parser
from experiments.harness.constants import FLASH_3, KERNELS, configuration
from experiments.harness.pages import How, Table, commit_of, read_table, show, write_results
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

N = 4  # micro-batches of a step
SPEC = configuration("7b_128k", *constants.settings())
COST: ProfiledWorkload = workload_of(SPEC, constants.profile())
OPTIONS = PackerOptions(num_micro_batches=N, context_window=WINDOW, cost=COST)


CAPPED = {
    "the paper's": ("WLB-LLM, 2 queues", f"bounded, S_max {constants.S_MAX}, D 10"),
    "wide": ("WLB-LLM, 2 queues, T 1.5, S_max 2.0", "bounded, T 1.5, S_max 2.0, D 10"),
}
"""Pairs of rows with the same caps: Algorithm 1 and `bounded`, with the paper's and wide caps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A method of the table."""

    label: str
    make: Callable[[], Packer]  # returns its packer
    paper: tuple[float, int] | None = None  # (imbalance, overhead in ms) in the paper's Table 2


Record = dict[str, Any]
"""A row of the CSV: method, the paper's numbers, all fields of `PackingSummary`, and a note.

A field is None if it was not measured, or is missing in an earlier result.
"""


def record_of(row: Row, figures: Mapping[str, Any], note: str = "") -> Record:
    imbalance, ms = row.paper or (None, None)
    names = [field.name for field in fields(PackingSummary)]
    return {
        "row": row.label,
        "paper_imbalance": imbalance,
        "paper_ms": ms,
        **{name: figures.get(name) for name in names},
        "note": note or None,
    }


def measured(row: Row, batches: list[GlobalBatch], *, is_timed: bool = True) -> Record:
    """Packs the batches with a method and returns its row.

    Args:
        row: The method.
        batches: Global batches.
        is_timed: Whether the row has its packing time.
    """
    figures = measure(row.make(), batches, cost=COST).summary.to_json()
    return record_of(row, figures | ({} if is_timed else {"packing_ms": None}))


def rows(options: PackerOptions = OPTIONS) -> list[Row]:
    """Returns all methods except the solver, in the paper's order, with ours last.

    The paper leaves some choices open. Ours are:

    - S_max is 1.1 windows. One queue has the threshold 0.2 windows, two have 0.2 and 0.63, and
      three have 0.2, 0.4 and 0.63.
    - The micro-batches of a packing window are grouped into steps by their work.
    - The paper's loader keeps long documents whole. A loader that cuts anywhere is shown too.
    - The solver minimises the sum over steps of the slowest micro-batch.
    - Imbalance is the mean over steps of Section 7.4's degree.

    Args:
        options: Number and size of micro-batches, and prices.
    """
    whole = OriginalPacker(options=options, cut=WindowCut.SHORT)
    out = [
        Row(label="original packing", make=lambda: whole, paper=(1.44, 0)),
        Row(label="original, cut anywhere", make=lambda: OriginalPacker(options=options)),
    ]
    for w, paper in ((1, (1.41, 4)), (2, (1.22, 5)), (4, (1.11, 5)), (8, (1.08, 5))):
        packer = FixedPacker(options=options, window_batches=w)
        out.append(Row(label=f"fixed greedy, W = {w}", make=lambda p=packer: p, paper=paper))
    for n, paper in ((1, (1.24, 8)), (2, (1.05, 20)), (3, (1.05, 23))):
        var_len = VarLenPacker(
            options=options,
            s_max=int(constants.S_MAX * WINDOW),
            queue_thresholds=tuple(int(t * WINDOW) for t in constants.QUEUES[n]),
        )
        out.append(
            Row(label=f"WLB-LLM, {n} queue{'s' * (n > 1)}", make=lambda p=var_len: p, paper=paper)
        )
    # Show both policies with both caps, so that the effect of wide caps is not taken for that of a
    # policy.
    wide = VarLenPacker(
        options=options,
        s_max=2 * WINDOW,
        step_tokens=int(1.5 * N * WINDOW),
        queue_thresholds=tuple(int(t * WINDOW) for t in constants.QUEUES[2]),
    )
    out.append(Row(label=CAPPED["wide"][0], make=lambda: wide))
    narrow = BoundedPacker(options=options, s_max=int(constants.S_MAX * WINDOW), max_delay=10)
    out.append(Row(label=CAPPED["the paper's"][1], make=lambda: narrow))
    for s_max, step_tokens, delay in ((2.0, 1.5, 10), (1.5, 1.1, 40)):
        bounded = BoundedPacker(
            options=options,
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
    batches: list[GlobalBatch], *, num_solved: int, time_limit_s: float, is_timed: bool
) -> list[Record]:
    """Packs with the solver (Eq. 1, by HiGHS) and returns its rows.

    The note of each row compares it with greedy packing of the same windows.

    Args:
        batches: Global batches.
        num_solved: Batches that are packed if W is above 1.
        time_limit_s: Time limit of a window.
        is_timed: Whether rows have packing times.
    """
    out: list[Record] = []
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
        # Leave out the windows of the flush.
        del reports[len(some) // w :]
        times = [r.time_s * 1e3 for r in reports]
        better = sum(r.objective_ns < r.greedy_objective_ns for r in reports)
        note = (
            f"{len(some)} batches; greedy there {greedy.imbalance:.3f}; better in {better} of "
            f"{len(reports)} windows; gap {np.mean([r.gap for r in reports]):.2%}, at most "
            f"{max(r.gap for r in reports):.2%}"
        )
        # Only solving takes time; most pushes just add to the window.
        packing_ms = float(np.mean(times)) / w if is_timed else None
        figures = found.to_json() | {"packing_ms": packing_ms}
        out.append(record_of(row, figures, note))
    return out


def ratio() -> float:
    """Returns W_a / W_l in forward for a document as long as the window."""
    linear = sum(ns for name, ns in COST.ns_per_token.items() if name.endswith("_forward"))
    return int(COST.forward_latency_ns([WINDOW])[0]) / (linear * WINDOW) - 1


PAGE = {
    "row": "method", "paper_imbalance": "paper", "imbalance": "ours", "imbalance_p95": "p95",
    "imbalance_time_weighted": "time-weighted", "mean_delay": "mean delay", "max_delay": "max",
    "packing_ms": "ms", "paper_ms": "paper ms",
}  # fmt: skip
FORMATS = dict.fromkeys(("imbalance", "imbalance_p95", "imbalance_time_weighted"), ".3f")
FORMATS |= {"paper_imbalance": ".2f", "mean_delay": ".2f", "packing_ms": ".2f"}


def table_of(name: str, records: Sequence[Record]) -> Table:
    """Returns the table of a source of lengths, with the notes of its rows below."""
    notes = "; ".join(f"{r['row']}: {r['note']}" for r in records if r["note"])
    return Table.of(
        file_of(name), title_of(name), records, formats=FORMATS, page_columns=PAGE,
        note=f"{notes}." if notes else "",
    )  # fmt: skip


def file_of(name: str) -> str:
    """Returns the name of the CSV file of a source."""
    return Path(title_of(name)).stem.split(" ")[0].lower()


def earlier(folder: Path, name: str) -> dict[str, Record]:
    """Reads the rows of a source from the results, by method."""
    table = read_table(folder, file_of(name), title="", formats={})
    found = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    return {record["row"]: record for record in found}


def all_rows(
    batches: list[GlobalBatch],
    *,
    num_solved: int,
    time_limit_s: float,
    known: dict[str, Record],
    is_timed: bool = True,
) -> list[Record]:
    """Returns the rows of all methods in the paper's order, and measures those that are missing.

    Args:
        batches: Global batches.
        num_solved: Batches that the solver packs. 0: its rows are not measured.
        time_limit_s: Time limit of the solver for a window.
        known: Rows of earlier results, by method. New rows beside them have no packing times, which
            could not be compared with times of another day.
        is_timed: Whether new rows have packing times.
    """
    solvers = [known[label] for w in PAPER_SOLVER if (label := solver_label(w)) in known]
    if num_solved and len(solvers) < len(PAPER_SOLVER):
        solvers = solver_rows(
            batches, num_solved=num_solved, time_limit_s=time_limit_s, is_timed=is_timed
        )
    is_timed = is_timed and not known
    found = [known.get(row.label) or measured(row, batches, is_timed=is_timed) for row in rows()]
    return [*found[:6], *solvers, *found[6:]]


def taken_text(folder: Path, known: dict[str, Record]) -> str:
    """Returns which rows come from earlier results of which commit, or "" if none do."""
    if not known:
        return ""
    new = [row.label for row in rows() if row.label not in known]
    but = f" but {' and '.join(new)} (which are not timed)" if new else ""
    return (
        f" Taken from earlier results, of commit {commit_of(folder)}: all rows{but}, and other "
        f"draws."
    )


def draws_of(*, steps: int, seeds: Sequence[int]) -> Table:
    """Measures all methods except the solver on other draws of the fitted distribution."""
    found: dict[str, list[float]] = {row.label: [] for row in rows()}
    for seed in seeds:
        batches = batches_of("evaluation", num_micro_batches=N, num_batches=steps, seed=seed)
        for row in rows():
            summary = measure(row.make(), batches, cost=COST).summary
            found[row.label].append(summary.imbalance)
    papers = {row.label: row.paper[0] if row.paper else None for row in rows()}
    return Table(
        name="draws",
        title=f"Other draws of the fitted distribution, seeds {seeds[0]} to {seeds[-1]}",
        columns=("method", "paper", "mean", "least", "most"),
        rows=[
            [label, papers[label], float(np.mean(x)), min(x), max(x)] for label, x in found.items()
        ],
        formats={"paper": ".2f"} | dict.fromkeys(("mean", "least", "most"), ".3f"),
    )


def flash_3_table(batches: list[GlobalBatch]) -> Table:
    """Measures all methods except the solver with the prices of FlashAttention-3."""
    spec = configuration("7b_128k", *constants.settings(FLASH_3))
    cost = workload_of(spec, constants.profile())
    found: list[list[Any]] = []
    for row in rows(replace(OPTIONS, cost=cost)):
        summary = measure(row.make(), batches, cost=cost).summary
        paper = row.paper[0] if row.paper else None
        found.append([row.label, paper, summary.imbalance, summary.mean_delay])
    return Table(
        name="flash_3",
        title=f"The fitted distribution at {KERNELS[FLASH_3]}'s prices",
        columns=["method", "paper", "ours", "mean delay"],
        rows=found,
        formats={"paper": ".2f", "ours": ".3f", "mean delay": ".2f"},
        note="Batches are those of the first table.",
    )


def caps_text(records: Sequence[Record]) -> str:
    """Returns the page's comparison of Algorithm 1 and `bounded` under the same caps."""
    by_label = {record["row"]: record for record in records}
    said: list[str] = []
    for name, labels in CAPPED.items():
        theirs, ours = (
            f"{by_label[label]['imbalance']:.4f} with a mean delay of "
            f"{by_label[label]['mean_delay']:.3f} steps"
            for label in labels
        )
        said.append(f"with {name} caps Algorithm 1 is at {theirs}, `bounded` at {ours}")
    return f"**Policies at the same caps** (forward imbalance): {'; '.join(said)}."


UNTIMED = "**Nothing was timed** in this run, because the machine had other work."


def timed_text(time_limit_s: float) -> str:
    """Returns what the times mean, and why the solver's cannot be compared with the paper's."""
    return (
        "Overheads are of one CPU core of a shared machine; the paper's solver is commercial.\n\n"
        "**The solver's time is of another problem than the paper's.** The paper's solver takes "
        "25.3 s at W = 4, and its table names no limit. Ours is told to stop after "
        f"{time_limit_s:g} s a window of W global batches, and its answer then has the gap that "
        "stands below the table. Where a time times W is above the limit, it stopped late. It also "
        "decides on fewer documents: long ones have a binary variable for each micro-batch, while "
        "short ones are a fluid that is divided among micro-batches and rounded afterwards. So the "
        "times of solver rows cannot be compared with the paper's. Their imbalance can."
    )


def main() -> None:
    parser = experiment_parser(
        __doc__, quick="pack 160 batches, with 24 for the solver", seed=1, steps=640, lengths=True,
        take="measure only rows that the results do not have yet",
    )  # fmt: skip
    text = "solver's time limit per window, in seconds"
    parser.add_argument("--time-limit", type=float, default=10.0, help=text)
    text = "leave out times, which say nothing where the machine has other work"
    parser.add_argument("--untimed", action="store_true", help=text)
    options = parser.parse_args()
    steps, num_solved = (160, 24) if options.quick else (max(160, options.steps), 320)
    folder = Path(__file__).parent
    names = ("evaluation", "stdlib", *options.lengths)
    known = {name: earlier(folder, name) if options.take else {} for name in names}
    found: dict[str, list[Record]] = {}
    for name in names:
        batches = batches_of(name, num_micro_batches=N, num_batches=steps, seed=options.seed)
        found[name] = all_rows(
            batches,
            num_solved=num_solved if name == "evaluation" else 0,
            time_limit_s=options.time_limit,
            known=known[name],
            is_timed=not options.untimed,
        )
        show(table_of(name, found[name]))
    if options.quick:
        return
    seeds = range(options.seed, options.seed + 5)
    write_results(
        folder,
        title="Table 2: imbalance degree and packing overhead",
        how=How.PREDICTED,
        profile=COST.profile,
        seed=options.seed,
        text=f"{steps} global batches of {N} windows of {WINDOW} tokens, W_a / W_l = {ratio():.2f} "
        f"forward at the window, S_max {constants.S_MAX}, queues "
        f"{list(constants.QUEUES.values())}; solver HiGHS, one thread, {options.time_limit:g} s a "
        f"window. The paper's numbers are for its own corpus: only the fitted distribution is "
        f"meant to reproduce them. Its lengths, S_max and queues were chosen by this table and by "
        f"Figure 12 (`experiments/harness/constants.py`). Prices were not: they are those of "
        f"FlashAttention-2, except in the table of FlashAttention-3."
        f"{taken_text(folder, known[names[0]])}\n\n{caps_text(found['evaluation'])}\n\n"
        f"{UNTIMED if options.untimed else timed_text(options.time_limit)}",
        tables=[
            *(table_of(name, records) for name, records in found.items()),
            flash_3_table(
                batches_of("evaluation", num_micro_batches=N, num_batches=steps, seed=options.seed)
            ),
            draws_of(steps=steps, seeds=seeds),
        ],
    )


if __name__ == "__main__":
    main()
