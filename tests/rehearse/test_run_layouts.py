"""Tests that all ranks of the layouts in the parity matrix agree on fake GPUs, at small width.

`tests/parity` compares values, over Gloo. Here streams, events, memory and the collectives' order
are those of CUDA and NCCL.
"""

from dataclasses import replace

import pytest

from tests.gpu import test_gpu
from tests.parity import test_fsdp, test_layouts
from tests.parity.case import Case, spec_of
from wlb.plan import UserError
from wlb.rehearse.run import rehearse_each
from wlb.rehearse.show import verdict
from wlb.spec import Dtype, Recompute, RunSpec, Schedule, TrainingSection

pytestmark = [pytest.mark.process, pytest.mark.full]

OVERLAP = (
    Case(tp=2, cp=2, overlap=True),
    Case(tp=2, overlap=True, recompute=Recompute.FULL),
    Case(tp=2, pp=2, v=2, overlap=True, schedule=Schedule.INTERLEAVED_ZERO_BUBBLE),
)
HSDP = (*test_fsdp.RESHARD, *test_fsdp.HSDP)
LARGE = tuple(case for case in test_layouts.CASES if case.world > 4)
SMALL = (*test_layouts.QUICK, *test_layouts.CASES, *test_gpu.CASES)


def rehearsed_spec(case: Case) -> RunSpec:
    """The parity case with the dtype and heads that GPU kernels take, and longer windows."""
    spec = spec_of(replace(case, head_dim=16))
    training = TrainingSection(recompute=case.recompute, dtype=Dtype.BFLOAT16)
    data = replace(spec.data, context_window=1024)
    evaluation = replace(spec.eval, steps=0)
    run = replace(spec.run, name=str(case))
    return replace(spec, data=data, training=training, eval=evaluation, run=run)


@pytest.mark.parametrize(
    "cases",
    [[case for case in dict.fromkeys(SMALL) if case not in LARGE], list(LARGE), [*HSDP, *OVERLAP]],
    ids=["small", "large", "hsdp"],
)
def test_all_ranks_of_a_layout_match_and_cannot_deadlock(cases: list[Case]) -> None:
    specs = [rehearsed_spec(case) for case in cases]
    for case, found in zip(cases, rehearse_each(specs, ranks="all", steps=1, jobs=2), strict=True):
        assert not isinstance(found, UserError), (case, found)
        assert found.passed, (case, verdict(found))
        assert found.proof.is_complete
        assert found.proof.num_communicators == found.proof.num_seen
        for rank in found.ranks:
            (step,) = rank.steps
            assert [wait.what for wait in step.host_waits] == ["tolist()"], case
