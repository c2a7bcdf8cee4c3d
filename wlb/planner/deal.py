"""Deals micro-batches to data-parallel pipelines, equally many to each.

A step waits for the pipeline with most work, and a pipeline's first stage holds the activations of
all its tokens. (1) Heaviest first, to the pipeline with the least work that has room; (2) exchanges
that lower the most work of a pipeline; (3) exchanges that lower the most tokens of one without
raising the most work by more than 0.1%, or 0.5% while it has more than 1.05 times the mean's.
Micro-batches keep their order in a pipeline.
Cost: 0.5 ms for 32 micro-batches on 8 pipelines, 30 ms for 1,024 on 64.

Where ranks of several pipelines meet in layers with experts, `deal_rounds` deals instead: in an EP
group of several pipelines a layer waits for its slowest member, so that what counts is which
micro-batches run at the same place of their pipelines: a round. Sorted by work and cut, rounds have
the least sum of their slowest work. Groups of pipelines that meet are then dealt whole rounds as
single micro-batches are; within a round all take equally long, so that its micro-batches go where
fewest tokens are.
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


def deal_rounds(work_ns: IntArray, tokens: IntArray, dp: int, meets: int) -> IntArray:
    """Shape [dp, N / dp]: the micro-batches of each pipeline; place i of `meets` neighbouring
    pipelines is a round. work_ns, tokens: shape [N]; what a rank computes between meetings."""
    if work_ns.size % dp or dp % meets:
        raise UserError(
            f"{work_ns.size} micro-batches cannot be dealt to {dp} pipelines, of which {meets} meet"
        )
    rounds = np.argsort(-work_ns, kind="stable").reshape(-1, meets)
    slowest, together = work_ns[rounds].max(1), tokens[rounds].sum(1)
    dealt = np.zeros((dp, work_ns.size // dp), np.int64)
    for group, chosen in enumerate(deal(slowest, together, dp // meets)):
        # Rounds come in the order of their first micro-batches.
        members = rounds[chosen]
        members = members[np.argsort(members.min(1), kind="stable")]
        dealt[group * meets : (group + 1) * meets] = _spread(members, tokens).T
    return dealt


def _spread(members: IntArray, tokens: IntArray) -> IntArray:
    """Order within each round, [rounds, meets], so that pipelines have about equal tokens."""
    held = np.zeros(members.shape[1], np.int64)
    out = np.zeros_like(members)
    unequal = np.ptp(tokens[members], axis=1)
    for i in np.argsort(-unequal, kind="stable").tolist():
        most_first = members[i][np.argsort(-tokens[members[i]], kind="stable")]
        least_first = np.argsort(held, kind="stable")
        out[i, least_first] = most_first
        held[least_first] += tokens[most_first]
    return out
