"""Tests attention with a window and a soft cap against scores of whole segments in float64."""

import pytest
import torch

from wlb.kernels import Segments, attend, windowed, windowed_backend
from wlb.kernels.windowed import WindowedBackend

LENGTHS = [(5, 5), (1, 9), (40, 70), (300, 300), (0, 3), (1, 1)]
"""Queries and keys of each segment; more queries than a block has, and none."""


def definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Attention of one segment, shape [queries, heads, size], from a mask of its own."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(len(k) - len(q), len(k))[:, None]
    seen = torch.arange(len(k)) <= at
    if window is not None:
        seen &= torch.arange(len(k)) > at - window
    weights = torch.where(seen, scores, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    ("window", "scores"), [(None, 3000), (1, 3000), (7, 3000), (7, windowed.SCORES), (1000, 3000)]
)
def test_output_and_gradients_are_the_definition_s(
    monkeypatch: pytest.MonkeyPatch, window: int | None, softcap: float | None, scores: int
) -> None:
    monkeypatch.setattr(windowed, "SCORES", scores)
    random = torch.Generator().manual_seed(0)
    queries, keys = (torch.tensor([0, *n]).cumsum(0).numpy() for n in zip(*LENGTHS, strict=True))
    shapes = [(queries[-1], 4), (keys[-1], 2), (keys[-1], 2), (queries[-1], 4)]
    *qkv, grad = (torch.randn(*s, 8, generator=random, dtype=torch.float64) for s in shapes)
    segments = Segments.from_offsets(queries, keys, device="cpu")
    name = windowed_backend(window=window, softcap=softcap)
    for dtype, allowed in [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 0.1)]:
        leaves = [x.to(dtype).requires_grad_() for x in qkv]
        out = attend(*leaves, segments, backend=name)
        found = [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        at = list(zip(exact, (queries, keys, keys), strict=True))
        parts = [
            definition(*(x[a[i] : a[i + 1]] for x, a in at), window, softcap)
            for i in range(len(LENGTHS))
        ]
        whole = torch.cat(parts)
        expected = [whole, *torch.autograd.grad(whole, exact, grad.to(dtype).double())]
        for got, truth in zip(found, expected, strict=True):
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), truth, atol=allowed, rtol=allowed)


def test_a_window_reads_no_key_outside_it() -> None:
    """Keys beyond the window may hold anything, as a block does not read them."""
    segments = Segments.from_offsets([0, 1], [0, 900], device="cpu")
    q, k, v = torch.ones(1, 1, 4), torch.full((900, 1, 4), torch.nan), torch.zeros(900, 1, 4)
    k[-3:], v[-3:] = 1.0, 2.0
    out = attend(q, k, v, segments, backend=windowed_backend(window=3))
    assert out.flatten().tolist() == pytest.approx([2.0] * 4)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="window = 0 must be at least 1"):
        WindowedBackend(window=0)
    with pytest.raises(ValueError, match=r"softcap = 0\.0 must be above 0"):
        WindowedBackend(softcap=0.0)
    prefix = Segments.from_offsets([0, 1], [0, 2], device="cpu", is_causal=False)
    q, k = torch.ones(1, 1, 4), torch.ones(2, 1, 4)
    with pytest.raises(ValueError, match=r"set cp\.overlap = false"):
        WindowedBackend(window=3).forward(q, k, k, prefix)
