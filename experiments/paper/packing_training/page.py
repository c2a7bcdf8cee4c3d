"""Makes the tables and pictures of the page of `experiments.paper.packing_training`."""

from typing import Any

from experiments.harness.drawing import COLOURS, MARKERS, new_figure
from experiments.harness.pages import Against, Picture, Table
from experiments.paper.packing_methods.lengths import DATASETS
from experiments.paper.packing_training.cases import GASES, Case, Result
from experiments.paper.packing_training.summary import Group, noise_band, paper_pair


def training_table(groups: list[Group]) -> Table:
    band = noise_band(groups)
    records: list[dict[str, Any]] = []
    for group in groups:
        is_baseline = group.case.method == "random_padding"
        verdict = "noise" if abs(group.difference) <= band else "worse"
        if group.difference < -band:
            verdict = "better"
        records.append(
            {
                "method": group.case.title,
                "bs, msl, gas": group.case.layout,
                "steps": group.steps,
                "tokens/s": group.mean("tokens_per_s"),
                "over padding": group.faster,
                "padding": group.mean("padding"),
                "peak memory (MiB)": group.mean("peak_mib"),
                "train loss": group.mean("train_loss"),
                "sd, train": group.spread("train_loss"),
                "held-out loss": group.mean("heldout_after"),
                "sd, held out": group.spread("heldout_after"),
                "less padding's": None if is_baseline else group.difference,
                "difference": None if is_baseline else verdict,
            }
        )
    losses = ("train loss", "held-out loss", "sd, train", "sd, held out")
    return Table.of(
        "training",
        "An epoch of every method",
        records,
        formats=dict.fromkeys(losses, ".3f")
        | {"steps": ".1f", "tokens/s": ",.0f", "over padding": ".2f", "padding": ".1%"}
        | {"peak memory (MiB)": ",.0f", "less padding's": "+.3f"},
        note=f"Means of {len(groups[0].results)} seeds; sd: standard deviation of seeds. tokens/s: "
        "of examples, by one thread's processor time in the model's passes. difference: noise "
        f"where it is within {band:.3f} nats (95%, paired by seed, variance pooled over methods).",
    )


def rates_table(found: dict[Case, Result]) -> Table:
    return Table(
        name="learning_rates",
        title="Learning rates",
        columns=("method", "bs, msl, gas", "learning rate", "steps", "train loss", "held-out loss"),
        rows=[
            [c.title, c.layout, f"{c.learning_rate:g}", r.steps, r.train_loss, r.heldout_after]
            for c, r in found.items()
        ],
        formats={"train loss": ".3f", "held-out loss": ".3f"},
        note="One seed each. All other runs have the rate that is best for MiniBatchPacking, as "
        "the paper has one rate for all.",
    )


def against_rows(groups: list[Group]) -> list[Against]:
    out: list[Against] = []
    for group in groups:
        pairs = {name: paper_pair(name, group.case) for name in DATASETS}
        if group.case.method == "random_padding" or not all(pairs.values()):
            continue
        out.append(
            Against(
                what=f"held-out loss less padding's, {group.title}",
                paper=" / ".join(f"{p.difference:+.3f}" for p in pairs.values() if p),
                ours=f"{group.difference:+.3f}",
                note="FLAN / OrcaMath / Stack",
            )
        )
        out.append(
            Against(
                what=f"tokens/s over padding, {group.title}",
                paper=" / ".join(f"{p.faster:.2f}" for p in pairs.values() if p),
                ours=f"{group.faster:.2f}",
                note="FLAN / OrcaMath / Stack",
            )
        )
    return out


def draw_methods(groups: list[Group]) -> Any:
    """Draws held-out loss (left) and speed (right) of each method, beside the paper's."""
    figure, axes = new_figure(ncols=2, height=5.6, sharey=True)
    band = noise_band(groups)
    shown = [g for g in groups if g.case.method != "random_padding"]
    axes[0].axvspan(-band, band, color="0.85", label="noise")
    for y, group in enumerate(shown):
        for axis, value in ((axes[0], "difference"), (axes[1], "faster")):
            axis.plot(
                getattr(group, value), y, "o", color="black", zorder=3, label="" if y else "here"
            )
            for i, name in enumerate(DATASETS):
                pair = paper_pair(name, group.case)
                if pair is not None:
                    axis.plot(
                        getattr(pair, value),
                        y,
                        MARKERS[i + 1],
                        color=COLOURS[i],
                        markerfacecolor="none",
                        label="" if y else f"paper, {name}",
                    )
        axes[0].plot(group.differences, [y] * len(group.differences), "|", color="black")
    axes[0].axvline(0, color="black", linewidth=1)
    axes[1].axvline(1, color="black", linewidth=1)
    first_few = next(
        i
        for i, g in enumerate(shown)
        if g.case.method not in ("mini_batch_posid", "group_by_length_padding")
    )
    second = next(i for i, g in enumerate(shown) if g.case.gas == GASES[1])
    for axis in axes:
        for at in (first_few, second):
            axis.axhline(at - 0.5, color="0.6", linewidth=0.8, linestyle=(0, (2, 2)))
    axes[0].set(
        xlabel="held-out loss less padding's (nats)",
        yticks=range(len(shown)),
        yticklabels=[f"{g.case.title}, {g.steps:.0f} steps" for g in shown],
    )
    axes[1].set(xlabel="tokens/s over padding's")
    axes[0].invert_yaxis()
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False
    )
    return figure


def pictures(groups: list[Group]) -> list[Picture]:
    return [
        Picture(
            name="methods",
            caption="Held-out loss and speed beside RandomSampling+Padding: "
            "dots the mean of seeds, ticks each seed, hollow the paper's tables at bs = 2",
            figure=draw_methods(groups),
        )
    ]
