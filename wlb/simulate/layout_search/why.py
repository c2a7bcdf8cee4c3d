"""Explain why other layouts are slower than the fastest one that a search has found (the winner).

Layouts are compared by families. A family is all layouts that have the same degree of TP, CP, PP or
EP, the same schedule, or the same kind of recompute; one more family is the run's own layout. The
best layout of each family is compared with the winner at the same depth of the search: both were
simulated with every packing, or both with one packing. The time of a layout is divided into kinds
of work ("terms"). Differences of terms add up to the difference of time, so the terms that differ
most are the reason. If no layout of a family fits into memory, the layout that lacks the fewest
bytes is named.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from wlb.simulate.layout_search.account import BUBBLE, MICRO_BATCHES, RECOMPUTE, TermSeconds
from wlb.simulate.layout_search.layouts import Candidate, Layouts, degrees_of
from wlb.simulate.layout_search.packings import POLICIES, with_settings
from wlb.simulate.layout_search.search import Search, Tuner
from wlb.simulate.layout_search.trial import Trial, TrialRunner
from wlb.spec import Recompute, RunSpec, Schedule

OWN = "the run's own layout"
"""Name of the family that has only the layout of the user's run."""
COMPARED = ("tp", "cp", "pp", "ep")
"""Axes of parallelism. All layouts with the same degree of one of these axes are a family."""
WORTH_NAMING = 0.1
"""A reason names a kind of work if it makes up at least this fraction of all additional time."""
MOST_NAMED = 3
"""Most kinds of work that a reason names."""
WORDS = {
    "gemm": "matrix products",
    "elementwise": "element-wise operators",
    "tp_comm": "TP communication",
    "cp_comm": "CP communication",
    "ep_comm": "EP communication",
    "calls": "launches and latency",
    "head": "head and loss",
    BUBBLE: "bubble",
}
"""Readable names of kinds of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loser:
    """A family of layouts to which the fastest layout (the winner) does not belong.

    A family is all layouts with the same degree of TP, CP, PP or EP, the same schedule or the same
    recompute. The layout of the user's run is a family of its own.
    """

    label: str  # name of the family, for example "tp 8"
    why: str  # why the family's best layout is slower, or why no layout fits into memory
    trial: Trial | None = None  # the family's best layout; None if no layout fits into memory
    # (time of `trial` - winner's time) / winner's time. If `trial` was simulated without sharding,
    # the winner's time without sharding is taken.
    behind: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "family": self.label,
            "why": self.why,
            "behind": self.behind,
            "best": None if self.trial is None else self.trial.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """The fastest layout, simulated with each packing policy and with each sharding strategy."""

    policies: tuple[Trial, ...]  # the best trial of each packing policy
    strategies: tuple[Trial, ...]  # one trial of each sharding strategy


def losers_of(tuner: Tuner, known: Search, *, own: RunSpec | None, node: int) -> list[Loser]:
    """Compare the fastest layout (the winner) with each family to which it does not belong.

    `Loser` says what a family is. The winner is compared with the layout that is probably
    the fastest of the family. If the search has not simulated this layout, it is simulated here
    with one packing. The run's own layout is simulated with all packings.

    Args:
        tuner: Runs the missing trials.
        known: Results of the search.
        own: The user's run, whose layout is a family of its own. None means that there is no such
            family.
        node: Number of ranks of a node.
    """
    winner = known.ranking[0]
    families = _families(known.layouts, winner.spec, own)
    best = {label: _likeliest(group, known) for label, group in families.items() if group}
    tuner.pack([c for c in best.values() if c.name not in known.tuned], known)
    # If the best candidate of a family was simulated with only one packing, it is compared with a
    # simulation of the winner with one packing. So the winner needs such a simulation too.
    winners = [c for c in known.layouts.candidates if c.name == winner.layout]
    tuner.pack(winners, known)
    for label, candidate in best.items():
        # Simulate the run's own layout with all packings and further settings, as was done for the
        # winner.
        if label.startswith(OWN) and candidate.name in known.packed:
            tuner.tune([candidate], known)
            tuner.polish([candidate.name], known)
    return [_compared(label, best.get(label), known, winner, node) for label in families]


def references_of(tuner: Tuner, winner: Trial) -> References:
    """Simulate the fastest layout with every packing policy and every sharding strategy.

    Args:
        tuner: Gives the global batches, and the policies and strategies to try.
        winner: The fastest layout.
    """
    spec, choices = winner.spec, tuner.choices
    runner = TrialRunner.of(spec, tuner.sample)
    candidate = Candidate(spec=spec, need_bytes=0, caps=winner.caps)
    best: dict[str, Trial] = {}
    for packing in replace(choices, policies=POLICIES).packings(candidate):
        if packing.policy == spec.packing.policy:
            continue
        trial = runner.packed(with_settings(spec, packing, spec.sharding.strategy))
        if trial is not None:
            known = best.setdefault(packing.policy, trial)
            best[packing.policy] = trial if trial.time_s < known.time_s else known
    policies = [runner.sharded(trial.spec) for trial in (winner, *best.values())]
    strategies = [
        runner.sharded(with_settings(spec, spec.packing, strategy))
        for strategy in (choices.strategies if spec.parallel.cp > 1 else (spec.sharding.strategy,))
    ]
    return References(
        policies=tuple(trial for trial in policies if trial is not None),
        strategies=tuple(trial for trial in strategies if trial is not None),
    )


def difference(loser: TermSeconds, winner: TermSeconds) -> TermSeconds:
    """Return how many more seconds each kind of work takes in the slower layout, largest first.

    Args:
        loser: Seconds of the slower layout, by kind of work.
        winner: Seconds of the faster layout, by kind of work.
    """
    names = dict.fromkeys([*winner, *loser])
    found = {name: loser.get(name, 0.0) - winner.get(name, 0.0) for name in names}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def reasons(loser: Trial, winner: Trial, *, node: int) -> str:
    """Return a text that says which kinds of work make one layout slower than another.

    The text names the kinds of work that take the most additional seconds in the slower layout. It
    also names the kind of work in which the slower layout saves the most seconds.

    Args:
        loser: The slower layout.
        winner: The faster layout.
        node: Number of ranks of a node.
    """
    terms = difference(loser.terms, winner.terms)
    grown = sum(s for s in terms.values() if s > 0)
    named = [(n, s) for n, s in terms.items() if s > 0 and s >= WORTH_NAMING * grown][:MOST_NAMED]
    parts = [f"{_words(name, loser, winner, node)} +{seconds:.3f} s" for name, seconds in named]
    least, seconds = min(terms.items(), key=lambda item: item[1], default=("", 0.0))
    if -seconds >= WORTH_NAMING * grown:
        parts.append(f"though {_words(least, loser, winner, node)} {seconds:.3f} s")
    return ", ".join(parts)


def _words(name: str, loser: Trial, winner: Trial, node: int) -> str:
    """Return the readable name of a kind of work, with what makes it slower if that is known.

    An example is "TP communication (groups over 2 nodes)".

    Args:
        name: Name of the kind of work, for example "tp_comm".
        loser: The slower layout.
        winner: The faster layout.
        node: Number of ranks of a node.
    """
    text, parallel = WORDS.get(name, name), loser.spec.parallel
    if name == "tp_comm" and parallel.tp > node:
        text += f" (groups over {-(-parallel.tp // node)} nodes)"
    if name == "cp_comm" and parallel.tp * parallel.cp > node:
        text += " (between nodes)"
    if name == MICRO_BATCHES and loser.caps.s_max < winner.caps.s_max:
        text += f" (S_max {loser.caps.s_max / loser.spec.data.context_window:.2f})"
    if name == RECOMPUTE:
        recompute = loser.spec.training.recompute
        text += f" ({winner.spec.training.recompute if recompute == Recompute.NONE else recompute})"
    return text


def _families(layouts: Layouts, winner: RunSpec, own: RunSpec | None) -> dict[str, list[Candidate]]:
    """Return the candidates of each family to which the winner does not belong, by family.

    A family is all layouts with the same degree of TP, CP, PP or EP, the same schedule or the same
    recompute. If no layout of a family fits into memory, its list is empty.

    Args:
        layouts: All layouts.
        winner: The fastest layout.
        own: The user's run, whose layout is a family of its own. None means that there is no such
            family.
    """
    out: dict[str, list[Candidate]] = {}
    own_label = "" if own is None else f"{OWN}, {degrees_of(own)}"
    if own is not None and degrees_of(own) != degrees_of(winner):
        out[own_label] = []
    specs = [c.spec for c in layouts.candidates] + [t.spec for t in layouts.too_large]
    for axis in COMPARED:
        for degree in sorted({getattr(s.parallel, axis) for s in specs}):
            if degree != getattr(winner.parallel, axis):
                out[f"{axis} {degree}"] = []
    mine = set(_pipeline_labels(winner))
    labels = [str(s) for s in Schedule] + [f"recompute {r}" for r in Recompute]
    known = {label for s in specs for label in _pipeline_labels(s)}
    out |= {label: [] for label in labels if label in known and label not in mine}
    for candidate in layouts.candidates:
        for label in _labels(candidate.spec):
            if label in out:
                out[label].append(candidate)
    return out


def _labels(spec: RunSpec) -> list[str]:
    """Return the names of the families to which a layout belongs, such as "tp 8" and "1f1b".

    The family "tp 8" is all layouts with a TP degree of 8.
    """
    degrees = [f"{axis} {getattr(spec.parallel, axis)}" for axis in COMPARED]
    return [f"{OWN}, {degrees_of(spec)}", *degrees, *_pipeline_labels(spec)]


def _pipeline_labels(spec: RunSpec) -> list[str]:
    """Return the names of two families of a layout: of its schedule, and of its recompute.

    Without pipeline parallelism a layout has no schedule, so only the latter is returned.
    """
    recompute = f"recompute {spec.training.recompute}"
    return [recompute] if spec.parallel.pp == 1 else [str(spec.pp.schedule), recompute]


def _likeliest(group: Sequence[Candidate], known: Search) -> Candidate:
    """Return the candidate of a group that is probably the fastest, from what a search knows.

    It is the fastest one of those that were simulated with every packing. If there are none, it is
    the fastest one of those that were simulated with one packing, and otherwise the one with the
    smallest lower bound.
    """

    def key(candidate: Candidate) -> tuple[int, float, str]:
        name = candidate.name
        tuned = known.tuned.get(name)
        if tuned is not None and tuned.best is not None:
            return 0, tuned.best.time_s, name
        if name in known.packed:
            return 1, known.packed[name].time_s, name
        return 2, known.bound_s(name), name

    return min(group, key=key)


def _compared(label: str, best: Candidate | None, known: Search, winner: Trial, node: int) -> Loser:
    """Compare the best layout of a family with the winner of the search.

    Args:
        label: Name of the family, for example "tp 8".
        best: The family's best candidate; None if no layout of the family fits into memory.
        known: Results of the search.
        winner: The fastest layout.
        node: Number of ranks of a node.
    """
    if best is None:
        return Loser(label=label, why=_does_not_fit(label, known.layouts))
    tuned = known.tuned.get(best.name)
    if tuned is not None and tuned.best is not None:
        trial, against = tuned.best, winner
    elif best.name in known.packed and winner.layout in known.packed:
        trial, against = known.packed[best.name], known.packed[winner.layout]
    else:
        return Loser(label=label, why=f"{best.name}: no packing that was tried fits into memory")
    return Loser(
        label=label,
        why=reasons(trial, against, node=node),
        trial=trial,
        behind=trial.time_s / against.time_s - 1,
    )


def _does_not_fit(label: str, layouts: Layouts) -> str:
    """Return a text that says why no layout of a family fits into memory.

    Args:
        label: Name of the family, for example "tp 8".
        layouts: All layouts.
    """
    found = [large for large in layouts.too_large if label in _labels(large.spec)]
    if not found:
        return "no such layout is possible and allowed by the restrictions"
    closest = min(found, key=lambda large: large.missing_bytes)
    return f"does not fit into memory; the layout that lacks the least is {closest.message}"
