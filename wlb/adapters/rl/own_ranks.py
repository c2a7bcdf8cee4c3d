"""Divide each rank's samples into balanced micro-batches, without moving samples between ranks.

verl, OpenRLHF, AReaL and TRL's GRPO assign samples to ranks first, and then each rank divides its
own samples into micro-batches. Call `cut` for this division, on every rank of the data-parallel
group. The ranks exchange their samples' lengths, so that all ranks get equally many micro-batches
and the m-th micro-batches of all ranks take nearly equal time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from wlb.balance import Cost, balance_step
from wlb.plan import IntLike, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Rules by which `cut` divides a rank's samples into micro-batches; see `balance_step`."""

    max_tokens: int  # most tokens of a micro-batch
    cost: Cost = "verl"  # predicts the time of a sample from its length
    # A number for each sample of this rank: samples with equal numbers stay in one micro-batch.
    # None means that any samples may be separated.
    atoms: Sequence[int] | None = None
    at_least: int = 1  # fewest micro-batches of a rank
    multiple: int = 1  # the number of micro-batches must be a multiple of this
    # Whether all ranks of the group get the same number of micro-batches. If False, each rank
    # divides its samples without regard to other ranks.
    in_step: bool = True


def cut(lengths: IntLike, how: Cut, group: Any = None) -> list[list[int]]:
    """Return this rank's micro-batches, sorted by descending work.

    Args:
        lengths: Tokens of each sample of this rank.
        how: Rules of the division.
        group: Data-parallel process group; None means the default group. If `how.in_step` is set
            (all ranks get equally many micro-batches), all ranks of the group must call this
            function. Otherwise the group is not used.

    Returns:
        For each micro-batch, the ascending indices of its samples in `lengths`.

    Raises:
        UserError: A rank has no sample, a sample longer than max_tokens, or fewer samples than
            micro-batches. All ranks raise the error.
    """
    mine = np.asarray(lengths, np.int64)
    atoms = np.arange(mine.size) if how.atoms is None else np.asarray(how.atoms, np.int64)
    rank, everyone = _gathered((mine, atoms), group if how.in_step else False)
    sizes = [part[0].size for part in everyone]
    if min(sizes) == 0:
        raise UserError(
            f"rank {sizes.index(0)} has no samples in this step, but every rank needs at least "
            "one; give each rank a sample"
        )
    step = balance_step(
        np.concatenate([part[0] for part in everyone]),
        num_ranks=len(everyone),
        max_tokens=how.max_tokens,
        cost=how.cost,
        ranks=np.repeat(np.arange(len(everyone)), sizes),
        atoms=_labels([part[1] for part in everyone]),
        at_least=how.at_least,
        multiple=how.multiple,
    )
    first = sum(sizes[:rank])
    return [(samples - first).tolist() for samples in step.of_rank(rank)]


def _gathered(mine: Any, group: Any) -> tuple[int, list[Any]]:
    """All-gather a value; return this process's rank in the group and the values of all ranks.

    Args:
        mine: This process's value.
        group: The process group; None means the default group. If it is False, or if
            torch.distributed is not initialised, only this process's value is returned.
    """
    if group is False or not (dist.is_available() and dist.is_initialized()):
        return 0, [mine]
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, mine, group=group)
    return dist.get_rank(group), out


def _labels(atoms: list[Any]) -> Any:
    """Concatenate the `Cut.atoms` of all ranks, changed such that ranks have no number in common.

    Samples with equal numbers stay in one micro-batch. Each rank's numbers are shifted above those
    of the ranks before it.

    Args:
        atoms: For each rank, an array with a number for each of its samples.
    """
    above = np.cumsum([0, *(int(a.max()) + 1 for a in atoms)])
    return np.concatenate([a + first for a, first in zip(atoms, above[:-1], strict=True)])
