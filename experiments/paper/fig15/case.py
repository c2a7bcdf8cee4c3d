"""Defines the study's layer and micro-batches: one layer of LLaMA2-7B, the fitted stream.

Other sharding experiments take them from here, so that all tables are about the same documents. The
corpus is the same for every window: the fitted distribution of 128K, whose longer documents are cut
at a shorter window.
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
"""Windows are multiples of it: N of them are whole windows of the stream."""
PROFILE = "h100_runs"
"""Kernel profile of predictions, and of choices on CUDA."""
TP = {65536: 4, 131072: 8}
"""Table 1 gives the 7B model this TP degree by window."""
PACKERS = ("original", "bounded")
MODEL: ModelSpec = replace(load("7b_128k").model, num_layers=1)
STATIC = ("per_sequence", "per_document")
STRATEGIES = (*STATIC, "adaptive", "hybrid", "balanced")
"""The tables have this order: the paper's strategies, then ours."""


def layer_cost(
    *, window: int, cp: int, profile: str = PROFILE, backend: str | None = None
) -> ProfiledWorkload:
    """Returns the cost of one layer of the 7B model on a rank of Table 1's TP degree."""
    tp = TP.get(window, TP[WINDOW])
    return ProfiledWorkload(
        model=MODEL,
        parallel=ParallelSpec(tp=tp, cp=cp, pp=1, dp=1),
        profile=load_profile(profile),
        backend=backend,
        micro_batch_tokens=window,
    )


def packer_of(policy: str, *, window: int, seed: int) -> Packer:
    """Returns a packer of the study.

    "original" is Plain-4D's loader, which keeps long documents whole; "bounded" has T 1.1, S_max
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
    """Returns piece lengths, in packed order, of the first `count` micro-batches of the stream.

    source: as of `streams.batches_of`
    """
    # A global batch of the study has N windows of `window` tokens, but `batches_of` counts windows
    # of 128K.
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
    """Returns a micro-batch's plan by each strategy."""
    return {name: shard(lengths, cp=cp, strategy=name, cost=cost) for name in STRATEGIES}


def distinct(plans: Mapping[str, ShardingPlan]) -> tuple[list[ShardingPlan], dict[str, int]]:
    """Returns the plans that differ in a span, and which of them each name stands for.

    Equal plans are timed once, so that they tie.
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
