"""The parts of the hour, the most valuable first."""

from collections.abc import Callable
from dataclasses import dataclass

from experiments.gpu_hour import checks, measured
from experiments.gpu_hour.setting import Answer, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the hour: a process of its own with a time limit, so that it costs only itself."""

    name: str
    title: str
    """What it finds out."""
    answer: Callable[[Setting], Answer]
    limit_s: int
    """Seconds after which it is ended."""
    quick_limit_s: int
    """The same with --quick."""
    least_gpus: int = 1

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
        name="steps",
        title="step times and memory of training runs beside what was predicted",
        answer=measured.steps,
        limit_s=900,
        quick_limit_s=420,
    ),
    Part(
        name="sharding",
        title="attention under each CP sharding (Figure 15)",
        answer=measured.sharding,
        limit_s=300,
        quick_limit_s=120,
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
        name="restart",
        title="whether a killed run goes on with the same losses",
        answer=checks.restart,
        limit_s=300,
        quick_limit_s=300,
    ),
)


def parts_for(setting: Setting, names: list[str]) -> list[Part]:
    """Parts that this number of GPUs can run, all or those of `names`. A CPU runs all."""
    known = {part.name for part in PARTS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no part {unknown[0]!r}; parts are {', '.join(sorted(known))}")
    fits = [p for p in PARTS if setting.device == "cpu" or setting.gpus >= p.least_gpus]
    return [part for part in fits if not names or part.name in names]
