"""The search of `wlb tune layout`: layout, recompute, packing and sharding for some devices.

Candidates pass through depths that are more and more exact and expensive: `work`, `even` and
`packed` (`trial.py`), then `tune` (every packing choice), then for the `top` best `polish` (all
shardings, other policies that are nearly as fast, more micro-batches, later weight-gradient
passes).

A time at one depth is a lower bound of the time at the next, up to SLACK. So each depth takes the
candidates in the order of their bounds, until the rest cannot be among the `top` best.
`Search.is_cut` says whether MOST_TUNED ended this earlier.

The search is deterministic: it uses no clock, its result does not depend on the number of workers,
and ties are broken by name. 1,000 candidates take about one minute on one core.
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
"""Fraction by which a time may be shorter than the bound of the depth before."""
BLOCK_WALKED, BLOCK_PACKED, BLOCK_TUNED = 128, 32, 8
"""Candidates of one block at each depth; a depth may stop after a block."""
MOST_TUNED = 32
"""Most candidates that are tuned, unless `top` is larger."""
NEARLY = 1.02
"""Policies within this factor of a layout's best packing are also simulated with their spans."""

Progress = Callable[[str, int], None]
"""Called with the name of a depth and the number of candidates that passed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A layout with its best packing and sharding."""

    name: str  # name of the layout
    best: Trial | None  # the fastest trial within the delay limit; None if there is none
    packed: tuple[Trial, ...]  # fastest `packed` trial of each policy
    in_time: tuple[Trial, ...]  # fastest `packed` trial of each policy within the delay limit


@dataclass(slots=True, kw_only=True)
class Search:
    """Results of a search, by name of the candidate."""

    layouts: Layouts  # all candidates and refused layouts
    # lower bound of each candidate's time, from the mean rank's work (depth `work`)
    work: dict[str, Outline] = field(default_factory=dict[str, Outline])
    # tighter bound of each candidate's time, from one simulated mean step (depth `even`)
    even: dict[str, Outline] = field(default_factory=dict[str, Outline])
    # each candidate simulated with its first packing choice (depth `packed`)
    packed: dict[str, Trial] = field(default_factory=dict[str, Trial])
    # best packing and sharding of each tuned candidate
    tuned: dict[str, Tuned] = field(default_factory=dict[str, Tuned])
    own: Trial | None = None  # the user's run as it is
    is_cut: bool = False  # whether candidates were not tried that might be among the best

    @property
    def ranking(self) -> list[Trial]:
        """The best trial of each tuned layout, fastest first."""
        best = [t.best for t in self.tuned.values() if t.best is not None]
        return sorted(best, key=lambda t: (t.time_s, t.name))

    def bound_s(self, name: str) -> float:
        """Return the tightest known bound of a candidate's time."""
        known = self.even.get(name) or self.work[name]
        return known.time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuner:
    """Searches layouts."""

    sample: BatchSample  # global batches on which layouts are compared
    choices: PackingChoices  # packings and shardings to try
    workers: Workers  # processes that run the trials
    top: int = 10  # number of fastest layouts that the search must find
    max_delay_mean: float = 0.5  # most steps that a token may be delayed on average
    progress: Progress = lambda what, more: None  # called after each group of trials

    def search(self, layouts: Layouts, own: RunSpec | None = None) -> Search:
        """Run all depths.

        Args:
            layouts: The candidates.
            own: A run that is also simulated as it is; None: there is none.

        Raises:
            UserError: No packing of any layout keeps the delay limit.
        """
        known = Search(layouts=layouts)
        if own is not None:
            task: GroupTask = (self.sample, TrialRunner.as_it_is, [own], ())
            (known.own,) = _run_group(task)

        # Depth `work` bounds every candidate. Then `even`, `packed` and `tune` take the candidates
        # in the order of the bounds of the depth before.
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
        """Pack candidates with their first choice, and return the times of those that fit."""
        todo = [c for c in candidates if c.name not in known.packed]
        found = self._run(todo, _pack_one, "packed", self.choices)
        known.packed.update({trial.layout: trial for trial in found if trial is not None})
        return [known.packed[c.name].time_s for c in candidates if c.name in known.packed]

    def tune(self, candidates: Sequence[Candidate], known: Search) -> list[float]:
        """Try every packing, shard the best, and return the times within the delay limit."""
        todo = [c for c in candidates if c.name not in known.tuned]
        found = self._run(todo, _tune_one, "tuned", self.choices, self.max_delay_mean)
        known.tuned.update({tuned.name: tuned for tuned in found})
        best = (known.tuned[c.name].best for c in candidates)
        return [trial.time_s for trial in best if trial is not None]

    def polish(self, names: Sequence[str], known: Search) -> None:
        """Try more settings on tuned layouts, and keep the fastest.

        They are all shardings, policies that are nearly as fast, more micro-batches, and later
        weight-gradient passes.
        """
        todo = [t for name in names if (t := known.tuned[name]).best is not None]
        found = self._run(todo, _polish_one, "polished", self.choices, self.max_delay_mean)
        known.tuned.update({tuned.name: tuned for tuned in found})

    def _outline(
        self, candidates: Sequence[Candidate], known: dict[str, Outline], *, is_walked: bool
    ) -> list[float]:
        """Compute a bound of each candidate and return the times."""
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
        """Evaluate candidates in blocks, in the order of their bounds.

        It stops when the rest cannot be among the `top` best.

        Args:
            bounds: Bounds by name of the candidate; others are left out.
            layouts: The candidates.
            evaluate: Evaluates a block and returns times.
            block: Candidates in a block.
            most: Most candidates to evaluate; None: no limit.

        Returns:
            Whether `most` ended it.
        """
        found = [c for c in layouts.candidates if c.name in bounds]
        found.sort(key=lambda c: (bounds[c.name].time_s, c.name))
        times: list[float] = []
        for start in range(0, len(found), block):
            # The time of the last of the `top` best so far; slower bounds need not be evaluated.
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
        """Return `function(runner, item, *arguments)` for each item, grouped by equal prices."""
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
        """Return the error message if no layout keeps the delay limit."""
        trials = [trial for tuned in known.tuned.values() for trial in tuned.packed]
        if not trials:
            return (
                "no layout has memory for any of the packing policies; allow fixed or original "
                "(--policies), or more recompute"
            )
        least = min(trials, key=lambda t: (t.mean_delay, t.name))
        return (
            f"no setting keeps the mean delay within {self.max_delay_mean:g} steps; the least is "
            f"{least.mean_delay:.3f} ({least.packing} on {least.layout}); raise --max-delay-mean "
            f"or try more policies"
        )


GroupTask = tuple[BatchSample, Callable[..., Any], Sequence[Any], tuple[Any, ...]]
"""Sample, function, items with equal prices, and further arguments."""


def _run_group(task: GroupTask) -> list[Any]:
    """Run a task: return `function(runner, item, *arguments)` for each of its items."""
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
    """Return the faster trial, or `best` if they are equal."""
    return other if other is not None and other.time_s < best.time_s else best


def _best_of_policies(packed: Sequence[Trial]) -> tuple[Trial, ...]:
    best: dict[str, Trial] = {}
    for trial in packed:
        best.setdefault(str(trial.spec.packing.policy), trial)
    return tuple(best.values())
