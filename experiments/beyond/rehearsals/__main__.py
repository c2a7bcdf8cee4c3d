"""Rehearses the presets on fake GPUs and writes the results page.

`python -m experiments.beyond.rehearsals` writes two tables, which
`experiments/beyond/rehearsals/results` explains. One has one rank of each pipeline position under
each system, and one has all ranks of each preset. The exit status is 1 if a rehearsal found a
fault.

Finished rehearsals are stored in `--folder`. So the same command resumes after an interruption,
unless the commit has changed.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.harness import pages
from experiments.harness.arguments import experiment_parser
from experiments.harness.pages import How, Table, write_results
from wlb.cli.system import with_system
from wlb.memory import gpu_budget
from wlb.plan import UserError
from wlb.rehearse.run import ALL, ONE_PER_STAGE, Rehearsed, rehearse_each
from wlb.rehearse.show import verdict
from wlb.spec import SYSTEMS, ParallelSpec, RunSpec, load

GIB = 1 << 30
TABLE_1 = tuple(
    f"{size}_{window}k" for size in ("550m", "7b", "30b", "70b") for window in (64, 128)
)
LARGE = "405b_128k"
FORCED = ("fixed_4d:2", "wlb:2")
"""Alternatives that are rehearsed besides the one that each system chooses by its memory.

"wlb:2" is the second alternative of the system wlb.
"""
Row = Sequence[object]
PROVEN = ("preset", "system", "ranks", "whole communicators", "collectives", "transfers")
"""Columns of both tables, besides the verdict."""
MEMORY = (
    *("peak (GiB)", "least peak / estimate", "most", "reserved (GiB)"),
    *("without expandable segments (GiB)", "may be reserved (GiB)"),
)
TEXT = """Ranks on fake CUDA tensors (`wlb rehearse`), {steps} steps of documents with the
presets' lengths. Positions: each preset under each system, and under both alternatives of the
systems that have two, with all its layers. Ranks: all ranks of each row of Table 1 under the
system `wlb`, with one layer a stage: messages between ranks repeat from layer to layer, and a
system changes their sizes, not their order (tests/rehearse/test_run_layouts.py, where recompute
is proven too). Of 405b_128k, whose 8,192 ranks are too many, the first and the last rank of the
first, a middle and the last pipeline position. Peak: most bytes of living tensors. Estimate:
`wlb.simulate.peak_memory.peak_of_step` for the same step, the first step left out. Reserved: what
torch's caching allocator takes for the same requests. May be reserved: the device's memory less
CUDA's context and NCCL's buffers. Nothing ran on a GPU."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and returns its exit status, 1 if a rehearsal found a fault."""
    parser = experiment_parser(__doc__, quick="rehearse one preset and system")
    parser.add_argument("--presets", nargs="+", default=[*TABLE_1, LARGE])
    parser.add_argument("--systems", nargs="+", default=[*SYSTEMS, *FORCED])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/rehearsals"))
    parser.add_argument(
        "--kept", action="store_true", help="write the page from stored rehearsals, run none"
    )
    parser.add_argument("--commit", default="", help="with --kept: commit of the stored rehearsals")
    options = parser.parse_args(arguments)
    if options.quick:
        rows = rehearsed("550m_64k", ["wlb"], ONE_PER_STAGE, layers=1, options=options)
        print(*rows, sep="\n")
        return exit_status(rows)
    commit = options.commit if options.kept and options.commit else pages.commit()
    kept = KeptRows(options.folder / "rows.jsonl", commit=commit)
    positions: list[Row] = []
    ranks: list[Row] = []
    for preset in options.presets:
        positions += kept.rows(preset, options.systems, ONE_PER_STAGE, layers=0, options=options)
    for preset in options.presets:
        which = ALL if preset != LARGE else corners(load(preset, []).parallel)
        found = kept.rows(preset, ["wlb"], which, layers=1, options=options)
        ranks += [row[: len(PROVEN)] + row[-1:] for row in found]
    text = TEXT.replace("\n", " ").format(steps=options.steps) + f" Rehearsed at commit {commit}."
    if kept.missing:
        text += f" Not rehearsed yet: {'; '.join(kept.missing)}."
    write_results(
        Path(__file__).parent,
        title="Rehearsals of the presets on fake GPUs",
        how=How.COMPUTED,
        profile="nothing was timed or priced.",
        text=text,
        tables=tables_of(positions, ranks),
    )
    return exit_status([*positions, *ranks])


def tables_of(positions: Sequence[Row], ranks: Sequence[Row]) -> list[Table]:
    """Returns the tables of the page, without those that have no rows."""
    tables = [
        Table(
            name="positions",
            title="One rank of each pipeline position, all layers",
            columns=(*PROVEN, *MEMORY, "verdict"),
            rows=positions,
            most_rows=len(positions),
        ),
        Table(
            name="ranks",
            title="All ranks (of 405b_128k its corners), one layer a stage",
            columns=(*PROVEN, "verdict"),
            rows=ranks,
        ),
    ]
    return [table for table in tables if table.rows]


class KeptRows:
    """Stores table rows of finished rehearsals in a file, so that they survive an interruption.

    Only rows of the given commit are used. With `--kept`, `missing` lists the rehearsals that have
    no row yet.
    """

    def __init__(self, path: Path, *, commit: str) -> None:
        self.path, self.commit = path, commit
        self.missing: list[str] = []
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        self._rows = {tuple(one["key"]): one["row"] for one in found if one["commit"] == commit}

    def rows(
        self,
        preset: str,
        systems: Sequence[str],
        ranks: str,
        *,
        layers: int,
        options: argparse.Namespace,
    ) -> list[list[object]]:
        """Returns the rows of a preset, and rehearses those that are not stored yet.

        Args:
            preset: Name of the preset.
            systems: Systems, in the order of the rows.
            ranks: Which ranks to rehearse, as for `wlb rehearse --ranks`.
            layers: Layers of each stage. 0 stands for the preset's layers.
            options: Command-line options. With `kept`, nothing is rehearsed.
        """
        keys = {system: (preset, system, ranks, layers, options.steps) for system in systems}
        missing = [system for system in systems if keys[system] not in self._rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if options.kept:
            what = "all layers" if ranks == ONE_PER_STAGE else f"ranks {ranks}"
            self.missing += [f"{preset} {system}, {what}" for system in missing]
            return [self._rows[keys[s]] for s in systems if s not in missing]
        for system in missing:
            (row,) = rehearsed(preset, [system], ranks, layers=layers, options=options)
            print(*row, sep=", ", flush=True)
            self._rows[keys[system]] = row
            with self.path.open("a", encoding="utf-8") as file:
                record = {"commit": self.commit, "key": keys[system], "row": row}
                print(json.dumps(record), file=file)
        return [self._rows[keys[system]] for system in systems]


def exit_status(rows: Sequence[Row]) -> int:
    """Returns 1 if a rehearsal found a fault or raised an error, else 0.

    Alternatives in `FORCED` may raise an error, because they may not fit into memory.
    """
    return int(
        any(
            "passed" not in str(row[-1])
            and not (row[1] in FORCED and str(row[-1]).startswith("refused"))
            for row in rows
        )
    )


def rehearsed(
    preset: str, systems: Sequence[str], ranks: str, *, layers: int, options: argparse.Namespace
) -> list[list[object]]:
    """Rehearses a preset under each system and returns a table row for each."""
    specs = [spec_of(preset, system, layers) for system in systems]
    found = rehearse_each(specs, ranks=ranks, steps=options.steps, jobs=options.jobs)
    return [line_of(preset, *one) for one in zip(systems, found, strict=True)]


def line_of(preset: str, system: str, found: Rehearsed | UserError) -> list[object]:
    """Returns a table row for a rehearsal, or for the error that prevented it."""
    if isinstance(found, UserError):
        return [preset, system, *[""] * (len(PROVEN) - 2 + len(MEMORY)), f"refused: {found}"]
    proof = found.proof
    counts = (proof.num_communicators, proof.num_collectives, proof.num_transfers)
    ranks = f"{len(found.ranks)} of {found.spec.parallel.world_size}"
    faults = [line for line in verdict(found) if line.startswith("FAULT")]
    warnings = sum(line.startswith("warning") for line in verdict(found))
    end = "; ".join(faults) or "passed" + f", {warnings} warning(s)" * (warnings > 0)
    return [preset, system, ranks, *counts, *memory_of(found), end]


def spec_of(preset: str, system: str, layers: int) -> RunSpec:
    """Returns the configuration of a preset under a system.

    Args:
        preset: Name of the preset.
        system: Name of the system, or one of its alternatives, such as "wlb:2".
        layers: Layers of each stage. 0 stands for the preset's layers.
    """
    num_stages = load(preset, []).num_stages
    overrides = with_system(preset, ["eval.steps=0"], system)
    if layers:
        overrides += [f"model.num_layers={layers * num_stages}", "pp.stage_layers=[]"]
    return load(preset, overrides)


def corners(parallel: ParallelSpec) -> str:
    """Returns the first and the last rank of the first, a middle and the last pipeline position.

    The result has the form of `wlb rehearse --ranks`, such as "0,7,64".
    """
    inner = parallel.tp * parallel.cp
    positions = (0, parallel.pp // 2, parallel.pp - 1)
    last = parallel.world_size - parallel.pp * inner
    return ",".join(str(r) for pp in positions for r in (pp * inner, last + pp * inner + inner - 1))


def memory_of(found: Rehearsed) -> tuple[float, ...]:
    """Returns the values of the columns `MEMORY`. The first step is not compared with estimates."""
    steps = [step for result in found.ranks for step in result.steps[1:]]
    shares = [step.peak_bytes / step.estimate_bytes for step in steps] or [float("nan")]
    peak = max(result.peak_bytes for result in found.ranks)
    kinds = ("expandable", "segments")
    reserved = (max(r.reserved[kind].peak_bytes for r in found.ranks) for kind in kinds)
    least, most = round(min(shares), 3), round(max(shares), 3)
    sizes = (*reserved, gpu_budget(found.spec).reservable_bytes)
    return (round(peak / GIB, 2), least, most, *(round(size / GIB, 2) for size in sizes))


if __name__ == "__main__":
    sys.exit(main())
