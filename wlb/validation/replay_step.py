"""Compare simulated steps with their replay on real processes.

In the replay, each pass sleeps for its simulated time, multiplied by a factor that makes the
shortest pass long enough to be measured. (Passes that are far shorter than the mean are lengthened
first, see `MOST_SPREAD`.) The simulator gets the same times, and simulates messages and collectives
that take no time. So the comparison tests the order of passes and which ranks wait for each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from wlb.plan import FloatArray, UserError
from wlb.simulate import NodeKind, PassKind, Simulation, step_graph
from wlb.spec import PipelineSection
from wlb.validation.replay import StepWaits, replay

ROWS_PER_TOKEN = 1 / 2048
"""Rows of a message in a replay per token of the micro-batch: few, so that messages are small."""
MOST_SPREAD = 20
"""No pass sleeps for less than the mean time of a kind of pass divided by this.

The kind with the smallest mean decides, and shorter passes are lengthened. Otherwise an almost
empty micro-batch would decide the factor, and other passes would sleep for minutes."""
MOST_PROCESSES = 32
"""Most processes of a replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The simulated and the replayed time of one step."""

    label: str  # name of the step in a report
    simulated_s: float
    replayed_s: tuple[float, ...]  # step time of every replay, in seconds

    @property
    def difference(self) -> float:
        """Return the relative difference: the replays' median step time / the simulated one - 1."""
        return median(self.replayed_s) / self.simulated_s - 1


def waits_of(simulation: Simulation, *, step: int, shortest_s: float) -> StepWaits:
    """Return the times of a simulated step's passes as sleeping times for a replay.

    Passes that are far shorter than the mean are lengthened (see `MOST_SPREAD`). Then all times are
    multiplied by one factor, so that the shortest pass takes `shortest_s`.

    Args:
        simulation: The simulation.
        step: Index of the step in the simulation.
        shortest_s: Seconds of the shortest pass in the result.
    """
    spec, prices = simulation.simulator.spec, simulation.prices
    _, dp, n, cp = prices.shape
    kinds = list(prices.linear[0])

    def seconds(kind: PassKind) -> FloatArray:
        out = np.zeros((dp, n, spec.num_stages, cp))
        if kind not in kinds:
            return out
        for stage in range(spec.num_stages):
            linear = prices.linear_ns(kind, stage)[step]
            out[:, :, stage] = (prices.attention_ns(kind, stage)[step] + linear[..., None]) * 1e-9
        return out

    backward = PassKind.BACKWARD_INPUT if PassKind.BACKWARD_INPUT in kinds else PassKind.BACKWARD
    parts = [seconds(kind) for kind in (PassKind.FORWARD, backward, PassKind.BACKWARD_WEIGHT)]
    there = [part for part in parts if part.any()]
    floor = min(float(part.mean()) for part in there) / MOST_SPREAD
    parts = [np.maximum(part, floor) if part.any() else part for part in parts]
    scale = shortest_s / min(float(part.min()) for part in parts if part.any())
    forward, back, weight = (part * scale for part in parts)
    rows = np.maximum(1, np.rint(prices.tokens[step] * ROWS_PER_TOKEN)).astype(np.int64)
    return StepWaits(forward=forward, backward=back, weight=weight, rows=rows)


def simulated_s(waits: StepWaits, pipeline: PipelineSection, *, pp: int) -> float:
    """Return the simulated time of a step in seconds, if its passes take the times in `waits`.

    Messages and collectives take no time in this simulation.

    Args:
        waits: The time of each pass.
        pipeline: Schedule and virtual stages.
        pp: Pipeline ranks.
    """
    dp, n, _, _ = waits.shape
    _, graph = step_graph(pipeline, pp=pp, num_micro_batches=n, has_fsdp=False)
    of_kind = waits.by_kind
    durations = np.zeros((len(graph.nodes), 1, dp), np.int64)
    for i in graph.indices(NodeKind.PASS):
        action = graph.nodes[i].action
        assert action is not None
        # A pass ends on all CP ranks at the same time, so the slowest CP rank decides.
        slowest = of_kind[action.kind][:, action.micro_batch, action.stage].max(axis=-1)
        durations[i, 0] = np.rint(slowest * 1e9)
    return float(graph.ends(durations).max()) * 1e-9


def compare(
    waits: Sequence[StepWaits], labels: Sequence[str], pipeline: PipelineSection, *, pp: int
) -> list[Agreement]:
    """Simulate each step, and replay it with processes that sleep instead of computing.

    Returns both times of each step.

    Args:
        waits: The sleeping times of each step.
        labels: A label for each step.
        pipeline: Schedule and virtual stages.
        pp: Pipeline ranks.

    Raises:
        UserError: The replay needs more than `MOST_PROCESSES` processes.
    """
    dp, _, _, cp = waits[0].shape
    if dp * pp * cp > MOST_PROCESSES:
        raise UserError(
            f"a replay of parallel.dp = {dp}, parallel.cp = {cp} and parallel.pp = {pp} needs "
            f"{dp * pp * cp} processes, but at most {MOST_PROCESSES} are allowed; lower "
            "parallel.dp, parallel.cp or parallel.pp"
        )
    runs = replay(waits, pipeline, pp=pp)
    return [
        Agreement(
            label=label,
            simulated_s=simulated_s(step, pipeline, pp=pp),
            replayed_s=tuple(run.step_s for run in repeated),
        )
        for step, label, repeated in zip(waits, labels, runs, strict=True)
    ]
