"""Draws Figure 8 from real packing runs: how outlier documents wait and leave.

`python -m experiments.paper.fig08 [--seed 0] [--steps 8]` shows a few consecutive steps of
the fitted stream (4 micro-batches of 128K), once under Algorithm 1 with two queues and once under
`bounded`, which has no queues and decides by predicted load. Both get the same documents.
`first_window` chooses the steps, `main` says what the pictures show. Needs matplotlib.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.harness.arguments import experiment_parser
from experiments.harness.pages import How, Picture, Table, show, write_results
from experiments.harness.streams import COST, RATIO, WINDOW, batches_of
from wlb.packing import (
    BoundedPacker,
    OriginalPacker,
    Packer,
    PackerOptions,
    VarLenPacker,
    WindowCut,
)
from wlb.plan import BoolArray, Carry, GlobalBatch, PackingPlan, Pieces, imbalance

try:
    from experiments.paper.fig08.draw import Block, Column, draw
except ModuleNotFoundError as error:
    raise SystemExit(f"this needs matplotlib: pip install -e '.[plot]' ({error})") from error

N = 4
NUM_BATCHES = 64
THRESHOLDS = (0.2, 0.63)
S_MAX = 2.0
STEP_TOKENS = 1.5
OPTIONS = PackerOptions(num_micro_batches=N, context_window=WINDOW, cost=COST, seed=0)
LEVELS = tuple(int(t * WINDOW) for t in THRESHOLDS)
ALGORITHM_1 = VarLenPacker(options=OPTIONS, s_max=int(S_MAX * WINDOW), queue_thresholds=LEVELS)
BOUNDED = BoundedPacker(
    options=OPTIONS, s_max=int(S_MAX * WINDOW), step_tokens=int(STEP_TOKENS * N * WINDOW)
)
PLAIN = OriginalPacker(options=OPTIONS, cut=WindowCut.SHORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Holds a step's plan and the pieces that waited when the step was planned.

    waiting: carried pieces, then the pieces of the step's own batch
    slot: slot of each waiting piece in the carry, -1 for a new piece, shape [len(waiting)]
    leaves: whether the plan takes each waiting piece, shape [len(waiting)]
    """

    plan: PackingPlan
    waiting: Pieces
    slot: np.ndarray
    leaves: BoolArray

    @property
    def level(self) -> np.ndarray:
        """Returns each piece's level, shape [len(waiting)].

        It is 0 for an ordinary document, i for L_i <= length < L_{i+1}.
        """
        return np.searchsorted(LEVELS, self.waiting.length, side="right")

    @property
    def imbalance(self) -> float:
        return imbalance(self.plan.workload_ns)


def steps_of(packer: Packer, batches: list[GlobalBatch]) -> list[Step]:
    carry: Carry = packer.start()
    out: list[Step] = []
    for batch in batches:
        before = carry
        plans, carry = packer.push(batch, before)
        waiting = Pieces.concat(before.pieces, OPTIONS.arrived(batch, before.next_step))
        new = np.full(len(waiting) - len(before.pieces), -1, np.int64)
        # Each batch makes one plan, because with these lengths every batch has an ordinary
        # document.
        (plan,) = plans
        leaves = np.isin(waiting.document, plan.pieces.document)
        slot = np.concatenate([before.slot, new])
        out.append(Step(plan=plan, waiting=waiting, slot=slot, leaves=leaves))
    return out


def plain_of(batches: list[GlobalBatch], first: int, num: int) -> list[float]:
    """Returns Plain-4D's imbalance in the steps of the same numbers."""
    carry, out = PLAIN.start(), []
    for batch in batches:
        plans, carry = PLAIN.push(batch, carry)
        out += [imbalance(plan.workload_ns) for plan in plans]
    return out[first : first + num]


def first_window(steps: list[Step], num: int) -> int:
    """Returns the first step to show.

    The steps shown are the first window of `num` steps that begins with level 2 empty and in which
    level 2 releases documents of several arrivals.
    """
    for first in range(len(steps) - num + 1):
        start = steps[first]
        if bool(((start.slot >= 0) & (start.level == 2)).any()):
            continue
        for step in steps[first : first + num]:
            released = step.leaves & (step.level == 2)
            if len(np.unique(step.waiting.arrival_step[released])) > 1:
                return first
    raise SystemExit(f"no window of {num} steps in {len(steps)} shows level 2 fill and release")


def block(step: Step, row: int) -> Block:
    level = int(step.level[row])
    return Block(
        size=int(step.waiting.length[row]) / WINDOW,
        arrival=int(step.waiting.arrival_step[row]),
        is_outlier=level > 0,
        leaves=bool(step.leaves[row]),
        is_delayed=bool(step.slot[row] >= 0),
    )


def note(num: int, out: int) -> str:
    """Returns the text above a stack of `num` outliers, `out` of which leave."""
    verb = "leaves" if out == 1 else "leave"
    return f"{num}" if not out else f"{out} {verb}" if out == num else f"{num}, {out} {verb}"


def queues(step: Step) -> tuple[dict[str, list[Block]], dict[str, str]]:
    """Returns Algorithm 1's two queues, oldest document at the bottom, and how full each is."""
    waiting: dict[str, list[Block]] = {}
    notes: dict[str, str] = {}
    for level in (1, 2):
        rows = np.flatnonzero((step.level == level) & (step.slot != 0)).tolist()
        waiting[f"queue {level}"] = [block(step, row) for row in rows]
        out = int(step.leaves[rows].sum())
        notes[f"queue {level}"] = note(len(rows), out) if out else f"{len(rows)} of {N}"
    return waiting, notes


def held(step: Step) -> tuple[dict[str, list[Block]], dict[str, str]]:
    """Returns the documents that `bounded` holds and the outliers of the new batch.

    Ordinary documents, which only the held stack shows, lie on top.
    """
    was_held = step.slot >= 0
    ordered = np.argsort(step.level == 0, kind="stable")
    rows = {
        "held": ordered[was_held[ordered]].tolist(),
        "new": np.flatnonzero(~was_held & (step.level > 0)).tolist(),
    }
    waiting = {label: [block(step, row) for row in mine] for label, mine in rows.items()}
    notes: dict[str, str] = {}
    for label, mine in waiting.items():
        num = sum(b.is_outlier for b in mine)
        out = sum(b.is_outlier and b.leaves for b in mine)
        notes[label] = note(num, out)
    return waiting, notes


def micro_batches(step: Step) -> list[list[Block]]:
    """Returns each micro-batch's stack: heights are predicted times, the tallest at the bottom."""
    unit = int(COST.workload_ns([WINDOW])[0])
    out: list[list[Block]] = []
    for batch in step.plan.micro_batches:
        work = COST.workload_ns(batch.lengths)
        arrival = batch.pieces.arrival_step
        blocks = [
            Block(
                size=int(work[row]) / unit,
                arrival=int(arrival[row]),
                is_outlier=bool(batch.lengths[row] >= LEVELS[0]),
                leaves=True,
                is_delayed=bool(arrival[row] < step.plan.step),
            )
            for row in np.argsort(-work, kind="stable").tolist()
        ]
        out.append(blocks)
    return out


def columns_of(steps: list[Step], plain: list[float], *, is_queued: bool) -> list[Column]:
    out: list[Column] = []
    for step, ratio in zip(steps, plain, strict=True):
        waiting, notes = queues(step) if is_queued else held(step)
        out.append(
            Column(
                step=step.plan.step,
                imbalance=step.imbalance,
                plain=ratio,
                waiting=waiting,
                notes=notes,
                micro_batches=micro_batches(step),
                windows=[int(tokens) / WINDOW for tokens in step.plan.tokens],
            )
        )
    return out


def placements(runs: dict[str, list[Step]]) -> Table:
    """Returns the table with one row per document placed."""
    rows: list[list[object]] = []
    for policy, steps in runs.items():
        for step in steps:
            number = step.plan.step
            for batch in step.plan.micro_batches:
                p = batch.pieces
                columns = (p.document, p.length, COST.workload_ns(p.length), p.arrival_step)
                for row in zip(*(column.tolist() for column in columns), strict=True):
                    rows.append([policy, number, batch.index, *row, number - row[-1]])
    names = ("policy", "step", "micro_batch", "document", "length", "workload_ns", "arrival")
    return Table(
        name="placements",
        title="Documents placed",
        columns=(*names, "delay"),
        rows=rows,
        most_rows=0,
        note="A row for each document; delay in steps.",
    )


def table(name: str, columns: list[Column]) -> Table:
    """Returns the numbers of a policy's picture."""
    records: list[dict[str, object]] = []
    for c in columns:
        leaving = sorted(b.arrival for blocks in c.micro_batches for b in blocks if b.is_outlier)
        records.append(
            {"step": c.step}
            | {label: c.notes[label] for label in c.waiting}
            | {
                "outliers that leave (came with step)": f"{len(leaving)} "
                f"({', '.join(map(str, leaving)) or '-'})",
                "tokens (windows)": sum(c.windows),
                "imbalance": c.imbalance,
                "Plain-4D": c.plain,
            }
        )
    mean, plain = np.mean([c.imbalance for c in columns]), np.mean([c.plain for c in columns])
    return Table.of(
        file_of(name),
        name,
        records,
        formats={"tokens (windows)": ".2f", "imbalance": ".3f", "Plain-4D": ".3f"},
        note=f"Mean imbalance {mean:.3f}; Plain-4D's {plain:.3f}.",
    )


def text_of(first: int, num: int) -> str:
    return (
        f"Lengths `wlb_paper`, window {WINDOW}, {N} micro-batches, W_a / W_l = {RATIO} at the "
        f"window, S_max {S_MAX:g} windows; Algorithm 1 with queues from {THRESHOLDS[0]:g} and "
        f"{THRESHOLDS[1]:g} windows; bounded with T = {STEP_TOKENS:g} global batches.\n\n"
        f"Steps {first} to {first + num - 1}: the first window of {num} steps that begins with "
        f"level 2 empty and in which level 2 releases documents of several arrivals, of the "
        f"first {NUM_BATCHES} global batches.\n\n"
        f"An outlier is a document of at least the first queue's length. What waits is counted "
        f"once the step's own batch has come, before anything leaves. Figures above the "
        f"micro-batches are their tokens, in windows. Plain-4D is the loader that keeps long "
        f"documents whole, on the same stream, in the step of the same number."
    )


def file_of(name: str) -> str:
    return name.lower().replace(" ", "_")


PICTURES = {
    "Algorithm 1": (
        "Algorithm 1: a queue of outliers releases one for each micro-batch",
        "outliers that wait\n(length in windows)",
    ),
    "bounded": (
        "bounded: outliers leave when the step they make is balanced enough for their delay",
        "held, and new outliers\n(length in windows)",
    ),
}
"""Title of each policy's picture, and label of its upper row."""


def main() -> None:
    """Draws one picture under Algorithm 1 and one under `bounded`, and writes the page.

    - The upper row shows the outliers that wait when the step is planned, those of its own batch
      included, coloured by the step they arrived with.
    - The lower row shows the micro-batches that the step makes, stacked by predicted time, so that
      equal height means balance.

    The picture shows that a queue fills until it has an outlier for every micro-batch. The step
    that releases it gives each micro-batch one of them, and ordinary documents make up the
    difference.
    """
    parser = experiment_parser(__doc__, seed=0)
    parser.add_argument("--steps", type=int, default=8, choices=range(2, 9), help="steps shown")
    options = parser.parse_args()
    batches = batches_of(
        "wlb_paper", num_micro_batches=N, num_batches=NUM_BATCHES, seed=options.seed
    )
    steps = steps_of(ALGORITHM_1, batches)
    first = first_window(steps, options.steps)
    shown_of = slice(first, first + options.steps)
    runs = {"Algorithm 1": steps[shown_of], "bounded": steps_of(BOUNDED, batches)[shown_of]}
    plain = plain_of(batches, first, options.steps)
    shown = {
        name: columns_of(mine, plain, is_queued=name == "Algorithm 1")
        for name, mine in runs.items()
    }
    tables = [table(name, columns) for name, columns in shown.items()]
    show(*tables)
    write_results(
        Path(__file__).parent,
        title="Figure 8: outliers wait until each micro-batch gets one",
        how=How.COMPUTED,
        profile=f"attention of a window takes {RATIO} times its linear layers' time.",
        seed=options.seed,
        text=text_of(first, options.steps),
        tables=[*tables, placements(runs)],
        figures=[
            Picture(
                name=file_of(name),
                caption=title,
                figure=draw(shown[name], title=title, waiting=waiting),
            )
            for name, (title, waiting) in PICTURES.items()
        ],
    )


if __name__ == "__main__":
    main()
