"""Rehearses the presets: one rank of each pipeline position under each system, and all ranks.

`python -m experiments.beyond.rehearsals` writes two tables, as
`experiments/beyond/rehearsals/results` explains, and ends with status 1 if a rehearsal found a
fault. Finished rehearsals are kept in `--folder`, so that the same command goes on after an
interruption, until the code changes.
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
"""Alternatives of systems that are rehearsed besides the one that memory leaves room for."""
Row = Sequence[object]
PROVEN = ("preset", "system", "ranks", "whole communicators", "collectives", "transfers")
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
    """Returns the exit status: 1 if a rehearsal found a fault."""
    parser = experiment_parser(__doc__, quick="rehearse one preset and system")
    parser.add_argument("--presets", nargs="+", default=[*TABLE_1, LARGE])
    parser.add_argument("--systems", nargs="+", default=[*SYSTEMS, *FORCED])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/rehearsals"))
    parser.add_argument("--kept", action="store_true", help="write pages of what is done, no more")
    parser.add_argument("--commit", default="", help="with --kept: the one that was rehearsed")
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
    """The tables that have rows."""
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
    """Rows by what was rehearsed, in a file that survives an interruption; of one commit. missing:
    what pages of kept rows lack.
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
        """The rows of a preset, in the order of `systems`; what is missing is rehearsed."""
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
    """1 if a row has a fault, or a system was refused; memory may leave no room for `FORCED`."""
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
    """Rehearses a preset under each system; lines of a table."""
    specs = [spec_of(preset, system, layers) for system in systems]
    found = rehearse_each(specs, ranks=ranks, steps=options.steps, jobs=options.jobs)
    return [line_of(preset, *one) for one in zip(systems, found, strict=True)]


def line_of(preset: str, system: str, found: Rehearsed | UserError) -> list[object]:
    """A line of a table, of plain values."""
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
    """The preset under a system, or an alternative of one (`wlb:2`). layers: of each stage; with 0
    the model's own.
    """
    num_stages = load(preset, []).num_stages
    overrides = with_system(preset, ["eval.steps=0"], system)
    if layers:
        overrides += [f"model.num_layers={layers * num_stages}", "pp.stage_layers=[]"]
    return load(preset, overrides)


def corners(parallel: ParallelSpec) -> str:
    """The first and the last rank of the first, a middle and the last pipeline position."""
    inner = parallel.tp * parallel.cp
    positions = (0, parallel.pp // 2, parallel.pp - 1)
    last = parallel.world_size - parallel.pp * inner
    return ",".join(str(r) for pp in positions for r in (pp * inner, last + pp * inner + inner - 1))


def memory_of(found: Rehearsed) -> tuple[float, ...]:
    """Values of the columns `MEMORY`."""
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
