"""Table of simulated runs, and a text that says how a kernel profile was obtained."""

from collections.abc import Callable, Sequence

from rich.table import Table

from wlb.cost import KernelProfile, cluster_peak_tflops
from wlb.memory.estimate import GIB
from wlb.report.tables import new_table
from wlb.simulate import RunSimulation
from wlb.spec import RunSpec

Cell = Callable[[RunSimulation, RunSimulation], str]
"""A function that returns the text of a table cell. The first argument is the run of the row, the
second argument is the run that speed-ups are relative to."""
COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("s/step", lambda run, _: f"{float(run.step_time_s.mean()):.2f}"),
    ("ktok/s", lambda run, _: f"{run.tokens_per_s / 1e3:,.0f}"),
    ("speed-up", lambda run, baseline: f"{run.tokens_per_s / baseline.tokens_per_s:.3f}"),
    ("bound", lambda run, _: f"{run.balanced_time_s() / run.time_s:.3f}"),
    ("imb.", lambda run, _: f"{run.imbalance:.3f}"),
    ("bubble", lambda run, _: f"{run.mean_bubble:.0%}"),
    ("delay", lambda run, _: f"{run.mean_delay:.2f}"),
    ("GiB", lambda run, _: f"{run.peak_memory_bytes.max() / GIB:.1f}"),
    ("MFU", lambda run, _: f"{run.mfu(peak_tflops=cluster_peak_tflops(run.simulator.spec)):.1%}"),
)


FEW = ("s/step", "speed-up", "imb.", "delay", "GiB")
"""The columns of the short table."""


def simulation_table(
    runs: Sequence[RunSimulation], *, title: str, own: str = "", has_all: bool = True
) -> Table:
    """Return a table with a row for each simulated run.

    Args:
        runs: The simulated runs. Speed-ups are relative to the first one.
        title: Title of the table.
        own: Label of the run whose row is printed in bold; "" = none.
        has_all: Whether the table has all columns or only those of `FEW`.
    """
    columns = [(name, cell) for name, cell in COLUMNS if has_all or name in FEW]
    names, caption = [name for name, _ in columns], CAPTION if has_all else FEW_CAPTION
    table = new_table(title, labels=["system"], numbers=names, is_plain=True, caption=caption)
    for run in runs:
        cells = [cell(run, runs[0]) for _, cell in columns]
        table.add_row(run.label, *cells, style="bold" if run.label == own else "")
    return table


FEW_CAPTION = (
    "s/step = seconds of a step. speed-up = tokens per second over those of the first row. imb. = "
    "imbalance, the time of a step's slowest micro-batch over the mean. delay = steps that a token "
    "waits. GiB = memory of the rank that needs most. All columns include the steps that train "
    "what still waits when the documents end"
)
CAPTION = (
    "All numbers are simulated, on the same documents in all rows, and include the steps that "
    "train what still waits when the documents end. s/step = seconds of a step. ktok/s = thousands "
    "of tokens per second. speed-up = tokens per second over those of the first row. bound = time "
    "of perfectly balanced steps over the simulated time. imb. = imbalance: time of a step's "
    "slowest micro-batch over the mean, forward plus backward, steps weighted by their time. "
    "bubble = fraction of the time in which pipeline ranks wait. delay = steps that a token waits. "
    "GiB = memory of the rank that needs most. MFU = model FLOPs utilization, with attention "
    "within documents only"
)


def layout_text(spec: RunSpec) -> str:
    """Return a description of the parallel layout of a run.

    For example: "TP 8, CP 2, PP 4, DP 1 (64 GPUs), interleaved_1f1b with 4 stages a rank, 2
    micro-batches a pipeline".
    """
    p = spec.parallel
    stages = f" with {spec.pp.virtual_stages} stages a rank" if spec.pp.virtual_stages > 1 else ""
    return (
        f"TP {p.tp}, CP {p.cp}, PP {p.pp}, DP {p.dp} ({p.world_size} GPUs), "
        f"{spec.pp.schedule}{stages}, {spec.micro_batches_per_pipeline} micro-batches a pipeline"
    )


def worth_of(profile: KernelProfile) -> list[tuple[str, str]]:
    """Return how the numbers of a kernel profile were obtained.

    Returns:
        Pairs of a kind ("published", "measured" or "assumed") and the names of the parts of the
        profile whose numbers are of this kind.
    """
    blocks = [
        (f"attention ({', '.join(t.backends)})", t.provenance.kind) for t in profile.attention
    ]
    blocks += [("GEMM", profile.gemm.provenance.kind)]
    blocks += [("element-wise", cost.provenance.kind) for cost in profile.elementwise]
    blocks += [("layer overhead", profile.layer.provenance.kind)]
    blocks += [("output head", profile.head.provenance.kind)]
    for cost in profile.collectives:
        scope = cost.scope.replace("inter_node", "between nodes").replace("intra_node", "in a node")
        blocks.append((f"{cost.op.replace('_', '-')} {scope}", cost.provenance.kind))
    by_kind: dict[str, list[str]] = {}
    for block, kind in dict.fromkeys(blocks):
        by_kind.setdefault(str(kind), []).append(block)
    return [(kind, ", ".join(found)) for kind, found in by_kind.items()]


def worth_line(profile: KernelProfile) -> str:
    """Return a line that says which numbers of a profile were measured, published or assumed."""
    kinds = "; ".join(f"{kind}: {blocks}" for kind, blocks in worth_of(profile))
    return f"predicted with kernel profile {profile.name} ({profile.device}; {kinds})"
