"""Balance where samples already lie on ranks: each rank's micro-batches, cut to meet the others'.

Hosts that send samples to ranks before they cut micro-batches (verl, OpenRLHF, AReaL, TRL's GRPO)
call `cut` on every rank of a data-parallel group. Lengths are gathered, so that all find the same
number of micro-batches, and the m-th ones of all ranks take nearly as long.
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
    """How a rank's samples are cut; see `balance_step`.

    max_tokens: of a micro-batch. atoms: labels of this rank's samples that share a micro-batch.
    at_least, multiple: of micro-batches. in_step: whether all ranks of the group get the same
    number of micro-batches; otherwise each rank is cut by itself.
    """

    max_tokens: int
    cost: Cost = "verl"
    atoms: Sequence[int] | None = None
    at_least: int = 1
    multiple: int = 1
    in_step: bool = True


def cut(lengths: IntLike, how: Cut, group: Any = None) -> list[list[int]]:
    """This rank's micro-batches as ascending indices into `lengths`, longest-running first.

    group: a torch.distributed group, None for the default one. UserError on every rank where one of
    them has a sample above the cap, or too few to fill as many micro-batches as others need.
    """
    mine = np.asarray(lengths, np.int64)
    atoms = np.arange(mine.size) if how.atoms is None else np.asarray(how.atoms, np.int64)
    rank, everyone = _gathered((mine, atoms), group if how.in_step else False)
    sizes = [part[0].size for part in everyone]
    if min(sizes) == 0:
        raise UserError(f"rank {sizes.index(0)} has no sample in this step; give each rank one")
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
    """This process's place in the group, and what each of the group gave."""
    if group is False or not (dist.is_available() and dist.is_initialized()):
        return 0, [mine]
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, mine, group=group)
    return dist.get_rank(group), out


def _labels(atoms: list[Any]) -> Any:
    """Labels of all ranks, no two ranks' the same."""
    above = np.cumsum([0, *(int(a.max()) + 1 for a in atoms)])
    return np.concatenate([a + first for a, first in zip(atoms, above[:-1], strict=True)])
