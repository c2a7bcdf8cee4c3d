"""The search of `wlb tune layout`: layout, recompute, packing and sharding for some devices.

Candidates pass the depths of `trial.py`, then `tune` (every packing choice) and `polish` (all
shardings, close policies, more micro-batches, later weights' passes; the `top` best only). A depth
bounds the next from below within SLACK, so each takes candidates best first until the rest cannot
be among the `top` best; `Search.is_cut` says where MOST_TUNED ended that. Deterministic: no clock,
no dependence on the number of workers, ties by name. 1,000 candidates take about a core-minute.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wlb.plan import UserError
from wlb.simulate.layout_search.layouts import Candidate, Layouts
from wlb.simulate.layout_search.packings import PackingChoices, with_settings
from wlb.simulate.layout_search.trial import BatchSample, Outline, Trial, TrialRunner, pricing_key
from wlb.simulate.layout_search.workers import Workers
from wlb.spec import RunSpec

SLACK = 0.03
BLOCK_WALKED, BLOCK_PACKED, BLOCK_TUNED = 128, 32, 8
MOST_TUNED = 32
NEARLY = 1.02
"""Policies within this factor of a layout's best packing are sharded too."""

Progress = Callable[[str, int], None]
"""Called with the name of a depth and the number of candidates that passed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A layout with its best packing and sharding. best: None where none keeps the delay. packed:
    best `packed` trial of each policy. in_time: best one of each policy that keeps the delay.
    """

    name: str
    best: Trial | None
    packed: tuple[Trial, ...]
    in_time: tuple[Trial, ...]


@dataclass(slots=True, kw_only=True)
class Search:
    """Results of a search by candidates' names. is_cut: candidates that might be among the best
    were not tried.
    """

    layouts: Layouts
    work: dict[str, Outline] = field(default_factory=dict[str, Outline])
    even: dict[str, Outline] = field(default_factory=dict[str, Outline])
    packed: dict[str, Trial] = field(default_factory=dict[str, Trial])
    tuned: dict[str, Tuned] = field(default_factory=dict[str, Tuned])
    own: Trial | None = None
    is_cut: bool = False

    @property
    def ranking(self) -> list[Trial]:
        """The best trial of each layout that was tuned, fastest first."""
        best = [t.best for t in self.tuned.values() if t.best is not None]
        return sorted(best, key=lambda t: (t.time_s, t.name))

    def bound_s(self, name: str) -> float:
        """The tightest known bound of a candidate."""
        known = self.even.get(name) or self.work[name]
        return known.time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuner:
    """Searches layouts. top: number of best layouts that must be right. max_delay_mean: steps that
    a token may wait on average.
    """

    sample: BatchSample
    choices: PackingChoices
    workers: Workers
    top: int = 10
    max_delay_mean: float = 0.5
    progress: Progress = lambda what, more: None

    def search(self, layouts: Layouts, own: RunSpec | None = None) -> Search:
        """Runs all depths. own: a run that is also simulated as it is.

        Raises UserError where no packing of any layout keeps the delay.
        """
        known = Search(layouts=layouts)
        if own is not None:
            task: GroupTask = (self.sample, TrialRunner.as_it_is, [own], ())
            (known.own,) = _run_group(task)
        self._outline(layouts.candidates, known.work, is_walked=False)
        self._best_first(
            known.work,
            layouts,
            lambda block: self._outline(block, known.even, is_walked=True),
            block=BLOCK_WALKED,
        )
        self._best_first(
            known.even, layouts, lambda block: self.pack(block, known), block=BLOCK_PACKED
        )
        known.is_cut = self._best_first(
            known.packed,
            layouts,
            lambda block: self.tune(block, known),
            block=BLOCK_TUNED,
            most=max(MOST_TUNED, self.top),
        )
        if not known.ranking:
            raise UserError(self._too_late(known))
        self.polish([trial.layout for trial in known.ranking[: self.top]], known)
        return known

    def pack(self, candidates: Sequence[Candidate], known: Search) -> list[float]:
        """Packs candidates with their first choice; times of those that find room."""
        todo = [c for c in candidates if c.name not in known.packed]
        found = self._run(todo, _pack_one, "packed", self.choices)
        known.packed.update({trial.layout: trial for trial in found if trial is not None})
        return [known.packed[c.name].time_s for c in candidates if c.name in known.packed]

    def tune(self, candidates: Sequence[Candidate], known: Search) -> list[float]:
        """Tries every packing, shards the best; times of layouts that keep the delay."""
        todo = [c for c in candidates if c.name not in known.tuned]
        found = self._run(todo, _tune_one, "tuned", self.choices, self.max_delay_mean)
        known.tuned.update({tuned.name: tuned for tuned in found})
        best = (known.tuned[c.name].best for c in candidates)
        return [trial.time_s for trial in best if trial is not None]

    def polish(self, names: Sequence[str], known: Search) -> None:
        """Tries all shardings, close policies and longer pipelines of tuned layouts."""
        todo = [t for name in names if (t := known.tuned[name]).best is not None]
        found = self._run(todo, _polish_one, "polished", self.choices, self.max_delay_mean)
        known.tuned.update({tuned.name: tuned for tuned in found})

    def _outline(
        self, candidates: Sequence[Candidate], known: dict[str, Outline], *, is_walked: bool
    ) -> list[float]:
        what = "walked" if is_walked else "priced"
        found = self._run(candidates, TrialRunner.outline, what, is_walked)
        known.update({outline.name: outline for outline in found})
        return [known[c.name].time_s for c in candidates]

    def _best_first(
        self,
        bounds: Mapping[str, Outline | Trial],
        layouts: Layouts,
        evaluate: Callable[[Sequence[Candidate]], list[float]],
        *,
        block: int,
        most: int | None = None,
    ) -> bool:
        """Evaluates blocks of the candidates that have bounds until the rest is too slow; returns
        whether `most` ended it.
        """
        found = [c for c in layouts.candidates if c.name in bounds]
        found.sort(key=lambda c: (bounds[c.name].time_s, c.name))
        times: list[float] = []
        for start in range(0, len(found), block):
            enough = sorted(times)[self.top - 1] if len(times) >= self.top else float("inf")
            part = [
                c
                for c in found[start : start + block]
                if bounds[c.name].time_s * (1 - SLACK) <= enough
            ]
            if not part:
                return False
            if most is not None and start >= most:
                return True
            times += evaluate(part)
        return False

    def _run(
        self, items: Sequence[Any], function: Callable[..., Any], what: str, *arguments: Any
    ) -> list[Any]:
        """Results of `function(runner, item, *arguments)`, by groups that share prices."""
        groups: dict[Any, list[Any]] = {}
        for item in items:
            groups.setdefault(pricing_key(_spec_of(item)), []).append(item)
        tasks = [(self.sample, function, group, arguments) for group in groups.values()]
        out: list[Any] = []
        for made in self.workers.each(_run_group, tasks):
            out += made
            self.progress(what, len(made))
        return out

    def _too_late(self, known: Search) -> str:
        trials = [trial for tuned in known.tuned.values() for trial in tuned.packed]
        if not trials:
            return (
                "no layout has room for any of the packing policies; allow fixed or original "
                "(--policies), or more recompute"
            )
        least = min(trials, key=lambda t: (t.mean_delay, t.name))
        return (
            f"no setting keeps the mean delay within {self.max_delay_mean:g} steps; the least is "
            f"{least.mean_delay:.3f} ({least.packing} on {least.layout}); raise --max-delay-mean "
            f"or try more policies"
        )


GroupTask = tuple[BatchSample, Callable[..., Any], Sequence[Any], tuple[Any, ...]]


def _run_group(task: GroupTask) -> list[Any]:
    """Results of `function(runner, item, *arguments)` for items that share prices."""
    sample, function, items, arguments = task
    runner = TrialRunner.of(_spec_of(items[0]), sample)
    return [function(runner, item, *arguments) for item in items]


def _spec_of(item: RunSpec | Candidate | Tuned) -> RunSpec:
    match item:
        case Candidate():
            return item.spec
        case Tuned():
            return item.packed[0].spec
        case _:
            return item


def _pack_one(runner: TrialRunner, candidate: Candidate, choices: PackingChoices) -> Trial | None:
    packings, strategy = choices.first(candidate), choices.strategies[0]
    trials = (runner.packed(with_settings(candidate.spec, p, strategy)) for p in packings)
    return next((trial for trial in trials if trial is not None), None)


def _tune_one(
    runner: TrialRunner, candidate: Candidate, choices: PackingChoices, max_delay_mean: float
) -> Tuned:
    trials: dict[str, Trial] = {}
    for packing in choices.packings(candidate):
        trial = runner.packed(with_settings(candidate.spec, packing, choices.strategies[0]))
        if trial is not None:
            trials.setdefault(trial.packing, trial)
    packed = sorted(trials.values(), key=lambda t: (t.time_s, t.name))
    in_time = _best_of_policies([t for t in packed if t.mean_delay <= max_delay_mean])
    return Tuned(
        name=candidate.name,
        best=runner.sharded(in_time[0].spec) if in_time else None,
        packed=_best_of_policies(packed),
        in_time=in_time,
    )


def _polish_one(
    runner: TrialRunner, tuned: Tuned, choices: PackingChoices, max_delay_mean: float
) -> Tuned:
    best = tuned.best
    if best is None:
        return tuned
    strategies = choices.strategies[1:] if best.spec.parallel.cp > 1 else ()
    for strategy in strategies:
        best = _faster(best, runner.sharded(with_settings(best.spec, best.spec.packing, strategy)))
    strategy = best.spec.sharding.strategy
    for trial in tuned.in_time[1:]:
        if trial.time_s <= tuned.in_time[0].time_s * NEARLY:
            made = runner.sharded(with_settings(trial.spec, trial.spec.packing, strategy))
            best = _faster(best, made)
    for changed in (choices.more_micro_batches, choices.later_weights):
        for spec in changed(best.spec):
            made = runner.sharded(spec)
            if made is not None and made.mean_delay <= max_delay_mean:
                best = _faster(best, made)
    return replace(tuned, best=best)


def _faster(best: Trial, other: Trial | None) -> Trial:
    """The faster trial; ties go to `best`."""
    return other if other is not None and other.time_s < best.time_s else best


def _best_of_policies(packed: Sequence[Trial]) -> tuple[Trial, ...]:
    best: dict[str, Trial] = {}
    for trial in packed:
        best.setdefault(str(trial.spec.packing.policy), trial)
    return tuple(best.values())
