"""Counts how unbalanced packed micro-batches are in published models, in FLOPs.

`python -m experiments.beyond.models [--quick]` counts the FLOPs of models from their config.json
(`wlb.cost.config_json`). For each model it packs the same documents into steps of 4 windows: with
the usual loader, which cuts documents anywhere, and with `bounded` (micro-batches of at most 1.1
windows, D 10). Documents have the paper's lengths; the longest are as long as the window.

Imbalance is the slowest micro-batch over the mean, in FLOPs of forward and backward, each summed
over steps: the computing time of a step over the time that perfect balance would take. Attention
kernels reach a smaller share of a GPU's peak than matrix products do, so times are less balanced
than these FLOPs.
"""

from itertools import islice
from pathlib import Path
from typing import Any

from experiments.harness import constants
from experiments.harness.arguments import experiment_parser
from experiments.harness.pages import How, Table, show, write_results
from wlb.cost.config_json import CountedModel, counted_of, workload_of_model
from wlb.data import GlobalBatches, LengthSource
from wlb.packing import BoundedPacker, OriginalPacker, PackerOptions, PackingSummary, measure
from wlb.plan import GlobalBatch

MODELS: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": {
        "model_type": "llama",
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    "Qwen3-30B-A3B": {"model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128},
    "DeepSeek-V3": {"model_type": "deepseek_v3"},
    "DeepSeek-V3.2": {"model_type": "deepseek_v32"},
    "gpt-oss-120b": {"model_type": "gpt_oss"},
    "Llama 4 Scout": {"model_type": "llama4_text"},
    "Gemma 3 27B": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "vocab_size": 262208,
    },
    "Qwen3-Next-80B-A3B": {"model_type": "qwen3_next"},
    "Kimi Linear 48B-A3B": {"model_type": "kimi_linear"},
    "Nemotron-H 8B": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    },
}
"""Values of each config.json that affect FLOPs and differ from the defaults of transformers."""
WINDOWS = (32_768, 131_072, 524_288)
N = 4  # windows, and micro-batches, of a step
SEED = 1


def batches_of(window: int, steps: int) -> list[GlobalBatch]:
    """Returns global batches of N windows of documents with the paper's lengths."""
    mean = int(constants.FAMILY.sample(4096, window=window, seed=SEED).mean())
    count = N * window * steps * 5 // 4 // mean
    lengths = constants.FAMILY.sample(count, window=window, seed=SEED)
    source = LengthSource(name="paper", lengths=lengths)
    stream = GlobalBatches(source, tokens_per_batch=N * window, seed=SEED)
    return [batch for batch, _ in islice(stream.iterate(), steps)]


def packed(model: CountedModel, batches: list[GlobalBatch], window: int) -> list[PackingSummary]:
    """Packs the batches with the usual loader and with `bounded`; returns their summaries."""
    cost = workload_of_model(model)
    options = PackerOptions(num_micro_batches=N, context_window=window, cost=cost)
    s_max = int(constants.S_MAX * window)
    packers = {
        "usual": OriginalPacker(options=options),
        "bounded": BoundedPacker(options=options, s_max=s_max, max_delay=10),
    }
    return [measure(p, batches, cost=cost, label=n).summary for n, p in packers.items()]


def models_table(windows: tuple[int, ...], steps: int) -> Table:
    drawn = {window: batches_of(window, steps) for window in windows}
    rows: list[list[Any]] = []
    for name, values in MODELS.items():
        model = counted_of(values, name)
        row: list[Any] = [name, model.layers, model.kinds.get("full", 0), model.crossover]
        delay = 0.0
        for window in windows:
            usual, ours = packed(model, drawn[window], window)
            row += [usual.step_time_weighted, ours.step_time_weighted]
            delay = ours.mean_delay
        rows.append([*row, delay])
    columns = ["model", "layers", "full", "crossover"]
    shown = {
        "model": "model",
        "layers": "layers",
        "full": "of them with full attention",
        "crossover": "tokens at which attention costs what all else does",
    }
    for window in windows:
        for key, text in (("usual", "usual loader"), ("ours", "ours")):
            columns.append(f"{key} {window}")
            shown[f"{key} {window}"] = f"{window // 1024}K, {text}"
    columns.append("delay")
    shown["delay"] = f"mean delay at {windows[-1] // 1024}K, steps"
    formats = {name: ".3f" for name in columns if name.startswith(("usual", "ours"))}
    return Table(
        name="models",
        title="Imbalance of FLOPs by model and window",
        columns=columns,
        rows=rows,
        formats={**formats, "crossover": ",d", "delay": ".2f"},
        page_columns=shown,
        note=(
            "DeepSeek-V3.2 has latent attention over 2,048 chosen keys in each layer, and an "
            "indexer that scores all keys, so that its attention is quadratic too, at a fifth of "
            "the price. Active parameters decide how much of a token is not attention: of the "
            "models with full attention in each layer, Qwen3-30B-A3B passes the fewest."
        ),
    )


def main() -> None:
    options = experiment_parser(__doc__, quick="one window, a tenth of the steps").parse_args()
    windows, steps = ((131_072,), 40) if options.quick else (WINDOWS, 400)
    table = models_table(windows, steps)
    show(table, width=170)
    if options.quick:
        return
    write_results(
        Path(__file__).parent,
        title="What there is to balance, by model",
        how=How.COMPUTED,
        profile="FLOPs of models by their config.json",
        seed=SEED,
        text=__doc__ or "",
        tables=[table],
    )


if __name__ == "__main__":
    main()
