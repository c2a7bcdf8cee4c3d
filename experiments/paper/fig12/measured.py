"""Measures Figure 12 on a cluster: makes documents for its runs, and compares finished runs.

`python -m experiments.paper.fig12.measured documents 7b_128k --steps 40 --out PREFIX` makes a token
store whose documents have lengths like the paper's, with enough tokens for that many steps.

`python -m experiments.paper.fig12.measured row 7b_128k RUN [RUN ...]` reads finished runs of
several systems and prints their tokens/s over Plain-4D's. Each RUN is the folder of a run and is
named by its system: plain_4d, fixed_4d, paper or wlb.

`slurm/fig12.sh` makes the documents, trains the runs and compares them.
"""

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.harness.constants import FLASH_2, FLASH_3, KERNELS, title
from experiments.harness.evaluation import NAMES
from experiments.harness.pages import Table, show
from wlb.plan import UserError
from wlb.prepare.synthetic import prepare_synthetic
from wlb.report.run.records import RunRecords, read_run
from wlb.spec import RunSpec, load

FAMILY = "wlb_paper"
SPARE = 1.1
"""Tokens of the store over the tokens of the steps, so that no system reads a document twice."""
PLAIN = "plain_4d"
LABELS = {PLAIN: "Plain-4D", **NAMES}
SIMULATED = {"simulated, FA2": FLASH_2, "simulated, FA3": FLASH_3}
"""Columns with the speed-ups that Figure 12's page predicts for an H100, by attention kernel."""
PREDICTIONS = Path(__file__).parent / "results" / "speedups.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSystem:
    """Measurements of a system's run, without warm-up steps, in which kernels are compiled."""

    num_steps: int  # steps after warm-up
    num_tokens: int  # document tokens that these steps trained
    time_s: float  # wall time of these steps on rank 0
    model_flops: float  # FLOPs of these documents, without padding and recomputation
    work_s: float  # wall time, summed over ranks, in which `model_flops` were computed
    held_tokens: int  # tokens that still wait after the last step

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.time_s

    @property
    def flops_per_s(self) -> float:
        """Returns the model FLOP/s of a rank; 0 if telemetry is off."""
        return self.model_flops / self.work_s if self.work_s else 0.0


def make_documents(spec: RunSpec, *, steps: int, out: Path) -> int:
    """Makes a token store for `steps` steps of a run and returns its number of tokens."""
    made = prepare_synthetic(
        out,
        family=FAMILY,
        num_tokens=int(steps * spec.tokens_per_step * SPARE),
        window=spec.data.context_window,
        seed=spec.run.seed,
    )
    return made.num_tokens


def measured(run: RunRecords) -> MeasuredSystem:
    """Returns the measurements of a run after its warm-up.

    Raises:
        UserError: If the run has no timed steps after its warm-up.
    """
    warm_up = run.spec.telemetry.warmup_steps
    steps = [step.measured for step in run.steps if step.steps_done > warm_up]
    times = [step.step_time_s for step in steps]
    known = [time_s for time_s in times if time_s is not None]
    if not known or len(known) < len(times):
        raise UserError(
            f"{run.folder} has {len(known)} timed steps after its warm-up of {warm_up}; train it "
            f"for more"
        )
    work = [
        telemetry.work
        for steps_done, telemetry in run.telemetry
        if steps_done > warm_up and telemetry.work is not None
    ]
    return MeasuredSystem(
        num_steps=len(steps),
        num_tokens=sum(step.num_tokens for step in steps),
        time_s=sum(known),
        model_flops=sum(one.model_flops for one in work),
        work_s=sum(one.rank_s for one in work),
        held_tokens=steps[-1].num_held_tokens,
    )


def read_systems(folders: Sequence[Path]) -> dict[str, MeasuredSystem]:
    """Reads runs and returns their measurements by the names of their folders, Plain-4D first.

    Raises:
        UserError: If Plain-4D is missing, or runs differ in more than their system.
    """
    runs = {folder.name: read_run(folder) for folder in folders}
    if PLAIN not in runs:
        raise UserError(f"no RUN is named {PLAIN}, which the others are compared with")
    expected = _compared(runs[PLAIN].spec)
    for run in runs.values():
        for key, value in _compared(run.spec).items():
            if value != expected[key]:
                raise UserError(
                    f"{run.folder} has {key} = {value}, and {PLAIN} has {expected[key]}; compare "
                    f"runs that differ in their system alone"
                )
    names = [PLAIN, *(name for name in runs if name != PLAIN)]
    return {name: measured(runs[name]) for name in names}


def _compared(spec: RunSpec) -> dict[str, Any]:
    """Returns the settings that must be equal in runs that are compared."""
    return {
        "model": spec.model,
        "parallel": spec.parallel,
        "data.store": spec.data.store,
        "data.context_window": spec.data.context_window,
        "data.num_windows": spec.num_windows,
        "run.seed": spec.run.seed,
        "training.dtype": spec.training.dtype,
    }


def simulated(config: str, kernel: str) -> dict[str, float]:
    """Returns the speed-ups over Plain-4D that Figure 12's page predicts, by label.

    The result is empty for configurations that are not in the paper's Table 1.
    """
    with PREDICTIONS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if (row["kernel"], row["configuration"]) == (KERNELS[kernel], title(config)):
                return {LABELS[PLAIN]: 1.0} | {name: float(row[name]) for name in NAMES.values()}
    return {}


def row_table(config: str, systems: dict[str, MeasuredSystem]) -> Table:
    """Returns the table of a configuration: measured speed-ups and the values behind them."""
    plain = systems[PLAIN]
    predicted = [simulated(config, kernel) for kernel in SIMULATED.values()]
    body: list[list[Any]] = []
    for name, one in systems.items():
        by_work = one.flops_per_s / plain.flops_per_s if plain.flops_per_s else None
        label = LABELS.get(name, name)
        body.append(
            [
                label,
                one.tokens_per_s / plain.tokens_per_s,
                by_work,
                *(speeds.get(label) for speeds in predicted),
                one.tokens_per_s,
                one.time_s / one.num_steps,
                one.num_steps,
                one.held_tokens / one.num_tokens,
            ]
        )
    columns = [
        "system",
        "tokens/s over Plain-4D",
        "FLOP/s over Plain-4D",
        *SIMULATED,
        "tokens/s",
        "s/step",
        "steps",
        "waiting",
    ]
    return Table(
        name="measured",
        title=f"Figure 12, measured: {title(config)}",
        columns=columns,
        rows=body,
        formats={
            "tokens/s over Plain-4D": ".3f",
            "FLOP/s over Plain-4D": ".3f",
            **dict.fromkeys(SIMULATED, ".3f"),
            "tokens/s": ",.0f",
            "s/step": ".3f",
            "waiting": ".1%",
        },
        note="FLOP/s: of the documents that were trained, without padding and recomputation. "
        "Systems that let long documents wait have trained others than Plain-4D when they stop; "
        "FLOP/s count that, tokens/s do not. Waiting: tokens that wait at the end, as a share of "
        "those trained. Simulated: Figure 12's page, for the preset as it is, on H100s with "
        "FlashAttention-2 or 3.",
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    documents = commands.add_parser("documents", help="make the token store of the runs")
    documents.add_argument("preset")
    documents.add_argument("--steps", type=int, required=True)
    documents.add_argument("--out", type=Path, required=True, help="prefix of the store")
    documents.add_argument("--set", dest="overrides", nargs="*", default=[], metavar="KEY=VALUE")
    row = commands.add_parser("row", help="print the speed-ups of runs")
    row.add_argument("preset")
    row.add_argument("folders", type=Path, nargs="+", metavar="RUN")
    options = parser.parse_args(words)
    try:
        if options.command == "row":
            show(row_table(options.preset, read_systems(options.folders)))
        else:
            spec = load(options.preset, options.overrides)
            tokens = make_documents(spec, steps=options.steps, out=options.out)
            print(f"{options.out}: {tokens:,} tokens in documents of lengths like the paper's")
    except UserError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
