"""Print the results of a rehearsal as tables and sentences, and convert them to JSON."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from wlb.memory import gpu_budget
from wlb.memory.budget import cluster_gib
from wlb.rehearse.results import RankResult, StepResult
from wlb.rehearse.run import Rehearsed
from wlb.report.tables import new_table

GIB = 1 << 30
_MOST_FAULTS = 8
_AXES = ("tp", "cp", "ep", "fsdp", "expert_shard", "expert_replicate", "pp")
_PARTS = ("attention", "GEMM", "element-wise", *_AXES)


def show(found: Rehearsed, console: Console) -> None:
    """Print memory, kernels, communication, waits of the host, and the verdict of a rehearsal."""
    console.print(_memory(found))
    console.print(_parts(found))
    for line in [*_exchanges(found.ranks), *_graphs(found.ranks), *_host_waits(found.ranks)]:
        console.print(line, markup=False)
    for line in verdict(found):
        console.print(line, markup=False)


def verdict(found: Rehearsed) -> list[str]:
    """Return lines of text about the faults that a rehearsal found, or about what it has proven.

    Lines of faults begin with "FAULT", and lines of warnings with "warning".
    """
    proof = found.proof
    lines: list[str] = []
    for result in found.ranks:
        shown, more = result.faults[:_MOST_FAULTS], len(result.faults) - _MOST_FAULTS
        lines += [f"FAULT: {fault}" for fault in shown]
        lines += [f"FAULT: rank {result.rank} has {more} more, see --json"] if more > 0 else []
    lines += [f"FAULT: {problem}" for problem in proof.problems]
    limit = gpu_budget(found.spec).reservable_bytes / GIB
    for result in found.ranks:
        for kind, taken in result.reserved.items():
            if taken.failed_bytes:
                is_fault = kind == "expandable"
                lines.append(
                    f"{'FAULT' if is_fault else 'warning'}: rank {result.rank} runs out of memory "
                    f"with {_segments(kind)}: {limit:.1f} GiB can be reserved, but a request for "
                    f"{taken.failed_bytes / GIB:.2f} GiB more does not fit when "
                    f"{taken.allocated_bytes / GIB:.1f} GiB are allocated ({taken.failed_at})"
                )
    if not found.faults and not proof.problems:
        whole = "no deadlock" if proof.is_complete else "no deadlock among the rehearsed ranks"
        lines.append(
            f"{proof.num_ranks} of {found.spec.parallel.world_size} ranks were rehearsed: "
            f"{proof.num_collectives:,} collectives and {proof.num_transfers:,} transfers match, "
            f"all members of {proof.num_communicators} of {proof.num_seen} communicators were "
            f"rehearsed, and there is {whole}"
        )
    return lines


def as_json(found: Rehearsed) -> dict[str, Any]:
    """Return the printed figures and all waits of the host as JSON values."""
    return {
        "passed": found.passed,
        "verdict": verdict(found),
        "proof": asdict(found.proof),
        "ranks": [
            {
                "rank": result.rank,
                "coordinates": dict(zip(("tp", "cp", "pp", "dp"), result.coordinates, strict=True)),
                "peak_bytes": result.peak_bytes,
                "at_peak": result.at_peak,
                "reserved": {kind: asdict(taken) for kind, taken in result.reserved.items()},
                "steps": [_step(step) for step in result.steps],
                "faults": [asdict(fault) for fault in result.faults],
                "wall_s": result.wall_s,
            }
            for result in found.ranks
        ],
    }


def _step(step: StepResult) -> dict[str, Any]:
    return {**asdict(step), "host_waits": [wait._asdict() for wait in step.host_waits]}


def _segments(kind: str) -> str:
    return "expandable segments" if kind == "expandable" else "torch's default segments"


def _memory(found: Rehearsed) -> Table:
    title = f"Memory in GiB (the GPU has {cluster_gib(found.spec):g} GiB)"
    numbers = ("peak", "estimate", "reserved", "without\nexpandable")
    table = new_table(title, labels=["rank"], numbers=numbers)
    table.add_column("largest kinds at peak")
    for result in found.ranks:
        estimate = max((step.estimate_bytes for step in result.steps), default=0)
        kinds = sorted(result.at_peak.items(), key=lambda item: -item[1])[:5]
        expandable, plain = result.reserved["expandable"], result.reserved["segments"]
        table.add_row(
            str(result.rank),
            f"{result.peak_bytes / GIB:.2f}",
            f"{estimate / GIB:.2f}",
            f"{expandable.peak_bytes / GIB:.2f}",
            f"{plain.peak_bytes / GIB:.2f}",
            ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in kinds),
        )
    return table


def _parts(found: Rehearsed) -> Table:
    """Return a table of the last step with a row for each rank and kind of work.

    Kinds of work are, for example, matrix products and the collectives of one axis of the mesh.
    """
    title = f"Last step, with times predicted from kernel profile {found.spec.cost.profile!r}"
    numbers = ("calls", "ms", "exposed ms", "GB", "TFLOP")
    table = new_table(title, labels=["rank", "part"], numbers=numbers)
    for result in found.ranks:
        if not result.steps:
            continue
        step = result.steps[-1]
        parts = [part for part in _PARTS if part in step.parts]
        for part in parts:
            totals = step.parts[part]
            communicates = part in _AXES
            table.add_row(
                str(result.rank) if part == parts[0] else "",
                part,
                f"{totals['calls']:,.0f}",
                f"{totals['time_ns'] / 1e6:,.1f}",
                f"{step.exposed_ns.get(part, 0.0) / 1e6:,.1f}" if communicates else "",
                f"{totals['num_bytes'] / 1e9:,.2f}",
                f"{totals['flops'] / 1e12:,.2f}" if totals["flops"] else "",
                end_section=part == parts[-1],
            )
    return table


def _exchanges(ranks: Iterable[RankResult]) -> list[str]:
    """Return lines that say how CP ranks exchange keys in the last step's longest micro-batch."""
    found = [step.exchange for result in ranks for step in result.steps[-1:] if step.exchange]
    return [
        f"exchange of keys in the longest micro-batch of the last step: {way}"
        for way in dict.fromkeys(found)
    ]


def _graphs(ranks: Iterable[RankResult]) -> list[str]:
    """Return a line with the number of graphs torch.compile made in each step; [] if none."""
    counts: Counter[int] = Counter()
    for result in ranks:
        for step in result.steps:
            counts[step.step] += step.graphs
    if not counts.total():
        return []
    made = ", ".join(f"{count} in step {step}" for step, count in sorted(counts.items()) if count)
    return [
        f"torch.compile made graphs: {made}; the element-wise kernels in the table are counted "
        f"before inductor fuses them"
    ]


def _host_waits(ranks: Iterable[RankResult]) -> list[str]:
    """Return a line for each place in the code where the host waits for the GPU.

    Waits of the first step are left out, because some of them do not occur in later steps.
    """
    counts: Counter[tuple[str, str]] = Counter()
    left_ns: dict[tuple[str, str], float] = {}
    num_steps = 0
    for result in ranks:
        for step in result.steps[1:]:
            num_steps += 1
            for wait in step.host_waits:
                key = wait.what, wait.where
                counts[key] += 1
                left_ns[key] = min(wait.left_ns, left_ns.get(key, wait.left_ns))
    return [
        f"the host waits for the GPU {count / num_steps:g} times a step: {what} at {where}"
        + (f"; the GPU then still has at least {left / 1e3:,.0f} us of work" if left else "")
        for (what, where), count in counts.most_common()
        for left in [left_ns[what, where]]
    ]
