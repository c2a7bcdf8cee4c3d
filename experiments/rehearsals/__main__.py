"""Rehearses the presets: one rank of each pipeline position under each system, and all ranks.

`python -m experiments.rehearsals [--presets ...] [--systems ...]` writes two tables. Positions:
each preset under each system with all its layers; memory beside its estimate. Ranks: all ranks of
each row of Table 1 with one layer a stage, because messages between ranks repeat from layer to
layer; what was proven over them. 405b_128k, whose 8,192 ranks are too many, is rehearsed at its
corners in both: the first and the last rank of the first, a middle and the last pipeline position.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiments.results import How, Table, write_results
from wlb.cli.system import with_system
from wlb.cost import gpu_budget
from wlb.plan import UserError
from wlb.rehearse.run import ALL, ONE_PER_STAGE, Rehearsed, rehearse_each
from wlb.rehearse.show import verdict
from wlb.spec import SYSTEMS, ParallelSpec, RunSpec, load

GIB = 1 << 30
TABLE_1 = tuple(
    f"{size}_{window}k" for size in ("550m", "7b", "30b", "70b") for window in (64, 128)
)
LARGE = "405b_128k"
Row = tuple[object, ...]
PROVEN = ("preset", "system", "ranks", "whole communicators", "collectives", "transfers")
MEMORY = (
    *("peak (GiB)", "least peak / estimate", "most", "reserved (GiB)"),
    *("without expandable segments (GiB)", "may be reserved (GiB)"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=[*TABLE_1, LARGE])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one preset and system; prints only")
    options = parser.parse_args(arguments)
    if options.quick:
        found = rehearsed("550m_64k", ["wlb"], ONE_PER_STAGE, layers=1, options=options)
        print(*(line_of("550m_64k", *one) for one in found), sep="\n")
        return
    positions: list[Row] = []
    ranks: list[Row] = []
    for preset in options.presets:
        found = rehearsed(preset, options.systems, ONE_PER_STAGE, layers=0, options=options)
        positions += [line_of(preset, *one) for one in found]
        print(*positions[-len(options.systems) :], sep="\n", flush=True)
    for preset in options.presets:
        found = rehearsed(preset, options.systems[-1:], ALL, layers=1, options=options)
        ranks += [line_of(preset, *one, shows_memory=False) for one in found]
        print(ranks[-1], flush=True)
    write_results(
        Path(__file__).parent,
        title="Rehearsals of the presets on fake GPUs",
        how=How.COMPUTED,
        profile="nothing was timed or priced.",
        text=(
            f"Ranks on fake CUDA tensors (`wlb rehearse`), {options.steps} steps of documents with "
            "the presets' lengths. Peak: most bytes of living tensors. Estimate: "
            "`wlb.simulate.memory.peak_of_step` for the same step, the first step left out. "
            "Reserved: what torch's caching allocator takes for the same requests. May be "
            "reserved: the device's memory less CUDA's context and NCCL's buffers. Nothing ran on "
            "a GPU."
        ),
        tables=[
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
        ],
    )


def rehearsed(
    preset: str, systems: Sequence[str], ranks: str, *, layers: int, options: argparse.Namespace
) -> list[tuple[str, Rehearsed | UserError]]:
    """Rehearses a preset under each system."""
    specs = [spec_of(preset, system, layers) for system in systems]
    wanted = [ranks if preset != LARGE else corners(spec.parallel) for spec in specs]
    found = rehearse_each(specs, ranks=wanted, steps=options.steps, jobs=options.jobs)
    return list(zip(systems, found, strict=True))


def line_of(
    preset: str, system: str, found: Rehearsed | UserError, *, shows_memory: bool = True
) -> Row:
    """A line of a table."""
    memory = MEMORY if shows_memory else ()
    if isinstance(found, UserError):
        return (preset, system, *[""] * (len(PROVEN) - 2 + len(memory)), f"refused: {found}")
    proof = found.proof
    counts = (proof.num_communicators, proof.num_collectives, proof.num_transfers)
    ranks = f"{len(found.ranks)} of {found.spec.parallel.world_size}"
    faults = [line for line in verdict(found) if line.startswith("FAULT")]
    warnings = sum(line.startswith("warning") for line in verdict(found))
    end = "; ".join(faults) or "passed" + f", {warnings} warning(s)" * (warnings > 0)
    return (preset, system, ranks, *counts, *(memory_of(found) if shows_memory else ()), end)


def spec_of(preset: str, system: str, layers: int) -> RunSpec:
    """The preset under a system. layers: of each stage, 0 = the model's own."""
    num_stages = load(preset, []).num_stages
    overrides = with_system(preset, ["eval.steps=0"], system)
    if layers:
        overrides += [f"model.num_layers={layers * num_stages}", "pp.stage_layers=[]"]
    return load(preset, overrides)


def corners(parallel: ParallelSpec) -> str:
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
    main()
