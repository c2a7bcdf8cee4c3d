"""`wlb train --dry-run`: layout, memory estimate, caps and the first plan, without any rank."""

from rich import box
from rich.console import Console
from rich.table import Table

from wlb.packing import with_s_max
from wlb.parallel import world as worlds
from wlb.parallel.mesh import rank_grid
from wlb.plan import PipelinePlan, StepPlan, UserError
from wlb.spec import Device, RunSpec
from wlb.train.memory import GIB, Budget, budget_of, caps_line, estimate_of, hold_against, within
from wlb.train.refuse import begins_with, computed_by, priced_by, refuse_early
from wlb.train.stores import open_stores, ready


def show(spec: RunSpec, console: Console) -> None:
    """Print what a run of `spec` would do on as many ranks as its layout has."""
    world_size = spec.parallel.world_size
    choice = _device(spec)
    stores = open_stores(spec, console)
    spec = ready(spec, stores, world_size)
    budget, told = _budget(spec, choice.kind)
    known = budget if told or choice.kind == "cuda" else None
    spec = with_s_max(spec, memory_gib=known.gib if known else None)
    spec, lowered = within(spec, budget if told else None)
    lines = lowered + hold_against(spec, budget if told else None)
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
        console.print(_plan(plan, planner.shard(plan, pipeline)))
    p = plan.predicted
    console.print(
        f"step 0: {p.num_tokens:,} tokens, {p.num_padding_tokens} padding, imbalance "
        f"{p.imbalance:.3f}"
        + ("" if plan.baseline is None else f" (Plain-4D {plan.baseline.imbalance:.3f})")
        + f", {p.num_held_tokens:,} tokens held back"
    )


def _device(spec: RunSpec) -> worlds.DeviceChoice:
    """The device of the ranks; the number of GPUs is not known here."""
    if spec.run.device == Device.CUDA:
        return worlds.DeviceChoice("cuda", "run.device = cuda (GPUs are not counted in a dry run)")
    return worlds.choose_device(spec.run.device, local_ranks=1)


def _layout(spec: RunSpec) -> Table:
    grid = rank_grid(spec.parallel)  # [pp, dp, cp, tp]
    table = Table(title="Layout", title_justify="left")
    for heading in ("pipeline rank", "stages", "layers", "ranks, by TP group"):
        table.add_column(heading)
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


def _budget(spec: RunSpec, device: str) -> tuple[Budget, bool]:
    """The memory that the layout is compared with, and whether a run started here would be refused
    for exceeding it."""
    found = budget_of(spec, device)
    if found is not None:
        return found, True
    return Budget(gib=spec.cluster.memory_gib, source="cluster.memory_gib"), False


def _memory(spec: RunSpec, budget: Budget) -> Table:
    estimate = estimate_of(spec)
    table = Table(
        title=f"Memory of the fullest rank (pipeline rank {estimate.pp_rank}), estimated",
        title_justify="left",
        show_header=False,
    )
    for name, size in estimate.terms.items():
        table.add_row(name.removesuffix("_bytes"), f"{size / GIB:.3f} GiB")
    table.add_row("total", f"{estimate.total_bytes / GIB:.3f} GiB")
    table.add_row(budget.source, f"{budget.gib:.3f} GiB")
    table.add_row("share", f"{estimate.total_bytes / GIB / budget.gib:.1%}")
    return table


def _plan(plan: StepPlan, pipeline: PipelinePlan) -> Table:
    table = Table(
        title=f"First plan, pipeline {pipeline.pipeline}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("batch", "documents", "tokens", "longest", "predicted ms", "sharding"):
        table.add_column(heading, justify="right")
    table.add_column("rows a\nCP rank", justify="right")
    for batch, sharding, rows in zip(
        pipeline.micro_batches, pipeline.shardings, pipeline.local_tokens, strict=True
    ):
        table.add_row(
            str(batch.index),
            str(len(batch.pieces)),
            str(batch.num_tokens),
            str(batch.lengths.max(initial=0)),
            f"{batch.workload_ns / 1e6:.3f}",
            sharding.strategy,
            str(rows),
        )
    return table
