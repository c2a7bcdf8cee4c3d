"""Tests which kernel computes the recurrence of linear layers, and the refusals."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from wlb.kernels import linear_package
from wlb.kernels.linear_package import choose_linear
from wlb.plan import UserError
from wlb.spec import LinearBackend

AUTO, TORCH, PACKAGE = LinearBackend
GPU: dict[str, Any] = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_size": 128}


def chunk_gated_delta_rule(
    q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any = None, **options: Any
) -> None:
    """Has no initial states, and no sequences of any length."""


def whole(
    *,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: Any = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
) -> None:
    """As the version has it that was read."""


def install(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = function  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)


def test_auto_takes_the_package_where_it_can_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, whole)
    expected = (PACKAGE, "linear-attention kernel flash_linear_attention (auto)")
    assert choose_linear(AUTO, **GPU) == expected
    assert choose_linear(PACKAGE, **GPU)[0] == PACKAGE
    assert choose_linear(TORCH, **GPU) == (
        TORCH,
        "linear-attention kernel torch (kernels.linear = torch)",
    )


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"device": torch.device("cpu")},
            "float16 on CUDA are supported, not torch.bfloat16 on cp",
        ),
        ({"dtype": torch.float32}, "float16 on CUDA are supported, not torch.float32 on cuda"),
        ({"head_size": 512}, "heads of 512 channels are too large; at most 256 are supported"),
        ({"deterministic": True}, "each process may tune the kernels differently"),
        ({"compiled": True}, "cannot trace the package's function"),
    ],
)
def test_it_is_refused_by_name_and_auto_takes_torch(
    changed: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, whole)
    backend, line = choose_linear(AUTO, **GPU | changed)
    assert backend == TORCH
    assert line.startswith(f"linear-attention kernel torch (auto; not {PACKAGE}: ")
    assert why in line
    refused = (
        f"kernels.linear = {PACKAGE} cannot be used for this run: .* Set kernels.linear = auto or"
    )
    with pytest.raises(UserError, match=refused) as error:
        choose_linear(PACKAGE, **GPU | changed)
    assert why in str(error.value)


def test_a_version_without_initial_states_or_lengths_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, chunk_gated_delta_rule)
    lacks = (
        "does not have the parameters initial_state, "
        "output_final_state, cu_seqlens, cu_seqlens_cpu. "
        f"Install the supported version {linear_package.PACKAGE.supported}"
    )
    with pytest.raises(UserError, match=lacks) as error:
        choose_linear(PACKAGE, **GPU)
    assert str(error.value).endswith(
        "install the package: pip install flash-linear-attention==0.6.0"
    )
    assert lacks in choose_linear(AUTO, **GPU)[1]


def test_a_missing_package_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("wlb.kernels.package.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    with pytest.raises(UserError, match="package fla-core is not installed"):
        choose_linear(PACKAGE, **GPU)
