"""Balanced `build_dp_schedule` for slime 0.3 with dynamic batch sizes.

    import wlb.adapters.rl.slime
    wlb.adapters.rl.slime.install()      # in the process that runs slime.ray.rollout

Rollouts are divided into steps as slime divides them. Within a step, samples are divided over ranks
and micro-batches at once. A sample longer than the limit gets a micro-batch to itself, as in slime.
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
# Where the replaced function is, as "module:name".
PLACE = "slime.utils.dp_schedule:build_dp_schedule"
# The cost that `install` was given; None means slime's FLOPs.
_costs: list[Cost | None] = [None]


class TooFewRollouts(UserError, AssertionError):
    """A step that cannot be filled.

    It is an AssertionError as well, because slime raises that and its callers expect it.
    """


def install(*, cost: Cost | None = None) -> None:
    """Make slime schedule by wlb.

    Args:
        cost: Prices of samples. By default slime's FLOPs of the model that it trains.
    """
    _costs[:] = [cost]
    _swap.install()


def uninstall() -> None:
    """Restore slime's function."""
    _swap.uninstall()


def build_dp_schedule(
    args: Any,
    train_parallel_config: dict[str, int],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
) -> Schedule:
    """Replace slime's function of this name, with the same arguments and result.

    Without args.use_dynamic_batch_size, slime's function is called.

    Args:
        args: slime's arguments.
        train_parallel_config: Sizes of slime's parallel groups.
        total_lengths: Tokens of each sample.
        global_batch_size: Rollouts of a step.
        rollout_indices: The rollout of each sample.

    Returns:
        The samples of each rank, its micro-batches as positions in them, the number of
        micro-batches of each step, and the rollouts of each step.

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
    """Return the step of each sample; -1 for the last rollouts, which do not fill a step."""
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
    """Return slime's FLOP count as a cost; it knows the model, with its experts and attention."""
    count = importlib.import_module("slime.utils.flops_utils").calculate_fwd_flops
    return lambda lengths: np.array([count([n], args) for n in lengths.tolist()], np.float64)


_swap = Swap("slime", {PLACE: build_dp_schedule})
