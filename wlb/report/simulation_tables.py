"""Simulated runs as a table, and what has to be said beside it."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from wlb.cost import KernelProfile, Kind
from wlb.simulate import RunSimulation

GIB = 2**30


def simulation_table(runs: Sequence[RunSimulation], *, title: str, own: str = "") -> Table:
    """A row for each run; speed-up over the last one, which is the baseline."""
    table = Table(
        title=title,
        title_justify="left",
        caption=CAPTION,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("system", no_wrap=True)
    for name in ("s/step", "ktok/s", "gain", "bound", "imb.", "bubble", "delay", "GiB", "MFU"):
        table.add_column(name, justify="right", no_wrap=True)
    baseline = runs[-1]
    for run in runs:
        cluster = run.simulator.spec.cluster
        table.add_row(
            run.label,
            f"{float(run.step_time_s.mean()):.3f}",
            f"{run.tokens_per_s / 1e3:.1f}",
            f"{run.tokens_per_s / baseline.tokens_per_s:.3f}",
            f"{run.balanced_time_s() / run.time_s:.3f}",
            f"{run.imbalance:.3f}",
            f"{run.mean_bubble:.1%}",
            f"{run.mean_delay:.2f}",
            f"{int(run.peak_memory_bytes.max()) / GIB:.1f}",
            f"{run.mfu(peak_tflops=cluster.peak_tflops):.1%}",
            style="bold" if run.label == own else "",
        )
    return table


CAPTION = (
    "simulated, nothing measured. gain: speed-up over the last row, same documents, flush counted; "
    "bound: time with every micro-batch and CP rank at its step's mean / this; imb.: slowest "
    "micro-batch over mean, forward and backward, time-weighted; bubble: time-weighted share that "
    "pipeline ranks wait; delay: steps a token waits; GiB: most that a rank needs; MFU: FLOPs of "
    "the documents, not of windows"
)


def worth_of(profile: KernelProfile) -> str:
    """What a profile's blocks are worth: how many are measured, published, assumed."""
    blocks = {
        "attention": [t.provenance.kind for t in profile.attention],
        "GEMM": [profile.gemm.provenance.kind],
        "element-wise": [e.provenance.kind for e in profile.elementwise],
        "collectives": [c.provenance.kind for c in profile.collectives],
    }
    parts: list[str] = []
    for kind in Kind:
        names = [name for name, kinds in blocks.items() if kind in kinds]
        parts += [f"{kind}: {', '.join(names)}"] if names else []
    return f"profile {profile.name} ({profile.device}); " + "; ".join(parts)
