"""Tests the workspace of attention kernels against the tensors that their sources allocate.

Each `*_tensors` function lists (shape, bytes of a value) by the names in the source that
`wlb.memory.workspace` cites.
"""

from dataclasses import replace
from math import ceil, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.memory import (
    AttentionCall,
    attention_workspace_bytes,
    deterministic_copies,
    most_attention_workspace_bytes,
)
from wlb.plan import UserError
from wlb.spec import AttentionBackend

Tensors = dict[str, tuple[tuple[int, ...], int]]

# One document of 131,072 tokens on a rank with 32 heads of 128.
LONG = AttentionCall(
    num_segments=1,
    num_queries=131072,
    num_keys=131072,
    max_q=131072,
    max_k=131072,
    num_heads=32,
    num_kv_heads=32,
    head_size=128,
)
CALLS = st.builds(
    lambda segments, heads, group, head_size, longest, more, is_causal: AttentionCall(
        num_segments=segments,
        num_queries=longest + more,
        num_keys=3 * longest + more,
        max_q=longest,
        max_k=2 * longest,
        num_heads=heads * group,
        num_kv_heads=heads,
        head_size=head_size,
        is_causal=is_causal,
    ),
    st.integers(1, 300),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from([8, 40, 64, 80, 96, 128, 160, 192, 256]),
    st.integers(0, 5000),
    st.integers(0, 5000),
    st.booleans(),
)


def flash2_tensors(call: AttentionCall, deterministic: bool, num_sms: int) -> Tensors:
    """mha_varlen_bwd of flash-attn 2.8.3."""
    total_q, batch_size, num_heads = call.num_queries, call.num_segments, call.num_heads
    rounded = ceil(call.head_size / 32) * 32
    if call.head_size > 128:
        rounded = ceil(call.head_size / 64) * 64
    nsplits = (num_sms + batch_size * num_heads - 1) // (batch_size * num_heads)
    one = (total_q + 128 * batch_size, num_heads, rounded)
    expanded = ((call.num_keys, num_heads, call.head_size), 2)
    found: Tensors = {
        "softmax_d": ((num_heads, total_q + 128 * batch_size), 4),
        "dq_accum": ((nsplits, *one) if deterministic else one, 4),
    }
    if call.num_kv_heads != num_heads:
        found |= {"dk_expanded": expanded, "dv_expanded": expanded}
    return found


def flash3_tensors(call: AttentionCall, deterministic: bool) -> Tensors:
    """mha_bwd of FlashAttention-3 on compute capability 9.0."""
    size = min(s for s in (64, 96, 128, 192, 256) if s >= call.head_size)
    k_block_m = {64: 128, 128: 64 if call.is_causal else 80}.get(size, 64)
    k_block_n = 128 if size <= 128 else (96 if size <= 192 else 80)
    batch, heads, kv_heads = call.num_segments, call.num_heads, call.num_kv_heads
    rows_q = (call.num_queries + batch * k_block_m + k_block_m - 1) // k_block_m * k_block_m
    rows_k = (call.num_keys + batch * k_block_n + k_block_n - 1) // k_block_n * k_block_n
    semaphore = (((call.max_k + k_block_n - 1) // k_block_n, batch, kv_heads), 4)
    found: Tensors = {
        "softmax_d": ((heads, rows_q), 4),
        "softmax_lse_log2": ((heads, rows_q), 4),
        "dq_accum": ((heads, rows_q * size), 4),
        "dq_semaphore": (((call.max_q + k_block_m - 1) // k_block_m, batch, heads), 4),
    }
    if heads != kv_heads:
        found |= {name: ((kv_heads, rows_k, size), 4) for name in ("dk_accum", "dv_accum")}
        if deterministic:
            found |= {"dk_semaphore": semaphore, "dv_semaphore": semaphore}
    return found


def flash4_tensors(call: AttentionCall, deterministic: bool, arch: int) -> Tensors:
    """_flash_attn_bwd of FlashAttention-4 on compute capability 9.0 or 10.0."""
    head_dim, batch, heads, kv_heads = (
        call.head_size,
        call.num_segments,
        call.num_heads,
        call.num_kv_heads,
    )
    m, n, multiple, cluster = 128, 128, 32, 1
    if arch == 9:
        m = 128 if head_dim <= 64 else 64
        if 96 < head_dim <= 128 and not call.is_causal:
            m = 80
        n = 128 if head_dim <= 128 else (96 if head_dim <= 192 else 48)
        multiple = 32 if head_dim <= 128 else 64
    elif head_dim >= 128:
        cluster = 2
    rows_q = (call.num_queries + (batch + 1) * m - 1) // m * m
    rows_k = (call.num_keys + (batch + 1) * cluster * n - 1) // (cluster * n) * (cluster * n)
    rounded = (head_dim + multiple - 1) // multiple * multiple
    q_blocks, k_blocks = (call.max_q + m - 1) // m, (call.max_k + n - 1) // n
    if cluster == 2 and k_blocks % 2:
        k_blocks += 1
    found: Tensors = {"dpsum": ((heads, rows_q), 4), "lse_log2": ((heads, rows_q), 4)}
    if arch == 10 and head_dim == 256:
        return found
    found["dq_accum"] = ((heads, rows_q * rounded), 4)
    if deterministic:
        found["dQ_semaphore"] = ((batch, heads, q_blocks, cluster), 4)
    if heads != kv_heads:
        found |= {name: ((kv_heads, rows_k * rounded), 4) for name in ("dk_accum", "dv_accum")}
        if deterministic:
            semaphore = ((batch, kv_heads, k_blocks, 2), 4)
            found |= {"dK_semaphore": semaphore, "dV_semaphore": semaphore}
    return found


def num_bytes(tensors: Tensors) -> int:
    return sum(prod(shape) * size for shape, size in tensors.values())


@given(CALLS, st.booleans(), st.sampled_from([108, 132, 148]))
def test_flash_attention_2_allocates_as_its_source_says(call, deterministic, num_sms):
    for backend in (AttentionBackend.FLASH_ATTENTION_2, AttentionBackend.TORCH_VARLEN):
        found = attention_workspace_bytes(
            backend, call, deterministic=deterministic, num_sms=num_sms
        )
        assert found == num_bytes(flash2_tensors(call, deterministic, num_sms))


@given(CALLS, st.booleans())
def test_flash_attention_3_and_4_allocate_as_their_sources_say(call, deterministic):
    backend = AttentionBackend.FLASH_ATTENTION_3
    found = attention_workspace_bytes(backend, call, deterministic=deterministic)
    assert found == num_bytes(flash3_tensors(call, deterministic))
    for major in (9, 10):
        backend = AttentionBackend.FLASH_ATTENTION_4
        found = attention_workspace_bytes(
            backend, call, deterministic=deterministic, compute_major=major
        )
        assert found == num_bytes(flash4_tensors(call, deterministic, major))


def test_a_long_document_keeps_five_copies_of_dq():
    copy = (131072 + 128) * 32 * 128 * 4
    softmax_d = 32 * (131072 + 128) * 4
    assert deterministic_copies(1, 32) == 5
    for deterministic, copies in ((True, 5), (False, 1)):
        found = attention_workspace_bytes(
            AttentionBackend.TORCH_VARLEN, LONG, deterministic=deterministic
        )
        assert found == copies * copy + softmax_d


def test_sdpa_counts_nothing_and_auto_the_largest():
    grouped = replace(LONG, num_kv_heads=16)
    counted = [
        attention_workspace_bytes(backend, grouped, deterministic=False)
        for backend in AttentionBackend
        if backend != AttentionBackend.AUTO
    ]
    auto = attention_workspace_bytes(AttentionBackend.AUTO, grouped, deterministic=False)
    sdpa = attention_workspace_bytes(AttentionBackend.SDPA, grouped, deterministic=True)
    assert (auto, sdpa) == (max(counted), 0)


@given(CALLS, st.booleans(), st.sampled_from(list(AttentionBackend)))
def test_the_most_is_that_of_some_number_of_segments(call, deterministic, backend):
    all_calls = [
        attention_workspace_bytes(
            backend, replace(call, num_segments=n, is_causal=mask), deterministic=deterministic
        )
        for n in range(1, call.num_segments + 1)
        for mask in {True, call.is_causal}
    ]
    most = most_attention_workspace_bytes(backend, call, deterministic=deterministic)
    assert most == max(all_calls)


@pytest.mark.parametrize("change", [{"num_segments": 0}, {"num_heads": 0}, {"max_q": 131073}])
def test_impossible_calls_are_refused(change):
    with pytest.raises(UserError):
        replace(LONG, **change)


def test_heads_that_only_torchs_own_attention_computes_count_nothing() -> None:
    call = AttentionCall(
        num_segments=1,
        num_queries=128,
        num_keys=128,
        max_q=128,
        max_k=128,
        num_heads=8,
        num_kv_heads=8,
        head_size=512,
    )
    assert attention_workspace_bytes(AttentionBackend.AUTO, call, deterministic=False) == 0
