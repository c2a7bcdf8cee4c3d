"""Tests prices of GPUs with another power limit and other memory."""

from pathlib import Path

import numpy as np
import pytest

from kernels_profile import derive
from kernels_profile.derive import (
    H100_500W,
    H100_SXM,
    PRODUCT_SPEED,
    GpuVariant,
    clock_ratio,
    profile_of_runs,
    profile_of_variant,
    with_product_speed,
    with_speed,
)
from wlb.cost import Collective, Elementwise, load_profile
from wlb.cost.profile_file import save_profile
from wlb.plan import UserError


def test_the_clock_is_the_cube_root_of_what_the_limit_leaves() -> None:
    """500 W leave 300 W beside the 200 W that no clock saves; 700 W leave 500 W."""
    assert clock_ratio(H100_500W, measured=H100_SXM) == pytest.approx(0.6 ** (1 / 3))
    assert clock_ratio(H100_SXM, measured=H100_SXM) == 1


def test_products_follow_the_clock_and_copies_the_memory() -> None:
    own = load_profile("h100")
    slow = profile_of_variant(own, H100_500W)
    clock, memory = 0.6 ** (1 / 3), 2.4 / 3.35
    assert np.allclose(slow.gemm.forward.values, own.gemm.forward.values * clock)
    assert np.allclose(slow.attention[0].backward.values, own.attention[0].backward.values * clock)
    assert slow.head.tflops == pytest.approx(own.head.tflops * clock)
    assert slow.head.backward_bytes_per_s == pytest.approx(own.head.backward_bytes_per_s * memory)
    rates = [p.elementwise_of(Elementwise.NORM).forward_bytes_per_s for p in (own, slow)]
    assert rates[1] == pytest.approx(rates[0] * memory)
    assert slow.collective(Collective.ALL_GATHER, span_ranks=8) == own.collective(
        Collective.ALL_GATHER, span_ranks=8
    )
    assert (slow.name, slow.provenance.kind) == ("h100_500w", "assumed")
    assert (slow.device, slow.power_limit_w) == (own.device, 500.0)


def test_the_measured_board_keeps_its_profile() -> None:
    own = load_profile("h100")
    assert profile_of_variant(own, H100_SXM) is own


def test_products_and_attention_are_scaled_apart() -> None:
    own = load_profile("h100")
    found = with_product_speed(own, 0.5)
    assert float(found.gemm.backward.values[0, 0]) == 300.0
    assert found.head.tflops == 300.0
    assert found.attention is own.attention
    table = with_speed(own.attention[0], 0.5, own.provenance)
    assert np.array_equal(table.forward.values, own.attention[0].forward.values * 0.5)


@pytest.mark.parametrize(
    ("power_w", "memory", "said"), [(200.0, 1e12, "power_w = 200"), (700.0, 0.0, "memory_bytes")]
)
def test_boards_that_cannot_be_are_refused(power_w: float, memory: float, said: str) -> None:
    with pytest.raises(UserError, match=said):
        GpuVariant(name="board", power_w=power_w, memory_bytes_per_s=memory)


@pytest.mark.parametrize(
    ("name", "variant"), [("h100_runs", H100_SXM), ("h100_runs_500w", H100_500W)]
)
def test_shipped_profiles_are_what_the_command_writes(
    tmp_path: Path, name: str, variant: GpuVariant
) -> None:
    save_profile(tmp_path / "made.json", profile_of_runs(variant, name=name))
    shipped = Path(derive.__file__).parent / f"{name}.json"
    assert (tmp_path / "made.json").read_text() == shipped.read_text()


def test_products_of_runs_are_slower_and_attention_is_as_measured() -> None:
    measured, runs = load_profile("h100_sxm"), load_profile("h100_runs")
    ratio = runs.gemm.forward.values / measured.gemm.forward.values
    assert np.allclose(ratio, PRODUCT_SPEED, rtol=1e-3)
    forwards = [profile.attention[0].forward.values for profile in (runs, measured)]
    assert np.allclose(*forwards, rtol=1e-3)
    assert runs.provenance.kind == "published"
