"""Attention by torch's scaled_dot_product_attention: for the CPU, and for float32 on CUDA.

Segments of similar lengths form a **class**. Two lengths are similar if they round up to the same
one of 8, 12, 16, 24, 32, 48, ..., 512 (`_rounded`); longer segments must have equal lengths. The
rows of a class are copied into one padded batch, which one call of torch computes. Masks hide the
padding, so results are exact. Padding adds less than 50% to the length of a segment of 8 or more
rows. With a sliding window, segments are cut into blocks of queries. A key row may be copied
several times, for example for several blocks. The gradients of its copies are then added up in
float32, in a fixed order.

Shapes: B segments of Q query and K key rows in a class; P rows of all padded batches; N source
rows, which are the rows of the tensor of queries or keys that is copied into the batches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wlb.kernels.capped import capped_backward, capped_forward
from wlb.kernels.op import Gradients, SavedTensors, fixed_order, kernel_name, sum_dtype
from wlb.kernels.segments import Segments, copy_to_device

flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_PADDED_BELOW = 512
_LEAST_BLOCK, MOST_BLOCK = 128, 1024
"""Least and most query rows of the blocks into which a sliding window cuts segments.

Between these bounds a block has as many query rows as the window has keys.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """Indices that copy rows into padded batches, and that bring their gradients back.

    Source rows are the rows of the tensor of queries or keys. One may be copied several times.
    """

    # For each row of the batches, the source row that is copied there. Padding repeats the first
    # row of its segment, so that a NaN stays in its segment. None if the batches have exactly the
    # source rows, in order.
    take_P: Tensor | None
    padding: Tensor  # indices of the batches' rows that are padding
    first_N: Tensor  # for each of the N source rows the first row of the batches that copies it
    unused: Tensor  # source rows that are not copied
    # Further copies of source rows, as pairs (source rows, rows of the batches): the first pair has
    # the second copy of each row that has one, the second pair has the third copies, and so on.
    more: tuple[tuple[Tensor, Tensor], ...]

    def pad(self, x_N: Tensor, *, fill: float | None = None) -> Tensor:
        """Copy rows into the padded batches.

        Args:
            x_N: A tensor with one row for each query, or for each row of keys.
            fill: Value of padding. With None, padding repeats the first row of its segment.
        """
        if self.take_P is None:
            return x_N if x_N.stride(-1) == 1 else x_N.contiguous()
        padded = x_N.index_select(0, self.take_P)
        return padded if fill is None else padded.index_fill_(0, self.padding, fill)

    def collect(self, y_P: Tensor) -> Tensor:
        """Add up the copies of each source row, and return one row for each of the N source rows.

        Source rows are the rows from which `pad` copies. One without a copy gets 0. Padding is left
        out. If a source row has several copies, sums are in float32 (float64 for float64 inputs).

        Args:
            y_P: A tensor with one row for each row of the padded batches.
        """
        if self.take_P is None:
            return y_P
        total = y_P.index_select(0, self.first_N).index_fill_(0, self.unused, 0)
        if self.more:
            total = total.to(sum_dtype(y_P))
        # An entry of `more` has each source row at most once, so the indexed addition loses no
        # copy.
        for rows, where in self.more:
            total.index_copy_(0, rows, total.index_select(0, rows) + y_P.index_select(0, where))
        return total


class _Class(NamedTuple):
    """Segments of similar lengths, which one call computes as a padded batch."""

    num_segments: int
    num_queries: int  # Q, padding included
    num_keys: int  # K, padding included
    # whether to make two calls: for the keys before the queries, and for the keys at the queries'
    # positions (`prefixed_forward`)
    is_split: bool
    # This mask is added to the scores. Its shape is [1, 1, Q, K] if all segments have the same
    # mask. It is None in three cases: the kernel's own causal mask suffices, because segments have
    # as many keys as queries; the call is split (`is_split`); or the call is not causal and has no
    # padded keys.
    mask_B1QK: Tensor | None
    is_causal: bool  # whether query i attends only to the keys up to i, by the kernel's own mask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Classes:
    """The segments of a call, grouped into classes that are each computed as one padded batch."""

    classes: tuple[_Class, ...]  # in the order of their rows in the padded batches
    queries: _Rows  # how rows of queries are copied into the padded batches of all classes
    keys: _Rows  # how rows of keys and of values are copied into these batches

    def batch_queries(self, x_THD: Tensor, *, fill: float | None = None) -> list[Tensor]:
        """Return the padded queries, [B, H, Q, D] for each class of segments.

        A class has segments of similar lengths (`_Class`). Padding has the value `fill`. With None
        it repeats the first row of its segment.
        """
        padded = self.queries.pad(x_THD, fill=fill)
        return self._batch(padded, [c.num_queries for c in self.classes])

    def batch_lse(self, lse_HT: Tensor) -> list[Tensor]:
        """Return the log-sum-exp of the padded queries, [B, H, Q] for each class of segments.

        A class has segments of similar lengths (`_Class`). Padding has infinity.

        With infinity, the softmax weights of padded queries are zero in backward. Repeating the
        log-sum-exp of the segment's first row, as `pad` does, could make these weights infinite,
        because padded queries attend to more keys than the first row. The gradients would then be
        NaN.
        """
        rows = self.queries
        if rows.take_P is not None:
            # Select along dimension 1, because selecting rows of a transposed view is slow.
            lse_HT = lse_HT.index_select(1, rows.take_P)
            lse_HT.index_fill_(1, rows.padding, float("inf"))
        return self._batch(lse_HT.t(), [c.num_queries for c in self.classes])

    def batch_keys(self, x_SGD: Tensor) -> list[Tensor]:
        """Return the padded keys or values, [B, G, K, D] for each class of segments.

        A class has segments of similar lengths (`_Class`).
        """
        return self._batch(self.keys.pad(x_SGD), [c.num_keys for c in self.classes])

    def _batch(self, padded: Tensor, lengths: list[int]) -> list[Tensor]:
        sizes = [c.num_segments * n for c, n in zip(self.classes, lengths, strict=True)]
        return [
            part.unflatten(0, (c.num_segments, -1)).transpose(1, 2)
            for part, c in zip(padded.split(sizes), self.classes, strict=True)
        ]


class SdpaBackend:
    """Attention by torch's scaled_dot_product_attention.

    Args:
        deterministic: Whether backward adds up gradients in a fixed order. On the CPU the order is
            always fixed.
    """

    takes_key_rows = True  # see `wlb.kernels.op.Backend.takes_key_rows`

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self.name = kernel_name("sdpa", deterministic=deterministic)

    def forward(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """Return attention's output [T, H, D] and log-sum-exp [H, T]."""
        plan = _plan(q_THD, k_SGD, segments)
        call = _forward_on_cpu if q_THD.device.type == "cpu" else _forward_elsewhere
        if segments.scores.softcap:
            call = partial(_forward_capped, segments.scores.softcap)
        batches = (plan.batch_queries(q_THD), plan.batch_keys(k_SGD), plan.batch_keys(v_SGD))
        results = [call(*x) for x in zip(plan.classes, *batches, strict=True)]
        out_PHD, lse_PH = (_unbatch(list(parts)) for parts in zip(*results, strict=True))
        return plan.queries.collect(out_PHD), plan.queries.collect(lse_PH).t()

    def backward(self, grad_THD: Tensor, saved: SavedTensors, segments: Segments) -> Gradients:
        """Return the gradients of q, k and v."""
        q_THD, k_SGD, v_SGD, out_THD, lse_HT = saved
        plan = _plan(q_THD, k_SGD, segments)
        call = _backward_on_cpu if q_THD.device.type == "cpu" else _backward_elsewhere
        if segments.scores.softcap:
            call = partial(_backward_capped, segments.scores.softcap)
        batches = (
            plan.batch_queries(grad_THD, fill=0.0),
            plan.batch_queries(q_THD),
            plan.batch_keys(k_SGD),
            plan.batch_keys(v_SGD),
            plan.batch_queries(out_THD),
            plan.batch_lse(lse_HT),
        )
        with fixed_order(self.deterministic):
            results = [
                call(c, grad, SavedTensors(*x))
                for c, grad, *x in zip(plan.classes, *batches, strict=True)
            ]
        dq_PHD, dk_PGD, dv_PGD = (_unbatch(list(parts)) for parts in zip(*results, strict=True))
        return (
            plan.queries.collect(dq_PHD),
            plan.keys.collect(dk_PGD).to(k_SGD.dtype),
            plan.keys.collect(dv_PGD).to(v_SGD.dtype),
        )


SDPA, SDPA_DETERMINISTIC = SdpaBackend(), SdpaBackend(deterministic=True)


def _forward_on_cpu(
    c: _Class, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor
) -> tuple[Tensor, Tensor]:
    k_BHKD, v_BHKD = (_repeat_heads(x, q_BHQD.shape[1]) for x in (k_BGKD, v_BGKD))
    if c.is_split:
        return prefixed_forward(q_BHQD, k_BHKD, v_BHKD)
    return flash_forward(q_BHQD, k_BHKD, v_BHKD, 0.0, c.is_causal, attn_mask=c.mask_B1QK)


def _backward_on_cpu(c: _Class, grad_BHQD: Tensor, saved: SavedTensors) -> Gradients:
    q_BHQD, k_BGKD, v_BGKD, out_BHQD, lse_BHQ = saved
    k_BHKD, v_BHKD = (_repeat_heads(x, q_BHQD.shape[1]) for x in (k_BGKD, v_BGKD))
    saved = SavedTensors(q_BHQD, k_BHKD, v_BHKD, out_BHQD, lse_BHQ)
    if c.is_split:
        dq, dk, dv = prefixed_backward(grad_BHQD, saved)
    else:
        dq, dk, dv = flash_backward(grad_BHQD, *saved, 0.0, c.is_causal, attn_mask=c.mask_B1QK)
    return dq, _sum_heads(dk, k_BGKD.shape[1]), _sum_heads(dv, k_BGKD.shape[1])


def _forward_capped(
    softcap: float, c: _Class, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor
) -> tuple[Tensor, Tensor]:
    k_BHKD, v_BHKD = (_repeat_heads(x, q_BHQD.shape[1]) for x in (k_BGKD, v_BGKD))
    return capped_forward(q_BHQD, k_BHKD, v_BHKD, c.mask_B1QK, c.is_causal, softcap)


def _backward_capped(
    softcap: float, c: _Class, grad_BHQD: Tensor, saved: SavedTensors
) -> Gradients:
    q_BHQD, k_BGKD, v_BGKD, out_BHQD, lse_BHQ = saved
    k_BHKD, v_BHKD = (_repeat_heads(x, q_BHQD.shape[1]) for x in (k_BGKD, v_BGKD))
    saved = SavedTensors(q_BHQD, k_BHKD, v_BHKD, out_BHQD, lse_BHQ)
    dq, dk, dv = capped_backward(grad_BHQD, saved, c.mask_B1QK, c.is_causal, softcap)
    return dq, _sum_heads(dk, k_BGKD.shape[1]), _sum_heads(dv, k_BGKD.shape[1])


def _repeat_heads(x_BGKD: Tensor, num_heads: int) -> Tensor:
    """Repeat key/value heads, so that there is one for each of `num_heads` query heads."""
    repeats = num_heads // x_BGKD.shape[1]
    return x_BGKD if repeats == 1 else x_BGKD.repeat_interleave(repeats, 1)


def _sum_heads(x_BHKD: Tensor, num_kv_heads: int) -> Tensor:
    """Add up the gradients of repeated key/value heads, in float32 (float64 for float64 inputs)."""
    if x_BHKD.shape[1] == num_kv_heads:
        return x_BHKD
    return x_BHKD.unflatten(1, (num_kv_heads, -1)).sum(2, dtype=sum_dtype(x_BHKD))


def _forward_elsewhere(
    c: _Class, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output of a class of segments, and zeros, on a device other than the CPU.

    torch chooses the kernel. The zeros are in place of the log-sum-exp, which torch does not
    return. Key heads are repeated, because the only float32 kernel whose memory is linear in the
    length needs as many key heads as query heads.
    """
    k_BHKD, v_BHKD = (_repeat_heads(x, q_BHQD.shape[1]) for x in (k_BGKD, v_BGKD))
    out_BHQD = F.scaled_dot_product_attention(
        q_BHQD, k_BHKD, v_BHKD, attn_mask=c.mask_B1QK, is_causal=c.is_causal
    )
    return out_BHQD, out_BHQD.new_zeros(out_BHQD.shape[:3], dtype=sum_dtype(out_BHQD))


def _backward_elsewhere(c: _Class, grad_BHQD: Tensor, saved: SavedTensors) -> Gradients:
    """Return the gradients of q, k and v for one class of segments, on other devices than the CPU.

    Autograd recomputes forward and differentiates it. The output's gradient must be zero for
    padding.
    """
    q_BHQD, k_BGKD, v_BGKD, _, _ = saved
    repeated = (_repeat_heads(x, q_BHQD.shape[1]) for x in (k_BGKD, v_BGKD))
    leaves = [x.detach().requires_grad_() for x in (q_BHQD, *repeated)]
    with _autograd():
        out_BHQD, _ = _forward_elsewhere(c, *leaves)
        dq, dk, dv = torch.autograd.grad(out_BHQD, leaves, grad_BHQD)
    return dq, _sum_heads(dk, k_BGKD.shape[1]), _sum_heads(dv, k_BGKD.shape[1])


@contextmanager
def _autograd() -> Iterator[None]:
    """Enable autograd in the block, inside a custom op, where torch has switched it off."""
    Key, Keys = torch._C.DispatchKey, torch._C.DispatchKeySet
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (Key.AutogradFunctionality, Key.AutogradOther, Key.AutogradNestedTensor):
        excluded -= Keys(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def _unbatch(parts: list[Tensor]) -> Tensor:
    """Concatenate the batches [B, H, rows, ...] of all classes of segments to rows [P, H, ...]."""
    rows = [x.transpose(1, 2).flatten(0, 1) for x in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _plan(q_THD: Tensor, k_SGD: Tensor, segments: Segments) -> _Classes:
    name = f"sdpa {q_THD.dtype} {k_SGD.shape[0]}"
    return segments.derive(name, partial(_classify, dtype=q_THD.dtype, num_key_rows=k_SGD.shape[0]))


def _classify(segments: Segments, *, dtype: torch.dtype, num_key_rows: int) -> _Classes:
    """Group segments into classes of similar lengths, and make the masks and indices of each.

    Args:
        segments: The segments of the call.
        dtype: Dtype of queries, which masks must have.
        num_key_rows: Number of rows of the tensor of keys.
    """
    # 1. Group segments by rounded lengths and kind of mask.
    starts_q, lengths_q, starts_k, lengths_k = _blocks(segments)
    sliding, capped = segments.scores.sliding, segments.scores.softcap > 0
    members: dict[tuple[bool, bool, int, int], list[int]] = {}
    for i, (num_q, num_k) in enumerate(zip(lengths_q.tolist(), lengths_k.tolist(), strict=True)):
        if num_q:
            slides = 0 < sliding < num_k
            square = segments.is_causal and num_q == num_k and not slides
            key = (square, slides, _rounded(num_q), _rounded(num_k))
            members.setdefault(key, []).append(i)
    # 2. Make the mask of each class.
    device = segments.cu_seqlens_q.device
    classes: list[_Class] = []
    for (square, slides, num_q, num_k), who in members.items():
        is_long = min(num_q, num_k) > _PADDED_BELOW and not slides and not capped
        is_split = segments.is_causal and not square and device.type == "cpu" and is_long
        mask, keys_of = None, lengths_k[who]
        if segments.is_causal and not square and not is_split:
            rows_of, shape = lengths_q[who], (num_q, num_k)
            mask = _mask(keys_of, rows_of, shape, device, dtype, sliding=sliding if slides else 0)
        if not segments.is_causal and (keys_of < num_k).any():
            mask = _mask(keys_of, np.ones_like(keys_of), (num_q, num_k), device, dtype)
        is_causal = segments.is_causal and mask is None
        classes.append(_Class(len(who), num_q, num_k, is_split, mask, is_causal))
    # 3. Make the indices that copy rows into padded batches.
    queries = [(n, starts_q[who], lengths_q[who]) for (*_, n, _), who in members.items()]
    keys = [(n, starts_k[who], lengths_k[who]) for (*_, n), who in members.items()]
    is_shared = segments.key_rows is not None or sliding > 0 or capped
    return _Classes(
        classes=tuple(classes),
        queries=_rows(queries, segments.num_queries, device),
        keys=_rows(keys, num_key_rows, device, row_of=segments.key_rows, is_shared=is_shared),
    )


def _blocks(segments: Segments) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut segments with a sliding window or capped scores into blocks of query rows.

    A block has only the keys to which its queries attend. A segment with more keys than the sliding
    window is cut, so that the work is linear in its length. A causal segment with capped scores is
    cut, so that its scores fit into memory. Every other segment is one block.

    Returns:
        First query, number of queries, first key and number of keys of each block.
    """
    q, k = np.array(segments.offsets_q), np.array(segments.offsets_k)
    num_q, num_k = np.diff(q), np.diff(k)
    sliding, capped = segments.scores.sliding, segments.scores.softcap > 0
    if not sliding and not (capped and segments.is_causal):
        return q[:-1], num_q, k[:-1], num_k
    rows = min(max(sliding, _LEAST_BLOCK), MOST_BLOCK) if sliding else MOST_BLOCK
    is_whole = (num_k <= sliding) & (not capped)
    rows_of = np.where(is_whole, np.maximum(num_q, 1), rows)
    num_blocks = -(-num_q // rows_of)
    of = np.repeat(np.arange(num_q.size), num_blocks)
    first = np.arange(of.size) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
    first = first * rows_of[of]
    size = np.minimum(rows_of[of], num_q[of] - first)
    seen = num_k[of] - num_q[of] + first
    begin = np.maximum(0, seen - sliding + 1) if sliding else np.zeros_like(seen)
    return q[of] + first, size, k[of] + begin, seen + size - begin


def _rounded(length: int) -> int:
    """Round a segment's length up to 8, 12, 16, 24, 32, 48, ..., 512; keep longer lengths."""
    if length > _PADDED_BELOW:
        return length
    power = 1 << max(3, (length - 1).bit_length())
    return power * 3 // 4 if length <= power * 3 // 4 and power > 8 else power


PADDED_LENGTHS = tuple(sorted({_rounded(n) for n in range(1, _PADDED_BELOW + 1)}))
"""All lengths to which segments are padded. Longer segments are not padded."""


def _mask(
    keys_B: np.ndarray,
    queries_B: np.ndarray,
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    sliding: int = 0,
) -> Tensor:
    """Make a mask [B or 1, 1, Q, K] that is 0 where query i attends to key j, else -inf.

    B is the number of segments. If all segments have the same lengths, one mask serves them all.
    Query i of a segment with Lq queries and Lk keys attends to the keys up to Lk - Lq + i. Padded
    queries attend to the same keys as the last query, so that every row has a key. The mask is
    added to scores and has the queries' dtype, because torch would convert a bool mask in every
    call.

    Args:
        keys_B: Number of keys of each segment, Lk.
        queries_B: Number of queries of each segment, Lq. If all are 1, every query attends to all
            keys of its segment, and the mask hides only padded keys.
        shape: Padded numbers of queries and keys, (Q, K).
        device: Device of the mask.
        dtype: Dtype of the mask.
        sliding: Size of the sliding window: a query attends only to the last `sliding` of its keys.
            0 means all.
    """
    both = np.stack([keys_B, queries_B])
    if (both == both[:, :1]).all():
        both = both[:, :1]
    keys_B11, queries_B11 = both[..., None, None]
    last_BQ1 = keys_B11 - queries_B11 + np.minimum(np.arange(shape[0])[:, None], queries_B11 - 1)
    key_K = np.arange(shape[1])
    is_hidden = key_K > last_BQ1
    if sliding:
        is_hidden |= key_K <= last_BQ1 - sliding
    hidden = copy_to_device(is_hidden, device)[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, float("-inf"))


def _rows(
    classes: list[tuple[int, np.ndarray, np.ndarray]],
    num_rows: int,
    device: torch.device,
    *,
    row_of: np.ndarray | None = None,
    is_shared: bool = False,
) -> _Rows:
    """Make the indices that copy rows of queries or keys into padded batches.

    Args:
        classes: For each class of segments the padded length, and the starts and lengths of the
            segments. A start is an index among the queries, or the keys, of all segments.
        num_rows: N, the number of source rows (rows of the tensor of queries or keys).
        device: Device to which the indices are copied.
        row_of: Source row of each query or key. None if query or key i is source row i.
        is_shared: Whether a source row may be copied several times.
    """
    takes: list[np.ndarray] = []
    reals: list[np.ndarray] = []
    for padded, starts, lengths in classes:
        position = np.arange(padded)
        real = position < lengths[:, None]
        takes.append(np.where(real, starts[:, None] + position, starts[:, None]).ravel())
        reals.append(real.ravel())
    take, real = np.concatenate(takes), np.concatenate(reals)
    if row_of is not None:
        take = row_of[take].astype(np.int64)
    where = np.flatnonzero(real)
    uses = _uses(take[where], where, is_shared=is_shared)
    first = np.full(num_rows, -1)
    first[uses[0][0]] = uses[0][1]
    is_same = np.array_equal(take, np.arange(num_rows))

    def there(x: np.ndarray) -> Tensor:
        return copy_to_device(x, device)

    return _Rows(
        take_P=None if is_same else there(take),
        padding=there(np.flatnonzero(~real)),
        first_N=there(np.maximum(first, 0)),
        unused=there(np.flatnonzero(first < 0)),
        more=tuple((there(rows), there(padded)) for rows, padded in uses[1:]),
    )


def _uses(
    rows: np.ndarray, where: np.ndarray, *, is_shared: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Divide copies of rows into groups, so that no group has two copies of the same source row.

    Args:
        rows: Source row of each copy.
        where: For each copy, its row in the padded batches.
        is_shared: Whether a source row may have several copies.

    Returns:
        A pair (source rows, rows of the batches) for each group. The first group has one copy of
        every source row, the second group a second copy of the rows that have one, and so on.
    """
    if not is_shared:
        return [(rows, where)]
    order = np.argsort(rows, kind="stable")
    rows, where = rows[order], where[order]
    begins = np.flatnonzero(np.diff(rows, prepend=-1))
    nth = np.arange(rows.size) - np.repeat(begins, np.diff(begins, append=rows.size))
    return [(rows[nth == n], where[nth == n]) for n in range(int(nth.max()) + 1)]


def prefixed_forward(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor) -> tuple[Tensor, Tensor]:
    """Compute bottom-right causal attention on the CPU: output [B, H, Q, D], log-sum-exp [B, H, Q].

    The queries are the last Q of K positions. Two calls of the CPU's flash kernel are merged by
    their log-sum-exps. The first call has the keys before the queries, to which all queries attend.
    The second call has the keys at the queries' own positions and is causal. One call with a mask
    of Q * K values would take 1.5 to 2 times as long.
    """
    prefix = k_BHKD.shape[2] - q_BHQD.shape[2]
    before, lse_before = flash_forward(q_BHQD, k_BHKD[:, :, :prefix], v_BHKD[:, :, :prefix])
    inside, lse_inside = flash_forward(
        q_BHQD, k_BHKD[:, :, prefix:], v_BHKD[:, :, prefix:], is_causal=True
    )
    lse = torch.logaddexp(lse_before, lse_inside)
    share = (lse_before - lse).exp()[..., None].to(inside.dtype)
    return torch.lerp(inside, before, share), lse


def prefixed_backward(grad_BHQD: Tensor, saved: SavedTensors) -> Gradients:
    """Return the gradients of q, k and v for `prefixed_forward`.

    Args:
        grad_BHQD: Gradient of the output.
        saved: Inputs and results of `prefixed_forward`.
    """
    q, k, v, out, lse = saved
    prefix = k.shape[2] - q.shape[2]
    (dq, dk, dv), (dq_own, dk_own, dv_own) = (
        flash_backward(grad_BHQD, q, k[:, :, rows], v[:, :, rows], out, lse, 0.0, is_causal)
        for rows, is_causal in ((slice(0, prefix), False), (slice(prefix, None), True))
    )
    return dq + dq_own, torch.cat([dk, dk_own], 2), torch.cat([dv, dv_own], 2)
