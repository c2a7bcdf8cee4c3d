"""Tests the wait of pipelines that meet in every layer, with literal prices."""

from dataclasses import replace

import numpy as np
import pytest

from wlb.simulate.order import PassKind
from wlb.simulate.pass_times import StepPrices, TermPrices

KINDS = (PassKind.FORWARD, PassKind.BACKWARD_INPUT, PassKind.BACKWARD_WEIGHT)


def prices(num_pipelines: int) -> StepPrices:
    """Returns a step of two micro-batches on two pipelines: 100 and 200 tokens at a time, then 100
    each; a token takes 2 ns of its own and 1 ns of experts', in two layers.
    """
    tokens = np.array([[[100, 100], [200, 100]]])
    attention = np.array([[[[50, 30], [0, 0]], [[10, 20], [40, 0]]]])
    none = np.zeros_like(tokens)
    return StepPrices(
        tokens=tokens,
        attention_forward_ns=attention,
        attention_backward_ns=2 * attention,
        exchange_forward_ns=none,
        exchange_backward_ns=none,
        linear=({kind: TermPrices(per_token={"gemm": 3.0}) for kind in KINDS},),
        ends={},
        message={},
        kind_layers=((2, 2),),
        expert_layers=(2, 2),
        pipelines_per_ep_group=num_pipelines,
        pooled=dict.fromkeys(KINDS, 1.0),
    )


def test_a_pass_takes_its_slowest_member_and_the_mean_of_experts_rows() -> None:
    apart, together = prices(1), prices(2)
    forward = apart.pass_ns(PassKind.FORWARD, 0)[0]
    assert forward.tolist() == [[2 * (50 + 300), 2 * 300], [2 * (20 + 600), 2 * (40 + 300)]]
    # Own work of place 0 is 50 + 200 and 20 + 400, of place 1 0 + 200 and 40 + 200; experts have
    # 150 and 100 rows a rank.
    met = together.pass_ns(PassKind.FORWARD, 0)[0]
    assert met.tolist() == [[2 * (420 + 150), 2 * (240 + 100)]] * 2
    backward = together.pass_ns(PassKind.BACKWARD_INPUT, 0)[0]
    assert backward.tolist() == [[2 * (440 + 150), 2 * (280 + 100)]] * 2
    weights = [p.pass_ns(PassKind.BACKWARD_WEIGHT, 0).tolist() for p in (apart, together)]
    assert weights[0] == weights[1]


def test_pipelines_meet_where_there_are_experts() -> None:
    """Of two stages of two layers one has MLPs alone, the other one of both kinds."""
    dense = {kind: TermPrices(per_token={"gemm": 5.0}) for kind in KINDS}
    routed = prices(2).linear
    mixed = replace(
        prices(2), linear=(*routed, dense), kind_layers=((0, 1), (2, 1)), expert_layers=(0, 1)
    )
    assert mixed.stages_with_experts == {1}
    first, second = (mixed.pass_ns(PassKind.FORWARD, stage)[0].tolist() for stage in (0, 1))
    assert first == [[2 * (50 + 500), 2 * 500], [2 * (20 + 1000), 2 * (40 + 500)]]
    # A layer of each kind: 2 x 20 of attention, 200 tokens of 5 and 2 ns, and 150 of experts.
    assert second == [[40 + 1400 + 150, 80 + 700 + 100]] * 2
    # Of the mean layer, experts' own work is 2 ns of a token and an MLP's 5 in 3 of 4 layers.
    mean = {kind: TermPrices(per_token={"gemm": (3 + 3 * 5) / 4}) for kind in KINDS}
    own = replace(mixed, linear=(mean,), kind_layers=((2, 2),))
    assert mixed.layer_wait == pytest.approx(own.layer_wait)


def test_the_wait_is_the_slowest_rank_over_the_mean() -> None:
    # Forward, CP ranks of both pipelines: 250 230 | 410 420 and 200 200 | 240 200.
    slowest, mean = 420 + 240, (250 + 230 + 410 + 420) / 4 + (200 + 200 + 240 + 200) / 4
    # Backward, with twice the attention.
    slowest += 440 + 280
    mean += (300 + 260 + 420 + 440) / 4 + (200 + 200 + 280 + 200) / 4
    assert prices(2).layer_wait == pytest.approx(slowest / mean)
    alone = prices(1).layer_wait
    assert 1 < alone < prices(2).layer_wait
    even = replace(
        prices(2),
        tokens=np.full((1, 2, 2), 100),
        attention_forward_ns=np.ones((1, 2, 2, 2), np.int64),
        attention_backward_ns=np.ones((1, 2, 2, 2), np.int64),
    )
    assert even.layer_wait == 1.0
