"""Divides what a simulated run loses against perfect balance into its causes.

The simulation is repeated with more and more kept equal: CP ranks of a micro-batch, micro-batches
of a pipeline, pipelines of a step, which is the bound of perfect balance (`StepPrices.balanced`),
then steps: as many as there were global batches, all of the same work, so that a policy cannot look
well by steps of its own choice. Attention keeps the price of the spans that sharding made.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wlb.plan import FloatArray
from wlb.simulate import RunSimulation, StepPrices
from wlb.simulate.step import CHUNK

CP_RANKS, MICRO_BATCHES, PIPELINES = 3, 2, 1
"""Axes of prices: [steps, pipelines, micro-batches, CP ranks]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Holds the times of a run in seconds, as simulated and with more and more kept equal.

    end_s: what the steps from the last global batch on lose against the bound
    start_s: the same of the first steps, as many as a document may wait
    """

    time_s: float
    equal_cp_ranks_s: float
    equal_micro_batches_s: float
    bound_s: float
    equal_steps_s: float
    start_s: float
    end_s: float
    num_extra_steps: int

    @property
    def of_bound(self) -> float:
        """The bound of perfect balance over the run's time."""
        return self.bound_s / self.time_s

    @property
    def of_equal_steps(self) -> float:
        """The same for a run of equal steps, one a global batch."""
        return self.equal_steps_s / self.time_s

    def shares(self) -> dict[str, float]:
        """Returns the share of the run's time that each cause takes; they add up to
        1 - of_equal_steps."""
        times = {
            "CP ranks": self.equal_cp_ranks_s,
            "micro-batches": self.equal_micro_batches_s,
            "pipelines": self.bound_s,
            "steps": self.equal_steps_s,
        }
        before, out = self.time_s, dict[str, float]()
        for name, after in times.items():
            out[name] = (before - after) / self.time_s
            before = after
        return out


def losses(run: RunSimulation, *, num_batches: int, start: int) -> Losses:
    """Repeats the simulation of `run`, which trained `num_batches` global batches.

    start: number of steps that count as the start
    """
    prices, num_steps = run.prices, run.step_time_s.size

    def times(axes: tuple[int, ...]) -> FloatArray:
        return _times(run, lambda chosen: chosen.evened(axes))

    bound = times((PIPELINES, MICRO_BATCHES, CP_RANKS))
    scale = num_steps / num_batches
    mean = prices.evened((0, PIPELINES, MICRO_BATCHES, CP_RANKS)).select(slice(0, 1))
    equal = mean.changed(lambda x: np.rint(x * scale).astype(np.int64))
    lost = run.step_time_s - bound
    return Losses(
        time_s=run.time_s,
        equal_cp_ranks_s=float(times((CP_RANKS,)).sum()),
        equal_micro_batches_s=float(times((MICRO_BATCHES, CP_RANKS)).sum()),
        bound_s=float(bound.sum()),
        equal_steps_s=float(run.simulator.run(equal).step_time_s[0]) * num_batches,
        start_s=float(lost[:start].sum()),
        end_s=float(lost[num_batches - 1 :].sum()),
        num_extra_steps=num_steps - num_batches,
    )


def _times(run: RunSimulation, change: Callable[[StepPrices], StepPrices]) -> FloatArray:
    """Seconds of each step after `change` is applied to its prices."""
    starts = range(0, run.step_time_s.size, CHUNK)
    parts = [change(run.prices.select(slice(i, i + CHUNK))) for i in starts]
    return np.concatenate([run.simulator.run(part).step_time_s for part in parts])
