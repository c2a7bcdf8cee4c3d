"""Draws Figure 8 from real packing runs: how outlier documents wait and are released.

`python -m experiments.paper.fig08 [--seed 0] [--steps 8]` shows some consecutive steps of the same
documents (4 micro-batches of 128K) under two policies: Algorithm 1 with two queues, and `bounded`,
which has no queues and decides by predicted work. `first_window` chooses the steps, and `main` says
what the pictures show. Needs matplotlib.
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
    """A step's plan, and the pieces that waited when the step was planned."""

    plan: PackingPlan
    waiting: Pieces  # pieces carried from earlier steps, then those of the step's global batch
    slot: np.ndarray  # slot in the carry of each waiting piece, -1 for new ones, [len(waiting)]
    leaves: BoolArray  # whether the step trains each waiting piece, shape [len(waiting)]

    @property
    def level(self) -> np.ndarray:
        """Returns the queue that each piece belongs to by its length, shape [len(waiting)].

        It is i for L_i <= length < L_{i+1}, and 0 for an ordinary document, which is shorter than
        L_1.
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
        # Each batch makes exactly one plan, because with these lengths every batch has an ordinary
        # document.
        (plan,) = plans
        leaves = np.isin(waiting.document, plan.pieces.document)
        slot = np.concatenate([before.slot, new])
        out.append(Step(plan=plan, waiting=waiting, slot=slot, leaves=leaves))
    return out


def plain_of(batches: list[GlobalBatch], first: int, num: int) -> list[float]:
    """Returns Plain-4D's imbalance in `num` steps from step `first` on."""
    carry, out = PLAIN.start(), []
    for batch in batches:
        plans, carry = PLAIN.push(batch, carry)
        out += [imbalance(plan.workload_ns) for plan in plans]
    return out[first : first + num]


def first_window(steps: list[Step], num: int) -> int:
    """Returns the number of the first step to show.

    It is the first of `num` consecutive steps that begin with an empty second queue and in which
    this queue releases documents that arrived in different steps.
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
    """Returns the text above a stack of `num` outliers, of which `out` are trained in the step."""
    verb = "leaves" if out == 1 else "leave"
    return f"{num}" if not out else f"{out} {verb}" if out == num else f"{num}, {out} {verb}"


def queues(step: Step) -> tuple[dict[str, list[Block]], dict[str, str]]:
    """Returns the stacks of Algorithm 1's two queues, and the text above each stack.

    The oldest document is at the bottom.
    """
    waiting: dict[str, list[Block]] = {}
    notes: dict[str, str] = {}
    for level in (1, 2):
        rows = np.flatnonzero((step.level == level) & (step.slot != 0)).tolist()
        waiting[f"queue {level}"] = [block(step, row) for row in rows]
        out = int(step.leaves[rows].sum())
        notes[f"queue {level}"] = note(len(rows), out) if out else f"{len(rows)} of {N}"
    return waiting, notes


def held(step: Step) -> tuple[dict[str, list[Block]], dict[str, str]]:
    """Returns the stacks of documents that wait under `bounded`, and the text above each stack.

    The stack "held" has documents of earlier steps, ordinary ones on top. The stack "new" has the
    outliers of the step's global batch.
    """
    has_waited = step.slot >= 0
    ordered = np.argsort(step.level == 0, kind="stable")
    rows = {
        "held": ordered[has_waited[ordered]].tolist(),
        "new": np.flatnonzero(~has_waited & (step.level > 0)).tolist(),
    }
    waiting = {label: [block(step, row) for row in mine] for label, mine in rows.items()}
    notes: dict[str, str] = {}
    for label, mine in waiting.items():
        num = sum(b.is_outlier for b in mine)
        out = sum(b.is_outlier and b.leaves for b in mine)
        notes[label] = note(num, out)
    return waiting, notes


def micro_batches(step: Step) -> list[list[Block]]:
    """Returns a stack of documents for each micro-batch, the longest at the bottom.

    The height of a document is its predicted time, over that of a document of one window.
    """
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
    """Returns the table of all documents that the steps train, with their micro-batches."""
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
    """Returns the table of the numbers in a policy's picture."""
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
    """Draws a picture for Algorithm 1 and one for `bounded`, and writes the page.

    A column is a step. Its upper half shows the outliers that wait when the step is planned,
    including those that have just arrived, coloured by the step of their arrival. The lower half
    shows the micro-batches of the step as stacks of predicted time, so equal heights mean balance.

    The pictures show that a queue of Algorithm 1 fills until it has an outlier for every
    micro-batch. The step that releases it gives one to each micro-batch, and ordinary documents
    even out the rest.
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
