"""Draws random plans to replay: systems, layouts, schedules and documents from one seed.

Every plan is one step of a system on its own stream of documents, packed and sharded by the planner
and simulated with a kernel profile. It is not the first step but a later one, which is drawn, too,
so that some documents already wait.

The model is the paper's 7B with 48 layers, a number that all drawn numbers of stages divide.
Layouts are those of pp 2 to 4, cp 1 to 2 and dp 1 to 4 that have 8 to 32 processes.
"""

import random
from dataclasses import dataclass
from itertools import islice

from experiments.harness.constants import configuration
from wlb.cost import workload_for
from wlb.data import GlobalBatches, lengths_of_family
from wlb.plan import GlobalBatch
from wlb.simulate import Simulation, Simulator, planner_of, sharded_steps
from wlb.spec import SYSTEMS, RunSpec, Schedule, system_overrides

PROCESSES = range(8, 33)
MEMORY_GIB = 1000.0
"""Memory of a device: effectively unlimited, because a replayed step needs none."""
LAST_STEP = 8
"""Largest step number that is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPlan:
    """The parameters of a random plan."""

    system: str
    variant: int  # index of one of the system's alternatives
    schedule: Schedule
    virtual_stages: int
    pp: int
    cp: int
    dp: int
    num_micro_batches: int  # micro-batches of a pipeline
    seed: int  # seed of the document stream
    step: int  # step of the stream that is planned

    @property
    def processes(self) -> int:
        return self.pp * self.cp * self.dp

    @property
    def layout(self) -> str:
        return f"pp {self.pp} cp {self.cp} dp {self.dp}"

    @property
    def order(self) -> str:
        """Returns the schedule and its virtual stages in words."""
        short = {
            Schedule.ONE_F_ONE_B: "1F1B",
            Schedule.INTERLEAVED_1F1B: f"interleaved, v {self.virtual_stages}",
            Schedule.INTERLEAVED_ZERO_BUBBLE: f"zero-bubble, v {self.virtual_stages}",
        }
        return short[self.schedule]

    def spec(self) -> RunSpec:
        overrides = system_overrides(self.system, planned_gib=MEMORY_GIB)[self.variant]
        return configuration(
            "7b_64k",
            "model.num_layers=48",
            f"parallel.pp={self.pp}",
            f"parallel.cp={self.cp}",
            f"parallel.dp={self.dp}",
            f"pp.schedule={self.schedule}",
            f"pp.virtual_stages={self.virtual_stages}",
            f"data.num_windows={self.num_micro_batches * self.dp}",
            f"run.seed={self.seed}",
            "planner.baseline=false",
            "cost.profile=h100",
            *overrides,
        )

    def simulate(self) -> Simulation:
        """Plans the stream up to the drawn step and simulates this step."""
        spec = self.spec()
        simulator = Simulator(spec=spec, cost=workload_for(spec, "cuda"))
        planner = planner_of(spec, simulator.cost, _batches(spec))
        steps = tuple(sharded_steps(planner, dp=self.dp, most=self.step + 1))[-1:]
        return simulator.run(simulator.price(steps))


def draw_plans(count: int, *, seed: int) -> list[DrawnPlan]:
    """Draws `count` plans. Systems, schedules and layouts take turns; everything else is random."""
    draw = random.Random(seed)
    layouts = [
        (pp, cp, dp)
        for pp in (2, 3, 4)
        for cp in (1, 2)
        for dp in (1, 2, 3, 4)
        if pp * cp * dp in PROCESSES
    ]
    draw.shuffle(layouts)
    systems, schedules = list(SYSTEMS), list(Schedule)
    plans: list[DrawnPlan] = []
    for number in range(count):
        system = systems[number % len(systems)]
        schedule = schedules[number % len(schedules)]
        pp, cp, dp = layouts[number % len(layouts)]
        plan = DrawnPlan(
            system=system,
            variant=draw.randrange(len(SYSTEMS[system])),
            schedule=schedule,
            virtual_stages=1 if schedule == Schedule.ONE_F_ONE_B else draw.choice((2, 4)),
            pp=pp,
            cp=cp,
            dp=dp,
            num_micro_batches=draw.randint(pp, 2 * pp),
            seed=draw.randrange(1000),
            step=draw.randint(2, LAST_STEP),
        )
        plans.append(plan)
    return plans


def _batches(spec: RunSpec) -> list[GlobalBatch]:
    """Returns enough global batches, of the fitted lengths, for any step that may be drawn."""
    wanted = spec.tokens_per_step * (LAST_STEP + 4)
    some = lengths_of_family(window=spec.data.context_window, num_documents=4096, seed=0)
    source = lengths_of_family(
        window=spec.data.context_window,
        num_documents=wanted * some.num_documents // some.num_tokens + 1,
        seed=spec.run.seed,
    )
    stream = GlobalBatches(source, tokens_per_batch=spec.tokens_per_step, seed=spec.run.seed)
    return [batch for batch, _ in islice(stream.iterate(), LAST_STEP + 2)]
