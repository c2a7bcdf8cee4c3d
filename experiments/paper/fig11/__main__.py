"""Predicts Figure 11: how the sharding of a micro-batch is chosen (Section 5.3).

`python -m experiments.paper.fig11 [--preset 7b_64k] [--cp 4] [--seed 0] [--batches 24]` plans
global batches drawn from the fitted distribution. It shows two micro-batches: the one where
per-document sharding gains most over per-sequence sharding, and the one where the opposite is true.

For each it draws the steps of Section 5.3: the spans under both strategies (1), the segments that
they become for the attention kernel (2), the predicted attention time of each CP rank (3), and the
choice (4).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from experiments.harness.arguments import experiment_parser
from experiments.harness.constants import configuration, title
from experiments.harness.drawing import RANK_COLOURS, new_figure, tokens_axis
from experiments.harness.pages import Against, How, Picture, Table, priced_with, show, write_results
from experiments.paper.fig09.draw import draw_spans
from wlb.cost import AttentionLatency, ProfiledWorkload, attention_latency, workload_for
from wlb.data import GlobalBatches, lengths_of_family
from wlb.plan import IntArray, ShardingPlan, offsets_of
from wlb.sharding import shard
from wlb.simulate import planner_of
from wlb.spec import RunSpec

STATIC = ("per_sequence", "per_document")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A micro-batch under both static strategies, and which of them `adaptive` chooses."""

    step: int
    micro_batch: int
    plans: tuple[ShardingPlan, ...]  # one per strategy, in the order of STATIC
    latencies: tuple[AttentionLatency, ...]  # predicted times of ranks, in the order of STATIC
    chosen: str  # the strategy that `adaptive` chooses

    @property
    def times_ns(self) -> tuple[int, ...]:
        """Returns the attention time under each strategy, in the order of STATIC.

        Ranks wait for each other in each pass, so it is the slowest rank's forward plus the slowest
        rank's backward.
        """
        return tuple(latency.slowest_kernels_ns for latency in self.latencies)

    @property
    def gain(self) -> float:
        """Returns the time of the slower strategy over that of the faster one, minus 1."""
        return max(self.times_ns) / min(self.times_ns) - 1

    @property
    def name(self) -> str:
        return f"micro-batch {self.micro_batch} of step {self.step}"


def choice_of(
    lengths: IntArray, cost: ProfiledWorkload, *, cp: int, step: int, micro_batch: int
) -> Choice:
    plans = tuple(shard(lengths, cp=cp, strategy=name, cost=cost) for name in STATIC)
    return Choice(
        step=step,
        micro_batch=micro_batch,
        plans=plans,
        latencies=tuple(attention_latency(plan, cost) for plan in plans),
        chosen=shard(lengths, cp=cp, strategy="adaptive", cost=cost).strategy,
    )


def choices_of(spec: RunSpec, cost: ProfiledWorkload, *, num_batches: int) -> list[Choice]:
    """Returns the choice for every planned micro-batch of at least half a window."""
    window = spec.data.context_window
    mean = int(lengths_of_family(window=window, num_documents=4096, seed=0).lengths.mean())
    source = lengths_of_family(
        window=window,
        num_documents=num_batches * spec.tokens_per_step * 5 // 4 // mean,
        seed=spec.run.seed,
    )
    stream = GlobalBatches(source, tokens_per_batch=spec.tokens_per_step, seed=spec.run.seed)
    batches = [batch for batch, _ in islice(stream.iterate(), num_batches)]
    return [
        choice_of(m.lengths, cost, cp=spec.parallel.cp, step=plan.step, micro_batch=m.index)
        for plan in planner_of(spec, cost, batches).steps()
        for m in plan.packing.micro_batches
        # Smaller micro-batches occur only in the flush and are not typical.
        if m.num_tokens >= window // 2
    ]


def shown_of(choices: Sequence[Choice]) -> list[Choice]:
    """Returns, for each strategy that is ever chosen, the micro-batch where it gains most.

    The gain is over the other strategy.
    """
    found = ([c for c in choices if c.chosen == name] for name in STATIC)
    return [max(mine, key=lambda c: c.gain) for mine in found if mine]


def draw(choice: Choice) -> Any:
    """Draws the spans under both strategies (left) and the predicted time of each rank (right)."""
    figure, (left, right) = new_figure(ncols=2, height=4.9, width_ratios=(2.4, 1))
    for y, plan in enumerate(choice.plans):
        draw_spans(left, y, plan)
    _documents(left, choice.plans[0])
    labels = [
        f"{name.replace('_', '-')}\n{len(plan.piece)} segments"
        for name, plan in zip(STATIC, choice.plans, strict=True)
    ]
    left.set(xlim=(0, choice.plans[0].num_tokens), ylim=(1.75, -0.95), yticks=(-0.7, 0, 1))
    left.set_yticklabels(["documents", *labels])
    left.tick_params(axis="y", length=0)
    left.grid(visible=False)
    tokens_axis(left, log=False)
    left.set_xlabel("token of the packed micro-batch")
    left.set_title("1, 2  spans of each CP rank (colour, number)", fontsize=10, loc="left")
    _bars(right, choice)
    for axes in (left, right):
        axes.spines[["left"]].set_visible(False)
    return figure


def _documents(axes: Any, plan: ShardingPlan) -> None:
    """Draws the documents above the spans, in two greys, and their borders through the spans."""
    ends = offsets_of(plan.lengths)
    for i, length in enumerate(plan.lengths.tolist()):
        axes.barh(-0.7, length, 0.28, ends[i], color=("#B0B0B0", "#707070")[i % 2], lw=0)
    for y in (0, 1):
        axes.vlines(ends, y - 0.37, y + 0.37, color="black", linewidth=0.9, zorder=3)


def _bars(axes: Any, choice: Choice) -> None:
    """Draws forward (full) and backward (light) times of each rank, and the total as a line.

    The total is the slowest rank's forward plus the slowest rank's backward.
    """
    cp = choice.plans[0].cp
    height = 0.62 / cp
    longest = max(choice.times_ns) / 1e6
    for y, (name, latency, time) in enumerate(
        zip(STATIC, choice.latencies, choice.times_ns, strict=True)
    ):
        for rank in range(cp):
            at = y + (rank - (cp - 1) / 2) * height
            forward, backward = (
                int(x[rank]) / 1e6 for x in (latency.forward_ns, latency.backward_ns)
            )
            colour = RANK_COLOURS[rank % len(RANK_COLOURS)]
            axes.barh(at, forward, 0.9 * height, color=colour)
            axes.barh(at, backward, 0.9 * height, forward, color=colour, alpha=0.5)
        is_chosen = name == choice.chosen
        axes.plot([time / 1e6] * 2, [y - 0.38, y + 0.38], color="black", lw=1.6 if is_chosen else 1)
        words = f"{time / 1e6:.1f} ms" + (", chosen" if is_chosen else "")
        is_short = time < 0.6e6 * longest
        axes.text(
            0 if is_short else time / 1e6,
            y + 0.4,
            words,
            ha="left" if is_short else "right",
            va="top",
            fontsize=10,
            fontweight="bold" if is_chosen else "normal",
        )
    rows = [y + (rank - (cp - 1) / 2) * height for y in (0, 1) for rank in range(cp)]
    axes.set(xlim=(0, 1.04 * longest), ylim=(1.75, -0.95), yticks=rows)
    axes.set_yticklabels([*range(cp)] * 2, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("attention, all layers (ms)")
    axes.set_title("3, 4  predicted; line: slowest", fontsize=10, loc="left")
    axes.text(0, -0.72, "full: forward; light: backward", fontsize=9, va="center")


def ranks_table(shown: Sequence[Choice]) -> Table:
    rows: list[list[Any]] = []
    for choice in shown:
        for name, plan, latency in zip(STATIC, choice.plans, choice.latencies, strict=True):
            for rank in range(plan.cp):
                spans = plan.for_rank(rank)
                rows.append(
                    [
                        choice.name, name, rank, spans.num_tokens, len(spans.piece),
                        int(latency.forward_ns[rank]) / 1e6, int(latency.backward_ns[rank]) / 1e6,
                        "yes" if name == choice.chosen else "",
                    ]
                )  # fmt: skip
    columns = ("micro-batch", "strategy", "CP rank", "tokens", "segments", "forward (ms)",
               "backward (ms)", "chosen")  # fmt: skip
    return Table(
        name="ranks",
        title="Ranks of the micro-batches shown",
        columns=columns,
        rows=rows,
        formats={"tokens": ",d", "forward (ms)": ".2f", "backward (ms)": ".2f"},
    )


def choices_table(choices: Sequence[Choice]) -> Table:
    return Table(
        name="choices",
        title="All micro-batches",
        columns=("step", "micro-batch", "documents", "tokens", "per_sequence (ms)",
                 "per_document (ms)", "chosen"),
        rows=[
            [c.step, c.micro_batch, len(c.plans[0].lengths), c.plans[0].num_tokens,
             *(t / 1e6 for t in c.times_ns), c.chosen]
            for c in choices
        ],
        formats={"tokens": ",d", "per_sequence (ms)": ".2f", "per_document (ms)": ".2f"},
        most_rows=0,
    )  # fmt: skip


def against(choices: Sequence[Choice]) -> list[Against]:
    shares = [sum(c.chosen == name for c in choices) / len(choices) for name in STATIC]
    static = [sum(c.times_ns[k] for c in choices) for k in (0, 1)]
    best = sum(min(c.times_ns) for c in choices)
    return [
        Against(
            what="per-document sharding is not always better (Section 5.3)",
            paper="short pieces make the kernel less efficient",
            ours=f"per-sequence is chosen for {shares[0]:.0%} of {len(choices)} micro-batches",
        ),
        Against(
            what="attention of all micro-batches, adaptive over per-sequence and per-document",
            paper="1.075, 1.034 (layer, Figure 15)",
            ours=f"{static[0] / best:.3f}, {static[1] / best:.3f} (attention kernels alone)",
        ),
    ]


def main() -> None:
    parser = experiment_parser(__doc__, seed=0)
    parser.add_argument("--preset", default="7b_64k")
    parser.add_argument("--cp", type=int, default=4)
    parser.add_argument("--backend", default="flash_attention_3", help="attention kernel")
    parser.add_argument("--batches", type=int, default=24)
    options = parser.parse_args()
    spec = configuration(
        options.preset,
        "parallel.dp=1",
        f"parallel.cp={options.cp}",
        f"run.seed={options.seed}",
        f"kernels.attention={options.backend}",
    )
    cost = workload_for(spec, "cuda")
    choices = choices_of(spec, cost, num_batches=options.batches)
    shown = shown_of(choices)
    rows = against(choices)
    show(ranks_table(shown), against=rows, width=150)
    write_results(
        Path(__file__).parent,
        title="Figure 11: choosing the sharding of a micro-batch",
        how=How.PREDICTED,
        profile=priced_with(cost.profile),
        seed=options.seed,
        text=(
            f"{title(options.preset)} at CP {options.cp}, lengths `wlb_paper`, {options.batches} "
            f"global batches packed by `{spec.packing.policy}`, attention kernel "
            f"`{options.backend}`; times are of all layers of a pipeline rank. Of micro-batches "
            f"with at least half a window, those are shown where the strategy that is chosen gains "
            f"most over the other one.\n\nKeys and values of the whole micro-batch "
            f"are gathered on each rank (1); a rank's queries are its spans, each a segment of "
            f"(query rows, keys up to its end) for the kernel (2). A segment is priced in tiles at "
            f"the throughput of its shape, and each rank's segments are summed (3). Ranks wait for "
            f"each other in each layer's collectives, forward and backward, so a strategy takes "
            f"the slowest rank's forward plus the slowest rank's backward; the faster strategy is "
            f"chosen (4). Cuts through a few long documents unbalance per-sequence sharding; where "
            f"all documents are short, per-document sharding's many short segments cost more than "
            f"they balance."
        ),
        against=rows,
        tables=[ranks_table(shown), choices_table(choices)],
        figures=[
            Picture(
                name=c.chosen,
                caption=f"{c.name}: {c.chosen.replace('_', '-')} sharding is chosen, "
                f"{min(c.times_ns) / 1e6:.1f} ms instead of {max(c.times_ns) / 1e6:.1f} ms",
                figure=draw(c),
            )
            for c in shown
        ],
    )


if __name__ == "__main__":
    main()
