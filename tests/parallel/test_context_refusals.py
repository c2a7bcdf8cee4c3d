"""Tests that ranks which disagree about context-parallel attention all say so."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wlb.launch.local import run_local
from wlb.parallel.collectives import agree
from wlb.parallel.context.attention import ContextAttention
from wlb.parallel.world import World
from wlb.sharding.paper import per_document

pytestmark = pytest.mark.dist

ARGUMENTS: dict[str, Any] = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "dtype": torch.float32,
    "device": "cpu",
}


def refusal(world: World, lengths: tuple[int, ...] = (20, 3), **changed: Any) -> str:
    """Returns what from_plan says on this rank, or the empty string if it makes an attention."""
    plan = per_document(lengths, cp=changed.pop("cp", world.world_size))
    plan = replace(plan, exchange=changed.pop("exchange", "gather"))
    try:
        ContextAttention.from_plan(plan, group=dist.group.WORLD, **ARGUMENTS | changed)
    except ValueError as error:
        return str(error)
    return ""


def refusals(world: World) -> dict[str, str]:
    """Lets ranks 0 and 2 agree and rank 1 do something else; then all do the same wrong thing."""
    odd = world.rank == 1
    return {
        "plan": refusal(world, (20, 3) if not odd else (19, 4)),
        "rows": refusal(world, row_multiple=5 if odd else 1),
        "dtype": refusal(world, dtype=torch.bfloat16 if odd else torch.float32),
        "heads": refusal(world, num_heads=8 if odd else 4),
        "exchange": refusal(world, exchange="needed" if odd else "gather"),
        "keep": refusal(world, keep_gathered_kv=odd),
        "one rank's heads": refusal(world, num_kv_heads=3 if odd else 2),
        "one rank's type": refusal(world, row_multiple="4" if odd else 1),
        "one rank's device": refusal(world, device="gpu" if odd else "cpu"),
        "device": refusal(world, device="meta" if odd else "cpu"),
        "cp": refusal(world, cp=2),
        "tokens": refusal(world, (1, 1)),
        "int": refusal(world, dtype=torch.int64),
        "backend": refusal(world, backend="cutlass"),
        "fine": refusal(world),
        "fine by need": refusal(world, exchange="needed"),
    }


def test_ranks_that_disagree_all_say_so() -> None:
    first, *others = run_local(refusals, 3, start_group=True, timeout_s=600)
    assert all(first == other for other in others)
    digests = [per_document(x, cp=3).digest() for x in ((20, 3), (19, 4))]
    start = "all ranks must pass the same arguments, but the ranks differ in "
    assert first["plan"] == (
        f"{start}plan digest: rank 0 has {digests[0]}, rank 1 has {digests[1]}, "
        f"rank 2 has {digests[0]}"
    )
    assert first["rows"] == f"{start}rows: rank 0 has 8, rank 1 has 10, rank 2 has 8"
    assert first["dtype"] == (
        f"{start}dtype: rank 0 has torch.float32, rank 1 has torch.bfloat16, "
        "rank 2 has torch.float32"
    )
    assert first["heads"] == f"{start}num_heads: rank 0 has 4, rank 1 has 8, rank 2 has 4"
    assert (
        first["keep"]
        == f"{start}keep_gathered_kv: rank 0 has False, rank 1 has True, rank 2 has False"
    )
    assert first["one rank's heads"] == (
        "rank 1: num_heads = 4 must be a multiple of num_kv_heads = 3"
    )
    assert first["one rank's type"].startswith("rank 1: TypeError")
    assert first["one rank's device"].startswith("rank 1: RuntimeError")
    assert "Expected one of cpu, cuda" in first["one rank's device"]
    assert first["device"] == f"{start}device: rank 0 has cpu, rank 1 has meta, rank 2 has cpu"
    for name, message in {
        "cp": "the plan is for 2 CP ranks, but the group has 3",
        "tokens": "cp = 3 must be at most 2, the number of tokens",
        "int": "dtype = torch.int64 must be one of torch.float32, ",
        "backend": "backend = 'cutlass' must be one of auto, sdpa, ",
    }.items():
        assert all(f"rank {rank}: {message}" in first[name] for rank in range(3)), first[name]
    assert first["exchange"].startswith(
        f"{start}exchange: rank 0 has gather, rank 1 has needed, rank 2"
    )
    assert first["fine"] == first["fine by need"] == ""


def long_values(world: World) -> str:
    """Returns what ranks say of values whose first 64 characters are the same."""
    with pytest.raises(ValueError, match="the ranks differ in") as caught:
        agree({"long": "x" * 64 + str(world.rank), "same": "y" * 99}, None, group=dist.group.WORLD)
    return str(caught.value)


def test_values_are_compared_to_their_end() -> None:
    values = ", ".join(f"rank {rank} has {'x' * 64}" for rank in range(2))
    expected = f"all ranks must pass the same arguments, but the ranks differ in long: {values}"
    assert run_local(long_values, 2, start_group=True, timeout_s=600) == [expected] * 2
