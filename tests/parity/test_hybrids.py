"""Tests that layouts of models with linear layers compute what one process does (fp32, CPU, Gloo).

The documents of `tests.parity.case` are short for chunks of 64 tokens, but CP ranks cut them.
"""

from dataclasses import replace

import pytest

from tests.parity.body import expect_equal_to_one_process
from tests.parity.case import Case
from tests.sets import full, nightly
from wlb.plan import KeyExchange
from wlb.spec import ExpertsSpec, LinearSpec, Recompute, Schedule

pytestmark = pytest.mark.dist

LINEAR = LinearSpec(num_key_heads=4, num_value_heads=8, key_head_dim=4, value_head_dim=6)
# A larger epsilon than models have: outputs of a document's first tokens may be near zero, and the
# norm behind them magnifies their rounding. In one process gradients are then 2e-6 off float64's.
MODEL = (
    ("full_every", 2),
    ("linear", LINEAR),
    ("rotary_share", 0.5),
    ("norm_eps", 1e-2),
    ("init_std", 0.1),
)
HYBRID = Case(keys=MODEL, parts=("attention_gate", "qk_norm", "zero_centred_norms"))
EXPERTS = ExpertsSpec(num=8, per_token=2, hidden_size=16, shared=1, shared_gate=True)
IZB = Schedule.INTERLEAVED_ZERO_BUBBLE


def hybrid(**changed: object) -> Case:
    return replace(HYBRID, **changed)  # pyright: ignore[reportArgumentType]


CASES = [
    hybrid(cp=2),
    *full(
        hybrid(tp=2, row_multiple=3),
        hybrid(cp=4, strategy="per_sequence"),
        hybrid(cp=2, recompute=Recompute.FULL, exchange=KeyExchange.NEEDED),
        hybrid(tp=2, cp=2, recompute=Recompute.SELECTIVE),
        hybrid(pp=2, cp=2, v=2, own_first=True),
        hybrid(dp=2, cp=2, num_micro_batches=8, reshard=True),
        hybrid(cp=2, experts=EXPERTS, ep=2),
        hybrid(tp=2, pp=2, v=2, schedule=IZB),
        hybrid(cp=2, compile_backend="aot_eager"),
    ),
    *nightly(
        hybrid(tp=2, cp=2, pp=2, experts=EXPERTS, ep=4, ep_stages=2, v=2, schedule=IZB),
        hybrid(
            cp=2,
            pp=2,
            experts=replace(EXPERTS, dense_layers=(0, 1)),
            ep=2,
            recompute=Recompute.FULL,
        ),
        hybrid(cp=4, pp=2, v=2, keys=(("full_every", 4), *MODEL[1:])),
        # More TP ranks than KV heads, of which only attention has copies.
        hybrid(tp=4, keys=(*MODEL, ("num_kv_heads", 2))),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts_equal_one_process(case: Case) -> None:
    expect_equal_to_one_process(case)
