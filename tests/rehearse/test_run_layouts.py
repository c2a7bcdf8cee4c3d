"""Tests that all ranks of the layouts in the parity matrix agree on fake GPUs, at small width.

`tests/parity` compares values, over Gloo. Here streams, events, memory and the collectives' order
are those of CUDA and NCCL.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from experiments.beyond.rehearsals.__main__ import FORCED
from tests.gpu import test_gpu
from tests.parity import test_fsdp, test_hybrids, test_layouts
from tests.parity.case import Case, spec_of
from tests.rehearse.case import ON_ALL_AXES, SMALL
from wlb.cli.system import with_system
from wlb.plan import KeyExchange, UserError
from wlb.rehearse.run import rehearse_each
from wlb.rehearse.show import verdict
from wlb.spec import SYSTEMS, Dtype, Recompute, RunSpec, TrainingSection, load

pytestmark = [pytest.mark.process, pytest.mark.full]

LAYOUTS = dict.fromkeys(
    (
        *test_layouts.QUICK,
        *test_layouts.CASES,
        *test_layouts.NIGHTLY,
        *test_layouts.MORE,
        *test_gpu.CASES,
    )
)
ALTERNATIVES = (*SYSTEMS, *FORCED)


def rehearsed_spec(case: Case) -> RunSpec:
    """The parity case with the dtype and heads that GPU kernels take, and longer windows. Compiled
    layers are those of inductor, whose graphs a rehearsal knows.
    """
    spec = spec_of(replace(case, head_dim=16))
    training = TrainingSection(
        recompute=case.recompute, dtype=Dtype.BFLOAT16, compile=bool(case.compile_backend)
    )
    data = replace(spec.data, context_window=1024)
    evaluation = replace(spec.eval, steps=0)
    # Folders of runs are named after them, and a file system has a longest name.
    run = replace(spec.run, name=str(case)[:100])
    return replace(spec, data=data, training=training, eval=evaluation, run=run)


LARGE = [case for case in LAYOUTS if case.world > 4]
APART = [case for case in LAYOUTS if case.stage_layers or case.weight_delay > 1]
FEW = [next(case for case in test_layouts.QUICK if case.exchange == KeyExchange.NEEDED)]
"""Keys by need; tests/rehearse/test_run.py has TP x CP x PP. Each layout takes ten seconds."""
AXES = [case for case in (*test_layouts.QUICK, *APART) if case not in FEW]
"""Every axis alone on four ranks, and options of stages that no large layout has."""
COMBINED = [case for case in LARGE if case.exchange == KeyExchange.NEEDED]
"""Three axes together, with what a large layout may have besides. All others are nightly."""
SMALL_ONES = [case for case in LAYOUTS if case not in (*LARGE, *FEW, *AXES)]
HYBRIDS = [
    test_hybrids.hybrid(tp=2, cp=2),
    test_hybrids.hybrid(cp=2, recompute=Recompute.FULL, exchange=KeyExchange.NEEDED),
    test_hybrids.hybrid(pp=2, cp=2, v=2, own_first=True),
]
LARGE_ONES = [case for case in LARGE if case not in COMBINED]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(FEW, id="few"),
        pytest.param(AXES, id="axes-and-stages", marks=pytest.mark.nightly),
        pytest.param(COMBINED, id="three-axes", marks=pytest.mark.nightly),
        pytest.param(LARGE_ONES, id="large", marks=pytest.mark.nightly),
        pytest.param(test_fsdp.CASES, id="fsdp", marks=pytest.mark.nightly),
        pytest.param(SMALL_ONES, id="small", marks=pytest.mark.nightly),
        pytest.param(HYBRIDS[:1], id="hybrid"),
        pytest.param(HYBRIDS[1:], id="hybrids", marks=pytest.mark.nightly),
    ],
)
def test_all_ranks_of_a_layout_match_and_cannot_deadlock(cases: Sequence[Case]) -> None:
    specs = [rehearsed_spec(case) for case in cases]
    for case, found in zip(cases, rehearse_each(specs, ranks="all", steps=1, jobs=2), strict=True):
        assert not isinstance(found, UserError), (case, found)
        assert found.passed, (case, verdict(found))
        assert found.proof.is_complete
        assert found.proof.num_communicators == found.proof.num_seen
        for rank in found.ranks:
            (step,) = rank.steps
            assert [wait.what for wait in step.host_waits] == ["tolist()"], case


@pytest.mark.nightly
def test_systems_differ_in_the_sizes_of_messages_not_in_their_order() -> None:
    """So the experiment's rehearsals of all ranks take one system. Recompute (wlb:2) gathers again;
    it and the first are proven here over all ranks.
    """
    specs = [
        load("550m_64k", with_system("550m_64k", [*SMALL, *ON_ALL_AXES], name))
        for name in ALTERNATIVES
    ]
    ranks = ["all" if name in ("plain_4d", "wlb:2") else "0,7" for name in ALTERNATIVES]
    orders: dict[str, list[object]] = {}
    for name, found in zip(
        ALTERNATIVES, rehearse_each(specs, ranks=ranks, steps=1, jobs=2), strict=True
    ):
        assert not isinstance(found, UserError), (name, found)
        assert found.passed, (name, verdict(found))
        orders[name] = [
            [(m.kind, m.communicator, m.op) for m in result.messages]
            for result in found.ranks
            if result.rank in (0, 7)
        ]
    recomputed = orders.pop("wlb:2")
    assert all(order == orders["plain_4d"] for order in orders.values())
    assert all(len(a) > len(b) for a, b in zip(recomputed, orders["wlb"], strict=True))
