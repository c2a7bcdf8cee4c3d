"""Balanced micro-batches in slime 0.3 with dynamic batch sizes, by replacing one function.

    import wlb.adapters.rl.slime
    wlb.adapters.rl.slime.install()      # in the process that runs slime.ray.rollout

The replaced function is slime's `build_dp_schedule`. Rollouts are divided into steps by slime's own
rule. Within a step, samples are divided over ranks and micro-batches so that work is balanced. A
sample with more tokens than a micro-batch may have (max_tokens_per_gpu x CP ranks) gets a
micro-batch of its own, as in slime.
"""

import importlib
from typing import Any

from wlb.adapters.versions import require

require("slime>=0.3")

import numpy as np

from wlb.adapters.rl.swap import Swap
from wlb.balance import Cost, balance_step
from wlb.balance.request import labels
from wlb.plan import UserError

Schedule = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]
# The function of slime that wlb replaces, as "module:name".
PLACE = "slime.utils.dp_schedule:build_dp_schedule"
# The cost given to `install`, in a list so that it can be changed; None means slime's FLOPs.
_costs: list[Cost | None] = [None]


class TooFewRollouts(UserError, AssertionError):
    """There are fewer rollouts than one step needs.

    It is also an AssertionError, because slime raises that error in this case.
    """


def install(*, cost: Cost | None = None) -> None:
    """Replace slime's `build_dp_schedule` by wlb's in this process.

    Args:
        cost: Predicts the time of a sample from its length. None means the FLOPs that slime counts
            for the model that it trains.
    """
    _costs[:] = [cost]
    _swap.install()


def uninstall() -> None:
    """Restore slime's `build_dp_schedule`."""
    _swap.uninstall()


def build_dp_schedule(
    args: Any,
    train_parallel_config: dict[str, int],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
) -> Schedule:
    """Divide the samples of all steps over ranks and micro-batches with balanced work.

    Arguments and result are those of slime's function of this name. If args.use_dynamic_batch_size
    is False, slime's own function is called.

    Args:
        args: slime's arguments.
        train_parallel_config: Sizes of slime's parallel groups.
        total_lengths: Tokens of each sample.
        global_batch_size: Number of rollouts of a step.
        rollout_indices: For each sample, the number of the rollout to which it belongs.

    Returns:
        Four lists: the samples of each rank; the micro-batches of each rank, as positions in its
        list of samples; the number of micro-batches of each step; the number of rollouts of each
        step.

    Raises:
        UserError: There are fewer rollouts than a step needs, or fewer samples than micro-batches.
    """
    if not args.use_dynamic_batch_size:
        return _swap.theirs[PLACE](
            args,
            train_parallel_config,
            total_lengths,
            global_batch_size=global_batch_size,
            rollout_indices=rollout_indices,
        )
    ranks = train_parallel_config["dp_size"]
    has_stages = train_parallel_config["vpp_size"] > 1
    step_of = _steps(rollout_indices, global_batch_size)
    trained = np.flatnonzero(step_of >= 0)
    lengths = np.asarray(total_lengths, np.int64)[trained]
    step = balance_step(
        lengths,
        num_ranks=ranks,
        max_tokens=args.max_tokens_per_gpu * train_parallel_config["cp_size"],
        cost=_flops(args) if _costs[0] is None else _costs[0],
        mini_batches=step_of[trained],
        multiple=train_parallel_config["microbatch_group_size_per_vp_stage"] if has_stages else 1,
        too_long="alone",
    )
    partitions: list[list[int]] = [[] for _ in range(ranks)]
    micro_batches: list[list[list[int]]] = [[] for _ in range(ranks)]
    for k in range(step.num_mini_batches):
        for rank in range(ranks):
            for samples in step.of_rank(rank, k):
                first = len(partitions[rank])
                partitions[rank] += trained[samples].tolist()
                micro_batches[rank].append(list(range(first, first + samples.size)))
    rollouts = [global_batch_size] * step.num_mini_batches
    return partitions, micro_batches, step.num_micro_batches.tolist(), rollouts


def _steps(rollout_indices: list[int], size: int) -> Any:
    """Return the step in which each sample is trained; -1 if it is left over.

    Rollouts are trained in order, `size` in each step. If too few for a step remain at the end,
    these are left over.

    Args:
        rollout_indices: For each sample, the number of its rollout.
        size: Number of rollouts of a step.
    """
    rollout = labels("rollout_indices", rollout_indices, len(rollout_indices))
    num = (int(rollout.max()) + 1) // size if rollout.size else 0
    if num < 1:
        raise TooFewRollouts(
            f"a step needs global_batch_size = {size} rollouts, but only "
            f"{len(set(rollout_indices))} were given; lower global_batch_size or sample more "
            "rollouts"
        )
    return np.where(rollout // size < num, rollout // size, -1)


def _flops(args: Any) -> Any:
    """Return a function that maps lengths of samples to the forward FLOPs that slime counts."""
    count = importlib.import_module("slime.utils.flops_utils").calculate_fwd_flops
    return lambda lengths: np.array([count([n], args) for n in lengths.tolist()], np.float64)


_swap = Swap("slime", {PLACE: build_dp_schedule})
