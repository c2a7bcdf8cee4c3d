"""`wlb train --dry-run`: predicts a run's memory and time without starting ranks or using torch.

The figures are for the machines that the run is meant for, not for the machine that runs the
command. The run's kernel profile and its section [cluster] describe these machines. If the run
names a token store, only the store's index is read, for the lengths of documents and the size of
the vocabulary. If the run names only `data.corpus`, the corpus is not opened, and lengths are drawn
at random.
"""

import math
from itertools import islice
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from wlb.cost import machine_name, mismatches, workload_for
from wlb.cost.key_bytes import key_bytes
from wlb.data import DRAWN, GlobalBatches, enough_of_family, open_batches
from wlb.memory import Budget, cpu_budget, gpu_budget
from wlb.memory.estimate import GIB
from wlb.packing import with_s_max
from wlb.parallel.grid import rank_grid
from wlb.plan import GlobalBatch, PipelinePlan, ShardingPlan
from wlb.report.tables import facts_table, new_table
from wlb.simulate.forecast import (
    DAY_S,
    ENOUGH,
    MOST_MICRO_BATCHES,
    Forecast,
    forecast,
    steps_to_simulate,
)
from wlb.simulate.published import published_error, trust_line
from wlb.spec import Device, RunSpec, resolve_dp
from wlb.train.checkpoint.room import most_at_once
from wlb.train.memory_check import ROUNDING, caps_line, estimate_of, too_much, within
from wlb.train.refuse_inputs import begins_with, check_stores, check_weights, refuse_snapshots
from wlb.train.stores import Stores, named_stores, ready, with_vocabulary
from wlb.train.telemetry.sinks import refuse_missing


class _Documents(NamedTuple):
    """The documents of the simulated steps, from which the whole run is predicted."""

    batches: list[GlobalBatch]  # the run's first global batches
    note: str  # says where the documents' lengths come from, for the table


def show(spec: RunSpec, console: Console) -> bool:
    """Print whether a run fits and how long it would take, then details of its plan and memory.

    Args:
        spec: The run.
        console: Where the text is printed.

    Returns:
        Whether the run fits into memory; True if the memory of the machines is not known.

    Raises:
        UserError: If training would refuse the run because of its telemetry, token stores or
            checkpoint.
    """
    refuse_missing(spec)
    device = _device(spec)
    refuse_snapshots(spec, device)
    stores = named_stores(spec)
    spec = _filled(spec, stores)
    # Without cluster.memory_gib, GPUs are assumed to have as much memory as the profile's GPU. The
    # memory of CPUs is then not known.
    given = _cluster_budget(spec, device)
    budget = given or gpu_budget(spec)
    known = None if device == "cpu" and given is None else budget
    spec = with_s_max(spec, planned_gib=known.planned_gib if known else None)
    spec, lines = within(spec, given)
    estimate = estimate_of(spec)
    fits = known is None or estimate.total_bytes <= budget.planned_bytes * ROUNDING
    if not fits:
        lines.append(f"memory: {too_much(estimate, budget)}")
    # Refuse what training would refuse. A run that does not fit into memory is only reported.
    begin = begins_with(spec)
    if stores is not None:
        check_stores(spec, train=stores.train, heldout=stores.heldout)
    if begin is not None:
        check_weights(spec.model, begin, "checkpoint.init_from")
    made, documents = _forecast(spec, stores, device)
    answer = _verdict(made, budget if known else None, fits=fits)
    console.print(answer, soft_wrap=True, markup=False)
    console.print(_facts(made, documents.note, _machine(made, budget, known)))
    console.print(trust_line(made.spec, made.cost.profile), soft_wrap=True, markup=False)
    console.print(_layout(spec))
    console.print(_memory(spec, budget))
    notes = [f"times: {note}" for note in mismatches(made.cost)]
    for line in [*lines, caps_line(spec, budget), *notes]:
        console.print(line, soft_wrap=True, markup=False)
    _first_step(made, console)
    if not fits:
        console.print(answer, soft_wrap=True, markup=False)
    return fits


def _verdict(made: Forecast, budget: Budget | None, *, fits: bool) -> str:
    """Return in words whether the run fits into memory, and how long a step and the run take.

    If the run does not fit, the answer also says what to try first.

    Args:
        made: The prediction.
        budget: Memory that plans may use; None if the memory of the machines is not known.
        fits: Whether the estimate is within the budget.
    """
    spec, estimate = made.spec, estimate_of(made.spec)
    need = _size(estimate.total_bytes)
    if budget is None:
        memory = f"The fullest rank needs {need}. The memory of the machines is not known."
    elif fits:
        free = _size(budget.planned_bytes)
        memory = f"It fits: the fullest rank needs {need} of the {free} that plans may use."
    else:
        memory = (
            f"It does not fit: the fullest rank needs {need}, and plans may use "
            f"{_size(budget.planned_bytes)} of {_size(round(budget.gib * GIB))}. Try a lower "
            f"packing.s_max first, then training.recompute, then more ranks."
        )
    error = published_error(spec, made.cost.profile)
    trust = "" if error is None or made.is_cpu else f", ±{error.largest:.0%}"
    return (
        f"{memory} A step takes {made.step_time_s:.3g} s (predicted{trust}), and all "
        f"{spec.training.steps:,} take {_spelled(made.days)}."
    )


def _device(spec: RunSpec) -> str:
    """Return the kind of device for which the figures are predicted, "cpu" or "cuda".

    In a dry run, run.device = auto means GPUs, because the run may be meant for another machine.
    It means CPUs only if cost.profile is auto too and this machine has no GPU.
    """
    if spec.run.device == Device.AUTO and spec.cost.profile == "auto":
        return "cuda" if machine_name("cuda") else "cpu"
    return "cpu" if spec.run.device == Device.CPU else "cuda"


def _filled(spec: RunSpec, stores: Stores | None) -> RunSpec:
    """Fill in the data-parallel size and the vocabulary size, as training would.

    `stores` are the token stores that the run names; None if the run names none.
    """
    world_size = spec.parallel.world_size
    if stores is not None:
        return ready(spec, stores, world_size)
    return with_vocabulary(resolve_dp(spec, world_size))


def _cluster_budget(spec: RunSpec, device: str) -> Budget | None:
    """Return a rank's memory by the key `cluster.memory_gib`; None if the key is not set."""
    given = spec.cluster.memory_gib
    if not given:
        return None
    of = cpu_budget if device == "cpu" else gpu_budget
    return of(spec, gib=given, source="cluster.memory_gib")


def _forecast(spec: RunSpec, stores: Stores | None, device: str) -> tuple[Forecast, _Documents]:
    """Predict the run's step time by simulating its first steps.

    The simulation is repeated with more steps until the relative standard error of the mean step
    time is at most `ENOUGH`. It ends earlier after about `MOST_MICRO_BATCHES` micro-batches, or at
    the end of the documents. `stores` are the run's token stores; None if it names none.

    Returns:
        The prediction, and the documents of the simulated steps.
    """
    cost, count = workload_for(spec, device), steps_to_simulate(spec)
    most = max(count, MOST_MICRO_BATCHES // spec.num_micro_batches)
    while True:
        documents = _documents(spec, stores, count)
        made = forecast(spec, cost, documents.batches, is_cpu=device == "cpu")
        error = made.simulation.standard_error
        if error <= ENOUGH or count >= most or len(documents.batches) < count:
            return made, documents
        # The standard error is proportional to 1 / sqrt(number of steps), which gives the number of
        # steps that are needed. After few steps the standard error is itself uncertain, so a round
        # simulates at most eight times as many steps as the round before.
        needed = 1.1 * count * (error / ENOUGH) ** 2
        count = min(most, max(2 * count, math.ceil(min(needed, 8 * count))))


def _documents(spec: RunSpec, stores: Stores | None, count: int) -> _Documents:
    """Return the first `count` global batches of the run.

    Lengths of documents come from `stores`, the run's token stores. With None, which means that the
    run names no store, they are drawn at random.
    """
    batch: dict[str, Any] = {"tokens_per_batch": spec.tokens_per_step, "seed": spec.run.seed}
    if stores is not None:
        stream = open_batches(stores.train, epochs=spec.data.epochs, **batch)
        note = f"{stores.note}; only their lengths were read"
    else:
        source = enough_of_family(
            window=spec.data.context_window,
            num_tokens=spec.tokens_per_step * (count + 1),
            seed=spec.run.seed,
        )
        stream = GlobalBatches(source, **batch)
        note = (
            f"lengths were drawn from {DRAWN}, the paper's distribution; "
            f"{spec.data.corpus} was not read. To predict with the lengths of your documents, set "
            "data.store, or use `wlb simulate NAME --lengths FILE`"
        )
    return _Documents([one for one, _ in islice(stream.iterate(), count)], note)


def _machine(made: Forecast, budget: Budget, known: Budget | None) -> str:
    """Return the text of the table's row on the machines for which the figures are predicted.

    Args:
        made: The prediction.
        budget: Memory of one device.
        known: None if the memory of the machines is not known (`budget` is then a default),
            otherwise the same as `budget`.
    """
    profile, ranks = made.cost.profile, made.spec.parallel.world_size
    reason = "run.device = cpu"
    if made.spec.run.device == Device.AUTO:
        reason = "run.device = auto, and this machine has no NVIDIA driver"
    kind = f"CPU processes, each with its own cores ({reason})" if made.is_cpu else "GPUs"
    memory = f"{budget.gib:g} GiB ({budget.source})" if known else "unknown memory"
    chosen = ""
    if made.spec.cost.profile == "auto" and not made.is_cpu:
        chosen = ", which cost.profile = auto selected"
    return (
        f"{ranks} {kind} like {profile.device} with {memory} each; times are predicted with the "
        f"kernel profile {profile.name} ({profile.provenance.kind}){chosen}. The machines of the "
        f"run were not examined"
    )


def _facts(made: Forecast, documents: str, machine: str) -> Table:
    """Return the table of facts about the run: parameters, ranks, times, checkpoints and so on.

    `documents` and `machine` are the texts of the rows with these names.
    """
    spec, p = made.spec, made.spec.parallel
    table = facts_table(f"{spec.run.name}: dry run, nothing was started")
    size = spec.model.num_parameters
    table.add_row("parameters", f"{size:,} ({_large(size)})" if size >= 1e6 else f"{size:,}")
    table.add_row("ranks", f"{p.world_size} = TP {p.tp} x CP {p.cp} x PP {p.pp} x DP {p.dp}")
    table.add_row(
        "tokens per step",
        f"{spec.tokens_per_step:,}: {spec.num_windows} windows of {spec.data.context_window:,}, in "
        f"{spec.num_micro_batches} micro-batches",
    )
    mfu = "MFU unknown (set cluster.peak_tflops)"
    if made.mfu is not None:
        mfu = f"MFU {made.mfu:.1%} of {made.peak_tflops:g} TFLOP/s"
    table.add_row(
        "step time", f"{made.step_time_s:.3g} s predicted: {made.tokens_per_s:,.0f} tokens/s, {mfu}"
    )
    steps = spec.training.steps
    table.add_row(
        "the run",
        f"{steps:,} steps, {_large(steps * spec.tokens_per_step)} tokens: {_duration(made.days)} "
        f"predicted, without evaluations, saves and interruptions",
    )
    if p.ep > 1:
        table.add_row("experts' rows", _experts_rows(made))
    table.add_row("checkpoint", _checkpoints(made))
    error, num = made.simulation.standard_error, made.simulation.step_time_s.size
    if math.isfinite(error):
        documents += f"; the step time's standard error over {num:,} simulated steps is {error:.1%}"
    table.add_row("documents", documents)
    table.add_row("machine", machine)
    return table


def _checkpoints(made: Forecast) -> str:
    """Return the text of the table's row on the size of a checkpoint and the needed disk space."""
    one, most = made.checkpoint_bytes, most_at_once(made.spec)
    return (
        f"{_size(one)} each; the run needs space for {_size(most * one)}: "
        f"{made.spec.checkpoint.keep} kept, and the one that is being written"
    )


def _experts_rows(made: Forecast) -> str:
    """Describe how long a step's all-to-alls for experts take, and how long ranks wait for them."""
    spec = made.spec
    num = spec.micro_batches_per_pipeline
    tokens = spec.tokens_per_step // max(1, spec.parallel.dp)
    whole, exposed = (ns / 1e6 for ns in made.cost.linear.routed_rows_ns(tokens, num))
    layers = spec.stage_expert_layers
    most = max(sum(layers[s] for s in spec.stages_of(rank)) for rank in range(spec.parallel.pp))
    stages = "one stage" if spec.ep.stages == 1 else f"{spec.ep.stages} stages"
    return (
        f"all-to-alls over EP {spec.parallel.ep} in {stages} take {whole:,.0f} ms per step. Ranks "
        f"wait {exposed:,.0f} ms for them; the rest is predicted to run behind matrix products. "
        f"The host waits {num * most} times per step to read how many rows experts get"
    )


def _large(count: int) -> str:
    """Return a number as text, such as "1.5 billion"; below a million, in digits."""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count:,}"


def _duration(days: float) -> str:
    """Return a time in days as text, such as "3.0 days" or "0.25 days (6 hours)"."""
    return _spelled(days) if days >= 1 else f"{days:.2g} days ({_spelled(days)})"


def _spelled(days: float) -> str:
    """Return a time, given in days, as text such as "6 hours".

    The unit is the largest of days, hours, minutes and seconds in which the value is at least 1;
    shorter times are in seconds.
    """
    if days >= 1:
        return f"{days:,.1f} days"
    seconds = days * DAY_S
    for unit_s, name in ((3600, "hours"), (60, "minutes"), (1, "seconds")):
        if seconds >= unit_s or unit_s == 1:
            return f"{seconds / unit_s:.3g} {name}"
    raise AssertionError("one second is the last unit")


def _size(num_bytes: int) -> str:
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:,.1f} GiB"
    return f"{num_bytes / 2**20:,.1f} MiB"


def _layout(spec: RunSpec) -> Table:
    """Return the table that shows the stages, layers and ranks of each pipeline rank."""
    # Numbers of the ranks, in shape [pp, dp, cp, tp].
    grid = rank_grid(spec.parallel)
    table = new_table(
        "Layout", labels=["pipeline rank"], texts=["stages", "layers", "ranks, by TP group"]
    )
    for pp_rank, ranks in enumerate(grid):
        stages = spec.stages_of(pp_rank)
        layers = ", ".join(_range(list(spec.layers_of(s))) for s in stages)
        groups = " ".join(_range(group) for pipeline in ranks for group in pipeline.tolist())
        table.add_row(str(pp_rank), ", ".join(map(str, stages)), layers, groups)
    return table


def _range(ranks: list[int]) -> str:
    """Return consecutive numbers as text, such as "4-7"; "none" for an empty list."""
    if not ranks:
        return "none"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _memory(spec: RunSpec, budget: Budget) -> Table:
    """Return the table of the memory that the fullest rank needs, and of a device's memory.

    `budget` is the memory of a device with the parts of it that plans may not use.
    """
    estimate = estimate_of(spec)
    table = facts_table(f"Memory of the fullest rank (pipeline rank {estimate.pp_rank}), estimated")
    for name, size in estimate.terms.items():
        if size >= estimate.total_bytes / 1000:  # smaller terms would only lengthen the table
            table.add_row(name.removesuffix("_bytes").replace("_", " "), _size(size))
    table.add_row("total", _size(estimate.total_bytes), end_section=True)
    table.add_row(budget.source, f"{budget.gib:.3f} GiB")
    for name, size in budget.terms.items():
        if size:
            table.add_row(f"  {name}", f"-{size / GIB:.3f} GiB")
    table.add_row("plans may use", f"{budget.planned_bytes / GIB:.3f} GiB")
    return table


def _first_step(made: Forecast, console: Console) -> None:
    """Print the first step's plan for pipeline 0, and the imbalance of the whole step."""
    plan = made.first.plan
    console.print(_plan(made.spec, made.first.pipelines[0]))
    p = plan.predicted
    console.print(
        f"step 0: {p.num_tokens:,} tokens, {p.num_padding_tokens} padding, imbalance "
        f"{p.imbalance:.3f}"
        + ("" if plan.baseline is None else f" (usual loader {plan.baseline.imbalance:.3f})")
        + f", {p.num_held_tokens:,} tokens wait for later steps",
        soft_wrap=True,
    )


def _plan(spec: RunSpec, pipeline: PipelinePlan) -> Table:
    """Return the table that lists the micro-batches of one pipeline in a step."""
    of_several = f" of {spec.parallel.dp} pipelines" if spec.parallel.dp > 1 else ""
    has_keys = spec.parallel.cp > 1
    table = new_table(
        f"First plan, pipeline {pipeline.pipeline}{of_several}",
        labels=["batch"],
        numbers=[
            "documents",
            "tokens",
            "longest",
            "predicted ms",
            "sharding",
            "rows per\nCP rank",
            *(["exchange per\nlayer (MiB)"] if has_keys else []),
        ],
        is_plain=True,
    )
    for batch, sharding, rows in zip(
        pipeline.micro_batches, pipeline.shardings, pipeline.local_tokens, strict=True
    ):
        table.add_row(
            str(batch.index),
            str(len(batch.pieces)),
            str(batch.num_tokens),
            str(batch.lengths.max(initial=0)),
            f"{batch.workload_ns / 1e6:.3f}",
            _sharded(sharding),
            str(rows),
            *([f"{_most_keys(spec, sharding, rows) / 2**20:.2f}"] if has_keys else []),
        )
    return table


def _sharded(sharding: ShardingPlan) -> str:
    """Return a micro-batch's sharding strategy and, with several CP ranks, its exchange as text."""
    return sharding.strategy + (f", {sharding.exchange}" if sharding.cp > 1 else "")


def _most_keys(spec: RunSpec, sharding: ShardingPlan, rows: int) -> int:
    """Return the size in bytes of the buffers of one layer's exchange, on the fullest CP rank.

    The buffers hold the rows of keys and values that the rank sends and that it receives. `rows` is
    the number of rows that each CP rank has.
    """
    ranks = range(sharding.cp)
    return max(sum(key_bytes(spec, sharding, rank=r, local_tokens=rows)) for r in ranks)
