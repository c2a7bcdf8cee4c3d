"""Bytes that attention kernels allocate in backward, besides the gradients that they return.

Shapes were read in the sources: flash-attn 2.8.3 (csrc/flash_attn/flash_api.cpp, mha_varlen_bwd;
torch has the same lines), FlashAttention-3 (hopper/flash_api.cpp, mha_bwd, August 2026) and
FlashAttention-4 (flash_attn/cute/interface.py, _flash_attn_bwd, 4.0.0b36). They were not measured
on a GPU. Forward needs no workspace, because wlb never uses split-KV.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from wlb.plan import UserError
from wlb.spec import AttentionBackend

HOPPER_SMS = 132
"""Streaming multiprocessors of an H100 SXM and an H200; a B200 has 148."""
MOST_HEAD_SIZE = 256
"""Largest head size that FlashAttention supports."""
_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Size of one variable-length attention call on a rank."""

    num_segments: int  # segments of the call
    num_queries: int  # query rows of all segments
    num_keys: int  # keys of all segments
    max_q: int  # query rows of the longest segment
    max_k: int  # keys of the longest segment
    num_heads: int  # query heads on the TP rank
    num_kv_heads: int  # KV heads on the TP rank
    head_size: int  # size of a head
    value_bytes: int = 2  # bytes of one value of Q, K and V
    # False for calls over other ranks' keys (`cp.overlap_stages`), which have no mask
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
    """Return the workspace of one backward call in bytes.

    sdpa counts nothing: it is used on CPU, in float32 and for heads above `MOST_HEAD_SIZE`, which
    the other kernels refuse. `auto` counts the largest of the others, because plans are also made
    on machines without a GPU, where the choice is not known.

    Args:
        backend: The attention kernel.
        call: Size of the call.
        deterministic: Whether the kernel must be deterministic.
        num_sms: Streaming multiprocessors of the GPU.
        compute_major: Compute capability of the GPU; 9 is Hopper, 10 a B200.
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
    """Return the largest workspace of any call that is at most as large as `call`.

    All numbers of segments from 1 to `call.num_segments` are considered: more segments need more
    padding rows, but FlashAttention-2 needs fewer deterministic copies. If `call` has no mask,
    causal calls are considered too, because a rank that makes such calls makes both.

    Args:
        backend: The attention kernel.
        call: The largest call.
        deterministic: Whether the kernel must be deterministic.
    """
    masks = {True, call.is_causal}
    numbers = _most_segments_by_copies(call)
    calls = (replace(call, num_segments=n, is_causal=x) for n in numbers for x in masks)
    return max(attention_workspace_bytes(backend, c, deterministic=deterministic) for c in calls)


def _most_segments_by_copies(call: AttentionCall) -> Iterator[int]:
    """Yield, for each possible number of deterministic copies, the most segments that need it."""
    yield call.num_segments
    for copies in range(2, -(-HOPPER_SMS // call.num_heads) + 1):
        # This solves `deterministic_copies` for the number of segments.
        most = (-(-HOPPER_SMS // (copies - 1)) - 1) // call.num_heads
        if 1 <= most < call.num_segments:
            yield most


def deterministic_copies(num_segments: int, num_heads: int, *, num_sms: int = HOPPER_SMS) -> int:
    """Return how many float32 copies of dQ FlashAttention-2 adds up in deterministic backward."""
    return -(-num_sms // (num_segments * num_heads))


def _flash2(call: AttentionCall, deterministic: bool, num_sms: int) -> int:
    """FlashAttention-2: softmax_d, dq_accum; with grouped heads dK and dV of every query head."""
    copies = 1
    if deterministic:
        copies = deterministic_copies(call.num_segments, call.num_heads, num_sms=num_sms)
    # Kernels pad each segment by up to 128 rows.
    rows = call.num_heads * (call.num_queries + 128 * call.num_segments)
    head_size = _up(call.head_size, 32 if call.head_size <= 128 else 64)
    # dK and dV are computed for every query head, and then summed over each group of heads.
    expanded = 0
    if call.num_heads != call.num_kv_heads:
        expanded = 2 * call.num_keys * call.num_heads * call.head_size * call.value_bytes
    return _FLOAT32 * rows * (1 + copies * head_size) + expanded


def _flash3(call: AttentionCall, deterministic: bool) -> int:
    """FlashAttention-3: softmax_d, softmax_lse_log2, dq_accum, dk_accum, dv_accum, semaphores."""
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
    """FlashAttention-4: dpsum, lse_log2, dq_accum, dk_accum, dv_accum, semaphores."""
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
    """Return the query rows of a tile in FlashAttention-3 and -4, for heads above 64."""
    return 80 if 96 < head_size <= 128 and not is_causal else 64


def _flash4_blocks(call: AttentionCall, is_hopper: bool) -> tuple[int, int, int, int]:
    """Return the tile shape of FlashAttention-4.

    Returns:
        Query rows, key rows, thread blocks of a cluster, and the multiple of head sizes.
    """
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
    """Return the bytes of accumulators in padded rows and of semaphores.

    Each query row of a head has two float32 numbers and dQ. With grouped heads, keys have dK and
    dV. Semaphores are 32-bit integers for each head and segment.
    """
    numbers = call.num_heads * (rows_q * (2 + head_size) + call.num_segments * semaphores_q)
    if call.num_heads != call.num_kv_heads:
        numbers += call.num_kv_heads * 2 * rows_k * head_size
        numbers += call.num_kv_heads * call.num_segments * semaphores_k
    return _FLOAT32 * numbers


def _up(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple
