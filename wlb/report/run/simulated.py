"""Simulation of a step of a run, for the timeline of a step that was not measured. Needs no torch.

The step is planned once more: the planner runs from the start of the data up to this step, with the
run's token store and kernel profile. If the plan differs from the plan that was trained, a
UserError is raised.
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
    """Plan a recorded step once more and simulate it.

    Args:
        records: Everything that was recorded about the run.
        record: The step.

    Raises:
        UserError: The plan that was trained cannot be made once more.
        OSError: The token store of the run cannot be read.
    """
    start: dict[str, Any] = records.starts[-1] if records.starts else {}
    name, device = start.get("train_store"), str(start.get("device", ""))
    if not name or not device:
        raise UserError(
            f"step {record.steps_done} has no measured timeline, and cannot be simulated "
            "either, because metrics.jsonl does not record the run's token store and device; set "
            "--step to a step whose timeline was measured"
        )
    store: StoreName = name if isinstance(name, str) else tuple(str(part) for part in name)
    first = records.learned_from
    if first is not None and record.step >= first.step:
        raise UserError(learned_remark(first))
    made = simulate_again(records.spec, store, device, {record.step: record.measured})
    if not made:
        raise UserError(
            f"step {record.steps_done} cannot be simulated, because the run's token store now ends "
            f"before this step; restore the token store with which the run trained, or set --step "
            f"to a step whose timeline was measured"
        )
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
    """Plan steps of a run once more, compare the plans with records of the run, and simulate them.

    Args:
        spec: Configuration of the run.
        store: Token store of the run.
        device: Type of the run's devices, "cuda" or "cpu".
        trained: The steps to simulate: for each step number, the recorded counts of its plan.
        profile: Name or path of the kernel profile to simulate with; "" for the profile of the run.
        written: Name of the file with the recorded counts, for error messages.

    Returns:
        Simulations, each of one or more consecutive steps.

    Raises:
        UserError: A plan differs from the plan that was trained.
    """
    spec = replace(spec, planner=replace(spec.planner, baseline=False))
    planner = open_planner(spec, store, device)
    if profile:
        spec = replace(spec, cost=replace(spec.cost, profile=profile))
    simulator = Simulator(spec=spec, cost=workload_for(spec, device))
    steps = _planned_again(planner, trained, dp=spec.parallel.dp, written=written)
    return [simulator.run(simulator.price(chunk)) for chunk in chunked(steps)]


def learned_remark(first: StepRecord) -> str:
    """Return a sentence that says that this version of wlb cannot plan some steps of a run.

    Args:
        first: The first of these steps (`RunRecords.learned_from`).
    """
    return (
        f"step {first.steps_done} and later steps cannot be simulated: they were planned with "
        f"cost.online, which adjusted predicted times to measured times and which this version of "
        f"wlb no longer has; use the version of wlb that trained the run"
    )


def _planned_again(
    planner: Planner, trained: Mapping[int, StepCounts], *, dp: int, written: str
) -> Iterator[ShardedStep]:
    """Plan steps of a run once more, and raise a UserError if their counts differ from the records.

    Args:
        planner: Planner at the start of the run.
        trained: For each step number, the recorded counts of the step's plan.
        dp: Number of pipelines.
        written: Name of the file with the recorded counts, for error messages.
    """
    # Plan all steps from the first one, because a plan depends on the documents that earlier steps
    # left waiting.
    until = islice(planner.steps(), max(trained) + 1)
    plans = (plan for plan in until if plan.step in trained)
    for step in sharded_steps(planner, dp=dp, plans=plans):
        planned = step.plan.predicted
        for name in ("num_documents", "num_tokens", "num_targets", "max_delay"):
            was, now = getattr(trained[planned.step], name), getattr(planned, name)
            if was != now:
                raise UserError(
                    f"planning step {planned.step} again gives {name} = {now}, but {written} has "
                    f"{was}, so the token store, the kernel profile or wlb has changed since the "
                    f"run; use the ones with which the run trained"
                )
        yield step
