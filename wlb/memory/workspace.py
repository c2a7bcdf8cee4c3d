"""Memory that attention kernels allocate in backward, besides the gradients that they return.

The shapes of the allocated tensors are taken from the kernels' sources: flash-attn 2.8.3
(csrc/flash_attn/flash_api.cpp, mha_varlen_bwd; torch has the same lines), FlashAttention-3
(hopper/flash_api.cpp, mha_bwd, August 2026) and FlashAttention-4 (flash_attn/cute/interface.py,
_flash_attn_bwd, 4.0.0b36). The sizes were not measured on a GPU. Forward allocates nothing, because
wlb never uses split-KV.
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
    """Sizes of one variable-length attention call on a rank."""

    num_segments: int
    num_queries: int  # query rows of all segments together
    num_keys: int  # keys of all segments together
    max_q: int  # query rows of the longest segment
    max_k: int  # keys of the longest segment
    num_heads: int  # query heads on the TP rank
    num_kv_heads: int  # KV heads on the TP rank
    head_size: int  # size of a head
    value_bytes: int = 2  # bytes of one value of Q, K and V
    # Whether the call has a causal mask. Calls over other ranks' keys have none
    # (`cp.overlap_stages`).
    is_causal: bool = True

    def __post_init__(self) -> None:
        if min(self.num_segments, self.num_heads, self.num_kv_heads, self.head_size) < 1:
            raise UserError(
                "num_segments, num_heads, num_kv_heads and head_size must all be at least 1, but "
                f"one is less in {self}; correct it"
            )
        if not 0 <= self.max_q <= self.num_queries or not 0 <= self.max_k <= self.num_keys:
            raise UserError(
                f"max_q = {self.max_q} must be from 0 to num_queries = {self.num_queries}, and "
                f"max_k = {self.max_k} from 0 to num_keys = {self.num_keys}; correct these sizes"
            )


def attention_workspace_bytes(
    backend: AttentionBackend,
    call: AttentionCall,
    *,
    deterministic: bool,
    num_sms: int = HOPPER_SMS,
    compute_major: int = 9,
) -> int:
    """Return the bytes that a kernel allocates in the backward of one attention call.

    For sdpa the result is 0. wlb uses sdpa on CPU, in float32, and for heads above
    `MOST_HEAD_SIZE`, which the other kernels refuse. For `auto` the result is the largest of all
    kernels, because a machine without a GPU may plan, and there the kernel is not known yet.

    Args:
        backend: The attention kernel.
        call: Sizes of the call.
        deterministic: Whether the kernel must be deterministic.
        num_sms: Streaming multiprocessors of the GPU.
        compute_major: Major compute capability of the GPU: 9 for Hopper, 10 for a B200.
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
    """Return the most bytes that a kernel allocates in backward for calls of at most these sizes.

    The largest call need not be the worst. With more segments a kernel needs more padding rows, but
    FlashAttention-2 needs fewer copies of dQ in deterministic mode. So all numbers of segments up
    to `call.num_segments` are considered. If `call` has no causal mask, causal calls are considered
    too, because a rank that makes calls without a mask also makes causal calls.

    Args:
        backend: The attention kernel.
        call: The largest sizes of a call.
        deterministic: Whether the kernel must be deterministic.
    """
    masks = {True, call.is_causal}
    numbers = _most_segments_by_copies(call)
    calls = (replace(call, num_segments=n, is_causal=x) for n in numbers for x in masks)
    return max(attention_workspace_bytes(backend, c, deterministic=deterministic) for c in calls)


def _most_segments_by_copies(call: AttentionCall) -> Iterator[int]:
    """Yield the numbers of segments at which FlashAttention-2 may need the most memory.

    In deterministic mode a call allocates several copies of dQ, fewer if it has more segments
    (`deterministic_copies`). With the same number of copies, a call with more segments needs more
    memory. So for each number of copies, the largest number of segments that gives it is yielded.

    Args:
        call: The largest sizes of a call, such as its number of segments.
    """
    yield call.num_segments
    for copies in range(2, -(-HOPPER_SMS // call.num_heads) + 1):
        # Solve the formula of `deterministic_copies` for the number of segments.
        most = (-(-HOPPER_SMS // (copies - 1)) - 1) // call.num_heads
        if 1 <= most < call.num_segments:
            yield most


def deterministic_copies(num_segments: int, num_heads: int, *, num_sms: int = HOPPER_SMS) -> int:
    """Return how many float32 copies of dQ FlashAttention-2 adds up in a deterministic backward.

    Args:
        num_segments: Segments of the call.
        num_heads: Query heads on the rank.
        num_sms: Streaming multiprocessors of the GPU.
    """
    return -(-num_sms // (num_segments * num_heads))


def _flash2(call: AttentionCall, deterministic: bool, num_sms: int) -> int:
    """Return the bytes of FlashAttention-2's tensors softmax_d and dq_accum.

    With grouped-query attention, dK and dV of every query head are included too.
    """
    copies = 1
    if deterministic:
        copies = deterministic_copies(call.num_segments, call.num_heads, num_sms=num_sms)
    # Kernels pad each segment by up to 128 rows.
    rows = call.num_heads * (call.num_queries + 128 * call.num_segments)
    head_size = _up(call.head_size, 32 if call.head_size <= 128 else 64)
    # The kernel computes dK and dV for every query head, before they are added up over the query
    # heads that share a KV head.
    expanded = 0
    if call.num_heads != call.num_kv_heads:
        expanded = 2 * call.num_keys * call.num_heads * call.head_size * call.value_bytes
    return _FLOAT32 * rows * (1 + copies * head_size) + expanded


def _flash3(call: AttentionCall, deterministic: bool) -> int:
    """Return the bytes of FlashAttention-3's tensors softmax_d, softmax_lse_log2 and accumulators.

    The accumulators are those of dQ, dK and dV, with semaphores.
    """
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
    """Return the bytes of FlashAttention-4's tensors dpsum, lse_log2 and accumulators.

    The accumulators are those of dQ, dK and dV, with semaphores.
    """
    is_hopper = compute_major == 9
    if call.head_size == 256 and not is_hopper:
        # On GPUs other than Hopper, the kernel for this head size allocates no float32 gradients.
        rows = _up(call.num_queries + call.num_segments * 128, 128)
        return _FLOAT32 * 2 * call.num_heads * rows
    block_q, block_k, cluster, step = _flash4_blocks(call, is_hopper)
    # FlashAttention-4 rounds with (rows + (segments + 1) * block - 1) // block * block. `_up` gives
    # the same numbers.
    return _accumulators(
        call,
        rows_q=_up(call.num_queries + call.num_segments * block_q, block_q),
        rows_k=_up(call.num_keys + call.num_segments * cluster * block_k, cluster * block_k),
        head_size=_up(call.head_size, step),
        semaphores_q=cluster * -(-call.max_q // block_q) if deterministic else 0,
        semaphores_k=4 * _up(call.max_k, cluster * block_k) // block_k if deterministic else 0,
    )


def _hopper_rows(head_size: int, is_causal: bool) -> int:
    """Return a tile's query rows in FlashAttention-3 and -4 on Hopper, for head sizes above 64."""
    return 80 if 96 < head_size <= 128 and not is_causal else 64


def _flash4_blocks(call: AttentionCall, is_hopper: bool) -> tuple[int, int, int, int]:
    """Return the tile shape of FlashAttention-4.

    Returns:
        Query rows of a tile, key rows of a tile, thread blocks of a cluster, and the number of
        which the padded head size is a multiple.
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
    """Return the bytes of a kernel's float32 accumulators and of its semaphores.

    Each query row of a head has two softmax statistics and a row of dQ. If several query heads
    share a KV head, each key of a KV head has rows of dK and dV. Semaphores are 32-bit integers.

    Args:
        call: Sizes of the call.
        rows_q: Query rows of all segments, with padding.
        rows_k: Keys of all segments, with padding.
        head_size: Size of a head, with padding.
        semaphores_q: Semaphores of dQ for each query head and segment.
        semaphores_k: Semaphores of dK and dV for each KV head and segment.
    """
    numbers = call.num_heads * (rows_q * (2 + head_size) + call.num_segments * semaphores_q)
    if call.num_heads != call.num_kv_heads:
        numbers += call.num_kv_heads * 2 * rows_k * head_size
        numbers += call.num_kv_heads * call.num_segments * semaphores_k
    return _FLOAT32 * numbers


def _up(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple
