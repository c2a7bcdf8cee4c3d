"""Makes Table 1: the paper's configurations with our dimensions, and the memory of a GPU.

`python -m experiments.paper.table1` counts parameters and estimates the memory of the pipeline rank
that needs most (`wlb.memory.memory_estimate`), for windows of equal tokens (Plain-4D) and for
var_len packing with S_max 1.1. A configuration that does not fit is tried with selective and then
with full recomputation of activations.

A configuration fits if it needs at most 80 GB = 80e9 bytes. A card with that name has 85e9 bytes;
the rest is for memory that is not estimated: the CUDA context, NCCL's buffers and fragmentation.
Nothing runs, and nothing is priced.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.arguments import experiment_parser
from experiments.harness.constants import TABLE_1, VOCABULARY, configuration, title
from experiments.harness.drawing import COLOURS, HATCHES, new_figure
from experiments.harness.pages import Against, How, Picture, Table, show, write_results
from wlb.memory import MemoryEstimate, memory_estimate
from wlb.spec import RunSpec

GPU_BYTES = 80e9
S_MAX = 1.1
PACKINGS = {
    "windows": ("packing.policy=original",),
    f"var_len, S_max {S_MAX}": ("packing.policy=var_len", f"packing.s_max={S_MAX}"),
}
LEVELS = ("none", "selective", "full")
"""Values of `training.recompute`, from least work to least memory."""
TERMS = {
    "activations": ("activations_bytes",),
    "weights, gradients, optimiser": (
        "parameters_bytes",
        "gradients_bytes",
        "fresh_gradients_bytes",
        "optimizer_bytes",
    ),
    "workspace of a layer": ("workspace_bytes", "kernel_bytes"),
    "outputs, logits, inputs": ("boundaries_bytes", "logits_bytes", "inputs_bytes"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Memory of a configuration with one packing."""

    name: str  # preset of Table 1
    packing: str  # a key of PACKINGS
    spec: RunSpec
    memory: MemoryEstimate
    recompute: str  # least recomputation with which it fits; "full" if none does

    @property
    def fits(self) -> bool:
        return self.memory.total_bytes <= GPU_BYTES

    def gb_of(self, names: tuple[str, ...]) -> float:
        return sum(self.memory.terms[name] for name in names) / 1e9


def fit(name: str, packing: str) -> Fit:
    """Estimates a configuration with the least recomputation that fits, or else with the most."""
    for level in LEVELS:
        spec = configuration(name, *PACKINGS[packing], f"training.recompute={level}")
        found = Fit(
            name=name, packing=packing, spec=spec, memory=memory_estimate(spec), recompute=level
        )
        if found.fits:
            break
    return found


def configurations_table() -> Table:
    records: list[dict[str, Any]] = []
    for name in TABLE_1:
        spec = configuration(name)
        model, p = spec.model, spec.parallel
        records.append(
            {
                "configuration": title(name),
                "hidden": model.hidden_size,
                "layers": model.num_layers,
                "heads": model.num_heads,
                "FFN": model.ffn_hidden_size,
                "parameters": model.num_parameters,
                "TP, CP, PP, DP": f"{p.tp}, {p.cp}, {p.pp}, {p.dp}",
                "GPUs": p.world_size,
                "micro-batches a step": spec.num_micro_batches,
            }
        )
    return Table.of(
        "configurations",
        "Configurations",
        records,
        formats=dict.fromkeys(("hidden", "FFN", "parameters"), ",d"),
        note=f"As many key heads as query heads, heads of 128, vocabulary {VOCABULARY:,}, "
        "embedding and head untied, four virtual stages a pipeline rank.",
    )


def memory_table(fits: list[Fit]) -> Table:
    terms = tuple(f"{term} (GB)" for term in TERMS)
    records = [
        {
            "configuration": title(f.name),
            "packing": f.packing,
            "longest micro-batch": f.memory.micro_batch_tokens,
            "passes in flight": f.memory.num_in_flight,
            **{f"{term} (GB)": f.gb_of(names) for term, names in TERMS.items()},
            "total (GB)": f.memory.total_bytes / 1e9,
            "recomputation": f.recompute,
            "fits 80 GB": "yes" if f.fits else "no",
        }
        for f in fits
    ]
    formats = dict.fromkeys((*terms, "total (GB)"), ".1f") | {"longest micro-batch": ",d"}
    return Table.of(
        "memory",
        "Memory of a GPU",
        records,
        formats=formats,
        note="GB = 1e9 bytes, of the pipeline rank that needs most; all micro-batches in flight "
        "are taken to be as long as the longest may be.",
    )


def draw(fits: list[Fit]) -> Any:
    figure, (axes,) = new_figure(height=4.6)
    thick = 0.36
    for row, f in enumerate(fits):
        at = row // len(PACKINGS) + (row % len(PACKINGS) - 0.5) * thick * 1.12
        left = 0.0
        for i, (term, names) in enumerate(TERMS.items()):
            axes.barh(
                at,
                f.gb_of(names),
                thick,
                left,
                color=COLOURS[i if i != 3 else 4],
                hatch=HATCHES[i],
                edgecolor="white",
                linewidth=0.5,
                label=term if not row else None,
            )
            left += f.gb_of(names)
        more = "" if f.recompute == "none" else f", recompute {f.recompute}"
        # A white box keeps the text legible where the line at 80 GB crosses it.
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axes.text(left + 0.8, at, f"{f.packing}{more}", va="center", fontsize=8, bbox=box)
    gpu = GPU_BYTES / 1e9
    axes.axvline(gpu, color="black", linestyle=(0, (4, 2)), linewidth=1)
    axes.annotate("80 GB", (gpu, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom")
    axes.set(
        yticks=np.arange(len(TABLE_1)),
        yticklabels=[title(name) for name in TABLE_1],
        xlabel="memory of the GPU that needs most (GB)",
        xlim=(0, 1.2 * max(gpu, *(f.memory.total_bytes / 1e9 for f in fits))),
    )
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside lower center", ncols=len(TERMS), frameon=False)
    return figure


def words(fits: list[Fit]) -> str:
    """Returns which cases fit, which need recomputation, and which do not fit at all."""
    needed = [
        f"{title(f.name)} ({f.packing}): {f.recompute}" for f in fits if f.recompute != "none"
    ]
    failing = [f"{title(f.name)} ({f.packing})" for f in fits if not f.fits]
    plain = sum(f.fits and f.recompute == "none" for f in fits)
    text = f"{plain} of {len(fits)} cases fit without recomputing anything."
    if needed:
        text += f" Recomputation was needed for {'; '.join(needed)}."
    if failing:
        text += f" These do not fit: {', '.join(failing)}."
    return text


def main() -> None:
    experiment_parser(__doc__).parse_args()
    fits = [fit(name, packing) for name in TABLE_1 for packing in PACKINGS]
    made = [configurations_table(), memory_table(fits)]
    against = [
        Against(
            what="parameters",
            paper=size,
            ours=f"{configuration(name).model.num_parameters / 1e6:,.0f} million",
        )
        for name in TABLE_1[::2]
        for size in [title(name).split("-")[0]]
    ]
    show(*made, width=200)
    write_results(
        Path(__file__).parent,
        title="Table 1: configurations",
        how=How.COMPUTED,
        profile="parameters are counted, memory is what `wlb.memory` says must be resident; "
        "no time is in it, and no GPU has confirmed it.",
        text=(
            "The paper gives model sizes, windows and layouts, and says that the 7B model is "
            "LLaMA2-7B's architecture. The other dimensions are ours, in its proportions, with "
            "layers that four pipeline ranks of four virtual stages divide.\n\n"
            f"{words(fits)} The paper does not say how much memory its runs take.\n\n"
            "80 GB are 80e9 bytes; what a card has beyond that is left to the CUDA context, NCCL "
            "and fragmentation, which the estimate does not count."
        ),
        against=against,
        tables=made,
        figures=[
            Picture(
                name="memory",
                caption="Memory of the GPU that needs most, by configuration and packing",
                figure=draw(fits),
            )
        ],
    )


if __name__ == "__main__":
    main()
