"""Tests how a [packing] section becomes a packer: policies, caps given or from memory, refusals."""

from dataclasses import replace
from typing import Any

import pytest

from wlb.cost import FlopsWorkload
from wlb.memory import memory_estimate, memory_of_rank, token_caps
from wlb.packing import (
    BinMethod,
    BoundedPacker,
    CapacityPacker,
    FixedPacker,
    OriginalPacker,
    PriceRange,
    VarLenPacker,
    WindowCut,
    baseline_for,
    packer_for,
    with_s_max,
)
from wlb.packing.policies import caps_of
from wlb.spec import (
    SYSTEMS,
    ModelSpec,
    ParallelSpec,
    Policy,
    RunSpec,
    check,
    load,
    system_overrides,
)

GIB = 1 << 30
COST = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=10)


def spec(**packing: Any) -> RunSpec:
    base = RunSpec(parallel=ParallelSpec(pp=4, dp=2))
    base = replace(base, data=replace(base.data, context_window=1000))
    return check(replace(base, packing=replace(base.packing, **packing)))


def test_each_policy_has_its_packer_and_options() -> None:
    original = packer_for(spec(policy=Policy.ORIGINAL, window_cut=WindowCut.SHORT), COST)
    assert isinstance(original, OriginalPacker)
    assert (original.cut, original.num_micro_batches) == (WindowCut.SHORT, 8)
    fixed = packer_for(spec(policy=Policy.FIXED, window_batches=4), COST)
    assert isinstance(fixed, FixedPacker)
    assert fixed.window_batches == 4
    var_len = packer_for(spec(s_max=1.25, step_tokens=1.2, queue_thresholds=(0.5,)), COST)
    assert isinstance(var_len, VarLenPacker)
    assert (var_len.s_max, var_len.step_tokens) == (1250, 9600)
    assert (var_len.queue_thresholds, var_len.literal) == ((500,), False)
    bounded = packer_for(
        spec(policy=Policy.BOUNDED, s_max=2.0, step_tokens=1.5, max_delay=7, delay_price=0.5), COST
    )
    assert isinstance(bounded, BoundedPacker)
    assert (bounded.s_max, bounded.limits.step_tokens) == (2000, 12000)
    assert (bounded.max_delay, bounded.limits.price) == (7, 0.5)
    assert var_len.price_range == PriceRange()
    narrow = {"price_range": (0.9, 1.2), "s_max": 2.0, "step_tokens": 1.5}
    for policy in (Policy.BOUNDED, Policy.VAR_LEN):
        packer = packer_for(spec(policy=policy, **narrow), COST)
        assert isinstance(packer, BoundedPacker | VarLenPacker)
        assert packer.price_range == PriceRange(low=0.9, high=1.2)
    capacity = packer_for(
        spec(policy=Policy.CAPACITY, method="random_posid", window_batches=2), COST
    )
    assert isinstance(capacity, CapacityPacker)
    assert (capacity.method, capacity.pack_batches) == (BinMethod.NEXT_FIT, 2)
    assert capacity.bin_tokens == 1000


def test_another_number_of_micro_batches_leaves_the_global_batch_as_it_is() -> None:
    more = spec(policy=Policy.BOUNDED, s_max=2.0, step_tokens=1.5, num_micro_batches=12)
    assert (more.num_micro_batches, more.num_windows, more.tokens_per_step) == (12, 8, 8000)
    packer = packer_for(more, COST)
    assert isinstance(packer, BoundedPacker)
    limits = packer.limits
    assert (packer.num_micro_batches, limits.tokens_per_step, limits.step_tokens) == (
        12,
        8000,
        12000,
    )
    assert limits.price == pytest.approx(0.15 / 12**0.5)
    baseline = baseline_for(more, COST)
    assert (baseline.num_micro_batches, baseline.options.tokens_per_step) == (8, 8000)


@pytest.mark.parametrize("system", ["plain_4d", "fixed_4d", "paper"])
def test_the_papers_systems_have_as_many_micro_batches_as_windows(system: str) -> None:
    own = ["packing.policy=bounded", "packing.s_max=2.0", "packing.num_micro_batches=6"]
    assert load("7b_128k", own).num_micro_batches == 6
    for overrides in system_overrides(system, planned_gib=70):
        assert load("7b_128k", [*own, *overrides]).num_micro_batches == 4


def test_defaults_mean_what_their_help_says() -> None:
    var_len = packer_for(spec(), COST)
    assert isinstance(var_len, VarLenPacker)
    assert var_len.step_tokens is None
    bounded = packer_for(spec(policy=Policy.BOUNDED, s_max=1.5), COST)
    assert isinstance(bounded, BoundedPacker)
    assert bounded.limits.step_tokens == 8 * 1500  # only S_max limits a step
    assert bounded.limits.price == pytest.approx(0.15 / 8**0.5)
    assert bounded.price_range == PriceRange()
    robust = packer_for(spec(policy=Policy.BOUNDED, s_max=1.5, price_range=(0.7, 1.6)), COST)
    assert isinstance(robust, BoundedPacker)
    assert robust.limits.price == pytest.approx(0.1 / 8**0.5)
    assert baseline_for(spec(), COST).cut == WindowCut.ANYWHERE


@pytest.mark.parametrize(
    ("packing", "message"),
    [
        ({"s_max": 0.9}, "packing.s_max = 0.9 must be at least 1 context window"),
        (
            {"s_max": 1.0, "policy": Policy.BOUNDED},
            r"8 micro-batches of at most packing.s_max = 1.0 context windows have no room for "
            r"a global batch of 8 windows and for delayed documents; raise packing.s_max",
        ),
        (
            {"num_micro_batches": 6, "s_max": 1.25},
            "6 micro-batches of at most packing.s_max = 1.25 context windows have no room for a "
            "global batch of 8 windows; raise packing.s_max or packing.num_micro_batches",
        ),
        (
            {"num_micro_batches": 12, "policy": Policy.FIXED},
            "packing.num_micro_batches = 12 is not supported by packing.policy = fixed, which "
            "makes one micro-batch of each of the 8 windows; set",
        ),
        ({"num_micro_batches": -1}, "packing.num_micro_batches = -1 must be at least 0"),
        ({"step_tokens": 1.0}, "packing.step_tokens = 1.0 must be above 1 global batch"),
        ({"step_tokens": -2.0}, "packing.step_tokens = -2.0 must be at least 0"),
        ({"memory_gib": -1.0}, "packing.memory_gib = -1.0 must be at least 0"),
        ({"price_range": (0.7,)}, r"packing.price_range = \[0.7\] must be two factors"),
        ({"price_range": (1.1, 1.6)}, r"packing.price_range = \[1.1, 1.6\] must be two factors"),
        ({"price_range": (0.7, 0.9)}, r"packing.price_range = \[0.7, 0.9\] must be two factors"),
        ({"price_range": (0.0, 1.6)}, r"packing.price_range = \[0.0, 1.6\] must be two factors"),
        ({"delay_price": -0.1}, "packing.delay_price = -0.1 must be at least 0"),
        ({"max_delay": 0}, "packing.max_delay = 0 must be at least 1"),
        ({"window_batches": 0}, "packing.window_batches = 0 must be at least 1"),
        ({"delay_price": float("nan")}, "packing.delay_price = nan must be a finite number"),
        ({"queue_thresholds": (0.5, 0.2)}, "entry 1 must be above 0.5"),
    ],
)
def test_sections_that_cannot_work_are_refused(packing: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec(**packing)


def seven_b(**packing: Any) -> RunSpec:
    """Returns LLaMA2-7B at 128K on (TP 8, CP 2, PP 4, DP 1), with wide caps."""
    base = load("7b_128k", ["parallel.dp=1", "model.vocab_size=32000"])
    changes = {"policy": Policy.BOUNDED, "s_max": 2.0, "step_tokens": 0.0, **packing}
    return check(replace(base, packing=replace(base.packing, **changes)))


def test_memory_lowers_both_caps_until_the_estimate_fits() -> None:
    run = seven_b()
    wide, tight = (token_caps(run, memory_bytes=g * GIB) for g in (70, 60))
    assert tight.s_max <= wide.s_max <= run.s_max
    assert wide.step_tokens is not None
    assert tight.step_tokens is not None
    assert run.tokens_per_step < tight.step_tokens < wide.step_tokens
    # The step's cap, spread over its micro-batches, is what the estimate of rank 0 allows.
    each = tight.step_tokens // run.num_micro_batches
    assert memory_of_rank(run, pp_rank=0, micro_batch_tokens=each).total_bytes <= 60 * GIB
    more = memory_of_rank(run, pp_rank=0, micro_batch_tokens=int(each * 1.3)).total_bytes
    assert more > 60 * GIB


def test_without_a_pipeline_only_the_micro_batch_is_limited() -> None:
    base = RunSpec(
        model=ModelSpec(vocab_size=32000, hidden_size=1024, num_layers=8, ffn_hidden_size=4096)
    )
    data = replace(base.data, context_window=8192, num_windows=8)
    run = replace(base, data=data, packing=replace(base.packing, s_max=3.0))
    full = memory_estimate(run).total_bytes
    assert token_caps(run, memory_bytes=full + GIB // 8).step_tokens is None
    caps = token_caps(run, memory_bytes=int(full * 0.8))
    assert caps.s_max < run.s_max
    assert caps.step_tokens is None  # one micro-batch is under way at a time
    fits = memory_of_rank(run, pp_rank=0, micro_batch_tokens=caps.s_max).total_bytes
    assert fits <= full * 0.8


def test_caps_of_a_run() -> None:
    assert caps_of(seven_b(s_max=1.5, step_tokens=1.2)) == (196608, int(1.2 * 4 * 131072))
    limited = caps_of(seven_b(memory_gib=60.0))
    by_memory = token_caps(seven_b(), memory_bytes=60 * GIB)
    assert limited == (by_memory.s_max, by_memory.step_tokens)
    # What is configured holds where it is lower.
    assert caps_of(seven_b(memory_gib=80.0, step_tokens=1.1))[1] == int(1.1 * 4 * 131072)


@pytest.mark.parametrize(
    ("gib", "message"),
    [
        (2.0, "gradients, optimizer states and logits, but packing.memory_gib allows only 2.0 GiB"),
        (30.0, "packing.memory_gib = 30.0 has room for steps of at most"),
    ],
)
def test_memory_that_cannot_hold_a_step_is_refused(gib: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packer_for(seven_b(memory_gib=gib), COST)


def test_more_memory_is_never_refused_where_less_will_do() -> None:
    """There are several pipelines: T is less an eighth, and without T shorter micro-batches may
    do.
    """
    keys = ["packing.policy=bounded", "packing.s_max=1.5", "model.vocab_size=32000"]
    spec = load("7b_64k", [*keys, "parallel.dp=4", "pp.virtual_stages=2"])
    n = 8 * spec.parallel.dp
    spec = replace(spec, data=replace(spec.data, num_windows=n))
    is_known_to_fit = False
    for gib in [half / 2 for half in range(88, 160)]:
        made = replace(spec, packing=replace(spec.packing, memory_gib=gib))
        try:
            caps_of(made)
        except ValueError:
            assert not is_known_to_fit, gib
        else:
            is_known_to_fit = True
    assert is_known_to_fit


def test_s_max_is_what_fits_the_memory() -> None:
    keys = ["packing.policy=bounded", "packing.s_max=0", "model.vocab_size=32000"]
    pipeline = ["pp.schedule=1f1b", "pp.virtual_stages=1", "data.num_windows=16"]
    spec = load("7b_64k", [*keys, *pipeline])
    spec = replace(spec, parallel=replace(spec.parallel, dp=1))
    window, found = spec.data.context_window, dict[float, RunSpec]()
    for gib in (190.0, 57.0, 47.5):
        made = with_s_max(spec, planned_gib=gib)
        assert made.packing.memory_gib == gib
        s_max, step_tokens = caps_of(made)
        assert s_max == made.s_max
        assert step_tokens is None or step_tokens > made.tokens_per_step
        need = memory_estimate(made, micro_batch_tokens=s_max, step_tokens=step_tokens)
        assert need.total_bytes <= 1.0001 * gib * GIB
        found[gib] = made
    assert found[190.0].s_max == 2 * window  # no more, however much there is
    assert window < found[47.5].s_max < found[57.0].s_max < 2 * window
    # With what the user plans with there, the device does not matter.
    planned = replace(spec, packing=replace(spec.packing, memory_gib=47.5))
    assert with_s_max(planned, planned_gib=None) == found[47.5]
    # A number is left alone, and where nothing needs it any will do.
    assert with_s_max(found[47.5], planned_gib=10.0) is found[47.5]
    windows = replace(spec, packing=replace(spec.packing, policy=Policy.ORIGINAL))
    assert with_s_max(windows, planned_gib=None).packing.s_max == 1.0


@pytest.mark.parametrize(
    ("gib", "windows", "share"),
    [(40.85, 1.007, None), (43.7, 1.05, None), (44.65, 1.45, 1.1), (57.0, 2.0, 1.45)],
)
def test_s_max_leaves_room_for_a_step(gib: float, windows: float, share: float | None) -> None:
    """A short pipeline has a whole step under way, so that S_max and T share the memory."""
    keys = ["packing.policy=bounded", "packing.s_max=0", "model.vocab_size=32000"]
    spec = load("7b_64k", keys)
    spec = with_s_max(replace(spec, parallel=replace(spec.parallel, dp=1)), planned_gib=gib)
    _, step_tokens = caps_of(spec)
    assert spec.packing.s_max == pytest.approx(windows, abs=0.01)
    assert (step_tokens and step_tokens / spec.tokens_per_step) == pytest.approx(share, abs=0.01)


def test_s_max_without_memory_is_refused() -> None:
    unfilled = spec(s_max=0)
    with pytest.raises(ValueError, match=r"unknown on a CPU; .* set cluster\.memory_gib"):
        with_s_max(unfilled, planned_gib=None)
    with pytest.raises(
        ValueError, match=r"needs .* GiB for weights, gradients, optimizer states and"
    ):
        with_s_max(unfilled, planned_gib=0.001)
    with pytest.raises(ValueError, match=r"packing\.s_max = 0 .*set packing\.s_max"):
        packer_for(unfilled, COST)
    with pytest.raises(ValueError, match=r"packing\.s_max = 0\.5 must be at least 1 context"):
        spec(s_max=0.5)


def test_our_system_weighs_labels_alike_and_no_other_changes_the_normaliser() -> None:
    for system in SYSTEMS:
        for overrides in system_overrides(system, planned_gib=70):
            spec = load("7b_128k", overrides)
            assert (spec.training.loss_normalizer == "constant") == (system == "wlb")
