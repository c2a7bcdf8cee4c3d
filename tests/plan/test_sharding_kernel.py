"""Tests that a kernel's arguments come from public names alone: attention by NumPy, sharded."""

from typing import Any

import numpy as np
import pytest

from wlb import Planner, RankSpans, shard
from wlb.plan import FloatArray, UserError
from wlb.planner import LLAMA2_7B

SIZE = 4


def varlen_attention(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> FloatArray:
    """Returns what `flash_attn_varlen_func(causal=True)` does: the mask is aligned bottom right."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == np.int32
    assert np.diff(cu_seqlens_q).max(initial=0) == max_seqlen_q
    assert np.diff(cu_seqlens_k).max(initial=0) == max_seqlen_k
    assert cu_seqlens_k[-1] == len(k) == len(v)
    out = np.zeros_like(q)
    for i in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[i], cu_seqlens_q[i + 1])
        keys = slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
        scores = q[rows] @ k[keys].T
        num_q, num_k = scores.shape
        scores[~np.tri(num_q, num_k, num_k - num_q, dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        out[rows] = weights / weights.sum(1, keepdims=True) @ v[keys]
    return out


@pytest.mark.parametrize(
    "strategy", ["per_sequence", "per_document", "adaptive", "hybrid", "balanced"]
)
@pytest.mark.parametrize("row_multiple", [1, 4])
def test_ranks_attend_as_one_process_does(strategy: str, row_multiple: int) -> None:
    rng = np.random.default_rng(0)
    cp, lengths = 3, rng.integers(1, 60, 30)
    planner = Planner.for_lengths(
        lengths,
        context_window=48,
        num_micro_batches=4,
        cp=cp,
        row_multiple=row_multiple,
        strategy=strategy,
    )
    for step in planner.steps():
        plan = planner.shard(step, pipeline=0)
        for batch, sharding, local_tokens in zip(
            plan.micro_batches, plan.shardings, plan.local_tokens, strict=True
        ):
            q, k, v = rng.normal(size=(3, batch.num_tokens, SIZE))
            whole = batch.cu_seqlens.astype(np.int32)
            longest = int(batch.lengths.max(initial=0))
            expected = varlen_attention(q, k, v, whole, whole, longest, longest)
            spans = [sharding.for_rank(rank) for rank in range(cp)]
            gathered = np.full((2, cp * local_tokens, SIZE), np.nan)
            for rank, of in enumerate(spans):
                mine = slice(rank * local_tokens, rank * local_tokens + of.num_tokens)
                gathered[:, mine] = k[of.token_index], v[of.token_index]
            rows = sharding.gathered_rows(local_tokens)
            for keys, values, key_rows in ((*gathered, rows), (k, v, None)):
                found = np.full_like(q, np.nan)
                for of in spans:
                    call = of.for_kernel(key_rows)
                    found[call.query_index] = varlen_attention(
                        q[call.query_index],
                        keys[call.key_index],
                        values[call.key_index],
                        call.cu_seqlens_q,
                        call.cu_seqlens_k,
                        call.max_seqlen_q,
                        call.max_seqlen_k,
                    )
                np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_what_no_kernel_can_take_is_refused() -> None:
    sharding = shard([9], cp=2, strategy="per_document", cost=LLAMA2_7B)
    with pytest.raises(UserError, match="local_tokens = 4 must be at least 5"):
        sharding.gathered_rows(4)
    of = RankSpans(
        piece=np.array([0]),
        start=np.array([2**31 - 1]),
        stop=np.array([2**31]),
        piece_offsets=np.array([0, 2**31]),
    )
    with pytest.raises(UserError, match=r"2147483648 keys, but the int32"):
        of.for_kernel()
