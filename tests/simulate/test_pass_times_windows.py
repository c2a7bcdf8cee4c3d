"""Tests prices of stages that hold different numbers of layers whose window of keys slides."""

from dataclasses import replace

import numpy as np
import pytest

from tests.simulate.runs import MODEL, cost_of, spec_of, steps_of
from wlb.cost import ProfiledWorkload, kernels_ns, over_gather_ns
from wlb.plan import IntArray
from wlb.simulate import PassKind, ShardedStep, Simulator
from wlb.simulate.pass_times import joined
from wlb.spec import ExchangeChoice, RunSpec, check

MIXED = [4096, 3000, 1096, 2048, 2048, 1000, 3000, 96]


def run_of(layers: tuple[int, ...], *, v: int) -> RunSpec:
    """Returns a run of 6 layers, of which the third and the sixth see all keys."""
    spec = spec_of(v=v, n=2)
    model = replace(MODEL, num_layers=6, sliding_window=256, full_every=3)
    sharding = replace(spec.sharding, exchange=ExchangeChoice.NEEDED)
    pipeline = replace(spec.pp, stage_layers=layers)
    return check(replace(spec, model=model, pp=pipeline, sharding=sharding))


def of_one_layer(
    cost: ProfiledWorkload, steps: tuple[ShardedStep, ...], spec: RunSpec
) -> tuple[IntArray, IntArray]:
    """Returns attention and exchange of a forward pass in one layer, by the plans' own prices."""
    (step,) = steps
    plans = [plan for pipeline in step.pipelines for plan in pipeline.shardings]
    rows = [n for pipeline in step.pipelines for n in pipeline.local_tokens]
    cp, layers = spec.parallel.cp, cost.num_layers_per_rank
    shape = (1, spec.parallel.dp, spec.micro_batches_per_pipeline)
    over = [
        over_gather_ns(plan, cost, num_rows=n * cp)[0] for plan, n in zip(plans, rows, strict=True)
    ]
    kernels = kernels_ns(plans, cost, cp=cp)[0].reshape(*shape, cp)
    return kernels / layers, np.array(over).reshape(shape) / layers


@pytest.mark.parametrize(
    ("layers", "v", "full", "sliding"),
    [((2, 4), 1, (0, 2), (2, 2)), ((1, 2, 1, 2), 2, (0, 1, 0, 1), (1, 1, 1, 1))],
)
def test_a_stage_takes_what_its_own_layers_take(
    layers: tuple[int, ...], v: int, full: tuple[int, ...], sliding: tuple[int, ...]
) -> None:
    spec = run_of(layers, v=v)
    assert spec.has_uneven_attention
    assert spec.stage_other_layers == sliding
    cost = cost_of(spec)
    steps = steps_of(spec, cost, MIXED)
    prices = Simulator(spec=spec, cost=cost).price(steps)
    all_full, all_slide = (
        of_one_layer(cost_of(replace(spec, model=model)), steps, spec)
        for model in (
            replace(spec.model, sliding_window=0, full_every=0),
            replace(spec.model, full_every=0),
        )
    )
    assert (all_full[0] - all_slide[0]).min() > 1000
    for stage, (num_full, num_sliding) in enumerate(zip(full, sliding, strict=True)):
        attention = prices.attention_ns(PassKind.FORWARD, stage)
        want = num_full * all_full[0] + num_sliding * all_slide[0]
        assert np.abs(attention - want).max() <= 4 * sum(layers)
    # Transfers that are hidden in part are not a sum over layers; all stages' sum is the mean's.
    exchanges = sum(prices.exchange_ns(PassKind.FORWARD, s) for s in range(len(layers)))
    assert np.abs(exchanges - sum(layers) * prices.exchange_forward_ns).max() <= len(layers)
    assert (prices.exchange_ns(PassKind.FORWARD, 0) < 0).any()
    # Steps are joined, and evened out, with the times of sliding layers.
    both = joined([prices, prices])
    assert (
        both.attention_ns(PassKind.BACKWARD, 1)[1] == prices.attention_ns(PassKind.BACKWARD, 1)
    ).all()
    even = prices.balanced().attention_ns(PassKind.FORWARD, 1)
    assert np.ptp(even) == 0
    assert even.mean() == pytest.approx(prices.attention_ns(PassKind.FORWARD, 1).mean(), abs=20)


def test_even_windows_are_priced_once() -> None:
    spec = run_of((3, 3), v=1)
    assert not spec.has_uneven_attention
    cost = cost_of(spec)
    prices = Simulator(spec=spec, cost=cost).price(steps_of(spec, cost, MIXED))
    assert prices.others is None
    assert prices.stage_key(0)[:2] == prices.stage_key(1)[:2]
