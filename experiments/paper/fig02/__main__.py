"""Draws Figure 2, 4-D parallelism, from a real plan and the executor's layout of ranks.

`python -m experiments.paper.fig02 [--tp 2] [--cp 2] [--pp 4] [--dp 4] [--seed 0]` plans one step
for the paper's example (TP=2, CP=2, PP=4, DP=4). It draws the contents of each rank: pipelines (DP)
have different micro-batches, pipeline ranks (PP) different layers, context-parallel ranks (CP)
different spans of each document, and tensor-parallel ranks (TP) different heads and columns of
weights. `wlb.parallel.mesh` numbers the ranks, so torch is needed.
"""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.arguments import experiment_parser
from experiments.harness.constants import configuration
from experiments.harness.drawing import RANK_COLOURS, new_figure
from experiments.harness.pages import Against, How, Picture, Table, priced_with, show, write_results
from wlb.cost import ProfiledWorkload, workload_for
from wlb.data import GlobalBatches, lengths_of_family
from wlb.parallel.mesh import rank_grid
from wlb.plan import ShardingPlan, offsets_of
from wlb.simulate import ShardedStep, planner_of, sharded_steps
from wlb.spec import RunSpec

PRESET = "7b_128k"
DOCUMENTS = ("#9A9A9A", "#CFCFCF")


def planned(spec: RunSpec, cost: ProfiledWorkload, *, step: int) -> ShardedStep:
    """Plans and shards one step of documents drawn from the fitted distribution."""
    window = spec.data.context_window
    mean = int(lengths_of_family(window=window, num_documents=4096, seed=0).lengths.mean())
    num = (step + 4) * spec.tokens_per_step // mean
    source = lengths_of_family(window=window, num_documents=num, seed=spec.run.seed)
    stream = GlobalBatches(source, tokens_per_batch=spec.tokens_per_step, seed=spec.run.seed)
    batches = [batch for batch, _ in islice(stream.iterate(), step + 2)]
    steps = sharded_steps(planner_of(spec, cost, batches), dp=spec.parallel.dp)
    return next(islice(steps, step, None))


def layers_of(spec: RunSpec, pp_rank: int) -> list[tuple[int, int, int]]:
    """Returns (stage, first layer, layer after the last) of each stage on a pipeline rank."""
    per_stage = spec.model.num_layers // spec.num_stages
    stages = range(pp_rank, spec.num_stages, spec.parallel.pp)
    return [(s, s * per_stage, (s + 1) * per_stage) for s in stages]


def ranks_table(spec: RunSpec, step: ShardedStep) -> Table:
    grid = rank_grid(spec.parallel)
    heads = spec.model.num_heads // spec.parallel.tp
    rows: list[list[Any]] = []
    for rank in range(spec.parallel.world_size):
        pp, dp, cp, tp = (int(x[0]) for x in np.nonzero(grid == rank))
        layers = layers_of(spec, pp)
        pipeline = step.pipelines[dp]
        tokens = [int(s.tokens[cp]) for s in pipeline.shardings]
        segments = [len(s.for_rank(cp).piece) for s in pipeline.shardings]
        rows.append(
            [
                rank, dp, pp, cp, tp,
                " ".join(str(stage) for stage, _, _ in layers),
                " ".join(f"{first}-{after - 1}" for _, first, after in layers),
                f"{tp * heads}-{(tp + 1) * heads - 1}",
                " ".join(str(m.index) for m in pipeline.micro_batches),
                " ".join(map(str, tokens)),
                " ".join(map(str, segments)),
            ]
        )  # fmt: skip
    columns = ("rank", "DP", "PP", "CP", "TP", "stages", "layers", "heads", "micro-batches",
               "tokens of each", "segments of each")  # fmt: skip
    return Table(
        name="ranks",
        title="What each rank holds",
        columns=columns,
        rows=rows,
        most_rows=16,
        note="Real tokens of each micro-batch on a rank, and how many spans of documents they are.",
    )


def draw(spec: RunSpec, step: ShardedStep) -> Any:
    """Draws all ranks beside the micro-batches of their pipelines, and one micro-batch below."""
    dp, pp = spec.parallel.dp, spec.parallel.pp
    figure, (upper, lower) = new_figure(
        nrows=2, height=2.6 + 1.25 * dp, height_ratios=(1.25 * dp + 0.5, 1.5)
    )
    for axes in (upper, lower):
        axes.set_axis_off()
    longest = max(int(step.plan.packing.tokens.max()), 1)
    for pipeline in range(dp):
        _micro_batches(upper, step, pipeline, longest)
        for stage_rank in range(pp):
            _cell(upper, spec, pipeline, stage_rank)
        upper.text(-2.36, pipeline + 0.5, f"DP {pipeline}", ha="right", va="center",
                   fontweight="bold")  # fmt: skip
    for stage_rank in range(pp):
        words = ", ".join(f"{a}-{b - 1}" for _, a, b in layers_of(spec, stage_rank))
        upper.text(stage_rank + 0.5, -0.04, f"layers {words}", ha="center", va="bottom", fontsize=8)
        upper.text(stage_rank + 0.5, -0.21, f"PP {stage_rank}", ha="center", va="bottom",
                   fontweight="bold")  # fmt: skip
    upper.text(-1.2, -0.21, "micro-batches", ha="center", va="bottom", fontweight="bold")
    upper.text(-1.2, -0.04, f"documents; longest: {longest:,} tokens", ha="center",
               va="bottom", fontsize=8)  # fmt: skip
    upper.set(xlim=(-2.8, pp + 0.02), ylim=(dp, -0.38))
    _zoom(lower, spec, step)
    return figure


def _micro_batches(axes: Any, step: ShardedStep, pipeline: int, longest: int) -> None:
    """Draws the micro-batches of a pipeline at the left of its row, each as a bar of documents."""
    batches = step.pipelines[pipeline].micro_batches
    height = 0.8 / len(batches)
    for row, batch in enumerate(batches):
        top = pipeline + 0.1 + row * height
        ends = offsets_of(batch.lengths) / longest * 1.95
        for i, length in enumerate(batch.lengths.tolist()):
            axes.barh(
                top + 0.42 * height, length / longest * 1.95, 0.8 * height, -2.1 + ends[i],
                color=DOCUMENTS[i % 2], lw=0,
            )  # fmt: skip
        axes.text(-2.13, top + 0.42 * height, str(batch.index), ha="right", va="center", fontsize=8)


def _cell(axes: Any, spec: RunSpec, pipeline: int, stage_rank: int) -> None:
    """Draws a pipeline rank as a grid: columns are CP ranks, rows are TP ranks."""
    from matplotlib.patches import Rectangle

    grid = rank_grid(spec.parallel)[stage_rank, pipeline]
    cp, tp = grid.shape
    wide, high = 0.84 / cp, 0.76 / tp
    axes.add_patch(
        Rectangle((stage_rank + 0.03, pipeline + 0.07), 0.94, 0.86, fill=False, ec="#444444", lw=1)
    )
    for c in range(cp):
        for t in range(tp):
            left, top = stage_rank + 0.08 + c * wide, pipeline + 0.12 + t * high
            axes.add_patch(
                Rectangle(
                    (left, top), wide * 0.94, high * 0.9, fc=RANK_COLOURS[c % len(RANK_COLOURS)],
                    alpha=0.75 if t % 2 == 0 else 0.4, ec="white", gid=f"rank{grid[c, t]}",
                )
            )  # fmt: skip
            axes.text(left + wide * 0.47, top + high * 0.45, str(grid[c, t]), ha="center",
                      va="center_baseline", fontsize=9)  # fmt: skip
    if stage_rank + 1 < spec.parallel.pp:
        axes.annotate(
            "", (stage_rank + 1.04, pipeline + 0.5), (stage_rank + 0.95, pipeline + 0.5),
            arrowprops={"arrowstyle": "-|>", "color": "black", "lw": 1.2, "shrinkA": 0,
                        "shrinkB": 0, "mutation_scale": 9},
        )  # fmt: skip


def _zoom(axes: Any, spec: RunSpec, step: ShardedStep) -> None:
    """Draws one micro-batch: its documents, and below them the spans on each CP and TP rank."""
    pipeline = step.pipelines[0]
    plan = pipeline.shardings[0]
    total, tp = plan.num_tokens, spec.parallel.tp
    ends = offsets_of(plan.lengths)
    for i, length in enumerate(plan.lengths.tolist()):
        axes.barh(0, length, 0.5, ends[i], color=DOCUMENTS[i % 2], lw=0)
    _spans(axes, plan, tp)
    heads = spec.model.num_heads // tp
    labels = {0.0: f"documents of micro-batch {pipeline.micro_batches[0].index}"}
    labels |= {1.0 + t: f"TP {t}: heads {t * heads}-{(t + 1) * heads - 1}" for t in range(tp)}
    for y, label in labels.items():
        axes.text(-0.01 * total, y, label, ha="right", va="center", fontsize=9)
    for c in range(plan.cp):
        at, colour = (0.28 * c * total, tp + 0.95), RANK_COLOURS[c % len(RANK_COLOURS)]
        axes.barh(at[1], 0.015 * total, 0.35, at[0], color=colour, alpha=0.75)
        words = f"CP {c}: {int(plan.tokens[c]):,} tokens"
        axes.text(at[0] + 0.02 * total, at[1], words, fontsize=9, va="center")
    axes.set(xlim=(-0.31 * total, 1.005 * total), ylim=(tp + 1.3, -0.75))
    axes.set_title(
        f"one micro-batch of DP 0, {total:,} tokens, sharded {plan.strategy.replace('_', '-')}",
        fontsize=10,
    )


def _spans(axes: Any, plan: ShardingPlan, tp: int) -> None:
    starts = offsets_of(plan.lengths)[plan.piece] + plan.start
    ranks = np.repeat(np.arange(plan.cp), np.diff(plan.rank_offsets))
    for x, width, rank in zip(
        starts.tolist(), (plan.stop - plan.start).tolist(), ranks.tolist(), strict=True
    ):
        for t in range(tp):
            colour = RANK_COLOURS[rank % len(RANK_COLOURS)]
            alpha = 0.75 if t % 2 == 0 else 0.4
            axes.barh(1 + t, width, 0.8, x, color=colour, alpha=alpha, lw=0)


def main() -> None:
    parser = experiment_parser(__doc__, seed=0)
    for name, size in (("tp", 2), ("cp", 2), ("pp", 4), ("dp", 4)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--step", type=int, default=8)
    options = parser.parse_args()
    spec = configuration(
        PRESET,
        *(f"parallel.{name}={getattr(options, name)}" for name in ("tp", "cp", "pp", "dp")),
        "pp.virtual_stages=2",
        f"data.num_windows={options.pp * options.dp}",
        f"run.seed={options.seed}",
        "kernels.attention=flash_attention_3",
    )
    cost = workload_for(spec, "cuda")
    step = planned(spec, cost, step=options.step)
    table = ranks_table(spec, step)
    rows = [
        Against(
            what="order of the axes from the inside out",
            paper="TP, CP, PP, DP (Figure 2, Section 2.2)",
            ours="the same: ranks 0 and 1 share a TP group",
        )
    ]
    show(table, against=rows, width=160)
    p = spec.parallel
    write_results(
        Path(__file__).parent,
        title="Figure 2: 4-D parallelism",
        how=How.COMPUTED,
        profile=f"no times; documents are packed, assigned and sharded by predictions: "
        f"{priced_with(cost.profile)}",
        seed=options.seed,
        text=(
            f"The paper's example, TP {p.tp}, CP {p.cp}, PP {p.pp}, DP {p.dp}: {p.world_size} "
            f"ranks, the 7B model with two stages a pipeline rank, step {options.step} of the "
            f"fitted stream (`wlb_paper`) packed by `{spec.packing.policy}`. Ranks are numbered as "
            f"the executor lays them out. Each frame is a pipeline rank: colours are CP ranks, "
            f"shades TP ranks. All ranks of a frame work on the same micro-batches; a CP rank has "
            f"its spans of each document (below), a TP rank its heads and columns of every layer. "
            f"Micro-batches go along the arrows and, since a rank has two stages, once more from "
            f"the last pipeline rank to the first. Pipelines communicate when parameters are "
            f"gathered and gradients are reduced, over DP and CP."
        ),
        against=rows,
        tables=[table],
        figures=[
            Picture(
                name="ranks",
                caption=f"Who holds what with TP {p.tp}, CP {p.cp}, PP {p.pp}, DP {p.dp}",
                figure=draw(spec, step),
            )
        ],
    )


if __name__ == "__main__":
    main()
