"""`wlb train --dry-run`: layout, memory estimate, caps and the first plan, without any rank."""

from rich import box
from rich.console import Console
from rich.table import Table

from wlb.cost import Budget, gpu_budget, key_bytes
from wlb.cost.memory import GIB
from wlb.packing import with_s_max
from wlb.parallel import world as worlds
from wlb.parallel.mesh import rank_grid
from wlb.plan import PipelinePlan, ShardingPlan, StepPlan, UserError
from wlb.spec import Device, RunSpec
from wlb.train.memory import budget_of, caps_line, estimate_of, hold_against, within
from wlb.train.refuse import begins_with, computed_by, priced_by, refuse_early
from wlb.train.stores import open_stores, ready


def show(spec: RunSpec, console: Console) -> None:
    """Print what a run of `spec` would do on as many ranks as its layout has."""
    world_size = spec.parallel.world_size
    if spec.run.device == Device.CUDA:
        choice = worlds.DeviceChoice("cuda", "run.device = cuda (a dry run counts no GPUs)")
    else:
        choice = worlds.choose_device(spec.run.device, local_ranks=1)
    stores = open_stores(spec, console)
    spec = ready(spec, stores, world_size)
    # A run that is started here would be refused for exceeding this budget.
    told = budget_of(spec, choice.kind)
    budget = told or gpu_budget(spec)
    known = budget if told or choice.kind == "cuda" else None
    spec = with_s_max(spec, planned_gib=known.planned_gib if known else None)
    spec, lowered = within(spec, told)
    lines = lowered + hold_against(spec, told)
    planner = refuse_early(
        spec,
        train=stores.train,
        heldout=stores.heldout,
        device=choice.kind,
        resume=None,
        init_from=begins_with(spec),
    )
    console.print(f"{choice.kind}: {choice.reason}")
    console.print(f"corpus: {stores.note}")
    console.print(_layout(spec))
    console.print(_memory(spec, budget))
    for line in [*lines, caps_line(spec, budget)]:
        console.print(line)
    console.print(computed_by(spec, choice.kind))
    console.print(priced_by(planner))
    plan = planner.next(planner.start())
    if plan is None:
        raise UserError("the corpus gives no step; raise data.epochs or use a larger corpus")
    for pipeline in range(spec.parallel.dp):
        console.print(_plan(spec, plan, planner.shard(plan, pipeline)))
    p = plan.predicted
    console.print(
        f"step 0: {p.num_tokens:,} tokens, {p.num_padding_tokens} padding, imbalance "
        f"{p.imbalance:.3f}"
        + ("" if plan.baseline is None else f" (Plain-4D {plan.baseline.imbalance:.3f})")
        + f", {p.num_held_tokens:,} tokens held back"
    )


def _layout(spec: RunSpec) -> Table:
    # The grid has shape [pp, dp, cp, tp].
    grid = rank_grid(spec.parallel)
    headings = ("pipeline rank", "stages", "layers", "ranks, by TP group")
    table = Table(*headings, title="Layout", title_justify="left")
    for pp_rank, ranks in enumerate(grid):
        stages = spec.stages_of(pp_rank)
        layers = ", ".join(_range(list(spec.layers_of(s))) for s in stages)
        groups = " ".join(_range(group) for pipeline in ranks for group in pipeline.tolist())
        table.add_row(str(pp_rank), ", ".join(map(str, stages)), layers, groups)
    return table


def _range(ranks: list[int]) -> str:
    if not ranks:
        return "none"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _memory(spec: RunSpec, budget: Budget) -> Table:
    estimate = estimate_of(spec)
    table = Table(
        title=f"Memory of the fullest rank (pipeline rank {estimate.pp_rank}), estimated",
        title_justify="left",
        show_header=False,
    )
    for name, size in estimate.terms.items():
        table.add_row(name.removesuffix("_bytes"), f"{size / GIB:.3f} GiB")
    table.add_row("total", f"{estimate.total_bytes / GIB:.3f} GiB", end_section=True)
    table.add_row(budget.source, f"{budget.gib:.3f} GiB")
    for name, size in budget.terms.items():
        if size:
            table.add_row(f"  {name}", f"-{size / GIB:.3f} GiB")
    table.add_row("plans may use", f"{budget.planned_bytes / GIB:.3f} GiB")
    return table


def _plan(spec: RunSpec, plan: StepPlan, pipeline: PipelinePlan) -> Table:
    table = Table(
        title=f"First plan, pipeline {pipeline.pipeline}", title_justify="left", box=box.SIMPLE_HEAD
    )
    for heading in ("batch", "documents", "tokens", "longest", "predicted ms", "sharding"):
        table.add_column(heading, justify="right")
    table.add_column("rows a\nCP rank", justify="right")
    if spec.parallel.cp > 1:
        table.add_column("keys of a\nlayer (MiB)", justify="right")
    for batch, sharding, rows in zip(
        pipeline.micro_batches, pipeline.shardings, pipeline.local_tokens, strict=True
    ):
        table.add_row(
            str(batch.index),
            str(len(batch.pieces)),
            str(batch.num_tokens),
            str(batch.lengths.max(initial=0)),
            f"{batch.workload_ns / 1e6:.3f}",
            sharding.strategy + (f", {sharding.exchange}" if sharding.cp > 1 else ""),
            str(rows),
            *([f"{_most_keys(spec, sharding, rows) / 2**20:.2f}"] if sharding.cp > 1 else []),
        )
    return table


def _most_keys(spec: RunSpec, sharding: ShardingPlan, rows: int) -> int:
    """Bytes of K and V of a layer while they travel, on the CP rank with most."""
    ranks = range(sharding.cp)
    return max(sum(key_bytes(spec, sharding, rank=r, local_tokens=rows)) for r in ranks)
