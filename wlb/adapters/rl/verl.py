"""Balance ranks, mini-batches and micro-batches in verl 0.9, by one call before training.

    import wlb.adapters.rl.verl
    wlb.adapters.rl.verl.install()

The call replaces verl's functions `get_seqlen_balanced_partitions` and `rearrange_micro_batches` in
all of its modules, and the method `_balance_batch` of its V1 trainer. Call it in every process,
also in workers.
"""

import contextlib
import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

from wlb.adapters.versions import require

require("verl>=0.9")

import numpy as np

from wlb.adapters.rl.own_ranks import Cut, cut
from wlb.adapters.rl.swap import Swap
from wlb.balance import Cost, balance_step
from wlb.plan import UserError

BALANCING = "verl.utils.seqlen_balancing"
TRAINER = "verl.trainer.ppo.v1.trainer_base"
BY_WIDTH = "seq-mean-token-sum-norm"
"""Value of verl's loss_agg_mode with which a loss is divided by the width of its micro-batch."""
# The cost given to `install`, in a list so that it can be changed.
_costs: list[Cost] = ["verl"]
# Number of mini-batches of a step while verl's `_balance_batch` runs; empty otherwise.
_mini_batches: list[int] = []


def install(*, cost: Cost = "verl") -> None:
    """Replace verl's functions for balancing by wlb's in this process.

    A second call only changes the cost.

    Args:
        cost: Predicts the time of a sample from its length. It is used to divide a rank's samples
            into micro-batches; the division of samples over ranks uses costs that verl computes.
    """
    _costs[:] = [cost]
    _swap.install()
    for owner in _trainers():
        if not hasattr(owner._balance_batch, "theirs"):
            owner._balance_batch = balance_batch(owner._balance_batch)


def uninstall() -> None:
    """Restore verl's own functions."""
    _swap.uninstall()
    for owner in _trainers():
        owner._balance_batch = getattr(owner._balance_batch, "theirs", owner._balance_batch)


def _trainers() -> list[Any]:
    """Return the V1 trainer classes that define `_balance_batch`.

    The list is empty in a worker process that cannot import them.
    """
    try:
        module = importlib.import_module(TRAINER)
    except ImportError:
        return []
    return [c for c in vars(module).values() if isinstance(c, type) and _balances(c)]


def _balances(owner: type[Any]) -> bool:
    return "_balance_batch" in vars(owner)


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Divide values into k lists with nearly equal sums; replaces verl's function of this name.

    Each list has ascending indices, except if verl's `_balance_batch` calls this function. Each
    list then consists of mini-batches, one after the other, and the m-th mini-batches of all ranks
    have nearly equal sums as well.

    Args:
        seqlen_list: The values, such as costs of samples.
        k_partitions: Number of lists.
        equal_size: Whether all lists must be equally long.

    Returns:
        For each of the k lists, the indices of its values in `seqlen_list`.

    Raises:
        UserError: There are fewer values than lists.
    """
    values = np.asarray(cast(Any, seqlen_list), np.float64)
    num = _mini_batches[-1] if _mini_batches and equal_size else 1
    if num > 1 and values.size % (num * k_partitions):
        num = 1
    step = balance_step(
        np.ones(values.size, np.int64),
        num_ranks=k_partitions,
        max_tokens=max(1, values.size),
        cost=values,
        wait="step",
        mini_batches=num,
        equal_counts=equal_size,
        num_micro_batches=1,
    )
    return [
        [i for k in range(num) for i in step.samples(k, rank, 0).tolist()]
        for rank in range(k_partitions)
    ]


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """Divide a rank's batch into balanced micro-batches; replaces verl's function of this name.

    Args:
        batch: The rank's samples.
        max_token_len: Most tokens of a micro-batch.
        dp_group: Data-parallel group. The m-th micro-batches of all its ranks take nearly equal
            time.
        num_batches_divided_by: The number of micro-batches must be a multiple of this. None = any
            number.
        same_micro_num_in_dp: Whether all ranks of the group get equally many micro-batches.
        min_num_micro_batch: Fewest micro-batches; None = no such limit.
        use_dynamic_bsz_balance: Whether micro-batches with little work come first and last, which
            shortens pipeline bubbles. If False, micro-batches are sorted by descending work.
        force_group_size: Number of consecutive samples that stay in one micro-batch.

    Returns:
        The micro-batches, and for each of them the indices of its samples in `batch`.
    """
    select = importlib.import_module("verl.utils.tensordict_utils").index_select_tensor_dict
    lengths = _lengths(batch)
    if len(lengths) % force_group_size:
        raise UserError(
            f"the number of samples, {len(lengths)}, must be a multiple of force_group_size = "
            f"{force_group_size}; add or remove samples, or change force_group_size"
        )
    how = Cut(
        max_tokens=int(max_token_len),
        cost=_costs[0],
        atoms=[i // force_group_size for i in range(len(lengths))],
        at_least=min_num_micro_batch or 1,
        multiple=num_batches_divided_by or 1,
        in_step=same_micro_num_in_dp and dp_group is not None,
    )
    indices = cut(lengths, how, dp_group)
    if use_dynamic_bsz_balance:
        indices = [*indices[0::2][::-1], *indices[1::2]]
    return [select(batch, part) for part in indices], indices


def _lengths(batch: Any) -> list[int]:
    """Return the tokens of each sample in a batch, whose tensors may be nested or padded."""
    ids = batch["input_ids"]
    found = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)
    return found.tolist()


def balance_batch(theirs: Any) -> Any:
    """Wrap the V1 trainer's `_balance_batch` so that it also balances the actor's mini-batches.

    A rank later cuts its list of samples into mini-batches, from the first sample to the last. So
    the wrapped method sorts each rank's samples by mini-batch. `actor.shuffle` must be off, because
    it would change the order.

    The wrapped method raises UserError for the loss "seq-mean-token-sum-norm" without
    `actor.loss_scale_factor`, because the value of that loss depends on which samples share a
    micro-batch.

    Args:
        theirs: verl's `_balance_batch`.
    """

    @functools.wraps(theirs)
    def balanced(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config.actor_rollout_ref
        _check_loss(config.actor)
        size = config.actor.ppo_mini_batch_size * config.rollout.n
        with _in_mini_batches(len(batch) // size):
            return theirs(self, batch, *args, **kwargs)

    cast(Any, balanced).theirs = theirs
    return balanced


def _check_loss(actor: Any) -> None:
    """Raise UserError for a loss whose value depends on which samples share a micro-batch."""
    mode, factor = (getattr(actor, k, None) for k in ("loss_agg_mode", "loss_scale_factor"))
    if mode == BY_WIDTH and factor is None:
        raise UserError(
            f"actor.loss_agg_mode = {mode!r} divides the loss by the width of a micro-batch, which "
            "balancing changes; set actor.loss_scale_factor, for example to the tokens of the "
            "longest response"
        )


@contextlib.contextmanager
def _in_mini_batches(num: int) -> Iterator[None]:
    """Within this context, `get_seqlen_balanced_partitions` also balances mini-batches.

    Args:
        num: Number of mini-batches of a step.
    """
    _mini_batches.append(num)
    try:
        yield
    finally:
        _mini_batches.pop()


_swap = Swap(
    "verl",
    {
        f"{BALANCING}:get_seqlen_balanced_partitions": get_seqlen_balanced_partitions,
        f"{BALANCING}:rearrange_micro_batches": rearrange_micro_batches,
    },
)
