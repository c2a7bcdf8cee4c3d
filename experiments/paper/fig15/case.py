"""Defines the layer and the micro-batches of Figure 15: a layer of LLaMA2-7B, fitted lengths.

Other experiments on sharding use them too, so that all tables are about the same documents. The
corpus is the same for every window: documents are drawn for a window of 128K, and cut if the window
is shorter.
"""

from collections.abc import Mapping
from dataclasses import replace

from experiments.harness.streams import COST, WINDOW, batches_of
from wlb.cost import ProfiledWorkload, WorkloadModel, load_profile
from wlb.packing import BoundedPacker, OriginalPacker, Packer, PackerOptions, WindowCut
from wlb.plan import IntArray, IntLike, ShardingPlan
from wlb.sharding import shard
from wlb.spec import ModelSpec, ParallelSpec, load

N = 4
WINDOW_STEP = WINDOW // N
"""The window must be a multiple of this, so that N windows are whole windows of the stream."""
PROFILE = "h100_runs"
"""Kernel profile that predicts times, and by which strategies choose on CUDA."""
TP = {65536: 4, 131072: 8}
"""TP degree of the 7B model by window, from Table 1."""
PACKERS = ("original", "bounded")
MODEL: ModelSpec = replace(load("7b_128k").model, num_layers=1)
STATIC = ("per_sequence", "per_document")
STRATEGIES = (*STATIC, "adaptive", "hybrid", "balanced")
"""Strategies in the order of the tables: the paper's, then ours."""


def layer_cost(
    *, window: int, cp: int, profile: str = PROFILE, backend: str | None = None
) -> ProfiledWorkload:
    """Returns the workload of one layer of the 7B model, at the TP degree of Table 1."""
    tp = TP.get(window, TP[WINDOW])
    return ProfiledWorkload(
        model=MODEL,
        parallel=ParallelSpec(tp=tp, cp=cp, pp=1, dp=1),
        profile=load_profile(profile),
        backend=backend,
        micro_batch_tokens=window,
    )


def packer_of(policy: str, *, window: int, seed: int) -> Packer:
    """Returns one of the PACKERS.

    "original" is Plain-4D's loader, which keeps long documents whole. "bounded" has T 1.1 and S_max
    1.5.
    """
    options = PackerOptions(num_micro_batches=N, context_window=window, cost=COST, seed=seed)
    match policy:
        case "original":
            return OriginalPacker(options=options, cut=WindowCut.SHORT)
        case "bounded":
            return BoundedPacker(
                options=options, s_max=window * 3 // 2, step_tokens=N * window * 11 // 10
            )
        case _:
            raise ValueError(f"no packer {policy!r} here; known are {', '.join(PACKERS)}")


def micro_batches(
    policy: str, *, window: int, count: int, seed: int, source: str = "wlb_paper"
) -> list[IntArray]:
    """Returns the first micro-batches of a stream, each as the lengths of its pieces in order.

    Args:
        policy: One of the PACKERS.
        window: Context window in tokens, a multiple of WINDOW_STEP.
        count: Number of micro-batches.
        seed: Seed of the documents and of the packer.
        source: Source of the documents, as for `streams.batches_of`.

    Raises:
        ValueError: If the stream has too few micro-batches, or `window` is no such multiple.
    """
    # A global batch has N windows of `window` tokens, but `batches_of` counts windows of 128K.
    if window % WINDOW_STEP:
        raise ValueError(f"window = {window} must be a multiple of {WINDOW_STEP}")
    batches = batches_of(
        source, num_micro_batches=N * window // WINDOW, num_batches=count // N + 8, seed=seed
    )
    packer = packer_of(policy, window=window, seed=seed)
    carry, out = packer.start(), []
    for batch in batches:
        plans, carry = packer.push(batch, carry)
        out += [mb.lengths for plan in plans for mb in plan.micro_batches if len(mb.lengths)]
    if len(out) < count:
        raise ValueError(f"{policy} made {len(out)} micro-batches of {count}")
    return out[:count]


def plans_of(lengths: IntLike, *, cp: int, cost: WorkloadModel) -> dict[str, ShardingPlan]:
    """Returns the plan of a micro-batch under each strategy."""
    return {name: shard(lengths, cp=cp, strategy=name, cost=cost) for name in STRATEGIES}


def distinct(plans: Mapping[str, ShardingPlan]) -> tuple[list[ShardingPlan], dict[str, int]]:
    """Returns the different plans, and the index of each strategy's plan among them.

    Strategies with equal plans share one, so that it is timed once and they get equal times.
    """
    found: dict[bytes, int] = {}
    unique: list[ShardingPlan] = []
    index: dict[str, int] = {}
    for name, plan in plans.items():
        arrays = (plan.piece, plan.start, plan.stop, plan.rank_offsets)
        key = b"|".join(array.tobytes() for array in arrays)
        if key not in found:
            found[key] = len(unique)
            unique.append(plan)
        index[name] = found[key]
    return unique, index
