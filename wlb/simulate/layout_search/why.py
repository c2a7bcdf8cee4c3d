"""Explains why other layouts lost: the best of each family against the winner, term by term.

A family is a degree of TP, CP or PP, a schedule, a kind of recompute, or the run's own layout.
Layouts are compared at the same depth (both tuned, or both packed with the first choice); term
differences add up to the time difference, so the terms that grew most are the reason. Where memory
refuses a whole family, the closest layout and the bytes it lacks are named.
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
COMPARED = ("tp", "cp", "pp", "ep")
WORTH_NAMING = 0.1
"""A term is named if it is at least this share of all growth."""
MOST_NAMED = 3
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
"""Readable names of terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loser:
    """A family that lost. trial: its best, None where nothing fits. behind: its time over the
    winner's at the same depth, minus 1.
    """

    label: str
    why: str
    trial: Trial | None = None
    behind: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "family": self.label,
            "why": self.why,
            "behind": self.behind,
            "best": None if self.trial is None else self.trial.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """The winner's layout with other policies and other shardings, all `sharded`."""

    policies: tuple[Trial, ...]
    strategies: tuple[Trial, ...]


def losers_of(tuner: Tuner, known: Search, *, own: RunSpec | None, node: int) -> list[Loser]:
    """The families that the winner does not belong to. own: a run whose layout is a family. node:
    ranks of a node. Packs the best candidate of a family, tunes that of the own layout, if needed.
    """
    winner = known.ranking[0]
    families = _families(known.layouts, winner.spec, own)
    best = {label: _likeliest(group, known) for label, group in families.items() if group}
    tuner.pack([c for c in best.values() if c.name not in known.tuned], known)
    winners = [c for c in known.layouts.candidates if c.name == winner.layout]
    tuner.pack(winners, known)
    for label, candidate in best.items():
        if label.startswith(OWN) and candidate.name in known.packed:
            tuner.tune([candidate], known)
            tuner.polish([candidate.name], known)
    return [_compared(label, best.get(label), known, winner, node) for label in families]


def references_of(tuner: Tuner, winner: Trial) -> References:
    """Trials of the winner's layout with every policy and every sharding strategy."""
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
    """Seconds by which the loser's terms exceed the winner's, largest first."""
    names = dict.fromkeys([*winner, *loser])
    found = {name: loser.get(name, 0.0) - winner.get(name, 0.0) for name in names}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def reasons(loser: Trial, winner: Trial, *, node: int) -> str:
    """The terms that grew most and the one that shrank most, as text."""
    terms = difference(loser.terms, winner.terms)
    grown = sum(s for s in terms.values() if s > 0)
    named = [(n, s) for n, s in terms.items() if s > 0 and s >= WORTH_NAMING * grown][:MOST_NAMED]
    parts = [f"{_words(name, loser, winner, node)} +{seconds:.3f} s" for name, seconds in named]
    least, seconds = min(terms.items(), key=lambda item: item[1], default=("", 0.0))
    if -seconds >= WORTH_NAMING * grown:
        parts.append(f"though {_words(least, loser, winner, node)} {seconds:.3f} s")
    return ", ".join(parts)


def _words(name: str, loser: Trial, winner: Trial, node: int) -> str:
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
    """Candidates by family without the winner's families; empty where nothing fits."""
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
    """Return all families that a layout may belong to."""
    degrees = [f"{axis} {getattr(spec.parallel, axis)}" for axis in COMPARED]
    return [f"{OWN}, {degrees_of(spec)}", *degrees, *_pipeline_labels(spec)]


def _pipeline_labels(spec: RunSpec) -> list[str]:
    recompute = f"recompute {spec.training.recompute}"
    return [recompute] if spec.parallel.pp == 1 else [str(spec.pp.schedule), recompute]


def _likeliest(group: Sequence[Candidate], known: Search) -> Candidate:
    """The fastest candidate at the deepest depth that any of them reached."""

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
    if best is None:
        return Loser(label=label, why=_does_not_fit(label, known.layouts))
    tuned = known.tuned.get(best.name)
    if tuned is not None and tuned.best is not None:
        trial, against = tuned.best, winner
    elif best.name in known.packed and winner.layout in known.packed:
        trial, against = known.packed[best.name], known.packed[winner.layout]
    else:
        return Loser(label=label, why=f"{best.name}: no packing setting finds room in its memory")
    return Loser(
        label=label,
        why=reasons(trial, against, node=node),
        trial=trial,
        behind=trial.time_s / against.time_s - 1,
    )


def _does_not_fit(label: str, layouts: Layouts) -> str:
    found = [large for large in layouts.too_large if label in _labels(large.spec)]
    if not found:
        return "no such layout is possible or within the restrictions"
    closest = min(found, key=lambda large: large.missing_bytes)
    return f"does not fit; closest: {closest.message}"
