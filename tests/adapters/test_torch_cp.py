"""Tests torch's context parallel on our shardings: indices, attention, torch's own balancer."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _load_balancer as theirs
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _context_parallel_shard,
    context_parallel_unshard,
    flex_cp_allgather,
)
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from wlb import FlopsWorkload, shard
from wlb.adapters.collate import block_mask
from wlb.adapters.torch_cp import ShardedLoadBalancer, rank_major
from wlb.launch.local import run_local
from wlb.plan import offsets_of

COST = FlopsWorkload(quadratic_ns=1.0, linear_ns_per_token=0.0)
STRATEGIES = ("per_document", "per_sequence", "hybrid", "balanced", "adaptive")


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    cp=st.integers(1, 4),
    strategy=st.sampled_from(STRATEGIES),
    extra=st.integers(0, 3),
)
def test_a_rank_has_its_spans_and_then_padding(
    lengths: list[int], cp: int, strategy: str, extra: int
) -> None:
    plan = shard(np.array(lengths), cp=cp, strategy=strategy, cost=COST)
    total = sum(lengths)
    rows = -(-total // cp) + extra
    index = rank_major(plan, rows * cp)
    assert sorted(index.tolist()) == list(range(rows * cp))
    for rank, mine in enumerate(index.reshape(cp, rows)):
        real = mine[mine < total]
        np.testing.assert_array_equal(real, plan.for_rank(rank).token_index)
        np.testing.assert_array_equal(mine[: real.size], real)
    balancer = ShardedLoadBalancer([plan], seq_length=rows * cp, device="cpu")
    there, back = (balancer._generate_indices(restore=r)[0] for r in (False, True))
    np.testing.assert_array_equal(there[back], torch.arange(rows * cp))


def test_refusals() -> None:
    plan = shard(np.array([5, 4]), cp=2, strategy="per_document", cost=COST)
    for bad in (9, 8, 0):
        with pytest.raises(ValueError, match=f"seq_length = {bad} must be a multiple of cp = 2"):
            rank_major(plan, bad)
    with pytest.raises(ValueError, match="at least one"):
        ShardedLoadBalancer([], seq_length=4, device="cpu")


def pairs_of(index: np.ndarray, lengths: list[int], cp: int) -> list[int]:
    """Returns the (query, key) pairs that each rank's rows of `index` have."""
    positions = np.concatenate([np.arange(n) for n in lengths])
    return [int((positions[rows] + 1).sum()) for rows in index.reshape(cp, -1)]


def test_torchs_own_balancer_gives_ranks_other_chunks_than_it_means_to() -> None:
    """The test fails once a version fixes it. One long document comes first, short ones after
    it.
    """
    lengths, cp = [32, 8, 8, 8, 8], 2
    found = theirs._PerDocumentHeadTailLoadBalancer([lengths], cp, "cpu")._generate_indices()[0]
    plan = shard(np.array(lengths), cp=cp, strategy="per_document", cost=COST)
    ours = pairs_of(rank_major(plan, 64), lengths, cp)
    assert ours[0] == ours[1]
    first, second = pairs_of(found.numpy(), lengths, cp)
    assert first > 3 * second
    with pytest.raises(AssertionError):
        theirs._PerDocumentHeadTailLoadBalancer([[3, 5]], cp, "cpu")._generate_indices()


def attention_of_ranks(world: Any, strategy: str) -> tuple[list[bool], float]:
    """Runs flex attention with torch's own sharding of tensors and masks, and compares with
    dense.
    """
    lengths, total, cp = [100, 7, 130, 1, 19], 512, 2
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    plan = shard(np.array(lengths), cp=cp, strategy=strategy, cost=COST)
    balancer = ShardedLoadBalancer([plan], seq_length=total, device="cpu")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, total, 16, generator=generator) for _ in range(3))
    segments = [*lengths, total - sum(lengths)]
    of = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(segments))

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (of[q_idx] == of[kv_idx]) & (kv_idx <= q_idx)

    whole = create_block_mask(mask, 1, 1, total, total, device="cpu")
    local = _context_parallel_shard(mesh, [q, k, v, whole], [2, 2, 2, 2], balancer)
    mine, local_k, local_v, local_mask = local
    group = dist._get_process_group_name(mesh.get_group())
    all_k, all_v = flex_cp_allgather(local_k.contiguous(), local_v.contiguous(), 2, group)
    out = flex_attention(mine, all_k, all_v, block_mask=local_mask)
    (out,) = context_parallel_unshard(mesh, [out], [2], balancer)
    dense = torch.from_numpy(block_mask(offsets_of(np.array(segments))))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    rows = rank_major(plan, total).reshape(cp, -1)[world.rank]
    same = [torch.equal(mine, q[:, :, rows]), torch.equal(local_k, k[:, :, rows])]
    return same, float((out - expected).abs().max())


@pytest.mark.nightly
@pytest.mark.dist
def test_flex_attention_on_two_ranks_is_dense_attention() -> None:
    for strategy in ("per_document", "hybrid"):
        for same, error in run_local(
            attention_of_ranks, 2, strategy, start_group=True, timeout_s=600
        ):
            assert all(same)
            assert error < 1e-5


def test_rows_of_a_batch_have_their_own_shardings() -> None:
    plans = [
        shard(np.array(n), cp=2, strategy="per_document", cost=COST) for n in ([9, 3], [2, 2, 8])
    ]
    balancer = ShardedLoadBalancer(plans, seq_length=12, device="cpu")
    index = balancer._generate_indices()
    assert index.shape == (2, 12)
    for row, plan in itertools.zip_longest(index.numpy(), plans):
        np.testing.assert_array_equal(row, rank_major(plan, 12))
