"""The search of `wlb tune layout`: layout, recompute, packing and sharding for some devices.

The candidates are layouts. The search evaluates candidates at several depths, each of which is more
exact and more expensive than the one before:

- `work`, `even` and `packed` simulate a layout with one packing (`trial.py`).
- `tune` tries every packing choice.
- `polish` tries further settings of the `top` best layouts: all shardings, other policies that are
  nearly as fast, more micro-batches, and later weight-gradient passes.

A candidate's time at one depth is nearly a lower bound of its time at the next depth, which may be
shorter by at most the fraction SLACK. So each depth takes the candidates in the order of their
times at the depth before, and stops when the remaining candidates cannot be among the `top` best.
Depth `tune` also stops when it has tuned MOST_TUNED candidates; `Search.is_cut` says whether that
happened.

The search is deterministic: it uses no clock, its result does not depend on the number of workers,
and of equally fast layouts the first by name comes first. 1,000 candidates take about one minute on
one core.
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
"""Fraction by which a time may be shorter than its lower bound from a less exact simulation.

The bounds are not exact, so candidates whose bound is this much too long are still tried.
"""
BLOCK_WALKED, BLOCK_PACKED, BLOCK_TUNED = 128, 32, 8
"""Number of candidates that are evaluated together at the depths `even`, `packed` and `tune`.

The search checks between two such blocks whether the other candidates are too slow to be tried.
"""
MOST_TUNED = 32
"""Most candidates that are tuned, unless `top` is larger; this bounds the time of the search."""
NEARLY = 1.02
"""Packing policies within this factor of a layout's fastest one are simulated with sharding too."""

Progress = Callable[[str, int], None]
"""Function that is called with what was done ("packed", "tuned", ...) and with how many layouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A layout with its best packing and sharding."""

    name: str  # name of the layout
    best: Trial | None  # fastest trial within the delay limit; None if no trial is within it
    # fastest trial of each policy without sharding, as if CP ranks had equal work
    packed: tuple[Trial, ...]
    # the same among the trials whose mean delay is within the limit
    in_time: tuple[Trial, ...]


@dataclass(slots=True, kw_only=True)
class Search:
    """Results of a search so far: one dict for each depth, by name of the layout.

    The search evaluates layouts at several depths, each of which is more exact and more expensive
    than the one before. A dict has the layouts that have a result at its depth.
    """

    layouts: Layouts  # all candidates and impossible layouts
    # depth `work`: a lower bound of the time, from the work of a pipeline rank without bubbles
    work: dict[str, Outline] = field(default_factory=dict[str, Outline])
    # depth `even`: a tighter lower bound, from simulating one step with equal micro-batches
    even: dict[str, Outline] = field(default_factory=dict[str, Outline])
    # depth `packed`: the simulated time with one packing (`PackingChoices.first`)
    packed: dict[str, Trial] = field(default_factory=dict[str, Trial])
    # depth `tune`: the best packing and sharding
    tuned: dict[str, Tuned] = field(default_factory=dict[str, Tuned])
    # The user's run with its own layout and settings; None if it was not simulated.
    own: Trial | None = None
    # whether candidates that may be better were not tried, because MOST_TUNED were tried already
    is_cut: bool = False

    @property
    def ranking(self) -> list[Trial]:
        """The best result of each layout that was simulated with every packing, fastest first."""
        best = [t.best for t in self.tuned.values() if t.best is not None]
        return sorted(best, key=lambda t: (t.time_s, t.name))

    def bound_s(self, name: str) -> float:
        """Return the highest known lower bound of a layout's time, in seconds per global batch."""
        known = self.even.get(name) or self.work[name]
        return known.time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuner:
    """Searches the fastest layouts, with their best packing and sharding."""

    sample: BatchSample  # global batches on which layouts are compared
    choices: PackingChoices  # packings and shardings to try
    workers: Workers  # processes that run the trials
    top: int = 10  # number of fastest layouts that the search must find
    max_delay_mean: float = 0.5  # delay limit: most steps that a token may be delayed on average
    # Called after each group of trials, with what was done ("packed", "tuned", ...) and the number
    # of layouts.
    progress: Progress = lambda what, more: None

    def search(self, layouts: Layouts, own: RunSpec | None = None) -> Search:
        """Search the fastest layouts, first with rough and then with more exact simulations.

        Args:
            layouts: The layouts among which to search.
            own: The user's run, which is also simulated with its own layout. None means that only
                `layouts` are simulated.

        Raises:
            UserError: No packing of any layout keeps the mean delay within the limit.
        """
        known = Search(layouts=layouts)
        if own is not None:
            task: GroupTask = (self.sample, TrialRunner.as_it_is, [own], ())
            (known.own,) = _run_group(task)

        # Depth `work` computes a bound of every candidate. Then `even`, `packed` and `tune` take
        # the candidates in the order of the bounds from the depth before.
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
        """Simulate layouts with one packing each, and add the results to `known`.

        `PackingChoices.first` lists packings. A layout gets the first one with which it fits into
        memory.

        Returns:
            Times of the layouts that fit into memory, in seconds per global batch.
        """
        todo = [c for c in candidates if c.name not in known.packed]
        found = self._run(todo, _pack_one, "packed", self.choices)
        known.packed.update({trial.layout: trial for trial in found if trial is not None})
        return [known.packed[c.name].time_s for c in candidates if c.name in known.packed]

    def tune(self, candidates: Sequence[Candidate], known: Search) -> list[float]:
        """Simulate layouts with every packing, and add the results to `known`.

        These simulations assume that CP ranks have equal work. For each layout, the fastest packing
        within the delay limit is then simulated with one sharding strategy, the first of `choices`.

        Args:
            candidates: The layouts.
            known: Results of the search so far.

        Returns:
            Times of the layouts that have a packing within the delay limit, in seconds per global
            batch.
        """
        todo = [c for c in candidates if c.name not in known.tuned]
        found = self._run(todo, _tune_one, "tuned", self.choices, self.max_delay_mean)
        known.tuned.update({tuned.name: tuned for tuned in found})
        best = (known.tuned[c.name].best for c in candidates)
        return [trial.time_s for trial in best if trial is not None]

    def polish(self, names: Sequence[str], known: Search) -> None:
        """Try further settings of layouts, and keep the fastest setting of each layout in `known`.

        These settings are all shardings, other policies that are nearly as fast, more
        micro-batches, and later weight-gradient passes.

        Args:
            names: Names of the layouts, which were simulated with every packing before.
            known: Results so far.
        """
        todo = [t for name in names if (t := known.tuned[name]).best is not None]
        found = self._run(todo, _polish_one, "polished", self.choices, self.max_delay_mean)
        known.tuned.update({tuned.name: tuned for tuned in found})

    def _outline(
        self, candidates: Sequence[Candidate], known: dict[str, Outline], *, is_walked: bool
    ) -> list[float]:
        """Compute a lower bound of each layout's time, add it to `known`, and return the bounds.

        Args:
            candidates: The layouts.
            known: Bounds by name of the layout. The new bounds are added.
            is_walked: Whether to simulate one step whose micro-batches are all equal. Otherwise the
                bound is the work of a pipeline rank, added up without bubbles, which is lower.
        """
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
        """Simulate layouts in blocks, in the order of the lower bounds of their times.

        This stops when the remaining layouts cannot be among the `top` best.

        Args:
            bounds: Lower bounds of times by name of the layout. Layouts without one are left out.
            layouts: The layouts.
            evaluate: Simulates the layouts of a block, and returns their times.
            block: Number of layouts in a block.
            most: Most layouts to simulate, rounded up to whole blocks; None means no limit.

        Returns:
            Whether this stopped because of `most`.
        """
        found = [c for c in layouts.candidates if c.name in bounds]
        found.sort(key=lambda c: (bounds[c.name].time_s, c.name))
        times: list[float] = []
        for start in range(0, len(found), block):
            # `enough` is the time of the slowest of the `top` best candidates so far. A candidate
            # with a larger bound cannot be among the `top` best.
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
        """Call a function for each item on the worker processes, and return the results.

        Items whose passes have the same prices (`pricing_key`) form one task and share a
        `TrialRunner`. Results are grouped by task, so they may not be in the order of `items`.

        Args:
            items: RunSpecs, `Candidate`s or `Tuned` layouts.
            function: Called as `function(runner, item, *arguments)`.
            what: What is done with the items, for example "tuned"; `progress` gets it.
            *arguments: Further arguments of the function.
        """
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
        """Return the text of the error that no layout keeps the mean delay within the limit.

        Args:
            known: Results of the search.
        """
        trials = [trial for tuned in known.tuned.values() for trial in tuned.packed]
        if not trials:
            return (
                "no layout has enough memory for any of the packing policies; add fixed or "
                "original to --policies, or allow more recompute"
            )
        least = min(trials, key=lambda t: (t.mean_delay, t.name))
        return (
            f"no packing delays tokens by at most {self.max_delay_mean:g} steps on average; the "
            f"smallest mean delay is {least.mean_delay:.3f} steps (packing {least.packing}, layout "
            f"{least.layout}); raise --max-delay-mean, or allow more --policies"
        )


GroupTask = tuple[BatchSample, Callable[..., Any], Sequence[Any], tuple[Any, ...]]
"""A task of a worker: (sample, function, items with equal prices, further arguments)."""


def _run_group(task: GroupTask) -> list[Any]:
    """Call a function for each item of a task; all items share one `TrialRunner`.

    Args:
        task: (sample, function, items, further arguments of the function).

    Returns:
        `function(runner, item, *arguments)` for each item.
    """
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
    """Return the faster of two trials; `best` if `other` is None or equally fast."""
    return other if other is not None and other.time_s < best.time_s else best


def _best_of_policies(packed: Sequence[Trial]) -> tuple[Trial, ...]:
    best: dict[str, Trial] = {}
    for trial in packed:
        best.setdefault(str(trial.spec.packing.policy), trial)
    return tuple(best.values())
