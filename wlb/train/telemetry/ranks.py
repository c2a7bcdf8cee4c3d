"""Records all ranks' times in tables, finds ranks that are slower, and records timelines of passes.

For each rank, a table has the measured and predicted time of the compared work (`StragglerWatch`),
and the times of computing, of pipeline bubbles and of waiting for inputs, each summed over
`RANKS_INTERVAL` steps. A table takes 35 bytes per rank in metrics.jsonl. A timeline shows when each
pass of a step ran, on a few ranks (`timed_ranks`). A timeline takes 20 bytes per pass.

On a CPU, the times of different ranks in a timeline are aligned by the clocks of their hosts,
unless the clocks differ by more than the duration of the step. On CUDA all ranks begin at time 0,
because the host's clock does not say when the device began the step.
"""

import platform
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from wlb.parallel.host import MOST_TIMED, gather_rows, host_group
from wlb.parallel.mesh import Mesh, coordinates, rank_grid
from wlb.parallel.observe import Pass
from wlb.parallel.world import World
from wlb.plan import MeasuredTimeline, Place, RankTable, Straggler, TimedPass
from wlb.plan.ranks import RANKS_INTERVAL, STRAGGLER_TABLES, STRAGGLER_THRESHOLD, TIMELINE_INTERVAL
from wlb.spec import ParallelSpec, RunSpec
from wlb.train.hooks import ExecutedStep, Hook, RunContext
from wlb.train.telemetry.clock import StepClock, StepSpans
from wlb.train.telemetry.report import RunReport

LEAST_SHARE = 0.5
"""Stragglers are only looked for in tables of at least this share of `RANKS_INTERVAL` steps.

The last table of a run may have fewer steps, and times of few steps vary too much."""
# Columns of a table of ranks, in the order of the times in `TelemetryMeter.own_ns`.
_TABLED = ("measured_us", "predicted_us", "compute_us", "bubble_us", "loading_us")
_KINDS = tuple(Pass)
_NONE = -1  # marks unused rows in the array of a rank's passes (`RankMeter._packed`)


class StragglerWatch:
    """Finds stragglers: ranks that are slower than others at the same work.

    The times of all ranks are gathered in tables, each with sums over `RANKS_INTERVAL` steps. In a
    table a rank is slow if its ratio of measured to predicted time exceeds the median of all ranks'
    ratios by more than the fraction `STRAGGLER_THRESHOLD`. A rank that is slow in
    `STRAGGLER_TABLES` tables in a row is a straggler, until the first table in which it is not
    slow.

    On a CPU with one thread per rank, times of decoder layers are compared. Otherwise only times of
    attention kernels are compared, because the rest of a layer includes waits for slower TP and CP
    ranks. So a rank that is late because of its host or a network link is not found, but its
    neighbours have larger pipeline bubbles.

    Args:
        spec: The run.
        places: Node and host of each rank.
    """

    def __init__(self, spec: RunSpec, places: Sequence[Place]) -> None:
        self.spec, self.places = spec, places
        self._streaks: dict[int, int] = {}
        self._named: tuple[Straggler, ...] = ()

    def update(self, table: RankTable) -> tuple[Straggler, ...]:
        """Add a table of all ranks' times, and return the present stragglers, slowest first."""
        if table.num_steps < LEAST_SHARE * RANKS_INTERVAL:
            return self._named
        over = table.over_median
        slow = (over > 1 + STRAGGLER_THRESHOLD).nonzero()[0].tolist()
        self._streaks = {rank: self._streaks.get(rank, 0) + 1 for rank in slow}
        known = [r for r, n in self._streaks.items() if n >= STRAGGLER_TABLES]
        known.sort(key=lambda rank: (-over[rank], rank))
        self._named = tuple(
            Straggler(
                rank=rank,
                over=float(over[rank]),
                **self.places[rank]._asdict(),
                **coordinates(rank, self.spec.parallel)._asdict(),
            )
            for rank in known
        )
        return self._named


class RankMeter:
    """Collects this rank's times, and gathers the times of all ranks for tables and timelines.

    All ranks add the same steps, and call `table` and `timeline` together.

    Args:
        spec: The run.
        mesh: This rank's place in the layout.
        places: Node and host of each rank (`gather_places`). Only rank 0 needs them.
    """

    def __init__(self, spec: RunSpec, mesh: Mesh, places: tuple[Place, ...]) -> None:
        self.spec, self.mesh = spec, mesh
        self._watch = StragglerWatch(spec, places)
        self._timed = timed_ranks(spec.parallel)
        self._clear()

    def _clear(self) -> None:
        self._own_ns, self._num_steps = np.zeros(5, np.int64), 0

    def add(self, own_ns: np.ndarray, num_steps: int) -> None:
        """Add the times of one or more steps of this rank.

        Args:
            own_ns: The five times of `TelemetryMeter.own_ns`, summed over the steps; int64 [5]. The
                first two are the measured and the predicted time of the same work.
            num_steps: Number of steps.
        """
        self._own_ns = self._own_ns + own_ns
        self._num_steps += num_steps

    def is_table_due(self, *, is_last: bool) -> bool:
        """Return whether `table` is due: after every `RANKS_INTERVAL` steps, and at the end.

        `is_last` is true after the run's last step.
        """
        return self._num_steps > 0 and (is_last or self._num_steps >= RANKS_INTERVAL)

    def table(self, step: int, steps_done: int) -> RankTable | None:
        """Gather the times of all ranks since the previous table. A collective call.

        Args:
            step: Number of the step that just ended.
            steps_done: Number of updates so far.

        Returns:
            The table on rank 0, None on other ranks.
        """
        own = torch.from_numpy(self._own_ns // 1000)
        rows = gather_rows(own)
        num_steps = self._num_steps
        self._clear()
        if rows is None:
            return None
        columns = dict(zip(_TABLED, rows.numpy().T.copy(), strict=True))
        table = RankTable(step=step, steps_done=steps_done, num_steps=num_steps, **columns)
        return replace(table, stragglers=self._watch.update(table))

    def timeline(self, spans: StepSpans, step: int, steps_done: int) -> MeasuredTimeline | None:
        """Gather from a few ranks when the passes of a step ran. All ranks must call this.

        Args:
            spans: When the passes of this rank ran.
            step: Number of the step.
            steps_done: Number of updates so far.

        Returns:
            The timeline on rank 0, None on other ranks.
        """
        rank, timed = self.mesh.rank, self._timed
        if rank not in timed:
            return None
        own = self._packed(spans)
        if rank:
            dist.send(own, dst=0, group=host_group())
            return None
        others = {r: torch.empty_like(own) for r in timed if r}
        for work in [dist.irecv(rows, src=r, group=host_group()) for r, rows in others.items()]:
            assert work is not None
            work.wait()
        return timeline_of(
            {r: others.get(r, own).numpy() for r in timed},
            step=step,
            steps_done=steps_done,
            has_common_clock=self.mesh.device.type == "cpu",
        )

    def _packed(self, spans: StepSpans) -> torch.Tensor:
        """Pack this rank's passes into an int64 array that has the same shape on every rank.

        The shape is [1 + most passes of a rank, 5]. The first row has the Unix time at which the
        step began (ns), and the step's wall time (us). Each further row has a pass: its kind,
        stage, micro-batch, begin (us) and duration (us). Unused rows are filled with `_NONE`.
        """
        spec = self.spec
        most = len(_KINDS) * spec.pp.virtual_stages * spec.micro_batches_per_pipeline
        packed = np.full((1 + most, 5), _NONE, np.int64)
        packed[0, :2] = spans.began_ns, spans.wall_ns // 1000
        for row, (cell, begin_ns, time_ns) in zip(packed[1:], spans.spans, strict=False):
            row[:3] = _KINDS.index(cell.kind), cell.stage, cell.micro_batch
            row[3:] = begin_ns // 1000, time_ns // 1000
        return torch.from_numpy(packed)


def timed_ranks(parallel: ParallelSpec) -> tuple[int, ...]:
    """Return the ranks whose passes a timeline shows.

    Of each pipeline, only ranks with TP rank 0 are shown. If one pipeline has more than
    `MOST_TIMED` of them, only those with CP rank 0 are shown. The first pipeline is always shown.
    Further pipelines are shown as long as there are at most `MOST_TIMED` ranks in total.
    """
    # The ranks with TP rank 0, in shape [dp, cp, pp].
    grid = rank_grid(parallel)[..., 0].transpose(1, 2, 0)
    if grid[0].size > MOST_TIMED:
        grid = grid[:, :1]
    pipelines = max(1, MOST_TIMED // grid[0].size)
    return tuple(grid[:pipelines].flatten().tolist()[: max(MOST_TIMED, parallel.pp)])


def timeline_of(
    rows: dict[int, np.ndarray], *, step: int, steps_done: int, has_common_clock: bool
) -> MeasuredTimeline:
    """Build a timeline from the passes of a few ranks.

    Args:
        rows: For each of these ranks, an array with a row for each pass (`RankMeter._packed`
            describes its columns).
        step: Number of the step.
        steps_done: Number of updates so far, including the step's.
        has_common_clock: Whether the times at which ranks began the step can be compared.
    """
    began_us = np.array([r[0, 0] // 1000 for r in rows.values()])
    walls_us = np.array([r[0, 1] for r in rows.values()])
    offsets_us = began_us - began_us.min()
    if not has_common_clock or offsets_us.max() > walls_us.max():
        offsets_us = np.zeros_like(offsets_us)
    passes: list[tuple[TimedPass, ...]] = []
    for table, offset in zip(rows.values(), offsets_us.tolist(), strict=True):
        found = table[1:][table[1:, 0] != _NONE].tolist()
        passes.append(
            tuple(
                TimedPass(str(_KINDS[kind]), stage, micro_batch, begin + offset, time)
                for kind, stage, micro_batch, begin, time in found
            )
        )
    return MeasuredTimeline(
        step=step,
        steps_done=steps_done,
        ranks=tuple(rows),
        wall_us=tuple((walls_us + offsets_us).tolist()),
        passes=tuple(passes),
    )


class RecordRanks(Hook):
    """Writes tables of all ranks' times and timelines of passes, and reports new stragglers."""

    def __init__(self, meter: RankMeter, clock: StepClock) -> None:
        self.meter, self.clock = meter, clock
        self._stragglers: dict[int, Straggler] = {}

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        """Write a table of all ranks' times and a timeline of passes, each if it is due."""
        meter, number = self.meter, step.plan.step
        if step.own_ns is not None and step.telemetry is not None:
            meter.add(step.own_ns, step.telemetry.num_steps)
        if not step.plan.num_targets:
            return
        is_last = run.is_last_step
        if meter.is_table_due(is_last=is_last):
            table = meter.table(number, run.steps_done)
            if table is not None:
                run.report.write("ranks", **table.to_json())
                run.tally.stragglers.add(table)
                self._report(table, run.report)
        if TIMELINE_INTERVAL and (is_last or run.steps_done % TIMELINE_INTERVAL == 0):
            timeline = meter.timeline(self.clock.spans(), number, run.steps_done)
            if timeline is not None:
                run.report.write("timeline", **timeline.to_json())

    def _report(self, table: RankTable, report: RunReport) -> None:
        """Report ranks that have become stragglers, and ranks that are stragglers no longer."""
        known = {s.rank: s for s in table.stragglers}
        for rank, straggler in known.items():
            if rank not in self._stragglers:
                report.say(f"straggler: {straggler.text} (step {table.steps_done})")
        for rank in self._stragglers.keys() - known.keys():
            report.say(f"rank {rank} is no longer a straggler (step {table.steps_done})")
        self._stragglers = known


def gather_places(mesh: Mesh, world: World) -> tuple[Place, ...]:
    """Gather on which node and host every rank runs. A collective call.

    Returns:
        On rank 0, node and host of each rank; () on other ranks.
    """
    found: list[Any] = [None] * mesh.world_size
    own = Place(platform.node(), world.node_rank)
    # Use all_gather_object, which passes data around a ring of ranks. With gather_object, rank 0
    # would need an open connection to every rank.
    dist.all_gather_object(found, own, group=host_group())
    return tuple(found) if mesh.rank == 0 else ()
