"""Deals micro-batches to data-parallel pipelines, equally many to each.

A step waits for the pipeline with most work, and a pipeline's first stage holds the activations of
all its tokens. (1) Heaviest first, to the pipeline with the least work that has room; (2) exchanges
that lower the most work of a pipeline; (3) exchanges that lower the most tokens of one without
raising the most work by more than 0.1%, or 0.5% while it has more than 1.05 times the mean's.
Micro-batches keep their order in a pipeline.
Cost: 0.5 ms for 32 micro-batches on 8 pipelines, 30 ms for 1,024 on 64.
"""

import numpy as np

from wlb.plan import IntArray, UserError

WORK_FOR_TOKENS = 1.001
WORK_FOR_UNEVEN_TOKENS = 1.005
EVEN_TOKENS = 1.05
"""Memory is planned for pipelines of at most 1 / DEALT_MARGIN = 1.14 times the mean's tokens
(`wlb.memory`); 0.1% of work alone leaves up to 1.2."""
MAX_PAIRS = 1 << 22
"""Most exchanges that are evaluated; bounds the time if pipelines have hundreds of
micro-batches."""


def deal(workload_ns: IntArray, tokens: IntArray, dp: int) -> IntArray:
    """Shape [dp, N / dp]: the micro-batches of each pipeline. workload_ns, tokens: shape [N]."""
    num = workload_ns.size
    if num % dp:
        raise UserError(f"{num} micro-batches cannot be dealt to {dp} pipelines equally")
    if dp == 1:
        return np.arange(num).reshape(1, num)
    dealt = _heaviest_first(workload_ns, dp)
    anything = np.iinfo(np.int64).max
    _exchange(dealt, workload_ns, tokens, limit=anything)
    work = int(workload_ns[dealt].sum(1).max())
    even = int(EVEN_TOKENS * int(tokens.sum()) / dp)
    _exchange(dealt, tokens, workload_ns, limit=int(work * WORK_FOR_TOKENS))
    _exchange(dealt, tokens, workload_ns, limit=int(work * WORK_FOR_UNEVEN_TOKENS), enough=even)
    dealt.sort(axis=1)
    return dealt


def _heaviest_first(workload_ns: IntArray, dp: int) -> IntArray:
    room, work = workload_ns.size // dp, np.zeros(dp, np.int64)
    dealt, count = np.zeros((dp, room), np.int64), np.zeros(dp, np.int64)
    full = np.iinfo(np.int64).max
    for i in np.argsort(-workload_ns, kind="stable").tolist():
        d = int(np.argmin(np.where(count < room, work, full)))
        dealt[d, count[d]] = i
        count[d] += 1
        work[d] += workload_ns[i]
    return dealt


def _exchange(
    dealt: IntArray, size: IntArray, other: IntArray, *, limit: int, enough: int = 0
) -> None:
    """Swap pairs of micro-batches, in place, while that lowers the largest pipeline's `size`.

    limit: no pipeline's sum of `other` may grow above it. enough: stop once no `size` is larger.
    """
    rounds = max(1, MAX_PAIRS // (dealt.size * dealt.shape[1]))
    for _ in range(min(128, rounds)):
        sums, other_sums = size[dealt].sum(1), other[dealt].sum(1)
        top = int(sums.argmax())
        if sums[top] <= enough:
            return
        # For each pair of a micro-batch of the largest pipeline and one of any pipeline: the larger
        # `size` of the two pipelines after exchanging them.
        moved = size[dealt[top]][:, None, None] - size[dealt][None]
        after = np.maximum(sums[top] - moved, sums[None, :, None] + moved)
        moved_other = other[dealt[top]][:, None, None] - other[dealt][None]
        over = np.maximum(other_sums[top] - moved_other, other_sums[None, :, None] + moved_other)
        after[(over > limit) & (over > other_sums.max())] = np.iinfo(np.int64).max
        after[:, top] = np.iinfo(np.int64).max
        best = int(after.argmin())
        if after.flat[best] >= sums[top]:
            return
        mine, d, theirs = np.unravel_index(best, after.shape)
        dealt[top, mine], dealt[d, theirs] = dealt[d, theirs], dealt[top, mine]
