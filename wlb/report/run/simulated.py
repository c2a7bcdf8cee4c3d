"""Plans and simulates one step of a run again, for a timeline where none was measured; no torch.

The planner runs from the start of the data to the step, with the run's own store and kernel
profile. A plan that is not the one that was trained is refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from wlb.cost import repriced, workload_for
from wlb.data import StoreName
from wlb.plan import NO_CHANGES, PriceSchedule, StepCounts, UserError
from wlb.planner import Planner, open_planner
from wlb.report.run.records import RunRecords, StepRecord
from wlb.simulate import ShardedStep, Simulation, Simulator, sharded_steps


def simulate_step(records: RunRecords, record: StepRecord) -> Simulation:
    """UserError or OSError where the step cannot be planned again."""
    start: dict[str, Any] = records.starts[-1] if records.starts else {}
    name, device = start.get("train_store"), str(start.get("device", ""))
    if not name or not device:
        raise UserError("the run's metrics do not say which store and device it had")
    spec = replace(records.spec, planner=replace(records.spec.planner, baseline=False))
    store: StoreName = name if isinstance(name, str) else tuple(str(part) for part in name)
    planner = open_planner(spec, store, device)
    trained = {record.step: record.measured}
    again = planned_again(planner, trained, dp=spec.parallel.dp, prices=records.prices)
    steps = tuple(again)
    if not steps:
        raise UserError(f"the run's data ends before step {record.steps_done}")
    cost = repriced(workload_for(spec, device), steps[0].plan.prices, device=device)
    simulator = Simulator(spec=spec, cost=cost)
    return simulator.run(simulator.price(steps))


def planned_again(
    planner: Planner,
    trained: Mapping[int, StepCounts],
    *,
    dp: int,
    written: str = "metrics.jsonl",
    prices: PriceSchedule = NO_CHANGES,
) -> Iterator[ShardedStep]:
    """The steps that were trained, by their numbers, sharded for `dp` pipelines. prices: that the
    run learned.

    UserError naming `written` for a plan that is not the one that was trained.
    """
    start = planner.start().with_prices(prices)
    until = islice(planner.steps(start), max(trained) + 1)  # steps count from 0
    plans = (plan for plan in until if plan.step in trained)
    for step in sharded_steps(planner, dp=dp, plans=plans):
        planned = step.plan.predicted
        for name in ("num_documents", "num_tokens", "num_targets", "max_delay"):
            was, now = getattr(trained[planned.step], name), getattr(planned, name)
            if was != now:
                raise UserError(
                    f"step {planned.step} is planned with {name} = {now}, but {was} is in "
                    f"{written}: the store, the profile that plans are priced with, or the program "
                    f"changed since"
                )
        yield step
