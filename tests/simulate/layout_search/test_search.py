"""Tests that the layout search finds the best, keeps its limits, and says why others lost."""

from dataclasses import replace
from itertools import product

import pytest

from tests.sets import nightly
from tests.simulate.layout_search.searched import WINDOW, N, sample, spec_of
from wlb.memory.estimate import GIB
from wlb.simulate import check_memory, simulate_run
from wlb.simulate.layout_search.layouts import LayoutChoices, layouts_of, planned_bytes
from wlb.simulate.layout_search.packings import PackingChoices, with_settings
from wlb.simulate.layout_search.search import Search, Tuner
from wlb.simulate.layout_search.trial import Trial, TrialRunner, pricing_key
from wlb.simulate.layout_search.why import difference, losers_of, references_of
from wlb.simulate.layout_search.workers import Workers
from wlb.spec import Policy, Recompute, RunSpec, Schedule, Strategy

FEW = PackingChoices(
    s_max=(1.25, 2.0), step_tokens=(0.0, 1.1), queues=(), micro_batches=(), weight_delays=()
)
SAMPLE = sample()


def search(
    spec: RunSpec,
    *,
    gpus: int = 8,
    choices: LayoutChoices | None = None,
    settings: PackingChoices = FEW,
    top: int = 3,
    own: RunSpec | None = None,
    max_delay_mean: float = 0.5,
    jobs: int = 1,
) -> tuple[Tuner, Search]:
    layouts = layouts_of(spec, gpus=gpus, choices=choices or LayoutChoices())
    with Workers(jobs=jobs) as workers:
        tuner = Tuner(
            sample=SAMPLE, choices=settings, workers=workers, top=top, max_delay_mean=max_delay_mean
        )
        return tuner, tuner.search(layouts, own)


@pytest.fixture(scope="module")
def found() -> Search:
    return search(spec_of(), own=spec_of())[1]


def exhaustive(known: Search, settings: PackingChoices, max_delay_mean: float) -> list[Trial]:
    """Tries every layout with every packing and every sharding, by `simulate_run`."""
    out: list[Trial] = []
    benches: dict[object, TrialRunner] = {}
    for c in known.layouts.candidates:
        key = pricing_key(c.spec)
        bench = benches.setdefault(key, TrialRunner.of(c.spec, SAMPLE))
        for packing, strategy in product(settings.packings(c), settings.strategies):
            trial = bench.sharded(with_settings(c.spec, packing, strategy))
            if trial is not None and trial.mean_delay <= max_delay_mean:
                out.append(trial)
    return out


@pytest.mark.full
@pytest.mark.parametrize(("memory_gib", "tp"), [(80.0, (1, 2)), *nightly((0.8, (2,)))])
def test_the_winner_is_as_fast_as_any_of_an_exhaustive_search(
    memory_gib: float, tp: tuple[int, ...]
) -> None:
    spec = spec_of(f"cluster.memory_gib={memory_gib}")
    choices = LayoutChoices(tp=tp, cp=(2, 4), schedules=(Schedule.INTERLEAVED_1F1B,))
    settings = replace(FEW, s_max=(2.0,))
    _, known = search(spec, choices=choices, settings=settings, top=1)
    everything = exhaustive(known, settings, 0.5)
    assert len({t.layout for t in everything}) > 5
    best = min(everything, key=lambda t: t.time_s)
    assert known.ranking[0].time_s == pytest.approx(best.time_s, rel=1e-12)
    is_pruned = len(known.tuned) < len(known.layouts.candidates)
    assert is_pruned or memory_gib < 80


@pytest.mark.full
def test_expert_parallelism_is_searched() -> None:
    """Experts over one rank, a pipeline's two, or two pipelines', which then meet in layers."""
    experts = ("model.experts.num=8", "model.experts.hidden_size=704", "model.experts.every=2")
    spec = spec_of(*experts)
    choices = LayoutChoices(tp=(1,), cp=(2,), pp=(1,), recompute=(Recompute.NONE,))
    settings = replace(FEW, s_max=(2.0,))
    _, known = search(spec, gpus=4, choices=choices, settings=settings, top=1)
    assert {c.spec.parallel.ep for c in known.layouts.candidates} == {1, 2, 4}
    best = min(exhaustive(known, settings, 0.5), key=lambda t: t.time_s)
    assert known.ranking[0].time_s == pytest.approx(best.time_s, rel=1e-12)
    times = {known.even[c.name].time_s for c in known.layouts.candidates}
    assert len(times) == 3


def test_more_micro_batches_and_later_weights_are_tried_on_the_best() -> None:
    """On four stages the bubbles of 4 micro-batches are worth 6 of them, within the delay."""
    spec = spec_of("model.num_layers=8")
    schedule = Schedule.INTERLEAVED_ZERO_BUBBLE
    choices = LayoutChoices(pp=(4,), cp=(1,), schedules=(schedule,), virtual_stages=(2,))
    more = replace(FEW, micro_batches=(1.5,), weight_delays=(2, 4))
    plain, tried = (
        search(spec, choices=choices, settings=settings, top=1)[1].ranking[0]
        for settings in (FEW, more)
    )
    assert tried.spec.packing.num_micro_batches == 6
    assert tried.packing.endswith(" M 6")
    assert tried.time_s < 0.97 * plain.time_s
    assert tried.mean_delay <= 0.5
    assert tried.layout == plain.layout
    again = TrialRunner.of(tried.spec, SAMPLE)
    delayed = (
        again.sharded(replace(tried.spec, pp=replace(tried.spec.pp, weight_delay=delay)))
        for delay in (1, 2, 4)
    )
    assert tried.time_s == min(trial.time_s for trial in delayed if trial is not None)


def test_micro_batches_that_no_schedule_takes_are_not_tried() -> None:
    spec = spec_of("parallel.pp=4", "pp.virtual_stages=1", "data.num_windows=8")
    bounded = replace(spec, packing=replace(spec.packing, policy=Policy.BOUNDED, s_max=2.0))
    settings = replace(FEW, micro_batches=(1.1, 1.25, 1.5))
    found = [s.packing.num_micro_batches for s in settings.more_micro_batches(bounded)]
    assert found == [10, 12]  # 9 are not two equal rounds over four stages
    fixed = replace(spec, packing=replace(spec.packing, policy=Policy.FIXED))
    assert not list(settings.more_micro_batches(fixed))
    with pytest.raises(ValueError, match=r"micro_batches = 1.0 must be above 1"):
        replace(FEW, micro_batches=(1.0,))


@pytest.mark.full
def test_the_winner_is_what_simulate_says(found: Search) -> None:
    best = found.ranking[0]
    bench = TrialRunner.of(best.spec, SAMPLE)
    run = simulate_run(best.spec, bench.cost, SAMPLE.batches)
    check_memory(run)
    assert best.time_s == pytest.approx(run.time_s / len(SAMPLE.batches), rel=1e-12)
    assert best.tokens_per_s == run.tokens_per_s
    assert best.mfu == run.mfu(peak_tflops=989.0)
    assert best.peak_memory_bytes == int(run.peak_memory_bytes.max())
    assert best.mean_delay == run.mean_delay
    assert best.max_delay == max(m.max_delay for m in run.metrics)
    assert sum(best.terms.values()) == pytest.approx(best.time_s)
    assert int(run.tokens.sum()) == SAMPLE.num_tokens
    assert best.spec.parallel.world_size == 8
    assert best.spec.num_micro_batches == N


def test_each_step_bounds_the_next(found: Search) -> None:
    for name, trial in found.packed.items():
        assert found.work[name].time_s <= found.even[name].time_s * 1.001
        assert found.even[name].time_s <= trial.time_s * 1.03


def test_the_own_settings_are_tried_as_they_are(found: Search) -> None:
    assert found.own is not None
    assert found.own.spec == spec_of()
    assert found.own.time_s > found.ranking[0].time_s


@pytest.mark.full
@pytest.mark.process
def test_equal_inputs_give_equal_results_on_any_number_of_workers(found: Search) -> None:
    _, again = search(spec_of(), own=spec_of(), jobs=2)
    assert [t.name for t in again.ranking] == [t.name for t in found.ranking]
    assert again.ranking == found.ranking
    assert again.even == found.even
    assert again.packed == found.packed


@pytest.mark.full
def test_memory_is_kept_and_costs_time(found: Search) -> None:
    gib = 1.0
    _, tight = search(spec_of(f"cluster.memory_gib={gib}"), choices=LayoutChoices(cp=(2, 4)))
    for trial in tight.ranking:
        assert trial.peak_memory_bytes <= planned_bytes(trial.spec) < gib * GIB
    assert found.ranking[0].peak_memory_bytes > gib * GIB
    assert tight.ranking[0].time_s > found.ranking[0].time_s


@pytest.mark.full
def test_the_delay_is_kept() -> None:
    tuner, known = search(spec_of(), max_delay_mean=0.1)
    assert all(t.mean_delay <= 0.1 for t in known.ranking)
    with pytest.raises(
        ValueError, match=r"at most 0\.0001 steps .* is 0\.\d+ steps \(.* layout tp"
    ):
        search(spec_of(), max_delay_mean=0.0001, choices=LayoutChoices(tp=(2,), cp=(2,), pp=(2,)))
    assert tuner.max_delay_mean == 0.1


def test_original_wins_only_where_it_is_asked_for() -> None:
    small = LayoutChoices(tp=(2,), cp=(2,), pp=(2,), schedules=(Schedule.INTERLEAVED_1F1B,))
    _, known = search(spec_of(), choices=small)
    assert Policy.ORIGINAL not in {t.spec.packing.policy for t in known.ranking}
    _, known = search(
        spec_of(), choices=small, settings=PackingChoices(policies=(Policy.ORIGINAL,))
    )
    assert {t.packing for t in known.ranking} == {"original"}


def test_a_sequence_on_one_rank_is_sharded_in_one_way() -> None:
    _, known = search(spec_of(), choices=LayoutChoices(cp=(1,), tp=(2,)))
    assert {t.spec.sharding.strategy for t in known.ranking} == {Strategy.BALANCED}


def test_why_the_others_lost(found: Search) -> None:
    tuner = Tuner(sample=SAMPLE, choices=FEW, workers=Workers(), top=3)
    own = spec_of()
    losers = {loser.label: loser for loser in losers_of(tuner, found, own=own, node=8)}
    winner = found.ranking[0].spec
    assert f"tp {winner.parallel.tp}" not in losers
    assert str(winner.training.recompute) == "none"
    own_label = "the run's own layout, tp 2 cp 2 pp 2 dp 1"
    expected = {
        *(f"tp {d}" for d in (1, 2, 4, 8) if d != winner.parallel.tp),
        *(f"cp {d}" for d in (1, 2, 4, 8) if d != winner.parallel.cp),
        *(f"pp {d}" for d in (1, 2, 4) if d != winner.parallel.pp),
        own_label,
    }
    assert expected <= set(losers)
    most = losers["tp 8"]
    assert most.trial is not None
    assert most.behind > 0
    assert "TP communication +" in most.why
    of_own = losers[own_label].trial
    assert of_own is not None
    assert of_own.is_sharded
    made = references_of(tuner, found.ranking[0])
    assert {str(t.spec.packing.policy) for t in made.policies} == {
        "bounded",
        "var_len",
        "fixed",
        "original",
    }
    assert all(t.is_sharded for t in (*made.policies, *made.strategies))
    best = {str(t.spec.sharding.strategy): t.time_s for t in made.strategies}
    assert min(best.values()) == pytest.approx(found.ranking[0].time_s)


@pytest.mark.full
def test_a_family_that_does_not_fit_is_said() -> None:
    tuner, known = search(spec_of("cluster.memory_gib=0.4"), top=1)
    losers = {x.label: x for x in losers_of(tuner, known, own=None, node=8)}
    for label in ("tp 1", "cp 8", "pp 4"):
        assert losers[label].trial is None
        assert losers[label].why.startswith(
            "does not fit into memory; the layout that lacks the least is tp "
        )
        assert " lacks " in losers[label].why


def test_differences_are_sorted_and_keep_the_sign() -> None:
    assert difference({"a": 1.0, "b": 3.0}, {"a": 2.0, "c": 0.5}) == {
        "b": 3.0,
        "c": -0.5,
        "a": -1.0,
    }


def test_settings_are_what_the_room_allows() -> None:
    (candidate,) = layouts_of(
        spec_of(), gpus=1, choices=LayoutChoices(recompute=(Recompute.NONE,))
    ).candidates
    settings = PackingChoices(s_max=(1.5,), step_tokens=(0.0, 1.1, 1.5), queues=((0.4,),))
    shown = [
        (str(p.policy), p.s_max, p.step_tokens, p.queue_thresholds)
        for p in settings.packings(candidate)
    ]
    own = spec_of().packing.queue_thresholds
    assert shown == [
        ("bounded", 1.5, 0.0, own),
        ("bounded", 1.5, 1.1, own),
        ("var_len", 1.5, 0.0, own),
        ("var_len", 1.5, 0.0, (0.4,)),
        ("fixed", 1.5, 0.0, own),
    ]
    assert [str(p.policy) for p in settings.first(candidate)] == ["bounded", "var_len", "fixed"]
    assert settings.first(candidate)[0].step_tokens == 1.1
    windows = replace(candidate, caps=None)
    assert [str(p.policy) for p in settings.packings(windows)] == ["fixed"]
    for name in ("policies", "s_max", "step_tokens", "strategies"):
        with pytest.raises(ValueError, match=f"{name} is empty"):
            PackingChoices(**{name: ()})
    with pytest.raises(ValueError, match="policy capacity is not supported"):
        PackingChoices(policies=(Policy.CAPACITY,))
    assert candidate.spec.data.context_window == WINDOW


def test_jobs() -> None:
    with pytest.raises(ValueError, match="jobs = 0 must be at least 1"):
        Workers(jobs=0)
