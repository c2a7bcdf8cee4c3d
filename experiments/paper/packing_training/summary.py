"""Summarises the runs of a method over seeds, and compares them with padding and with the paper."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import stats

from experiments.paper.packing_methods.counting import Method
from experiments.paper.packing_methods.paper import StepsRow, steps_rows
from experiments.paper.packing_training.cases import GASES, NAMES, ONLINE, Case, Result

CONFIDENCE = 0.95
PAPER_GAS = {
    "FLAN": dict(zip(GASES, (32, 4), strict=True)),
    "OrcaMath": dict(zip(GASES, (32, 4), strict=True)),
    "Stack": dict(zip(GASES, (32, 12), strict=True)),
}
"""The paper's gas (at bs 2) that corresponds to each of GASES, by data set.

With the first, offline packing takes few steps; with the second, about as many as padding.
"""


@dataclass(frozen=True)
class Group:
    """Runs of a method at one gas, and runs of the baseline with the same seeds."""

    cases: tuple[Case, ...]  # one run per seed
    results: tuple[Result, ...]  # their results
    baseline: tuple[Result, ...]  # results of RandomSampling+Padding with the same seeds

    @property
    def case(self) -> Case:
        return self.cases[0]

    @property
    def title(self) -> str:
        return f"{self.case.title} ({self.case.layout})"

    @property
    def steps(self) -> float:
        return self.mean("steps")

    def values(self, name: str) -> np.ndarray:
        return np.array([getattr(result, name) for result in self.results], float)

    def mean(self, name: str) -> float:
        return float(self.values(name).mean())

    def spread(self, name: str) -> float:
        """Returns the standard deviation over seeds."""
        return float(self.values(name).std(ddof=1)) if len(self.results) > 1 else 0.0

    @cached_property
    def differences(self) -> np.ndarray:
        """Returns the held-out loss minus the baseline's, shape [seeds].

        Runs with the same seed read the examples in the same order.
        """
        theirs = [result.heldout_after for result in self.baseline]
        return self.values("heldout_after") - np.array(theirs, float)

    @property
    def difference(self) -> float:
        return float(self.differences.mean())

    @property
    def faster(self) -> float:
        """Returns the tokens per second over the baseline's, as a mean over seeds."""
        theirs = np.array([result.tokens_per_s for result in self.baseline])
        return float((self.values("tokens_per_s") / theirs).mean())


def groups_of(found: dict[Case, Result]) -> list[Group]:
    """Groups runs by method and gas, in the order of `found`.

    Raises:
        ValueError: If a group has not as many seeds as padding.
    """
    baseline = [r for c, r in found.items() if c.method == "random_padding"]
    made: dict[tuple[str, int], list[tuple[Case, Result]]] = {}
    for case, result in found.items():
        made.setdefault((case.method, case.gas), []).append((case, result))
    out: list[Group] = []
    for pairs in made.values():
        cases, results = zip(*pairs, strict=True)
        if len(results) != len(baseline):
            raise ValueError(f"{cases[0].name}: {len(results)} seeds, padding has {len(baseline)}")
        out.append(Group(cases=cases, results=results, baseline=tuple(baseline)))
    return out


def noise_band(groups: list[Group]) -> float:
    """Returns the half width of the confidence interval of a difference, in nats.

    Differences smaller than this are noise. It is Student's t times the standard error of the mean
    over seeds. The variance of the differences, which are paired by seed, is pooled over methods.
    """
    compared = [g for g in groups if g.case.method != "random_padding"]
    num_seeds = len(compared[0].results)
    if num_seeds < 2:
        return float("nan")
    variance = float(np.mean([g.differences.var(ddof=1) for g in compared]))
    freedom = len(compared) * (num_seeds - 1)
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * np.sqrt(variance / num_seeds))


@dataclass(frozen=True)
class PaperPair:
    """A row of the paper, and RandomSampling+Padding at bs 2 in the same table."""

    row: StepsRow
    padding: StepsRow

    @property
    def difference(self) -> float:
        return self.row.validation_loss - self.padding.validation_loss

    @property
    def faster(self) -> float:
        return self.row.tokens_per_s / self.padding.tokens_per_s


def paper_pair(dataset: str, case: Case) -> PaperPair | None:
    """Returns the paper's row that corresponds to a run; None if it does not have the method."""
    title = NAMES[case.method]
    if title == Method.BEST_FIT_DECREASING:
        return None
    gas = 32 if case.method in ONLINE else PAPER_GAS[dataset][case.gas]
    bs, msl = (2, 4096) if case.method in ONLINE or case.is_fixed else (1, 8192)
    rows = [r for r in steps_rows() if r.dataset == dataset]
    key = (str(title), bs, msl, gas)
    row = next(r for r in rows if (r.method, r.bs, r.msl, r.gas) == key)
    padding = next(r for r in rows if (r.method, r.bs) == (str(Method.RANDOM_PADDING), 2))
    return PaperPair(row=row, padding=padding)
