"""Writes the page of what single GPUs measured, from committed records; needs no GPU.

`python -m experiments.gpu_hour.recorded` reads three folders of results:

- h100_2026-11-26: metrics of four training runs, times of Figure 15's kernels, and a run that was
  killed and resumed.
- h100_2026-11-27: layers that `experiments.gpu_hour.layers` timed.
- h200_2026-11-27: timed layers as well, and results of the tests in which several ranks share a GPU
  over NCCL.

The steps of the training runs are planned once more and simulated with three profiles: `h100`,
which is published; `h100_sxm`, which was measured on the day of the runs; and `h100_runs`, in which
matrix products are as slow as in long published runs.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.gpu_hour.measured import compared
from experiments.gpu_hour.runs import make_store
from experiments.harness.arguments import experiment_parser
from experiments.harness.constants import title
from experiments.harness.evaluation import NAMES
from experiments.harness.pages import ROOT, How, Table, show, write_results
from experiments.paper.fig15.case import STATIC, layer_cost, micro_batches
from wlb.cost import attention_latency
from wlb.sharding import shard

RECORDS = Path(__file__).parent / "results" / "h100_2026-11-26"
LAYERS = Path(__file__).parent / "results" / "h100_2026-11-27"
H200 = Path(__file__).parent / "results" / "h200_2026-11-27"
PROFILES = ("h100", "h100_sxm", "h100_runs")
DOCUMENTS = {"3m": 3_000_000, "6m": 6_000_000}
"""Token stores that the runs read: name in runs/gpu_hour/documents, and number of tokens."""
WINDOW = 131072
RUNS = {
    "billion_32k": "0.95B parameters, 4 windows of 32K, FlashAttention-2",
    "billion_32k_fa3": "0.95B parameters, 4 windows of 32K, FlashAttention-3",
    "stack_64k": "4 layers of LLaMA 7B, a window of 64K, FlashAttention-2",
    "stack_128k": "2 layers of LLaMA 7B, a window of 128K, recomputed, FlashAttention-2",
}
MEASURED, BEFORE, NOW = "over per sequence", "predicted then", "predicted by h100_sxm"
TEXT = """
The first two tables are of one H100 SXM 80GB at 700 W, driver 580.159.04, torch 2.11.0+cu130,
Python 3.12.3, alone on the card. The third has another H100 SXM and one H200, both at 700 W with
the same software. Each is one GPU, so nothing here says how fast GPUs talk to each other.

On the H100, {passed} tests of `pytest -m gpu` passed and {skipped} were skipped for packages or
GPUs that were not there. Remarks of torch, which are allowed since, failed {failed} more, which
were not run again. A small run that was killed after {killed} steps and resumed had {losses}.
FlashAttention-3 was version 3.0.0, built for heads of 128, causal and variable-length calls only.

On the H200, NCCL {nccl} connected up to {most_ranks} ranks that shared the card, each as a host of
its own (`tests/gpu/one_gpu.py`). So collectives, pipelines and context parallelism ran with NCCL's
own communicators and streams. {float32} layouts of tensor, context, pipeline, expert and data
parallelism in float32 had the losses, gradients and updates of one process, and {bfloat16} in
bfloat16 with FlashAttention-2 had its loss within 2%. A run of {most_ranks} ranks in
TP 2, CP 2 and PP 2 was trained for {steps} steps. From its checkpoint in the middle, the same
layout had the same losses to the last bit, and another layout (CP 4, DP 2) and one process had them
within 0.5%. On the second H100, 3 layouts in float32 and 2 in bfloat16 whose TP ranks hold copies
of a KV head passed the same tests.
"""


def make_documents() -> None:
    """Makes the token stores that the runs read, with the same lengths on any machine."""
    for name, tokens in DOCUMENTS.items():
        prefix = ROOT / "runs" / "gpu_hour" / "documents" / name
        make_store(prefix, tokens=tokens, window=WINDOW)


def steps_of(name: str) -> dict[str, Any]:
    """Returns a row: measured step time and memory of a run beside predictions of its steps."""
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
    """Returns predicted attention times under the paper's static shardings, by their names.

    The micro-batches are those that were measured, priced by `h100_sxm`. Only ratios of the times
    are used.
    """
    cost = layer_cost(window=window, cp=4, profile="h100_sxm", backend="torch_varlen")
    out = dict.fromkeys(STATIC, 0.0)
    for lengths in micro_batches("original", window=window, count=count, seed=0):
        for name in STATIC:
            made = attention_latency(shard(lengths, cp=4, strategy=name, cost=cost), cost)
            out[name] += float(made.forward_ns.max() + made.backward_ns.max())
    return out


def sharding_table() -> Table:
    """Returns Figure 15's table: measured and predicted kernel times under each sharding."""
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


LAYER_COLUMNS = {
    "gpu": "GPU",
    "config": "configuration",
    "system": "system",
    "predicted": "over Plain-4D, all predicted",
    "measured": "over Plain-4D, layers measured",
    "forward": "predicted over measured, forward",
    "backward": "predicted over measured, backward",
    "correlation": "correlation of a layer's times",
}
SYSTEM_NAMES = {"plain_4d": "Plain-4D", **NAMES}


def layers_table() -> Table:
    """Returns the table of speed-ups with predicted and with measured layers.

    Its last columns say how well the layers' times were predicted.
    """
    runs = [
        (gpu, config, systems)
        for gpu, folder in (("H100", LAYERS), ("H200", H200))
        for config, systems in json.loads((folder / "layers.json").read_text())["configs"].items()
    ]
    rows: list[list[Any]] = []
    for gpu, config, systems in runs:
        preset, *changed = config.split(", ")
        plain = systems["plain_4d"]
        for system, made in systems.items():
            speedups = [plain[name] / made[name] for name in ("predicted_s", "measured_s")]
            predicted, measured = (
                np.array(made[f"layers_{name}_ns"], float).reshape(-1, 2)
                for name in ("predicted", "measured")
            )
            # Ranks without tokens were not timed.
            timed = measured[:, 0] > 0
            ratios = predicted[timed].sum(axis=0) / measured[timed].sum(axis=0)
            both = predicted[timed].sum(axis=1), measured[timed].sum(axis=1)
            correlation = float(np.corrcoef(*both)[0, 1])
            names = [gpu, ", ".join([title(preset), *changed]), SYSTEM_NAMES[system]]
            rows.append([*names, *speedups, *map(float, ratios), correlation])
    return Table(
        name="layers",
        title="What balance gains, with the measured layers of every rank",
        columns=list(LAYER_COLUMNS),
        rows=rows,
        formats={
            **dict.fromkeys(("predicted", "measured", "forward", "backward"), ".3f"),
            "correlation": ".4f",
        },
        page_columns=LAYER_COLUMNS,
        note=(
            "Each system planned the same 17 steps of documents of the paper's lengths. For each "
            "micro-batch and context-parallel rank one decoder layer ran on the GPU, forward and "
            "backward, as wide as one tensor-parallel rank has it, with FlashAttention-2. These "
            "times take the place of predicted attention, matrix products and element-wise "
            "operations; collectives and the pipeline are simulated in both columns. Predictions "
            "are those of profile h100_runs, so the last three columns compare an H100 in long "
            "runs with a GPU that ran for a minute. With 8 KV heads, two of 70B's 16 TP ranks "
            "hold a copy of each KV head."
        ),
    )


def main() -> None:
    options = experiment_parser(__doc__, quick="simulate one run").parse_args()
    make_documents()
    names = list(RUNS)[2:3] if options.quick else list(RUNS)
    tables = [steps_table(names), sharding_table(), layers_table()]
    show(*tables)
    if options.quick:
        return
    restart = json.loads((RECORDS / "restart.json").read_text("utf-8"))["figures"]
    tests = json.loads((RECORDS / "kernels.json").read_text("utf-8"))
    shared = json.loads((H200 / "nccl.json").read_text("utf-8"))
    differ = restart["differ"]
    losses = (
        f"other losses in steps {differ}"
        if differ
        else "the losses of a whole one, to the last bit"
    )
    write_results(
        Path(__file__).parent,
        title="wlb on one GPU",
        how=How.MEASURED,
        profile="NVIDIA H100 80GB HBM3, one on 2026-11-26 and one on 2026-11-27; one NVIDIA H200",
        text=TEXT.format(killed=restart["killed_after"], losses=losses, **tests, **shared),
        tables=tables,
        command="python -m experiments.gpu_hour.recorded",
    )


if __name__ == "__main__":
    main()
