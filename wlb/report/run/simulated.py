"""Simulation of a step of a run from its plan, for a timeline where none was measured; no torch.

The planner runs from the start of the data up to the step, with the run's token store and kernel
profile. If it makes another plan than the one that was trained, the simulation is refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from wlb.cost import workload_for
from wlb.data import StoreName
from wlb.plan import StepCounts, UserError
from wlb.planner import Planner, open_planner
from wlb.report.run.records import RunRecords, StepRecord
from wlb.simulate import ShardedStep, Simulation, Simulator, sharded_steps
from wlb.simulate.step import chunked
from wlb.spec import RunSpec


def simulate_step(records: RunRecords, record: StepRecord) -> Simulation:
    """Plan and simulate a recorded step.

    Raises:
        UserError: The step cannot be planned once more.
        OSError: The run's store cannot be read.
    """
    start: dict[str, Any] = records.starts[-1] if records.starts else {}
    name, device = start.get("train_store"), str(start.get("device", ""))
    if not name or not device:
        raise UserError("the run's metrics do not say which store and device it had")
    store: StoreName = name if isinstance(name, str) else tuple(str(part) for part in name)
    first = records.learned_from
    if first is not None and record.step >= first.step:
        raise UserError(learned_remark(first))
    made = simulate_again(records.spec, store, device, {record.step: record.measured})
    if not made:
        raise UserError(f"the run's data ends before step {record.steps_done}")
    return made[0]


def simulate_again(
    spec: RunSpec,
    store: StoreName,
    device: str,
    trained: Mapping[int, StepCounts],
    *,
    profile: str = "",
    written: str = "metrics.jsonl",
) -> list[Simulation]:
    """Plan steps that a run has trained, check the plans, and simulate them.

    Args:
        spec: Configuration of the run.
        store: Its token store.
        device: Type of its devices.
        trained: Recorded counts of each step to simulate, by its number.
        profile: Kernel profile that prices the simulation; "" for the run's.
        written: File that recorded the counts, for messages.

    Raises:
        UserError: A plan differs from the one that was trained.
    """
    spec = replace(spec, planner=replace(spec.planner, baseline=False))
    planner = open_planner(spec, store, device)
    if profile:
        spec = replace(spec, cost=replace(spec.cost, profile=profile))
    simulator = Simulator(spec=spec, cost=workload_for(spec, device))
    steps = _planned_again(planner, trained, dp=spec.parallel.dp, written=written)
    return [simulator.run(simulator.price(chunk)) for chunk in chunked(steps)]


def learned_remark(first: StepRecord) -> str:
    """Say that steps from `first` on (`RunRecords.learned_from`) cannot be planned once more."""
    return (
        f"steps from {first.steps_done} on were planned with prices that the run had learned "
        f"(cost.online, which was removed), so this version of wlb cannot plan them again; the "
        f"version that trained them can"
    )


def _planned_again(
    planner: Planner, trained: Mapping[int, StepCounts], *, dp: int, written: str
) -> Iterator[ShardedStep]:
    """Plan the steps of `trained`, and check that their counts equal the recorded ones."""
    # A plan depends on the documents that earlier steps left waiting, so plan from the first step.
    until = islice(planner.steps(), max(trained) + 1)
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
