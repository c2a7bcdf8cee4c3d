"""Cut each rank's samples into balanced micro-batches where the samples cannot move between ranks.

verl, OpenRLHF, AReaL and TRL's GRPO send samples to ranks before they cut micro-batches. There,
every rank of a data-parallel group calls `cut`. The ranks gather their lengths, so all of them find
the same number of micro-batches, and the m-th micro-batches of all ranks take nearly equal time.
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
    """How a rank's samples are cut into micro-batches; see `balance_step`."""

    max_tokens: int  # most tokens of a micro-batch
    cost: Cost = "verl"  # prices of samples by their length
    # Label of each sample of this rank; samples with equal labels stay in one micro-batch. None
    # lets every sample stand alone.
    atoms: Sequence[int] | None = None
    at_least: int = 1  # fewest micro-batches of a rank
    multiple: int = 1  # the number of micro-batches is a multiple of this
    # Whether all ranks of the group get the same number of micro-batches; otherwise each rank is
    # cut alone.
    in_step: bool = True


def cut(lengths: IntLike, how: Cut, group: Any = None) -> list[list[int]]:
    """Return this rank's micro-batches, those with the most work first.

    Args:
        lengths: Tokens of each sample of this rank.
        how: Limits and prices.
        group: A torch.distributed group; None means the default group.

    Returns:
        Ascending indices into `lengths` for each micro-batch.

    Raises:
        UserError: On every rank, if one of them has a sample above max_tokens, or too few samples
            to fill as many micro-batches as other ranks need.
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
    """Return this process's place in the group, and the value that each process gave."""
    # With `group = False`, this process is balanced without the others.
    if group is False or not (dist.is_available() and dist.is_initialized()):
        return 0, [mine]
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, mine, group=group)
    return dist.get_rank(group), out


def _labels(atoms: list[Any]) -> Any:
    """Return the labels of all ranks, shifted so that no two ranks share a label."""
    above = np.cumsum([0, *(int(a.max()) + 1 for a in atoms)])
    return np.concatenate([a + first for a, first in zip(atoms, above[:-1], strict=True)])
