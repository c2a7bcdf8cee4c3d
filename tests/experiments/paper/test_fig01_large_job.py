"""Tests Figures 1 and 4: what the slowest GPU is compared with, and how windows are dealt."""

import numpy as np
import pytest

from experiments.paper.fig01 import large_job
from experiments.paper.fig01.large_job import in_order, over_others, slowest
from experiments.paper.fig04.__main__ import spreads
from wlb.planner import Planner

pytestmark = pytest.mark.full


def test_the_slowest_gpu_is_left_out_of_the_others() -> None:
    found = slowest(np.array([[1.0, 1.0], [1.0, 3.0]]), tp=1)
    assert (found.others, found.median, found.fastest) == (3.0, 3.0, 3.0)
    # With two TP ranks each, a second GPU is as slow as the slowest.
    assert slowest(np.array([1.0, 3.0]), tp=2).others == pytest.approx(3 / (5 / 3))
    assert over_others(np.array([[1.0, 2.0], [1.0, 4.0]]), tp=1).tolist() == [2.0, 4.0]


def test_windows_are_dealt_in_their_order() -> None:
    lengths = [100, 20, 90, 40, 60, 80, 10, 50]
    planner = Planner.for_lengths(lengths, context_window=128, num_micro_batches=4, cp=1, dp=2)
    steps = list(in_order(planner, 2))
    assert steps
    assert all(step.plan.pipelines.tolist() == [[0, 1], [2, 3]] for step in steps)
    assert len(steps[0].pipelines) == 2


def test_spreads_are_of_each_level() -> None:
    values = np.ones((2, 3, 2))
    values[1] *= 2
    values[..., 1] *= 1.5
    found = spreads(values)
    assert found["DP workers"] == (2.0, 2.0)
    assert found["PP workers of a DP worker"] == (1.0, 1.0)
    assert found["CP ranks of a group"] == (1.5, 1.5)


def test_every_system_recomputes_mlps_to_fit() -> None:
    for system in ("plain_4d", "paper", "wlb"):
        spec = large_job.spec_of(system)
        assert spec.training.recompute == "selective"
        assert spec.parallel.world_size == 8192
