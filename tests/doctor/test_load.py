"""Tests the speed of matrix products, and which ranks are called slow."""

import pytest
import torch

from tests.doctor.patient import facts, gpu
from wlb.doctor import load
from wlb.doctor.finding import Verdict


def test_products_are_timed_and_the_device_is_watched_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(load.SECONDS, "cpu", (0.0, 0.0))
    seen: list[int] = []
    cpu = torch.device("cpu")
    assert load.matrix_tflops(cpu, is_quick=True, meanwhile=lambda: seen.append(1)) > 0
    assert seen == [1]


def test_a_gpu_slower_than_the_others_is_named() -> None:
    ranks = [facts(rank, gpu=gpu(rank)) for rank in range(4)]
    found = load.speed_finding([700.0, 705.0, 520.0, 702.0], ranks)
    assert found.verdict == Verdict.WARN
    assert found.found == "520 to 705 TFLOP/s, median 71% of the peak of 989; slow: rank 2 (n1) 520"
    assert load.speed_finding([700.0, 705.0, 690.0, 702.0], ranks).verdict == Verdict.PASS
    # Cores are shared, so that ranks of a CPU are not judged.
    cpu = [facts(rank) for rank in range(4)]
    assert load.speed_finding([7.0, 7.0, 1.0, 7.0], cpu).verdict == Verdict.PASS
    assert load.speed_finding([0.0], cpu[:1]).verdict == Verdict.SKIP
