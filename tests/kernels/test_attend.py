"""One parity test for all backends: error at most twice that of the same-precision reference.

Both errors are root mean squares against the definition in float64. GPU backends are skipped
without a GPU.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb.kernels import BACKENDS, Segments, attend, select_backend
from wlb.spec.run import AttentionBackend

CPU = torch.device("cpu")

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: none here"),
]


class Case(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lengths: list[tuple[int, int]]
    """(queries, keys) of each segment."""


CASES = {
    "one document": Case(2, 2, 8, [(37, 37)]),
    "a length no class rounds": Case(2, 2, 8, [(32, 32)]),
    "the tail of one document": Case(2, 2, 8, [(13, 37)]),
    "gqa": Case(4, 2, 16, [(5, 5), (33, 33), (17, 17)]),
    "mqa": Case(4, 1, 16, [(5, 5), (33, 33), (17, 30)]),
    "one-token segments": Case(2, 1, 8, [(1, 1)] * 9),
    "one query, many keys": Case(4, 2, 8, [(1, 60), (1, 1), (1, 61)]),
    "heads and tails": Case(4, 2, 8, [(10, 10), (10, 40), (7, 7), (7, 28), (3, 31)]),
    "many shapes": Case(2, 2, 16, [(n, n + (n * 7) % 50) for n in range(1, 70, 3)]),
    "no queries in between": Case(4, 2, 8, [(0, 4), (3, 3), (0, 0), (2, 9), (0, 2)]),
    "long and short": Case(1, 1, 8, [(600, 600), (3, 3), (520, 700), (40, 40)]),
}


def offsets(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))])


def segments_of(case: Case, device: torch.device = CPU) -> Segments:
    queries, keys = zip(*case.lengths, strict=True)
    return Segments.from_offsets(offsets(queries), offsets(keys), device=device)


def inputs(case: Case, *, dtype: torch.dtype, device: torch.device = CPU) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    random = torch.Generator().manual_seed(0)
    queries, keys = (sum(n) for n in zip(*case.lengths, strict=True))
    shapes = [
        (queries, case.num_heads),
        *[(keys, case.num_kv_heads)] * 2,
        (queries, case.num_heads),
    ]
    return [
        torch.randn(*shape, case.head_dim, generator=random).to(dtype).to(device)
        for shape in shapes
    ]


def results(tensors: list[torch.Tensor], segments: Segments, backend: str) -> list[torch.Tensor]:
    """Output and the gradients of q, k and v, in float64 on the CPU."""
    *qkv, grad = tensors
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out = attend(*leaves, segments, backend=backend)
    grads = torch.autograd.grad(out, leaves, grad)
    return [x.detach().cpu().double() for x in (out, *grads)]


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def check_parity(case: Case, backend: str, dtype: torch.dtype, device: torch.device = CPU) -> None:
    segments = segments_of(case, device)
    tensors = inputs(case, dtype=dtype, device=device)
    exact = results([x.double() for x in tensors], segments, "reference")
    same_precision = results(tensors, segments, "reference")
    got = results(tensors, segments, backend)
    # Where the definition is exact (one key: weight 1, no gradient), float32 sums may still round;
    # and float64 is its own reference, so that there is nothing to double.
    eps = min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    eps *= 64 if dtype == torch.float64 else 16
    for name, x, reference, truth in zip("oqkv", got, same_precision, exact, strict=True):
        assert x.shape == truth.shape
        floor = eps * max(1.0, float(truth.abs().max()))
        error, allowed = (x - truth).abs(), (reference - truth).abs()
        assert rms(error) <= 2 * rms(allowed) + floor, name
        # One element may be less lucky: kernels round a key head's gradient once a query head.
        assert float(error.max()) <= 3 * float(allowed.max()) + floor, name


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sdpa_on_cpu(case, dtype):
    check_parity(case, "sdpa", dtype)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param("torch_varlen", torch.bfloat16, marks=gpu),
        pytest.param("torch_varlen", torch.float16, marks=gpu),
        pytest.param("sdpa", torch.float32, marks=gpu),
        pytest.param("sdpa", torch.bfloat16, marks=gpu),
    ],
)
def test_on_gpu(case, backend, dtype):
    check_parity(case, backend, dtype, torch.device("cuda"))


segment = st.tuples(st.integers(0, 40), st.integers(0, 60)).map(lambda n: (n[0], n[0] + n[1]))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(segment, min_size=1, max_size=8).filter(lambda n: sum(q for q, _ in n) > 0),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
)
def test_sdpa_on_random_segments(lengths, heads):
    check_parity(Case(*heads, 8, lengths), "sdpa", torch.float64)


def test_reference_by_hand():
    """One head of size 1, zero queries: outputs are means of the values each query sees."""
    segments = Segments.from_offsets([0, 2, 3], [0, 3, 4], device=CPU)
    v = torch.tensor([1.0, 3.0, 8.0, 5.0]).reshape(4, 1, 1)
    out = attend(torch.zeros(3, 1, 1), torch.ones(4, 1, 1), v, segments, backend="reference")
    assert out.flatten().tolist() == [2.0, 4.0, 5.0]


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_segments_do_not_see_each_other(backend):
    case = Case(2, 1, 8, [(9, 9), (4, 12), (9, 9)])
    q, k, v, _ = inputs(case, dtype=torch.float32)
    before = attend(q, k, v, segments_of(case), backend=backend)
    k[0], v[0] = torch.nan, torch.nan
    after = attend(q, k, v, segments_of(case), backend=backend)
    assert after[:9].isnan().all()
    assert torch.equal(after[9:], before[9:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_query_rows_give_zero_gradients(backend):
    case = Case(2, 1, 8, [(0, 5), (0, 0)])
    out, *grads = results(inputs(case, dtype=torch.float32), segments_of(case), backend)
    assert out.shape == (0, 2, 8)
    assert [float(grad.abs().sum()) for grad in grads] == [0.0, 0.0, 0.0]


def test_auto_selects_by_device_and_dtype():
    cuda = torch.device("cuda", 0)
    auto = AttentionBackend.AUTO
    assert select_backend(auto, device=CPU, dtype=torch.float32, head_size=64) == "sdpa"
    assert select_backend(auto, device=CPU, dtype=torch.bfloat16, head_size=64) == "sdpa"
    assert select_backend(auto, device=cuda, dtype=torch.float32, head_size=64) == "sdpa"
    assert select_backend(auto, device=cuda, dtype=torch.bfloat16, head_size=64) == "torch_varlen"
    bf16 = torch.bfloat16
    assert select_backend(auto, device=cuda, dtype=bf16, head_size=20) == "sdpa"
    with pytest.raises(ValueError, match="heads of 20"):
        select_backend(AttentionBackend.TORCH_VARLEN, device=cuda, dtype=bf16, head_size=20)
    assert (
        select_backend(AttentionBackend.SDPA, device=cuda, dtype=torch.bfloat16, head_size=64)
        == "sdpa"
    )


@pytest.mark.parametrize(("kind", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_an_explicit_choice_is_refused_not_replaced(kind, dtype):
    with pytest.raises(
        ValueError, match=rf"{dtype} on {kind} with heads of 64; set kernels\.attention = auto"
    ):
        select_backend(
            AttentionBackend.TORCH_VARLEN, device=torch.device(kind), dtype=dtype, head_size=64
        )


def test_every_backend_of_the_config_is_registered():
    assert set(AttentionBackend) - {AttentionBackend.AUTO} <= set(BACKENDS)


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (_zeros(3, 16), _zeros(3, 2, 8), _zeros(3, 2, 8), r"q \(3, 16\)"),
        (_zeros(3, 4, 8), _zeros(3, 2, 8), _zeros(3, 4, 8), r"v \(3, 4, 8\)"),
        (_zeros(3, 4, 8), _zeros(3, 3, 8), _zeros(3, 3, 8), "multiple of key heads"),
        (_zeros(3, 4, 8), _zeros(3, 2, 4), _zeros(3, 2, 4), "all heads of one size"),
        (_zeros(4, 4, 8), _zeros(3, 2, 8), _zeros(3, 2, 8), "3 queries and 3 keys, but q"),
        (
            _zeros(3, 4, 8),
            _zeros(3, 2, 8, dtype=torch.float64),
            _zeros(3, 2, 8),
            r"torch\.float64 on cpu",
        ),
        (*[_zeros(3, 2, 8, dtype=torch.int32)] * 3, "one floating dtype"),
    ],
)
def test_bad_tensors_are_refused(q, k, v, message):
    segments = Segments.from_offsets([0, 3], [0, 3], device=CPU)
    with pytest.raises(ValueError, match=message):
        attend(q, k, v, segments, backend="sdpa")


def test_bad_backends_are_refused():
    case = CASES["gqa"]
    *qkv, _ = inputs(case, dtype=torch.float32)
    with pytest.raises(ValueError, match="'flash' is not one of sdpa, torch_varlen, reference"):
        attend(*qkv, segments_of(case), backend="flash")
    with pytest.raises(ValueError, match=r"not torch\.float32 on cpu; use sdpa"):
        attend(*qkv, segments_of(case), backend="torch_varlen")
