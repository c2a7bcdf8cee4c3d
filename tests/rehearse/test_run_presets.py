"""Tests that ranks of every preset run under every system, and take the memory that was planned."""

import pytest

from experiments.rehearsals.__main__ import LARGE, TABLE_1, corners, spec_of
from wlb.plan import UserError
from wlb.rehearse.run import ONE_PER_STAGE, rehearse_each
from wlb.rehearse.show import verdict
from wlb.spec import SYSTEMS

pytestmark = [pytest.mark.process, pytest.mark.full]

LEAST = 0.88
"""Tensors' peak over its estimate: plans that leave more than 12% unused waste memory."""


@pytest.mark.parametrize("preset", [*TABLE_1, LARGE])
def test_each_pipeline_position_runs_under_each_system(preset: str) -> None:
    """With one layer a stage; `python -m experiments.rehearsals` takes all layers."""
    specs = [spec_of(preset, system, layers=1) for system in SYSTEMS]
    ranks = [ONE_PER_STAGE if preset != LARGE else corners(spec.parallel) for spec in specs]
    found = rehearse_each(specs, ranks=ranks, steps=2, jobs=2)
    for result in found:
        assert not isinstance(result, UserError), result
        assert result.passed, verdict(result)
        for rank in result.ranks:
            (_, step) = rank.steps  # the first has no state of the optimiser at its peak
            assert LEAST * step.estimate_bytes <= step.peak_bytes <= step.estimate_bytes
            assert [wait.what for wait in step.host_waits] == ["tolist()"]
