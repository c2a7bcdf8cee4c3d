"""Plans and simulates one step of a run again, for a timeline where none was measured; no torch.

The planner runs from the start of the data to the step, with the run's own store and kernel
profile. A plan that is not the one that was trained is refused.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any

from wlb.cost import workload_for
from wlb.data import StoreName
from wlb.plan import StepCounts, StepPlan, UserError
from wlb.planner import open_planner
from wlb.report.run.records import RunRecords, StepRecord
from wlb.simulate import Simulation, Simulator, sharded_steps


def simulate_step(records: RunRecords, record: StepRecord) -> Simulation:
    """UserError or OSError where the step cannot be planned again."""
    start: dict[str, Any] = records.starts[-1] if records.starts else {}
    name, device = start.get("train_store"), str(start.get("device", ""))
    if not name or not device:
        raise UserError("the run's metrics do not say which store and device it had")
    spec = replace(records.spec, planner=replace(records.spec.planner, baseline=False))
    store: StoreName = name if isinstance(name, str) else tuple(str(part) for part in name)
    planner = open_planner(spec, store, device)

    def wanted() -> Iterator[StepPlan]:
        until = takewhile(lambda plan: plan.step <= record.step, planner.steps())
        return (plan for plan in until if plan.step == record.step)

    steps = tuple(sharded_steps(planner, dp=spec.parallel.dp, plans=wanted()))
    if not steps:
        raise UserError(f"the run's data ends before step {record.steps_done}")
    refuse_other_plan(record.measured, steps[0].plan.predicted)
    simulator = Simulator(spec=spec, cost=workload_for(spec, device))
    return simulator.run(simulator.price(steps))


def refuse_other_plan(trained: StepCounts, planned: StepCounts, *, written: str = "") -> None:
    """Raise UserError for a plan that is not the one that was trained."""
    for name in ("num_documents", "num_tokens", "num_targets", "max_delay"):
        was, now = getattr(trained, name), getattr(planned, name)
        if was != now:
            raise UserError(
                f"step {planned.step} is planned with {name} = {now}, but {was} is in "
                f"{written or 'metrics.jsonl'}: the store, the profile that plans are priced with, "
                f"or the program changed since"
            )
