"""Tests that a run learns a hidden device's prices, with the estimator and planner of training."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.online_prices.__main__ import LIMIT, STEPS, WRONG, learn, row_of
from experiments.online_prices.simulate import Case, Hidden, Learning, draw_hidden, run_spec
from tests.sets import full, nightly
from wlb.plan import AS_PROFILED, TERMS
from wlb.train.telemetry.prices import first_step_unseen

SEEDS = [*full(0, 1, 2), *nightly(*range(3, 20))]
"""The page of the experiment has all twenty."""


@pytest.mark.parametrize("attention", WRONG)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_priced_wrong_becomes_as_balanced_as_one_priced_right(
    seed: int, attention: float
) -> None:
    """Within 0.01 of its imbalance after 30 steps, with noise, outliers and a slow rank."""
    outcome = learn(seed, attention)
    learned, right, wrong = (outcome.mean(name) for name in ("learned", "right", "wrong"))
    assert (learned - right).max() <= LIMIT
    assert wrong[1] > right[1] + LIMIT  # there was something to learn
    true, held = outcome.case.hidden.prices.relative, outcome.held.relative
    for name in TERMS:
        assert held[name] == pytest.approx(true[name], rel=0.1)
    assert row_of(outcome, attention, seed)[-1] == "yes"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_prices_do_not_follow_a_slow_rank(device: str) -> None:
    """Wherever it is: alone in its CP group it makes the others wait, on CUDA in linear layers."""
    for rank in (0, 5):
        hidden = Hidden(prices=AS_PROFILED, slow_rank=rank, seed=rank)
        run = Learning(Case(spec=run_spec(ranks=8), hidden=hidden, device=device))
        held = [step.held.relative for step in run.steps(STEPS)]
        most = max(abs(factor - 1) for step in held for factor in step.values())
        assert most < 0.06


def test_changes_are_bounded_and_come_when_nobody_has_seen_the_step() -> None:
    spec = run_spec(ranks=8)
    run = Learning(Case(spec=spec, hidden=draw_hidden(3, attention=2.0, ranks=8)))
    steps = list(run.steps(STEPS))
    found = [s.held.relative["attention_forward"] for s in steps]
    ratios = np.array(found[1:]) / found[:-1]
    assert ratios.max() <= 1.5 + 1e-5
    changed = [s.step for s, ratio in zip(steps[1:], ratios, strict=True) if ratio != 1]
    first = spec.telemetry.warmup_steps + spec.cost.online_interval - 1
    assert changed[0] == first_step_unseen(spec, first)


def test_without_noise_prices_are_found_within_a_bin() -> None:
    hidden = replace(draw_hidden(4, attention=0.5), noise=0.0, outliers=0.0)
    run = Learning(Case(spec=run_spec(), hidden=hidden))
    held = list(run.steps(STEPS))[-1].held.relative
    for name in TERMS:
        assert held[name] == pytest.approx(hidden.prices.relative[name], rel=0.03)
