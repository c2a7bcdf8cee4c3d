"""Writes the page of what an H100 measured, from the records that it left; needs no GPU.

`python -m experiments.gpu_hour.recorded` reads results/h100_2026-11-26: metrics of four training
runs, times of Figure 15's kernels, and a run that was killed and resumed. It plans the runs' steps
again and simulates them with the published profile `h100`, with `h100_sxm`, which was measured on
the same day, and with `h100_runs`, which has the slower products of long published runs.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.gpu_hour.measured import compared
from experiments.gpu_hour.runs import make_store
from experiments.harness.arguments import experiment_parser
from experiments.harness.pages import ROOT, How, Table, show, write_results
from experiments.paper.fig15.case import STATIC, layer_cost, micro_batches
from wlb.cost import attention_latency
from wlb.sharding import shard

RECORDS = Path(__file__).parent / "results" / "h100_2026-11-26"
PROFILES = ("h100", "h100_sxm", "h100_runs")
DOCUMENTS = {"3m": 3_000_000, "6m": 6_000_000}
"""Tokens of the stores that the runs read, by name in runs/gpu_hour/documents."""
WINDOW = 131072
RUNS = {
    "billion_32k": "0.95B parameters, 4 windows of 32K, FlashAttention-2",
    "billion_32k_fa3": "0.95B parameters, 4 windows of 32K, FlashAttention-3",
    "stack_64k": "4 layers of LLaMA 7B, a window of 64K, FlashAttention-2",
    "stack_128k": "2 layers of LLaMA 7B, a window of 128K, recomputed, FlashAttention-2",
}
MEASURED, BEFORE, NOW = "over per sequence", "predicted then", "predicted by h100_sxm"
TEXT = """
One H100 SXM 80GB at 700 W, driver 580.159.04, torch 2.11.0+cu130, Python 3.12.3, alone on the card.
It is one GPU, so nothing here is about collectives between GPUs, pipelines or context parallelism
between ranks.

Besides what the tables show: of `pytest -m gpu` {passed} tests passed and {skipped} were skipped
for packages or GPUs that were not there. Remarks of torch, which are allowed since, failed {failed}
more, which were not run again. A small run that was killed after {killed} steps and resumed had
{losses}.

FlashAttention-3 was version 3.0.0, built for heads of 128, causal and variable-length calls only.
"""


def make_documents() -> None:
    """Makes the stores that the runs read; their lengths do not depend on the machine."""
    for name, tokens in DOCUMENTS.items():
        prefix = ROOT / "runs" / "gpu_hour" / "documents" / name
        make_store(prefix, tokens=tokens, window=WINDOW)


def steps_of(name: str) -> dict[str, Any]:
    """A run's measured step time and memory, beside what is predicted for the same steps."""
    found = compared(RECORDS / name, {profile: profile for profile in PROFILES})
    row: dict[str, Any] = {
        "run": RUNS[name],
        "steps": len(found["measured_steps_s"]),
        "measured s": found["measured_s"],
    }
    for profile, priced in found["profiles"].items():
        row |= {profile: priced["ratio"], f"{profile} error": priced["mape"]}
    return row | {
        "estimated GiB": found["estimated_gib"],
        "tokens/s": found["tokens_per_s"],
        "peak GiB": found["peak_gib"],
    }


def steps_table(names: list[str]) -> Table:
    rows = [steps_of(name) for name in names]
    return Table(
        name="steps",
        title="Training steps on one H100, beside predictions for the same steps",
        columns=list(rows[0]),
        rows=[list(row.values()) for row in rows],
        formats={
            "measured s": ".3f",
            **dict.fromkeys(PROFILES, ".3f"),
            **{f"{profile} error": ".1%" for profile in PROFILES},
            "tokens/s": ",.0f",
            "estimated GiB": ".1f",
            "peak GiB": ".1f",
        },
        page_columns={
            "run": "run",
            "steps": "steps",
            "measured s": "measured, s a step",
            "h100": "predicted over measured, h100",
            "h100_sxm": "predicted over measured, h100_sxm",
            "h100_runs": "predicted over measured, h100_runs",
            "h100_sxm error": "mean error of a step, h100_sxm",
            "estimated GiB": "memory estimated, GiB",
            "peak GiB": "measured, GiB",
        },
        note="The first three steps of a run are left out. Memory is torch's most allocated.",
    )


def static_times(window: int, count: int) -> dict[str, float]:
    """The paper's shardings of the measured micro-batches, predicted by h100_sxm; any unit."""
    cost = layer_cost(window=window, cp=4, profile="h100_sxm", backend="torch_varlen")
    out = dict.fromkeys(STATIC, 0.0)
    for lengths in micro_batches("original", window=window, count=count, seed=0):
        for name in STATIC:
            made = attention_latency(shard(lengths, cp=4, strategy=name, cost=cost), cost)
            out[name] += float(made.forward_ns.max() + made.backward_ns.max())
    return out


def sharding_table() -> Table:
    """Figure 15: the slowest rank's kernels under each sharding, measured and predicted."""
    found = json.loads((RECORDS / "sharding.json").read_text("utf-8"))
    rows: list[list[Any]] = []
    for window, of in found["windows"].items():
        now = static_times(int(window), of["micro_batches"])
        total = {name: float(np.sum(ms)) for name, ms in of["ms"].items()}
        predicted = of["predicted_ms"]
        for name in ("per_sequence", "per_document", "adaptive", "hybrid", "balanced"):
            measured = total["per_sequence"] / total[name]
            expected = predicted["per_sequence"] / predicted[name]
            known = now["per_sequence"] / now[name] if name in now else None
            rows.append([int(window), name, total[name], measured, expected, known])
    return Table(
        name="sharding",
        title="Attention of one layer of LLaMA 7B under each CP sharding, CP 4, kernels alone",
        columns=["window", "sharding", "ms", MEASURED, BEFORE, NOW],
        rows=rows,
        formats={"window": ",d", "ms": ".1f", **dict.fromkeys((MEASURED, BEFORE, NOW), ".3f")},
        note=(
            "Sums over 16 micro-batches of the slowest rank's forward plus the slowest rank's "
            "backward. The shardings were chosen, and first predicted, by a fit of the same "
            "records in which empty thread blocks had no price. The paper's layer gains 1.01 and "
            "1.07 from per_document."
        ),
    )


def main() -> None:
    options = experiment_parser(__doc__, quick="simulate one run").parse_args()
    make_documents()
    names = list(RUNS)[2:3] if options.quick else list(RUNS)
    tables = [steps_table(names), sharding_table()]
    show(*tables)
    if options.quick:
        return
    restart = json.loads((RECORDS / "restart.json").read_text("utf-8"))["figures"]
    tests = json.loads((RECORDS / "kernels.json").read_text("utf-8"))
    differ = restart["differ"]
    losses = (
        f"other losses in steps {differ}"
        if differ
        else "the losses of a whole one, to the last bit"
    )
    write_results(
        Path(__file__).parent,
        title="wlb on an H100",
        how=How.MEASURED,
        profile="one NVIDIA H100 80GB HBM3, 2026-11-26",
        text=TEXT.format(killed=restart["killed_after"], losses=losses, **tests),
        tables=tables,
        command="python -m experiments.gpu_hour.recorded",
    )


if __name__ == "__main__":
    main()
