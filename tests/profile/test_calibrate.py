"""Tests scale factors from records against literal values, and profiles scaled by them."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cost.test_stages import first_plan, priced
from tests.plan.test_telemetry import record
from wlb.cost import (
    Provenance,
    ProvenanceKind,
    StageLayers,
    end_times_ns,
    load_profile,
    save_profile,
    stage_times,
    without_collectives,
)
from wlb.plan import TERMS, Moments, Telemetry
from wlb.profile.calibrate import Scales, calibrated_name, fit_scales, scaled_profile

PROVENANCE = Provenance(kind=ProvenanceKind.MEASURED, source="a run")
FACTORS = {
    "attention_forward": 1.3,
    "attention_backward": 0.8,
    "linear_forward": 2.0,
    "linear_backward": 2.0,
}


def records(*pairs: tuple[float, float]) -> list[Telemetry]:
    """Returns a record for each (predicted, measured), the same for all terms."""
    return [record(terms=tuple((name, Moments.of(*pair)) for name in TERMS)) for pair in pairs]


def test_a_factor_is_the_weighted_median_of_records() -> None:
    """Ratios are 1.3, 1.5 and 1.2 of equal weight, and 9.0 of a step that was disturbed."""
    fit = fit_scales(records((1.0, 1.3), (1.0, 1.5), (1.0, 1.2), (0.5, 4.5)))
    assert fit.by_term == dict.fromkeys(TERMS, 1.3)
    assert (fit.num_records, fit.num_steps) == (4, 8)
    # A step of twice the work counts twice.
    assert fit_scales(records((1.0, 1.3), (3.0, 6.0), (1.0, 1.2))).linear_forward == 2.0
    assert fit_scales(records((1.0, 1.2), (1.0, 1.4))).linear_forward == pytest.approx(1.3)


def test_records_without_a_measured_term_are_refused() -> None:
    with pytest.raises(
        ValueError, match="none of 0 records after warm-up has a time of attention_forward"
    ):
        fit_scales([])
    empty = record(terms=tuple((name, Moments()) for name in TERMS))
    with pytest.raises(ValueError, match=r"train more steps or lower telemetry\.warmup_steps"):
        fit_scales([empty])


def test_drift_is_a_terms_distance_from_the_others() -> None:
    def drifted(threshold: float, *factors: float) -> tuple[str, ...]:
        by_term = dict(zip(TERMS, factors, strict=True))
        return Scales(**by_term, num_records=1, num_steps=1).drifted(threshold)

    assert drifted(0.15, 1.3, 1.0, 1.0, 1.0) == ("attention_forward",)
    assert drifted(0.15, 1.0, 0.8, 1.0, 1.0) == ("attention_backward",)
    assert drifted(0.15, 2.6, 2.0, 2.0, 2.0) == ("attention_forward",)
    assert drifted(0.15, 2.0, 2.0, 2.0, 2.0) == ()  # a slower machine plans alike
    assert Scales(**FACTORS, num_records=1, num_steps=1).common == 1.65
    relative = Scales(**FACTORS, num_records=1, num_steps=1).relative
    assert relative["attention_forward"] == 1.3 / 2.0
    assert relative["linear_backward"] == 2.0 / 1.3


def cells(slope: float, intercept: float, predicted: tuple[float, ...]) -> Moments:
    return sum((Moments.of(x, intercept + slope * x) for x in predicted), Moments())


def test_linear_terms_are_a_line_where_micro_batches_differ() -> None:
    varied = (0.010, 0.020, 0.040)
    alike = (0.020, 0.0201, 0.0199)
    for predicted, slope, extra_ns in ((varied, 1.8, 3e6), (alike, 1.8 + 0.003 / 0.02, 0.0)):
        moments = cells(1.8, 0.003, predicted)
        fit = fit_scales([record(terms=tuple((name, moments) for name in TERMS))] * 3)
        for name in ("linear_forward", "linear_backward"):
            assert getattr(fit, name) == pytest.approx(slope, rel=1e-4)
            assert getattr(fit, f"{name}_extra_ns") == pytest.approx(extra_ns, rel=1e-4, abs=1)
        assert fit.attention_forward == pytest.approx(moments.measured_s / moments.predicted_s)


def test_what_a_micro_batch_costs_does_not_become_a_price_per_token() -> None:
    cost = priced("cpu")
    made = scaled_profile(
        cost.profile,
        **dict.fromkeys(TERMS, 1.0),
        linear_forward_extra_ns=5e5,
        linear_backward_extra_ns=7e5,
        name="x",
        provenance=PROVENANCE,
    )
    slower = replace(cost, profile=made)
    assert slower.linear_ns([1000]).tolist() == cost.linear_ns([1000]).tolist()
    layers = cost.num_layers_per_rank
    extra = [a - b for a, b in zip(slower.linear.call_ns, cost.linear.call_ns, strict=True)]
    assert extra == pytest.approx([5e5 * layers, 7e5 * layers])


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
    layers = StageLayers(counts=(cost.num_layers_per_rank,))
    before = stage_times(plan, cost, layers)
    after = stage_times(plan, replace(cost, profile=made), layers)
    for name, factor in FACTORS.items():
        expected = getattr(before, f"{name}_ns") * factor
        assert getattr(after, f"{name}_ns") == pytest.approx(expected, rel=1e-4)


def test_head_and_loss_have_a_factor_of_their_own() -> None:
    """It is a weighted median too. It is 1 for records that did not predict it, and cannot
    drift.
    """
    terms = tuple((name, Moments.of(1.0, 1.0)) for name in TERMS)
    seen = [record(terms=terms, head_s=head_s, predicted_head_s=0.2) for head_s in (0.1, 0.12, 0.9)]
    assert fit_scales([record(terms=terms)]).head == 1.0
    fit = fit_scales([*seen, record(terms=terms)])
    assert fit.head == pytest.approx(0.6)
    assert fit.drifted(0.15) == ()
    cost = priced("cpu")
    made = scaled_profile(
        cost.profile, **dict.fromkeys(TERMS, 1.0), head=0.5, name="x", provenance=PROVENANCE
    )
    embedding, head = end_times_ns(first_plan(), cost)
    after = end_times_ns(first_plan(), replace(cost, profile=made))
    assert after == pytest.approx((embedding, head / 2), abs=1)


def test_linear_factors_are_the_layers() -> None:
    """Single operators, embedding, attention and a head that was not measured keep their prices.

    A collective has one price for both passes, for four calls forward and six backward.
    """
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
        factor = 1.0 if old.op == "embedding" else 1.3
        assert new.forward_call_ns == old.forward_call_ns
        assert new.backward_call_ns == round(factor * old.backward_call_ns)
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
    assert made.attention[0].provenance == PROVENANCE  # first: what `auto` means without a device
    others = [table for i, table in enumerate(profile.attention) if i != 1]
    assert all(a is b for a, b in zip(made.attention[1:], others, strict=True))
    every = scaled_profile(profile, **FACTORS, name="x", provenance=PROVENANCE)
    assert not any(a is b for a, b in zip(every.attention, profile.attention, strict=True))


def test_a_kernel_that_was_priced_as_another_gets_a_table_of_its_own() -> None:
    """Kernels that share a table with the measured one keep theirs."""
    profile = load_profile("h100")
    table = profile.attention[0]
    for backend in ("sdpa", "torch_varlen"):
        made = scaled_profile(
            profile, **FACTORS, name="x", provenance=PROVENANCE, table=table, backend=backend
        )
        slower = made.table(backend=backend, head_dim=128, num_heads=8)
        assert slower.forward.values * 1.3 == pytest.approx(table.forward.values)
        for other in {"torch_varlen", "flash_attention_2", "flash_attention_3"} - {backend}:
            same = made.table(backend=other, head_dim=128, num_heads=8)
            before = profile.table(backend=other, head_dim=128, num_heads=8)
            assert (same.forward.values == before.forward.values).all()
            assert same.provenance == before.provenance
        # What torch-free commands take where the run says `auto`.
        assert made.table(head_dim=128, num_heads=8) is slower


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
