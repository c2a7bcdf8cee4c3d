"""Scale factors from records, literally, and profiles whose predictions are scaled by them."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cost.test_stage import first_plan, priced
from tests.plan.test_telemetry import record
from wlb.cost import (
    Kind,
    Provenance,
    Scales,
    calibrated_name,
    fit_scales,
    load_profile,
    save_profile,
    scaled_profile,
    stage_times,
    without_collectives,
)
from wlb.plan import TERMS, Moments, Telemetry

PROVENANCE = Provenance(kind=Kind.MEASURED, source="a run")
FACTORS = {
    "attention_forward": 1.3,
    "attention_backward": 0.8,
    "linear_forward": 2.0,
    "linear_backward": 2.0,
}


def records(*pairs: tuple[float, float]) -> list[Telemetry]:
    """A record for each (predicted, measured), the same for all terms."""
    return [record(terms=tuple((name, Moments.of(*pair)) for name in TERMS)) for pair in pairs]


def test_a_factor_is_the_weighted_median_of_records() -> None:
    """Ratios 1.3, 1.5, 1.2 of equal weight, and 9.0 of a step that was disturbed."""
    fit = fit_scales(records((1.0, 1.3), (1.0, 1.5), (1.0, 1.2), (0.5, 4.5)))
    assert fit.by_term == dict.fromkeys(TERMS, 1.3)
    assert (fit.num_records, fit.num_steps) == (4, 8)
    # A step of twice the work counts twice.
    assert fit_scales(records((1.0, 1.3), (3.0, 6.0), (1.0, 1.2))).linear_forward == 2.0
    assert fit_scales(records((1.0, 1.2), (1.0, 1.4))).linear_forward == pytest.approx(1.3)


def test_records_without_a_measured_term_are_refused() -> None:
    with pytest.raises(ValueError, match="no attention_forward time was measured in 0 records"):
        fit_scales([])
    empty = record(terms=tuple((name, Moments()) for name in TERMS))
    with pytest.raises(ValueError, match=r"train more steps or lower telemetry\.warmup_steps"):
        fit_scales([empty])


def test_drift_is_distance_from_one_in_either_direction() -> None:
    scales = Scales(**FACTORS, num_records=1, num_steps=1)
    assert scales.drifted(0.25) == ("attention_forward", "linear_forward", "linear_backward")
    assert scales.drifted(0.15) == TERMS
    assert scales.drifted(1.5) == ()


@pytest.mark.parametrize("collectives", [True, False])
@pytest.mark.parametrize("profile", ["h100", "cpu"])
def test_a_scaled_profile_predicts_scaled_times(profile: str, collectives: bool) -> None:
    cost = priced(profile)
    if not collectives:
        cost = without_collectives(cost)
    made = scaled_profile(
        cost.profile,
        **FACTORS,
        name="x",
        provenance=PROVENANCE,
        table=cost.table,
        collectives=collectives,
    )
    plan = first_plan()
    before = stage_times(plan, cost, virtual_stages=1)
    after = stage_times(plan, replace(cost, profile=made), virtual_stages=1)
    for name, factor in FACTORS.items():
        expected = getattr(before, f"{name}_ns") * factor
        assert getattr(after, f"{name}_ns") == pytest.approx(expected, rel=1e-4)


def test_linear_factors_are_the_layers() -> None:
    """Operators one by one, embedding, head and attention stay; a collective has one price for both
    passes, four calls forward and six backward."""
    profile = load_profile("h100")
    made = scaled_profile(
        profile,
        attention_forward=1.0,
        attention_backward=1.0,
        linear_forward=1.0,
        linear_backward=1.3,
        name="x",
        provenance=PROVENANCE,
    )
    assert made.gemm is profile.gemm
    assert made.head is profile.head
    assert (made.layer.forward_factor, made.layer.backward_factor) == (1.0, 1.3)
    for old, new in zip(profile.elementwise, made.elementwise, strict=True):
        assert new.forward_call_ns == old.forward_call_ns
        assert new.backward_call_ns == round(1.3 * old.backward_call_ns)
        assert new.backward_bytes_per_s == old.backward_bytes_per_s
    for old, new in zip(profile.collectives, made.collectives, strict=True):
        factor = (4 * 1.0 + 6 * 1.3) / 10 if old.op in ("all_gather", "reduce_scatter") else 1.0
        assert new.bytes_per_s == pytest.approx(old.bytes_per_s / factor)
    assert (made.attention[0].forward.values == profile.attention[0].forward.values).all()


def test_only_the_table_that_was_measured_is_scaled() -> None:
    profile = load_profile("cpu")
    made = scaled_profile(
        profile, **FACTORS, name="x", provenance=PROVENANCE, table=profile.attention[1]
    )
    same = [a is b for a, b in zip(made.attention, profile.attention, strict=True)]
    assert same == [i != 1 for i in range(len(same))]
    assert made.attention[1].provenance == PROVENANCE
    every = scaled_profile(profile, **FACTORS, name="x", provenance=PROVENANCE)
    assert not any(a is b for a, b in zip(every.attention, profile.attention, strict=True))


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    made = scaled_profile(load_profile("h100"), **FACTORS, name="x", provenance=PROVENANCE)
    path = tmp_path / "x.json"
    save_profile(path, made)
    again = load_profile(str(path))
    assert (again.name, again.provenance) == ("x", PROVENANCE)
    assert again.layer == made.layer
    for old, new in zip(made.attention, again.attention, strict=True):
        assert new.forward.values == pytest.approx(old.forward.values, rel=1e-3)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_that_are_none_are_refused(factor: float) -> None:
    factors = {**FACTORS, "linear_forward": factor}
    with pytest.raises(ValueError, match="factors of 'x' must be finite and above 0"):
        scaled_profile(load_profile("cpu"), **factors, name="x", provenance=PROVENANCE)


def test_names_count_up() -> None:
    names = ["cpu"]
    for _ in range(3):
        names.append(calibrated_name(names[-1]))
    assert names[1:] == ["cpu-calibrated", "cpu-calibrated-2", "cpu-calibrated-3"]
