"""Simulates random plans and replays them on real processes that sleep instead of computing.

The replay uses the pipeline executor of training, with its messages and collectives. So it checks
the simulator's order of passes and its dependencies between ranks, but not its prices.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from experiments.beyond.validation.plans import DrawnPlan, draw_plans
from experiments.beyond.validation.record import Conditions, conditions, load_now
from experiments.harness.drawing import MARKERS, new_figure
from experiments.harness.pages import Picture, Table
from wlb.spec import PipelineSection, Schedule
from wlb.validation.replay_step import compare, waits_of

LIMIT = 0.05
"""Relative difference of replayed and simulated time that is aimed at."""
SHORTEST_S = 0.06
"""Seconds of the shortest pass of a replay.

Times are scaled up to it, so that the 1 to 2 ms that a replay adds to every pass matter little.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A plan with its simulated time and the times of its replays."""

    plan: DrawnPlan
    imbalance: float  # simulated time of the step over its time under perfect balance
    simulated_s: float  # simulated time of the scaled step
    replayed_s: tuple[float, ...]  # time of each replay of the scaled step

    @property
    def difference(self) -> float:
        """Returns the median of the replays over the simulated time, minus 1."""
        return median(self.replayed_s) / self.simulated_s - 1


def measure(count: int, *, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Replays random plans and returns the results as JSON values.

    Args:
        count: Number of plans.
        seed: Seed of the plans.
        say: Gets a line about each plan.
    """
    before = load_now()
    found: list[Replayed] = []
    for plan in draw_plans(count, seed=seed):
        found.append(_replayed(plan))
        last = found[-1]
        say(
            f"{plan.system}, {plan.layout}, {plan.order}: simulated {last.simulated_s:.3f} s, "
            f"replayed {median(last.replayed_s):.3f} s ({last.difference:+.1%})"
        )
    return {
        "conditions": asdict(conditions(before)),
        "seed": seed,
        "plans": [asdict(f) for f in found],
    }


def _replayed(plan: DrawnPlan) -> Replayed:
    simulation = plan.simulate()
    waits = waits_of(simulation, step=0, shortest_s=SHORTEST_S)
    pipeline = PipelineSection(schedule=plan.schedule, virtual_stages=plan.virtual_stages)
    (agreement,) = compare([waits], [plan.layout], pipeline, pp=plan.pp)
    balanced = simulation.simulator.run(simulation.prices.balanced())
    return Replayed(
        plan=plan,
        imbalance=float(simulation.step_time_s[0] / balanced.step_time_s[0]),
        simulated_s=agreement.simulated_s,
        replayed_s=agreement.replayed_s,
    )


def parse(record: dict[str, Any]) -> tuple[Conditions, list[Replayed]]:
    found = [
        Replayed(
            plan=DrawnPlan(**{**p["plan"], "schedule": Schedule(p["plan"]["schedule"])}),
            imbalance=p["imbalance"],
            simulated_s=p["simulated_s"],
            replayed_s=tuple(p["replayed_s"]),
        )
        for p in record["plans"]
    ]
    return Conditions.parse(record["conditions"]), found


def table(found: list[Replayed]) -> Table:
    differences = [abs(f.difference) for f in found]
    records = [
        {
            "plan": f"{f.plan.system}{', per document' * (f.plan.variant == 1)}, seed "
            f"{f.plan.seed}, step {f.plan.step}",
            "layout": f.plan.layout,
            "processes": f.plan.processes,
            "schedule": f.plan.order,
            "micro-batches": f.plan.num_micro_batches,
            "over balanced": f.imbalance,
            "simulated s": f.simulated_s,
            "replayed s": median(f.replayed_s),
            "difference %": 100 * f.difference,
        }
        for f in found
    ]
    seconds = dict.fromkeys(("simulated s", "replayed s"), ".3f")
    return Table.of(
        "replay",
        "Simulated steps, replayed",
        records,
        formats=seconds | {"over balanced": ".2f", "difference %": "+.2f"},
        note=(
            f"Difference: largest {max(differences):.1%}, mean "
            f"{sum(differences) / len(found):.1%}, within {LIMIT:.0%} in "
            f"{sum(d <= LIMIT for d in differences)} of {len(found)}. Micro-batches: of a "
            f"pipeline. Over balanced: the simulated step over the one with all micro-batches and "
            f"CP ranks at their mean."
        ),
    )


def text(at: Conditions, found: list[Replayed]) -> str:
    return f"""### Replay
{len(found)} random plans (`plans.py`: four systems, three schedules, all layouts of 8 to 32
processes in turn; stages, micro-batches, documents and step drawn) are simulated with the h100
profile. A step's passes then become timed waits, the shortest of them {SHORTEST_S * 1e3:.0f} ms (a
replay adds 1 to 2 ms a pass of its own), on one process a rank, with the pipeline executor of
training, its messages and the collectives of CP groups over Gloo; the median of three replays is
compared with the simulator on the same waits. This tells whether order, dependencies and who waits
for whom are right; not whether prices are. {at.words()}"""


def picture(found: list[Replayed]) -> Picture:
    figure, (axis,) = new_figure(height=3.4)
    for mark, schedule in zip(MARKERS, Schedule, strict=False):
        some = [f for f in found if f.plan.schedule == schedule]
        axis.plot(
            [f.simulated_s for f in some],
            [100 * f.difference for f in some],
            mark,
            label=str(schedule).replace("_", " "),
        )
    axis.axhline(100 * LIMIT, color="black", linewidth=0.8, linestyle="--")
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xlabel("simulated step, s")
    axis.set_ylabel("replayed over simulated, %")
    axis.set_ylim(bottom=min(-1.0, *(110 * f.difference for f in found)))
    axis.legend()
    return Picture(
        name="replay",
        caption=f"{len(found)} random plans: replayed over simulated time; dashed: {LIMIT:.0%}.",
        figure=figure,
    )
