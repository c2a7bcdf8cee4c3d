"""Tests parity of all backends: the error is at most twice that of the same-precision reference.

Both errors are root mean squares against the definition in float64. GPU backends are skipped
without a GPU, and with one where `select_backend` refuses them (no package, another GPU).
"""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from wlb.kernels import BACKENDS, Scores, Segments, attend, sdpa, select_backend, torch_varlen
from wlb.kernels.op import SavedTensors, backward, empty_lse, fixed_order, forward, kernel_name
from wlb.kernels.torch_varlen import TorchVarlenBackend
from wlb.plan import UserError
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
    """Each segment has this many (queries, keys)."""
    scores: Scores = Scores()


CASES = {
    "one document": Case(2, 2, 8, [(37, 37)]),
    "a length no class rounds": Case(2, 2, 8, [(32, 32)]),
    "lengths no class rounds": Case(4, 2, 8, [(16, 16), (16, 16), (32, 32)]),
    "the tail of one document": Case(2, 2, 8, [(13, 37)]),
    "gqa": Case(4, 2, 16, [(5, 5), (33, 33), (17, 17)]),
    "mqa": Case(4, 1, 16, [(5, 5), (33, 33), (17, 30)]),
    "one-token segments": Case(2, 1, 8, [(1, 1)] * 9),
    "one query, many keys": Case(4, 2, 8, [(1, 60), (1, 1), (1, 61)]),
    "heads and tails": Case(4, 2, 8, [(10, 10), (10, 40), (7, 7), (7, 28), (3, 31)]),
    "many shapes": Case(2, 2, 16, [(n, n + (n * 7) % 50) for n in range(1, 70, 3)]),
    "no queries in between": Case(4, 2, 8, [(0, 4), (3, 3), (0, 0), (2, 9), (0, 2)]),
    "long and short": Case(1, 1, 8, [(600, 600), (3, 3), (520, 700), (40, 40)]),
    "a long tail, gqa": Case(4, 2, 8, [(520, 700)]),
}
MIXED = [(10, 10), (10, 40), (1, 1), (7, 28), (0, 3), (37, 37), (1, 60), (13, 31)]
SCORED = {
    "sliding": Case(4, 2, 8, MIXED, Scores(sliding=9)),
    "sliding by one key": Case(2, 1, 8, MIXED, Scores(sliding=1)),
    "sliding out of no sight": Case(2, 1, 8, MIXED, Scores(sliding=60)),
    "sliding over blocks": Case(4, 2, 8, [(300, 300), (290, 310), (128, 400)], Scores(sliding=150)),
    "capped": Case(4, 2, 8, MIXED, Scores(softcap=0.7)),
    "capped and sliding": Case(2, 1, 8, [*MIXED, (200, 260)], Scores(sliding=20, softcap=2.0)),
    "capped over blocks": Case(1, 1, 4, [(1100, 1100), (3, 1200)], Scores(softcap=1.5)),
}


def offsets(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))])


def segments_of(case: Case, device: torch.device = CPU) -> Segments:
    queries, keys = zip(*case.lengths, strict=True)
    cu_q, cu_k = offsets(queries), offsets(keys)
    return Segments.from_offsets(cu_q, cu_k, device=device, scores=case.scores)


def inputs(case: Case, *, dtype: torch.dtype, device: torch.device = CPU) -> list[torch.Tensor]:
    """Returns q, k, v and the gradient of the output."""
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
    """Returns output and the gradients of q, k and v, in float64 on the CPU."""
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


@pytest.mark.parametrize("case", SCORED.values(), ids=SCORED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sdpa_slides_and_caps(case, dtype):
    check_parity(case, "sdpa", dtype)


@pytest.mark.parametrize("case", SCORED.values(), ids=SCORED)
def test_sdpa_slides_and_caps_as_on_gpu(monkeypatch, case):
    monkeypatch.setattr(sdpa, "_forward_on_cpu", sdpa._forward_elsewhere)
    monkeypatch.setattr(sdpa, "_backward_on_cpu", sdpa._backward_elsewhere)
    check_parity(case, "sdpa", torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: none here")
@pytest.mark.parametrize("case", SCORED.values(), ids=SCORED)
@pytest.mark.parametrize("backend", [b for b in AttentionBackend if b != AttentionBackend.AUTO])
def test_kernels_slide_and_cap_on_gpu(case, backend):
    device, dtype = torch.device("cuda"), torch.bfloat16
    try:
        select_backend(
            backend, device=device, dtype=dtype, head_size=case.head_dim, scores=case.scores
        )
    except UserError as refused:
        pytest.skip(str(refused))
    check_parity(case, str(backend), dtype, device)


SCORES = [Scores(sliding=3), Scores(softcap=0.5), Scores(sliding=2, softcap=0.5)]


@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_scores_by_definition(scores):
    """Each query of (4, 9) by a loop over its keys."""
    q, k, v, _ = inputs(Case(1, 1, 4, [(4, 9)]), dtype=torch.float64)
    segments = Segments.from_offsets([0, 4], [0, 9], device=CPU, scores=scores)
    for i in range(4):
        first = max(0, 5 + i + 1 - scores.sliding) if scores.sliding else 0
        seen = range(first, 5 + i + 1)
        points = [float(q[i, 0] @ k[j, 0]) / 2 for j in seen]
        if scores.softcap:
            points = [scores.softcap * np.tanh(s / scores.softcap) for s in points]
        weights = np.exp(points) / np.exp(points).sum()
        want = sum(w * v[j, 0] for w, j in zip(weights, seen, strict=True))
        got = attend(q, k, v, segments, backend="reference")[i, 0]
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_explicit_gradients_of_scores_are_those_of_finite_differences(scores):
    case = Case(2, 1, 3, [(3, 5), (4, 4)], scores)
    leaves = [x.requires_grad_() for x in inputs(case, dtype=torch.float64)[:3]]
    segments = segments_of(case)
    assert torch.autograd.gradcheck(lambda *x: attend(*x, segments, backend="reference"), leaves)


def test_a_window_needs_a_causal_call():
    with pytest.raises(UserError, match="a sliding window of 2 needs a causal mask"):
        Segments.from_offsets([0, 1], [0, 3], device=CPU, is_causal=False, scores=Scores(sliding=2))


HALF = (torch.bfloat16, torch.float16)
TESTED = {
    "cpu": {"sdpa": (torch.float32, torch.bfloat16, torch.float64)},
    "cuda": {name: HALF for name in BACKENDS if not name.startswith(("sdpa", "reference"))}
    | {"sdpa": (torch.float32, torch.bfloat16)},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("kind", "backend", "dtype"),
    [
        pytest.param(
            kind,
            backend,
            dtype,
            marks=gpu if kind == "cuda" else (),
            id=f"{backend}-{dtype}-{kind}",
        )
        for kind, backends in TESTED.items()
        for backend, dtypes in backends.items()
        for dtype in dtypes
    ],
)
def test_every_backend(case, kind, backend, dtype):
    device = torch.device(kind)
    try:
        select_backend(
            AttentionBackend(backend.removesuffix("_deterministic")),
            device=device,
            dtype=dtype,
            head_size=case.head_dim,
            deterministic=backend.endswith("_deterministic"),
        )
    except ValueError as error:
        pytest.skip(str(error))
    check_parity(case, backend, dtype, device)


# Longer spans are split at their prefix, on CPU only.
SHORT = {name: case for name, case in CASES.items() if max(case.lengths) < (512,)}


@pytest.mark.parametrize("case", SHORT.values(), ids=SHORT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "one order"])
def test_sdpa_as_on_gpu(monkeypatch, case, dtype, deterministic):
    """This CPU runs what other devices run: no log-sum-exp, forward computed again in backward."""
    plain, was_deterministic = F.scaled_dot_product_attention, list[bool]()

    def attention(q, k, v, **options):
        # With fewer key heads, or with enable_gqa, CUDA's float32 has a quadratic kernel only.
        assert q.shape[1] == k.shape[1] == v.shape[1]
        assert not options.get("enable_gqa")
        was_deterministic.append(torch.are_deterministic_algorithms_enabled())
        return plain(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(sdpa, "_forward_on_cpu", sdpa._forward_elsewhere)
    monkeypatch.setattr(sdpa, "_backward_on_cpu", sdpa._backward_elsewhere)
    check_parity(case, kernel_name("sdpa", deterministic=deterministic), dtype)
    assert set(was_deterministic) == {False, deterministic}  # on for backward only
    assert not torch.are_deterministic_algorithms_enabled()


segment = st.tuples(st.integers(0, 40), st.integers(0, 60)).map(lambda n: (n[0], n[0] + n[1]))


@given(
    lengths=st.lists(segment, min_size=1, max_size=8).filter(lambda n: sum(q for q, _ in n) > 0),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
)
def test_sdpa_on_random_segments(lengths, heads):
    check_parity(Case(*heads, 8, lengths), "sdpa", torch.float64)


def test_calls_that_share_a_query_s_keys_add_up():
    """Keys without a mask in one call, own ones in another: merged output, gradients that add."""
    short = [([5, 3], [9, 2]), ([1, 1], [1, 4]), ([40, 20], [30, 70])]
    dtypes = [torch.float64, torch.float32, torch.bfloat16]
    for (queries, before), dtype in [
        *itertools.product(short, dtypes),
        (([600, 20], [30, 700]), torch.float32),  # no padding, and padded
    ]:
        parts = [(q, b + q) for q, b in zip(queries, before, strict=True)]
        case = Case(4, 2, 8, parts)
        q, k, v, grad = inputs(case, dtype=dtype)
        exact = results([x.double() for x in (q, k, v, grad)], segments_of(case), "reference")
        same = results([q, k, v, grad], segments_of(case), "reference")
        is_own = torch.cat([torch.arange(n) >= n - m for m, n in parts])
        own, others = (
            Segments.from_offsets(offsets(queries), offsets(n), device=CPU, is_causal=on)
            for n, on in ((queries, True), (before, False))
        )
        calls = [(own, k[is_own], v[is_own]), (others, k[~is_own], v[~is_own])]
        for backend in ("sdpa", "reference"):
            (out, lse), (other, other_lse) = (forward(backend, q, *kv, s) for s, *kv in calls)
            both = torch.logaddexp(lse, other_lse)
            share = (other_lse - both).exp().t()[..., None].to(lse.dtype)
            merged = torch.lerp(out.to(lse.dtype), other.to(lse.dtype), share).to(dtype)
            grads = [
                backward(backend, grad, SavedTensors(q, *kv, merged, both), s) for s, *kv in calls
            ]
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
            for rows, (_, *dkv) in zip((is_own, ~is_own), grads, strict=True):
                dk[rows], dv[rows] = dkv
            found = (merged, grads[0][0].double() + grads[1][0], dk, dv)
            for x, truth, one_call in zip(found, exact, same, strict=True):
                floor = torch.finfo(dtype).eps * 64 * max(1.0, float(truth.abs().max()))
                allowed = 2 * rms(one_call - truth)
                assert rms(x.double() - truth) <= allowed + (dtype != torch.bfloat16) * floor


def test_a_segment_without_a_key_is_refused_where_nothing_is_masked():
    with pytest.raises(ValueError, match="segment 1 has no key"):
        Segments.from_offsets([0, 2, 3], [0, 3, 3], device=CPU, is_causal=False)


def test_reference_by_hand():
    """With one head of size 1 and zero queries, outputs are means of the values each query sees."""
    segments = Segments.from_offsets([0, 2, 3], [0, 3, 4], device=CPU)
    v = torch.tensor([1.0, 3.0, 8.0, 5.0]).reshape(4, 1, 1)
    out = attend(torch.zeros(3, 1, 1), torch.ones(4, 1, 1), v, segments, backend="reference")
    assert out.flatten().tolist() == [2.0, 4.0, 5.0]


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_segments_do_not_see_each_other(backend):
    case = Case(2, 1, 8, [(9, 9), (4, 12), (9, 9)])
    tensors = inputs(case, dtype=torch.float32)
    before = results(tensors, segments_of(case), backend)
    _, k, v, _ = tensors
    k[0], v[0] = torch.nan, torch.nan
    after = results(tensors, segments_of(case), backend)
    assert after[0][:9].isnan().all()
    for x, y in zip(after, before, strict=True):
        assert torch.equal(x[9:], y[9:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_sees_large_scores(dtype):
    """With scores of hundreds a weight of padding would overflow with another row's log-sum-exp."""
    case = Case(2, 1, 8, [(9, 9), (5, 13), (600, 600)])
    q, k, v, grad = inputs(case, dtype=dtype)
    tensors = [q * 30, k * 30, v, grad]
    assert all(x.isfinite().all() for x in results(tensors, segments_of(case), "sdpa"))


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_explicit_gradients_are_those_of_finite_differences(backend):
    case = Case(2, 1, 3, [(3, 3), (2, 4), (0, 2)])
    qkv = [x.double().requires_grad_() for x in inputs(case, dtype=torch.float32)[:3]]
    segments = segments_of(case)
    assert torch.autograd.gradcheck(lambda *x: attend(*x, segments, backend=backend), qkv)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_kept_for_backward(backend, dtype):
    case = CASES["gqa"]
    q, k, v, _ = inputs(case, dtype=dtype)
    out, lse = forward(backend, q, k, v, segments_of(case))
    assert out.shape == q.shape
    assert out.dtype == dtype
    assert lse.shape == empty_lse(q).shape == (q.shape[1], q.shape[0])
    assert lse.dtype == empty_lse(q).dtype == torch.float32


# (queries, rows of the buffer that are the keys) of each segment.
KEY_ROWS = {
    "head and tail of a document": [(4, range(4)), (4, range(16)), (1, [16])],
    "ranks' rows in turn": [(3, [0, 8, 1]), (3, [0, 8, 1, 9, 2, 10]), (2, [3, 11, 4])],
    "thrice": [(1, [5]), (2, [5, 6]), (3, [5, 6, 7, 4]), (2, [3, 2])],
    "each once, in order": [(8, range(8)), (8, range(8, 16))],
    "a long tail": [(5, range(5)), (520, range(700))],
    "no queries, no keys": [(0, [1, 2]), (2, [2, 3]), (0, [])],
}


@pytest.mark.parametrize("spans", KEY_ROWS.values(), ids=KEY_ROWS)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_key_rows_are_as_gathering_first(spans, heads, dtype):
    """The output is equal bit by bit; gradients of rows are as added up in float64."""
    lengths = [(num_queries, len(rows)) for num_queries, rows in spans]
    key_rows = np.concatenate([np.array(rows, dtype=np.int64) for _, rows in spans])
    num_rows = max(20, int(key_rows.max()) + 3)
    case = Case(*heads, 8, lengths)
    q, _, _, grad = inputs(case, dtype=dtype)
    random = torch.Generator().manual_seed(1)
    k, v = (torch.randn(num_rows, heads[1], 8, generator=random).to(dtype) for _ in range(2))
    cu_q, cu_k = (offsets(n) for n in zip(*lengths, strict=True))
    gathered = Segments.from_offsets(cu_q, cu_k, device=CPU)
    direct = Segments.from_offsets(cu_q, cu_k, device=CPU, key_rows=key_rows)
    index = torch.from_numpy(key_rows)

    out, lse = sdpa.SDPA.forward(q, k, v, direct)
    expected, lse_expected = sdpa.SDPA.forward(q, k[index], v[index], gathered)
    assert torch.equal(out, expected)
    assert torch.equal(lse, lse_expected)

    dq, *dkv = sdpa.SDPA.backward(grad, SavedTensors(q, k, v, out, lse), direct)
    saved = SavedTensors(q, k[index], v[index], out, lse)
    dq_expected, *dkv_expected = sdpa.SDPA.backward(grad, saved, gathered)
    assert torch.equal(dq, dq_expected)
    for got, of_keys in zip(dkv, dkv_expected, strict=True):
        assert got.dtype == dtype
        total = torch.zeros(got.shape, dtype=torch.float64).index_add_(0, index, of_keys.double())
        # With grouped heads one rounding more is in the expected sum: one for each use.
        eps = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            got.double(), total, rtol=eps, atol=eps * float(total.abs().max())
        )


def test_views_of_one_tensor():
    """q, k and v have rows apart, and heads' values apart; the gradient is of one number."""
    case = Case(2, 2, 8, [(16, 16), (9, 9)])
    q, k, v, _ = inputs(case, dtype=torch.float32)
    packed = torch.stack([q, k, v], 1)
    expected = results([q, k, v, torch.ones_like(q)], segments_of(case), "sdpa")
    apart = torch.stack([q, k, v], -1)
    for views in (packed.unbind(1), apart.unbind(-1)):
        leaves = [x.detach().requires_grad_() for x in views]
        out = attend(*leaves, segments_of(case), backend="sdpa")
        got = torch.autograd.grad(out.sum(), leaves)
        for x, y in zip((out, *got), expected, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_query_rows_give_zero_gradients(backend):
    case = Case(2, 1, 8, [(0, 5), (0, 0)])
    out, *grads = results(inputs(case, dtype=torch.float32), segments_of(case), backend)
    assert out.shape == (0, 2, 8)
    assert [float(grad.abs().sum()) for grad in grads] == [0.0, 0.0, 0.0]


def test_a_fixed_order_is_asked_for_inside_only():
    """Torch does not fill new tensors with NaN meanwhile."""

    def settings() -> tuple[bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )

    before = settings()
    with fixed_order(False):
        assert settings() == before
    with fixed_order(True):
        inside = settings()
    assert (inside, settings(), before) == ((True, False), before, (False, True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_torch_varlen_fits_torchs_operators(monkeypatch, deterministic):
    """Forward and backward run on tensors without values, since the kernels need a GPU."""
    asked: list[bool] = []
    monkeypatch.setattr(
        torch_varlen, "fixed_order", lambda needed: asked.append(needed) or fixed_order(needed)
    )
    backend = TorchVarlenBackend(deterministic=deterministic)
    with FakeTensorMode(), torch.device("cuda"):
        q, grad = torch.empty(2, 8, 4, 16, dtype=torch.bfloat16)
        k, v = torch.empty(2, 12, 2, 16, dtype=torch.bfloat16)
        offsets = torch.empty(3, dtype=torch.int32)
        segments = Segments.of(offsets, offsets, 5, 7)
        out, lse = backend.forward(q, k, v, segments)
        assert (out.shape, lse.shape) == (q.shape, empty_lse(q).shape)
        dq, dk, dv = backend.backward(grad, SavedTensors(q, k, v, out, lse), segments)
        assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    assert asked == [deterministic]


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (_zeros(3, 16), _zeros(3, 2, 8), _zeros(3, 2, 8), r"q \(3, 16\)"),
        (_zeros(3, 4, 8), _zeros(3, 2, 8), _zeros(3, 4, 8), r"v \(3, 4, 8\)"),
        (_zeros(3, 4, 8), _zeros(3, 3, 8), _zeros(3, 3, 8), "must be a multiple of k's"),
        (_zeros(3, 4, 8), _zeros(3, 2, 4), _zeros(3, 2, 4), "all heads must have the same size"),
        (_zeros(4, 4, 8), _zeros(3, 2, 8), _zeros(3, 2, 8), "3 queries and 3 keys, but q has 4"),
        (
            _zeros(3, 4, 8),
            _zeros(3, 2, 8, dtype=torch.float64),
            _zeros(3, 2, 8),
            r"torch\.float64 on cpu",
        ),
        (*[_zeros(3, 2, 8, dtype=torch.int32)] * 3, "the same floating-point dtype"),
    ],
)
def test_bad_tensors_are_refused(q, k, v, message):
    segments = Segments.from_offsets([0, 3], [0, 3], device=CPU)
    with pytest.raises(ValueError, match=message):
        attend(q, k, v, segments, backend="sdpa")


def test_bad_backends_are_refused():
    case = CASES["gqa"]
    *qkv, _ = inputs(case, dtype=torch.float32)
    with pytest.raises(ValueError, match="'flash' must be one of sdpa, torch_varlen, "):
        attend(*qkv, segments_of(case), backend="flash")
    with pytest.raises(
        ValueError, match=r"not torch\.float32 on cpu; set kernels\.attention = sdpa"
    ):
        attend(*qkv, segments_of(case), backend="torch_varlen")
