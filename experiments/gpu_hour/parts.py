"""Lists the parts of gpu_hour, the most valuable first, since time may not suffice for all."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from experiments.gpu_hour import checks, measured
from experiments.gpu_hour.runs import TrainingRun, trainings
from experiments.gpu_hour.setting import Answer, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of gpu_hour, which runs in its own process under a time limit."""

    name: str
    title: str  # what the part finds out, as a clause
    answer: Callable[[Setting], Answer]  # the function that runs it
    limit_s: int  # seconds after which it is stopped
    quick_limit_s: int  # the limit with --quick
    least_gpus: int = 1  # GPUs that it needs

    def limit(self, setting: Setting) -> int:
        return self.quick_limit_s if setting.quick else self.limit_s


PARTS = (
    Part(
        name="doctor",
        title="whether the machine can run this",
        answer=checks.doctor,
        limit_s=300,
        quick_limit_s=120,
    ),
    Part(
        name="kernels",
        title="whether kernels and layouts compute what they should",
        answer=checks.kernels,
        limit_s=900,
        quick_limit_s=300,
    ),
    Part(
        name="profile",
        title="what kernels cost on this GPU, and how well that predicts",
        answer=measured.profile,
        limit_s=1200,
        quick_limit_s=300,
    ),
    Part(
        name="balance",
        title="what balance gains: Plain-4D, the paper's system and ours on the same documents",
        answer=measured.balance,
        limit_s=900,
        quick_limit_s=420,
        least_gpus=8,
    ),
    Part(
        name="exchange",
        title="what keys by need gain over all-gathers of keys",
        answer=measured.exchange,
        limit_s=600,
        quick_limit_s=300,
        least_gpus=8,
    ),
    Part(
        name="sharding",
        title="attention under each CP sharding (Figure 15)",
        answer=measured.sharding,
        limit_s=300,
        quick_limit_s=120,
    ),
    Part(
        name="layers",
        title="what balance gains with the measured layers of every rank of a cluster",
        answer=measured.layers,
        limit_s=300,
        quick_limit_s=150,
    ),
    Part(
        name="restart",
        title="whether a killed run goes on with the same losses",
        answer=checks.restart,
        limit_s=300,
        quick_limit_s=300,
    ),
)


def all_parts(setting: Setting) -> list[Part]:
    """Returns the parts that this number of GPUs can run, in order.

    Each training run is a part, too. It comes right before `sharding`.
    """
    trained = [
        _of_run(
            "steps", run, "step time and memory of {} beside what was predicted", measured.steps
        )
        for run in trainings(setting)
    ]
    rehearsed = [
        _of_run("memory", run, "memory of {} beside its rehearsal on a fake GPU", measured.memory)
        for run in trainings(setting)
        if setting.device == "cuda" and run.name.startswith("stack")
    ]
    where = [part.name for part in PARTS].index("sharding")
    parts = [*PARTS[:where], *trained, *PARTS[where:], *rehearsed]
    return [p for p in parts if setting.device == "cpu" or setting.gpus >= p.least_gpus]


def _of_run(kind: str, run: TrainingRun, title: str, answer: Callable[..., Answer]) -> Part:
    """Returns a part for one training run. `title` has {} in place of the run's name."""
    return Part(
        name=f"{kind}_{run.name}",
        title=title.format(run.name),
        answer=partial(answer, run=run),
        limit_s=300,
        quick_limit_s=150,
    )


def parts_for(setting: Setting, names: list[str]) -> list[Part]:
    """Returns the parts with these names, or all parts if there are no names.

    The name "steps" selects all training runs.

    Raises:
        ValueError: If there is no part of a name on this number of GPUs.
    """
    parts = all_parts(setting)
    known = {part.name for part in parts} | {"steps"}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no part {unknown[0]!r} here; parts are {', '.join(sorted(known))}")
    return [
        part
        for part in parts
        if not names or part.name in names or ("steps" in names and part.name.startswith("steps_"))
    ]
