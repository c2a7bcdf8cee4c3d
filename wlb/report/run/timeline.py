"""The timeline of a step as ranks measured it; needs matplotlib."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from wlb.plan import MeasuredTimeline, TimedPass
from wlb.report import timeline as bars
from wlb.report.plots import new_figure
from wlb.simulate import PassKind
from wlb.spec import ParallelSpec

MOST_ROWS = 16
_KINDS = {
    "forward": PassKind.FORWARD,
    "backward": PassKind.BACKWARD,
    "weight": PassKind.BACKWARD_WEIGHT,
}


class TimelineRow(NamedTuple):
    """A rank of the pipeline that is drawn."""

    rank: int
    pp: int
    cp: int
    wall_us: int  # duration of the step on this rank
    passes: tuple[TimedPass, ...]

    @property
    def idle(self) -> float:
        """Share of the step in which the rank executes no pass."""
        return 1 - sum(p.time_us for p in self.passes) / max(1, self.wall_us)


def measured_timeline_figure(
    timeline: MeasuredTimeline, parallel: ParallelSpec, pipeline: int
) -> Any:
    """Draw a measured step of one pipeline, with a row for each rank.

    Passes are coloured by micro-batch, forward light and backward dark. Idle time is blank.
    """
    rows = rows_of(timeline, parallel, pipeline)
    end_us = max(row.wall_us for row in rows)
    unit, scale = ("ms", 1e-3) if end_us < 2e6 else ("s", 1e-6)
    inches = bars.row_inches(len(rows))
    figure, (axes,) = new_figure(height=1.5 + inches * len(rows))
    labels = [f"pp {r.pp}, cp {r.cp}" if parallel.cp > 1 else f"pp {r.pp}" for r in rows]
    bars.frame_rows(axes, labels, end=end_us * scale, unit=unit)
    chunks = 1 + max((p.stage // parallel.pp for row in rows for p in row.passes), default=0)
    if chunks > 1:
        axes.set_title(f"lower in a row: later of {chunks} chunks", fontsize=8, loc="left")
    for (micro_batch, kind), boxes in _boxes(rows, parallel.pp, chunks, scale).items():
        bars.draw_passes(axes, micro_batch, _KINDS[kind], boxes, inches=inches)
    bars.write_idle(axes, (row.idle for row in rows))
    passes = [p for row in rows for p in row.passes]
    splits = any(p.kind == "weight" for p in passes)
    count = 1 + max((p.micro_batch for p in passes), default=0)
    bars.legend_below(figure, bars.shade_handles(splits=splits) + bars.colour_handles(count))
    return figure


def slowest_pipeline(timeline: MeasuredTimeline, parallel: ParallelSpec) -> int:
    """Return the recorded pipeline whose passes ended last."""
    ends: dict[int, int] = {}
    for rank, of_rank in zip(timeline.ranks, timeline.passes, strict=True):
        pipeline = rank // parallel.model_ranks
        end = max((p.begin_us + p.time_us for p in of_rank), default=0)
        ends[pipeline] = max(end, ends.get(pipeline, 0))
    return max(ends, key=lambda pipeline: (ends[pipeline], -pipeline))


def rows_of(timeline: MeasuredTimeline, parallel: ParallelSpec, pipeline: int) -> list[TimelineRow]:
    """Return a pipeline's ranks, sorted by pipeline rank and CP rank.

    If there are many CP ranks, only the first of them are returned.
    """
    rows: list[TimelineRow] = []
    for rank, wall_us, passes in zip(
        timeline.ranks, timeline.wall_us, timeline.passes, strict=True
    ):
        # rank = ((dp * PP + pp) * CP + cp) * TP + tp
        of_pipeline, rest = divmod(rank, parallel.model_ranks)
        pp, cp = divmod(rest // parallel.tp, parallel.cp)
        if of_pipeline == pipeline and cp < max(1, MOST_ROWS // parallel.pp):
            rows.append(TimelineRow(rank, pp, cp, wall_us, passes))
    return sorted(rows, key=lambda row: (row.pp, row.cp))


def _boxes(
    rows: Sequence[TimelineRow], pp: int, chunks: int, scale: float
) -> dict[tuple[int, str], list[bars.Box]]:
    """Return the bars of passes, by micro-batch and kind of pass."""
    boxes: dict[tuple[int, str], list[bars.Box]] = {}
    for i, row in enumerate(rows):
        for timed in row.passes:
            left, right = timed.begin_us * scale, (timed.begin_us + timed.time_us) * scale
            box = bars.row_box(left, right, row=i, chunk=timed.stage // pp, chunks=chunks)
            boxes.setdefault((timed.micro_batch, timed.kind), []).append(box)
    return boxes
