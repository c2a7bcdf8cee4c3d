"""Bytes that attention kernels allocate in backward, besides the gradients that they return.

Shapes were read in the sources: flash-attn 2.8.3 (csrc/flash_attn/flash_api.cpp, mha_varlen_bwd;
torch has the same lines), FlashAttention-3 (hopper/flash_api.cpp, mha_bwd, August 2026) and
FlashAttention-4 (flash_attn/cute/interface.py, _flash_attn_bwd, 4.0.0b36). None was measured on a
GPU. Forward needs no workspace: we never split keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from wlb.plan import UserError
from wlb.spec import AttentionBackend

HOPPER_SMS = 132
"""Streaming multiprocessors of an H100 SXM and an H200; a B200 has 148."""
MOST_HEAD_SIZE = 256
_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Size of one variable-length call on a rank.

    num_queries, num_keys: rows over all segments; max_q, max_k: of the longest. Heads are those of
    the TP rank. value_bytes: of one value of q, k and v. is_causal: False for the calls of
    `cp.overlap_stages` over other ranks' keys, which have no mask.
    """

    num_segments: int
    num_queries: int
    num_keys: int
    max_q: int
    max_k: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_bytes: int = 2
    is_causal: bool = True

    def __post_init__(self) -> None:
        if min(self.num_segments, self.num_heads, self.num_kv_heads, self.head_size) < 1:
            raise UserError(f"an attention call has at least one segment and one head: {self}")
        if not 0 <= self.max_q <= self.num_queries or not 0 <= self.max_k <= self.num_keys:
            raise UserError(f"the longest segment has no more rows than all segments: {self}")


def attention_workspace_bytes(
    backend: AttentionBackend,
    call: AttentionCall,
    *,
    deterministic: bool,
    num_sms: int = HOPPER_SMS,
    compute_major: int = 9,
) -> int:
    """Workspace of one backward call. num_sms, compute_major: of the GPU; 10 is a B200.

    sdpa counts nothing: it is for CPU, float32 and heads above `MOST_HEAD_SIZE`, which the others
    refuse. `auto` counts the largest of the others, because plans are also made where no GPU tells
    which of them it will take.
    """
    if call.head_size > MOST_HEAD_SIZE:
        return 0
    match backend:
        case AttentionBackend.SDPA:
            return 0
        case AttentionBackend.TORCH_VARLEN | AttentionBackend.FLASH_ATTENTION_2:
            return _flash2(call, deterministic, num_sms)
        case AttentionBackend.FLASH_ATTENTION_3:
            return _flash3(call, deterministic)
        case AttentionBackend.FLASH_ATTENTION_4:
            return _flash4(call, deterministic, compute_major)
        case AttentionBackend.AUTO:
            flash2, flash3 = _flash2(call, deterministic, num_sms), _flash3(call, deterministic)
            return max(flash2, flash3, _flash4(call, deterministic, compute_major))


def most_attention_workspace_bytes(
    backend: AttentionBackend, call: AttentionCall, *, deterministic: bool
) -> int:
    """The most over all calls of 1 to `call.num_segments` segments, else as large as `call`; of one
    without a mask also over causal ones, because a rank that makes such calls makes both.

    More segments need more rows of padding, but FlashAttention-2 keeps fewer deterministic copies.
    """
    masks = {True, call.is_causal}
    numbers = _most_segments_by_copies(call)
    calls = (replace(call, num_segments=n, is_causal=x) for n in numbers for x in masks)
    return max(attention_workspace_bytes(backend, c, deterministic=deterministic) for c in calls)


def _most_segments_by_copies(call: AttentionCall) -> Iterator[int]:
    """For each possible number of deterministic copies the most segments that have as many."""
    yield call.num_segments
    for copies in range(2, -(-HOPPER_SMS // call.num_heads) + 1):
        most = (-(-HOPPER_SMS // (copies - 1)) - 1) // call.num_heads
        if 1 <= most < call.num_segments:
            yield most


def deterministic_copies(num_segments: int, num_heads: int, *, num_sms: int = HOPPER_SMS) -> int:
    """Float32 copies of dQ that FlashAttention-2's deterministic backward adds up afterwards."""
    return -(-num_sms // (num_segments * num_heads))


def _flash2(call: AttentionCall, deterministic: bool, num_sms: int) -> int:
    """softmax_d, dq_accum and, with grouped heads, dK and dV of every query head."""
    copies = 1
    if deterministic:
        copies = deterministic_copies(call.num_segments, call.num_heads, num_sms=num_sms)
    rows = call.num_heads * (call.num_queries + 128 * call.num_segments)
    head_size = _up(call.head_size, 32 if call.head_size <= 128 else 64)
    expanded = 0
    if call.num_heads != call.num_kv_heads:
        expanded = 2 * call.num_keys * call.num_heads * call.head_size * call.value_bytes
    return _FLOAT32 * rows * (1 + copies * head_size) + expanded


def _flash3(call: AttentionCall, deterministic: bool) -> int:
    """softmax_d, softmax_lse_log2, dq_accum, dk_accum, dv_accum and the semaphores."""
    head_size = next(size for size in (64, 96, 128, 192, 256) if call.head_size <= size)
    block_q = 128 if head_size == 64 else _hopper_rows(head_size, call.is_causal)
    block_k = {192: 96, 256: 80}.get(head_size, 128)
    return _accumulators(
        call,
        rows_q=_up(call.num_queries + call.num_segments * block_q, block_q),
        rows_k=_up(call.num_keys + call.num_segments * block_k, block_k),
        head_size=head_size,
        semaphores_q=-(-call.max_q // block_q),
        semaphores_k=2 * -(-call.max_k // block_k) if deterministic else 0,
    )


def _flash4(call: AttentionCall, deterministic: bool, compute_major: int) -> int:
    """dpsum, lse_log2, dq_accum, dk_accum, dv_accum and the semaphores."""
    is_hopper = compute_major == 9
    if call.head_size == 256 and not is_hopper:
        # This head size has its own kernel, which uses no accumulators.
        rows = _up(call.num_queries + call.num_segments * 128, 128)
        return _FLOAT32 * 2 * call.num_heads * rows
    block_q, block_k, cluster, step = _flash4_blocks(call, is_hopper)
    # The source computes (rows + (segments + 1) * block - 1) // block * block, which is equal.
    return _accumulators(
        call,
        rows_q=_up(call.num_queries + call.num_segments * block_q, block_q),
        rows_k=_up(call.num_keys + call.num_segments * cluster * block_k, cluster * block_k),
        head_size=_up(call.head_size, step),
        semaphores_q=cluster * -(-call.max_q // block_q) if deterministic else 0,
        semaphores_k=4 * _up(call.max_k, cluster * block_k) // block_k if deterministic else 0,
    )


def _hopper_rows(head_size: int, is_causal: bool) -> int:
    """Query rows of a tile of heads above 64, in FlashAttention-3 and -4."""
    return 80 if 96 < head_size <= 128 and not is_causal else 64


def _flash4_blocks(call: AttentionCall, is_hopper: bool) -> tuple[int, int, int, int]:
    """(query rows, key rows, thread blocks of a cluster, step of head sizes) of the tiles."""
    head_size = call.head_size
    if not is_hopper:
        return 128, 128, 2 if head_size >= 128 else 1, 32
    if head_size <= 64:
        return 128, 128, 1, 32
    if head_size <= 128:
        return _hopper_rows(head_size, call.is_causal), 128, 1, 32
    return 64, 96 if head_size <= 192 else 48, 1, 64


def _accumulators(
    call: AttentionCall,
    *,
    rows_q: int,
    rows_k: int,
    head_size: int,
    semaphores_q: int,
    semaphores_k: int,
) -> int:
    """Two float32 numbers a query row, dQ, with grouped heads dK and dV; all in padded rows, and
    32-bit semaphores of a head and a segment.
    """
    numbers = call.num_heads * (rows_q * (2 + head_size) + call.num_segments * semaphores_q)
    if call.num_heads != call.num_kv_heads:
        numbers += call.num_kv_heads * 2 * rows_k * head_size
        numbers += call.num_kv_heads * call.num_segments * semaphores_k
    return _FLOAT32 * numbers


def _up(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple
