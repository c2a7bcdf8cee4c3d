"""Tests the three FlashAttention packages by stand-ins that take the real signatures.

The real packages need a GPU and are not among the test requirements; `flash_stand_ins` takes their
place. These tests show that calls fit the signatures and mean the right thing. That the kernels
compute it is left to the parity tests of test_op_attend.py, on a GPU.
"""

import sys
from importlib import metadata
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.flash_stand_ins import CALLS, STAND_INS, flash2_forward
from tests.words import lacks
from wlb.kernels.flash import (
    FLASH2,
    FLASH3,
    FLASH4,
    Flash2Backend,
    Flash3Backend,
    Flash4Backend,
    wheel_index,
)
from wlb.kernels.flash_package import FlashFunction
from wlb.kernels.op import SavedTensors
from wlb.kernels.package import KernelPackage
from wlb.kernels.reference import REFERENCE
from wlb.kernels.segments import Scores, Segments

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16
BACKENDS = {"2": Flash2Backend, "3": Flash3Backend, "4": Flash4Backend}


def install(monkeypatch, which: str, **replaced: Any) -> None:
    """Puts a stand-in where the package would be imported from."""
    path, functions = STAND_INS[which]
    parts = path.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    module = sys.modules[path]
    for name, function in {**functions, **replaced}.items():
        if function is not None:
            monkeypatch.setattr(module, name, function, raising=False)


def on_gpu(monkeypatch, *capability: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()


def tensors(queries: int, keys: int) -> list[Tensor]:
    """Returns q, k, v and the gradient of the output: four query heads, two key heads of 16."""
    random = torch.Generator().manual_seed(0)
    shapes = [(queries, 4, 16), (keys, 2, 16), (keys, 2, 16), (queries, 4, 16)]
    return [torch.randn(shape, generator=random) for shape in shapes]


@pytest.mark.parametrize("which", BACKENDS)
def test_results_are_those_of_the_reference(monkeypatch, which):
    install(monkeypatch, which)
    segments = Segments.from_offsets([0, 5, 5, 8], [0, 5, 7, 16], device=CPU)
    q, k, v, grad = tensors(8, 16)
    backend = BACKENDS[which]()
    with torch.no_grad():
        out, lse = backend.forward(q, k, v, segments)
        found = backend.backward(grad, SavedTensors(q, k, v, out, lse), segments)
        expected_out, expected_lse = REFERENCE.forward(q, k, v, segments)
        expected = REFERENCE.backward(
            grad, SavedTensors(q, k, v, expected_out, expected_lse), segments
        )
    assert lse.shape == (4, 8)
    assert lse.dtype == torch.float32
    for a, b in zip((out, lse, *found), (expected_out, expected_lse, *expected), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("which", BACKENDS)
@pytest.mark.parametrize("scores", [Scores(sliding=3), Scores(softcap=0.7)], ids=str)
def test_windows_and_caps_are_those_of_the_reference(monkeypatch, which, scores):
    install(monkeypatch, which)
    segments = Segments.from_offsets([0, 5, 8], [0, 5, 14], device=CPU, scores=scores)
    q, k, v, grad = tensors(8, 14)
    backend = BACKENDS[which]()
    with torch.no_grad():
        out, lse = backend.forward(q, k, v, segments)
        found = backend.backward(grad, SavedTensors(q, k, v, out, lse), segments)
        saved = SavedTensors(q, k, v, *REFERENCE.forward(q, k, v, segments))
        expected = REFERENCE.backward(grad, saved, segments)
    assert torch.equal(out, saved.out_THD)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


# Rows of queries and of keys in a tile of backward: on Hopper by size of heads, without a mask 80
# for 128, then on Blackwell.
TILES = {True: [(128, 128), (64, 128), (64, 96), (64, 48)], False: [(80, 128), (64, 96), (64, 48)]}


def flash4_kinds(lengths: Any, group: int, tile: tuple[int, int]) -> tuple[Any, Any]:
    """Returns what compile keys of flash-attn-4 4.0.0b36 hold of a call's lengths: in backward
    (`single_q_block`, `single_k_block`, `cu_total_m_blocks_k`) and in forward (`q_stage`,
    `is_static_persistent`, `cu_total_m_blocks`), on Blackwell and with Hopper's tiles.
    """
    (max_q, max_k), is_long = map(max, zip(*lengths, strict=True)), len(lengths) > 256
    stages = 2 if max_q * group > 128 else 1
    hopper = [max_q * group <= rows for rows in (128, 192)]
    blackwell = (stages, max_q * group <= 128 * stages)
    return (
        (max_q <= tile[0], max_k <= tile[1], is_long),
        ((*blackwell, is_long), *((fits, is_long) for fits in hopper)),
    )


ROWS = [1, 16, 17, 32, 33, 48, 49, 64, 65, 80, 81, 96, 97, 128, 129, 192, 193, 256, 257, 700]


@pytest.mark.parametrize("group", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_run_compiles_every_kind_of_call_of_flash_attention_4(is_causal, group):
    """Of lengths on both sides of every tile's edge."""
    calls = Flash4Backend().compiled_calls(group, is_causal=is_causal)
    pairs = [(q, k) for q, k in product(ROWS, ROWS) if q <= k or not is_causal]
    for tile in TILES[is_causal]:
        made = [flash4_kinds(call, group, tile) for call in calls]
        in_backward, in_forward = zip(*made, strict=True)
        for longest, num in product(pairs, (1, 256, 257)):
            backward, forward = flash4_kinds([longest] + [(1, 1)] * (num - 1), group, tile)
            assert backward in in_backward
            assert all(
                kind in of for kind, of in zip(forward, zip(*in_forward, strict=True), strict=True)
            )


COMMON = {"max_seqlen_q": 5, "max_seqlen_k": 9, "softmax_scale": 0.25}
PASSED = {
    "2": (
        {
            "causal": True,
            "window_size_left": -1,
            "window_size_right": -1,
            "dropout_p": 0.0,
            "softcap": 0.0,
            "alibi_slopes": None,
            "zero_tensors": False,
        },
        {"return_softmax": False, "seqused_k": None, "block_table": None},
        {"rng_state": None},
    ),
    "3": (
        {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0},
        {"causal": True, "num_splits": 1, "attention_chunk": 0, "seqused_q": None},
        {"is_causal": True, "sequed_q": None, "sequed_k": None},
    ),
    "4": (
        {"causal": True, "window_size_left": None, "window_size_right": None, "softcap": 0.0},
        {"return_lse": True, "qv": None, "seqused_k": None},
        {},
    ),
}


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("which", BACKENDS)
def test_what_the_kernels_are_passed(monkeypatch, which, deterministic, is_causal):
    install(monkeypatch, which)
    segments = Segments.from_offsets([0, 5, 8], [0, 5, 14], device=CPU, is_causal=is_causal)
    q, k, v, grad = tensors(8, 14)
    backend = BACKENDS[which](deterministic=deterministic)
    out, lse = backend.forward(q, k, v, segments)
    backend.backward(grad, SavedTensors(q, k, v, out, lse), segments)
    both, forward_only, backward_only = PASSED[which]
    for call, only in zip(CALLS, (forward_only, backward_only), strict=True):
        expected = COMMON | both | only
        expected |= {name: is_causal for name in ("causal", "is_causal") if name in expected}
        assert {name: call[name] for name in expected} == expected
        assert call["cu_seqlens_q"].tolist() == [0, 5, 8]
        assert call["cu_seqlens_k"].tolist() == [0, 5, 14]
        assert call["cu_seqlens_q"].dtype == call["cu_seqlens_k"].dtype == torch.int32
        assert call["q"].shape == (8, 4, 16)
        assert call["k"].shape == call["v"].shape == (14, 2, 16)
    assert CALLS[1]["deterministic"] is deterministic


@pytest.mark.parametrize("which", BACKENDS)
def test_gradients_are_contiguous_where_inputs_are_views(monkeypatch, which):
    install(monkeypatch, which)
    segments = Segments.from_offsets([0, 6], [0, 6], device=CPU)
    q, k, v = torch.randn(6, 8, 16).split([4, 2, 2], 1)
    backend = BACKENDS[which]()
    out, lse = backend.forward(q, k, v, segments)
    found = backend.backward(out, SavedTensors(q, k, v, out, lse), segments)
    for x, grad in zip((q, k, v), found, strict=True):
        assert grad.shape == x.shape
        assert grad.is_contiguous() or which == "4"  # this package makes its own


def test_flash2_never_decodes(monkeypatch):
    """Its maximum of 1 query with grouped heads would ask for one query in every segment."""
    install(monkeypatch, "2")
    segments = Segments.from_offsets([0, 1, 1], [0, 3, 4], device=CPU)
    q, k, v, _ = tensors(1, 4)
    Flash2Backend().forward(q, k, v, segments)
    assert CALLS[0]["max_seqlen_q"] == 2


def test_shared_instances():
    assert [b.name for b in (FLASH2, FLASH3, FLASH4)] == [
        "flash_attention_2",
        "flash_attention_3",
        "flash_attention_4",
    ]
    assert not any(b.takes_key_rows for b in (FLASH2, FLASH3, FLASH4))
    assert not any(b.deterministic for b in (FLASH2, FLASH3, FLASH4))


@pytest.mark.parametrize("which", BACKENDS)
def test_a_missing_package_is_named(monkeypatch, which):
    path, _ = STAND_INS[which]
    monkeypatch.setitem(sys.modules, path, None)
    monkeypatch.setitem(sys.modules, path.partition(".")[0], None)
    backend = BACKENDS[which]()
    q, k, v, _ = tensors(3, 3)
    with pytest.raises(ValueError, match=r"package flash-attn(-\d)? is not installed"):
        backend.forward(q, k, v, Segments.from_offsets([0, 3], [0, 3], device=CPU))
    on_gpu(monkeypatch, 9, 0)
    why = backend.why_not(device=CUDA, dtype=BF16, head_size=128)
    assert why is not None
    assert "is not installed" in why


def test_one_package_does_not_pass_for_another(monkeypatch):
    """flash-attn-4 brings the folder flash_attn, but not flash-attn's module in it."""
    install(monkeypatch, "4")
    on_gpu(monkeypatch, 9, 0)
    why = Flash2Backend().why_not(device=CUDA, dtype=BF16, head_size=128)
    assert why == "the package flash-attn is not installed"
    assert Flash4Backend().why_not(device=CUDA, dtype=BF16, head_size=128) is None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("undefined symbol:\n _ZN3c10"), "ImportError: undefined symbol: _ZN3c10"),
        (
            ModuleNotFoundError("No module named 'einops'", name="einops"),
            "No module named 'einops'",
        ),
        (RuntimeError("CUDA driver too old"), "RuntimeError: CUDA driver too old"),
    ],
)
def test_a_package_that_fails_to_import_says_why(monkeypatch, error, words):
    def broken(name):
        raise error

    monkeypatch.setattr("wlb.kernels.package.importlib.import_module", broken)
    monkeypatch.setattr(metadata, "version", lambda name: "3.0.0")
    problem = FLASH3.package.problem()
    assert problem is not None
    assert problem.startswith("flash-attn-3 3.0.0 cannot be imported: ")
    assert problem.endswith(words)


CAPABILITIES = [
    ("2", (8, 0), 256, None),
    ("2", (9, 0), 128, None),
    ("2", (7, 5), 128, "only compute capability 8.0 or newer is supported, not 7.5"),
    ("2", (8, 0), 264, "only head sizes up to 256 that are multiples of 8 are supported, not 264"),
    ("2", (8, 0), 20, "only head sizes up to 256 that are multiples of 8 are supported, not 20"),
    ("3", (9, 0), 192, None),
    ("3", (9, 0), 256, "only head sizes up to 192 that are multiples of 8 are supported, not 256"),
    ("3", (10, 0), 128, "only compute capability 9.x (Hopper) is supported, not 10.0"),
    ("3", (8, 0), 128, "only compute capability 9.x (Hopper) is supported, not 8.0"),
    ("4", (9, 0), 256, None),
    ("4", (10, 0), 128, None),
    ("4", (10, 3), 256, None),
    ("4", (10, 0), 192, "only head sizes up to 128 that are multiples of 8 are supported, not 192"),
    ("4", (8, 0), 128, "only compute capability 9.x and 10.x are supported, not 8.0"),
    ("4", (12, 0), 128, "only compute capability 9.x and 10.x are supported, not 12.0"),
]


@pytest.mark.parametrize(("which", "capability", "head_size", "expected"), CAPABILITIES)
def test_devices_and_head_sizes(monkeypatch, which, capability, head_size, expected):
    install(monkeypatch, which)
    on_gpu(monkeypatch, *capability)
    backend = BACKENDS[which](deterministic=True)
    assert backend.why_not(device=CUDA, dtype=BF16, head_size=head_size) == expected


def test_heads_of_256_on_hopper_without_determinism(monkeypatch):
    install(monkeypatch, "3")
    on_gpu(monkeypatch, 9, 0)
    backend = Flash3Backend(deterministic=False)
    assert backend.why_not(device=CUDA, dtype=BF16, head_size=256) is None


@pytest.mark.parametrize("which", BACKENDS)
@pytest.mark.parametrize(("device", "dtype"), [(CPU, BF16), (CUDA, torch.float32)])
def test_other_dtypes_and_devices(monkeypatch, which, device, dtype):
    install(monkeypatch, which)
    on_gpu(monkeypatch, 9, 0)
    why = BACKENDS[which]().why_not(device=device, dtype=dtype, head_size=128)
    assert why == "only bfloat16 and float16 on CUDA are supported"


def test_a_machine_without_a_gpu(monkeypatch):
    install(monkeypatch, "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    why = Flash2Backend().why_not(device=CUDA, dtype=BF16, head_size=128)
    assert why is not None
    assert "no GPU on this machine" in why


def older(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, **options):
    raise AssertionError("must not be called")


def newer(*, new_mask, **options):
    raise AssertionError("must not be called")


DRIFTS = [
    ("2", {"_flash_attn_varlen_forward": None}, "_flash_attn_varlen_forward is missing"),
    (
        "2",
        {"_flash_attn_varlen_backward": flash2_forward},
        ("does not have the parameters dout, out, softmax_lse"),
    ),
    ("3", {"_flash_attn_backward": older}, "softmax_scale, .*is_causal, .*deterministic"),
    (
        "3",
        {"_flash_attn_forward": newer},
        ("does not have the parameters q, .* and requires the parameters new_mask"),
    ),
    ("4", {"_flash_attn_fwd": older}, "does not have the parameters max_seqlen_q, max_seqlen_k"),
]


@pytest.mark.parametrize(("which", "replaced", "difference"), DRIFTS)
def test_other_signatures_are_refused(monkeypatch, which, replaced, difference):
    """They are never called on trust: the error names the installed version and the known one."""
    install(monkeypatch, which, **replaced)
    monkeypatch.setattr(metadata, "version", lambda name: "9.8.7")
    backend = BACKENDS[which]()
    package = backend.package
    q, k, v, _ = tensors(3, 3)
    with pytest.raises(ValueError, match=difference) as caught:
        backend.forward(q, k, v, Segments.from_offsets([0, 3], [0, 3], device=CPU))
    assert str(caught.value).startswith(f"{package.distribution} 9.8.7 is not supported: ")
    assert str(caught.value).endswith(f"Install the supported version {package.supported}")
    on_gpu(monkeypatch, 9, 0)
    assert backend.why_not(device=CUDA, dtype=BF16, head_size=128) == str(caught.value)
    assert not CALLS


def test_a_package_without_metadata_is_named_by_its_module(monkeypatch):

    def attend(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, a
    ) -> None: ...

    module = SimpleNamespace(attend=attend)
    monkeypatch.setitem(sys.modules, "wlb_test_kernels", module)
    package = KernelPackage(
        distribution="wlb-test-kernels",
        module="wlb_test_kernels",
        supported="wlb-test-kernels 1.0",
        install="never",
        functions=(FlashFunction("attend", ("a", "b"), {}), FlashFunction("attend", (), {})),
    )
    problem = package.problem() or ""
    assert (
        lacks(
            problem,
            "version unknown",
            ("attend does not have the parameters b"),
            "wlb-test-kernels 1.0",
        )
        == []
    )


def test_flash_attention_3_is_installed_from_the_index_of_torch_s_cuda() -> None:
    assert wheel_index("12.6") == "https://download.pytorch.org/whl/cu126"
    command = f"pip install --no-deps flash-attn-3 --index-url {wheel_index(torch.version.cuda)}"
    assert Flash3Backend.package.install == command
    page = Path(__file__).parents[2] / "slurm" / "INSTALL.md"
    assert command.rpartition("/cu")[0] in page.read_text("utf-8")
