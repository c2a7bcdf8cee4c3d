"""Tests that layouts with experts compute what one process computes (fp32, CPU, Gloo)."""

import pytest

from tests.parity.body import expect_parity, parity
from tests.parity.case import Case
from tests.sets import full
from wlb.launch.local import run_local
from wlb.plan import KeyExchange
from wlb.spec import ExpertsSpec, Recompute, Schedule, Scoring

pytestmark = pytest.mark.dist

F1B = Schedule.ONE_F_ONE_B
IZB = Schedule.INTERLEAVED_ZERO_BUBBLE
NEEDED = KeyExchange.NEEDED

PLAIN = ExpertsSpec(num=8, per_token=2, hidden_size=16)
SHARED = ExpertsSpec(num=8, per_token=3, hidden_size=16, shared=1, scoring=Scoring.SIGMOID)

QUICK = [
    Case(cp=2, experts=PLAIN, ep=2),
    Case(dp=2, pp=2, experts=SHARED, ep=2, v=2, schedule=IZB, num_micro_batches=8),
]
CASES = [
    # Experts as other weights: replicated, sharded by FSDP over all of dp x cp x tp.
    Case(pp=2, schedule=F1B, experts=PLAIN),
    Case(cp=2, experts=SHARED, row_multiple=3),
    Case(tp=2, experts=SHARED),
    Case(tp=2, cp=2, pp=2, v=2, experts=SHARED, exchange=NEEDED, recompute=Recompute.FULL),
    Case(dp=2, experts=PLAIN, num_micro_batches=8, reshard=True),
    # Expert parallelism over CP, DP and TP.
    Case(cp=2, pp=2, experts=PLAIN, ep=2, v=2),
    Case(tp=2, experts=SHARED, ep=2),
    Case(cp=2, dp=2, experts=PLAIN, ep=4, num_micro_batches=8, row_multiple=4),
    Case(cp=2, dp=2, experts=SHARED, ep=2, num_micro_batches=8, reshard=True, prefetch=2),
    Case(cp=2, pp=2, dp=2, experts=PLAIN, ep=2, v=2, schedule=IZB, num_micro_batches=8),
    Case(cp=2, pp=2, dp=2, experts=PLAIN, ep=4, v=2, schedule=IZB, num_micro_batches=8),
    Case(cp=2, pp=2, dp=2, experts=SHARED, ep=4, v=2, num_micro_batches=8, own_first=True),
    Case(cp=2, pp=2, dp=2, experts=PLAIN, ep=4, schedule=F1B, num_micro_batches=8),
    Case(tp=2, cp=2, pp=2, experts=SHARED, ep=4, v=2, schedule=IZB),
    Case(cp=2, pp=2, experts=PLAIN, ep=2, recompute=Recompute.FULL, schedule=F1B),
    Case(cp=2, dp=2, experts=SHARED, ep=4, recompute=Recompute.FULL, num_micro_batches=8),
    Case(cp=2, pp=2, experts=SHARED, ep=2, recompute=Recompute.SELECTIVE, v=2),
    Case(
        pp=2,
        dp=2,
        experts=PLAIN,
        ep=2,
        v=2,
        recompute=Recompute.SELECTIVE,
        schedule=IZB,
        num_micro_batches=8,
    ),
]


@pytest.mark.parametrize("case", [*QUICK, *full(*CASES)], ids=str)
def test_layout_equals_one_process(case: Case) -> None:
    results = run_local(parity, case.world, case, start_group=True, timeout_s=600)
    for result in results:
        expect_parity(result)
