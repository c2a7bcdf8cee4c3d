"""Draws README's picture: one step of 7B-128K as a usual loader packs it and as wlb packs it.

`python -m experiments.overview [--seed 0] [--batches 640]` packs documents of the fitted length
family with Plain-4D and with `bounded`. It picks a step whose work is about equal under both and
whose imbalance under Plain-4D is near the mean, and draws the predicted time of each micro-batch
and of each CP rank of the micro-batch that holds the longest document. Times are predicted with the
constants of `experiments/constants.py`, as in Table 2.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.drawing import new_figure
from experiments.results import How, Picture, Table, show, write_results
from experiments.streams import WINDOW, batches_of
from experiments.table2_imbalance.__main__ import COST, OPTIONS, N
from wlb.cost import attention_latency
from wlb.packing import BoundedPacker, OriginalPacker, Packer, WindowCut
from wlb.plan import GlobalBatch, IntArray, PackingPlan, imbalance
from wlb.sharding import shard

CP = 4
SHORT, LONG, WAITING = "#56B4E9", "#D55E00", "#E6E6E6"
NARROW = 0.01
"""Documents below this share of the slowest micro-batch are drawn without a border."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Describes one step under one policy.

    sharding: strategy that divides a micro-batch over the CP ranks
    """

    title: str
    packing: PackingPlan
    sharding: str

    @property
    def times_ns(self) -> IntArray:
        """Returns the predicted forward latency of each micro-batch in ns, shape [N]."""
        lengths = [batch.lengths for batch in self.packing.micro_batches]
        return np.array([int(COST.forward_latency_ns(of).sum()) for of in lengths], np.int64)

    @property
    def rank_times_ns(self) -> IntArray:
        """Returns the predicted forward attention of each CP rank in ns, shape [CP].

        The micro-batch is the one that holds the longest document.
        """
        batch = max(self.packing.micro_batches, key=lambda batch: int(batch.lengths.max()))
        plan = shard(batch.lengths, cp=CP, strategy=self.sharding, cost=COST)
        return attention_latency(plan, COST).forward_ns


def plans_of(packer: Packer, batches: Sequence[GlobalBatch]) -> list[PackingPlan]:
    """Returns the steps that the packer makes until the data ends, without the flush."""
    plans: list[PackingPlan] = []
    carry = packer.start()
    for batch in batches:
        made, carry = packer.push(batch, carry)
        plans += made
    return plans


def sides_of(batches: Sequence[GlobalBatch]) -> tuple[Side, Side]:
    plain = plans_of(OriginalPacker(options=OPTIONS, cut=WindowCut.SHORT), batches)
    ours = plans_of(
        BoundedPacker(options=OPTIONS, s_max=2 * WINDOW, step_tokens=3 * N * WINDOW // 2), batches
    )
    # By then the packers hold documents back.
    first = len(batches) // 4
    num = min(len(plain), len(ours))
    pairs = [
        (
            Side(title="windows of equal tokens (Plain-4D)", packing=a, sharding="per_sequence"),
            Side(title="balanced work (wlb)", packing=b, sharding="balanced"),
        )
        for a, b in zip(plain[first:num], ours[first:num], strict=True)
    ]
    seen = np.array([_typical(*pair) for pair in pairs])
    mean = np.array([*seen[:, :2].mean(0), 1.0])
    return pairs[int(np.abs(seen / mean - 1).max(1).argmin())]


def _typical(plain: Side, ours: Side) -> tuple[float, float, float]:
    """Returns the numbers that a step is chosen by.

    They are Plain-4D's imbalance over micro-batches, its imbalance over CP ranks, and our work over
    Plain-4D's work.
    """
    ranks = plain.rank_times_ns
    work = float(ours.times_ns.sum() / plain.times_ns.sum())
    return imbalance(plain.times_ns), float(ranks.max() / ranks.mean()), work


def draw(sides: Sequence[Side]) -> Any:
    """Draws micro-batches above and CP ranks below, one column per side, with shared x axes."""
    figure, axes = new_figure(nrows=2, ncols=2, height=5.0, sharex="row")
    for column, side in enumerate(sides):
        _micro_batches(axes[column], side)
        _ranks(axes[2 + column], side)
    kinds = [
        (LONG, f"documents of {WINDOW // 4096}K tokens and more"),
        (SHORT, "shorter documents"),
    ]
    handles = [axes[0].barh(0, 0, color=colour, label=label) for colour, label in kinds]
    handles += [axes[0].barh(0, 0, color=WAITING, hatch="//", edgecolor="white", label="waiting")]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _micro_batches(axes: Any, side: Side) -> None:
    times = side.times_ns / 1e6
    for y, batch in enumerate(side.packing.micro_batches):
        lengths = np.sort(batch.lengths)[::-1]
        at = 0.0
        for length, ns in zip(lengths, COST.forward_latency_ns(lengths).tolist(), strict=True):
            colour = LONG if length >= WINDOW // 4 else SHORT
            line = 0.4 if ns > NARROW * times.max() * 1e6 else 0.0
            axes.barh(y, ns / 1e6, 0.7, at, color=colour, edgecolor="white", linewidth=line)
            at += ns / 1e6
        axes.barh(y, times.max() - at, 0.7, at, color=WAITING, hatch="//", edgecolor="white", lw=0)
    axes.axvline(times.max(), color="black", lw=1.4, clip_on=False)
    axes.set(ylim=(len(times) - 0.4, -0.6), yticks=range(len(times)), ylabel="micro-batch")
    axes.set_xlabel("predicted forward time (ms)")
    axes.set_title(f"{side.title}\nslowest / mean micro-batch {imbalance(side.times_ns):.2f}",
                   fontsize=10, loc="left")  # fmt: skip
    axes.grid(visible=False)


def _ranks(axes: Any, side: Side) -> None:
    times = side.rank_times_ns / 1e6
    for y, ms in enumerate(times.tolist()):
        axes.barh(y, ms, 0.7, color="#009E73")
        axes.barh(y, times.max() - ms, 0.7, ms, color=WAITING, hatch="//", edgecolor="white", lw=0)
    axes.axvline(times.max(), color="black", lw=1.4, clip_on=False)
    axes.set(ylim=(CP - 0.4, -0.6), yticks=range(CP), ylabel="CP rank")
    axes.set_xlabel("its predicted attention, forward (ms)")
    axes.set_title(
        f"the longest document's micro-batch, sharded {side.sharding.replace('_', ' ')}\n"
        f"slowest / mean CP rank {times.max() / times.mean():.2f}",
        fontsize=10,
        loc="left",
    )
    axes.grid(visible=False)


def table_of(sides: Sequence[Side]) -> Table:
    rows: list[list[Any]] = []
    for side in sides:
        ranks = side.rank_times_ns
        rows.append(
            [
                side.title,
                side.packing.step,
                side.packing.num_tokens,
                imbalance(side.times_ns),
                float(side.times_ns.max() / 1e6),
                side.sharding,
                float(ranks.max() / ranks.mean()),
            ]
        )
    columns = ("step made of", "step", "tokens", "slowest / mean micro-batch", "slowest (ms)")
    return Table(
        name="steps",
        title="The steps",
        columns=(*columns, "sharding", "slowest / mean CP rank"),
        rows=rows,
        formats={columns[2]: ",d", columns[3]: ".3f", columns[4]: ".1f",
                 "slowest / mean CP rank": ".3f"},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batches", type=int, default=640)
    options = parser.parse_args()
    batches = batches_of(
        "evaluation", num_micro_batches=N, num_batches=options.batches, seed=options.seed
    )
    sides = sides_of(batches)
    table = table_of(sides)
    write_results(
        Path(__file__).parent,
        title="A step of equal tokens and a step of equal work",
        how=How.PREDICTED,
        profile=COST.profile,
        text="One step of the stream, chosen by the least of the largest deviations: of Plain-4D's "
        "imbalance of micro-batches and of CP ranks from their means over the stream, and of the "
        "work of the same step of `bounded` (T 1.5, S_max 2) from equal work. Plain-4D's imbalance "
        "here is below its mean over the stream, which Table 2 has. "
        f"Orange: documents of {WINDOW // 4:,} tokens and more. Below, the micro-batch "
        f"of the longest document on {CP} context-parallel ranks. Table 2 has all steps' means.",
        seed=options.seed,
        tables=[table],
        figures=[
            Picture(
                name="overview",
                caption="Predicted times of a step's micro-batches, and of the CP ranks of the "
                "longest document's: windows of equal tokens (left), balanced work (right); "
                "hatched: waiting for the slowest",
                figure=draw(sides),
            )
        ],
    )
    show(table)


if __name__ == "__main__":
    main()
