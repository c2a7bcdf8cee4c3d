"""step: `balance_step`, the front door."""

from dataclasses import dataclass

import numpy as np

from wlb.balance.assignment import StepBalance
from wlb.balance.dynamic import solve_dynamic
from wlb.balance.exchange import sums_by
from wlb.balance.improve import Rules, Units
from wlb.balance.mini_batches import choose
from wlb.balance.request import RankRules, SampleLabels, SlotRules, StepRequest
from wlb.balance.sample_costs import prices, whole
from wlb.balance.solve import solve
from wlb.cost import LLAMA2_7B, Cost, WorkloadModel, model_of
from wlb.plan import FloatArray, IntArray, IntLike, UserError, int_array, whole_number


def balance_step(
    lengths: IntLike,
    *,
    num_ranks: int,
    max_tokens: int,
    cost: Cost = LLAMA2_7B,
    passes: str = "train",
    mini_batches: int | IntLike = 1,
    equal_counts: bool = False,
    count_slack: int = 0,
    groups: IntLike | None = None,
    groups_on: str = "mini_batch",
    atoms: IntLike | None = None,
    ranks: IntLike | None = None,
    num_micro_batches: int | None = None,
    at_least: int = 1,
    multiple: int = 1,
    too_long: str = "refuse",
    wait: str = "micro_batch",
    cp: int = 1,
    dynamic_cp: int = 1,
) -> StepBalance:
    """All samples of one training step to ranks and micro-batches, with work as equal as possible.

    Nothing is delayed, dropped or repeated. Every rank gets as many micro-batches as any other, as
    few as max_tokens permits. Equal inputs give the same assignment everywhere. Sequences of
    numbers have one entry a sample. UserError for input that cannot work, with sample and limit.

    lengths: tokens. num_ranks: data-parallel ranks (CP groups, with cp). max_tokens: limit of a
    micro-batch, over all ranks of its CP group.
    cost: a WorkloadModel; a KernelProfile (for a 7B model); "llama2_7b", "verl" or "slime", whose
    formulas these are; the path of a Hugging Face config.json; a number, the tokens at which
    attention costs what linear layers do; the costs of the samples; or a function of the lengths
    that returns such.
    passes: "train", or "forward" for log-probabilities, where the model tells them apart.
    mini_batches: optimiser steps: how many, to be chosen alike in work and lengths, or the label
    of each sample's, in ascending order.
    equal_counts: as many samples on every rank of a mini-batch, give or take count_slack.
    groups: labels; a group stays in one mini-batch, and on one rank with groups_on="rank".
    atoms: labels of samples that share a micro-batch. ranks: where samples stay on their ranks.
    num_micro_batches: of every rank; else as few as fit, at_least so many, and a `multiple`.
    too_long: "refuse" samples above max_tokens, or let them be "alone" in a micro-batch.
    wait: where ranks wait for each other: after every "micro_batch" (FSDP, ZeRO-3, pipelines), or
    once a "step" (DDP, ZeRO-1 and 2).
    cp: ranks of a CP group, for `StepBalance.shard`. dynamic_cp: at most so many ranks (a power of
    two) share a micro-batch; max_tokens is then of one rank, and `ranks` is refused.
    """
    tokens = int_array("lengths", lengths)
    fixed, dynamic = whole_number("cp", cp, 1), whole_number("dynamic_cp", dynamic_cp, 1)
    asked = StepRequest(
        lengths=tokens,
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        too_long="alone" if dynamic > 1 else too_long,
        labels=SampleLabels.of(
            tokens.size, mini_batches=mini_batches, groups=groups, atoms=atoms, ranks=ranks
        ),
        rank_rules=RankRules(equal_counts=equal_counts, slack=count_slack, groups_on=groups_on),
        slots=SlotRules(num=num_micro_batches, at_least=at_least, multiple=multiple, wait=wait),
    )
    return _balanced(asked, cost, passes, cp=fixed, dynamic_cp=dynamic)


def _balanced(
    asked: StepRequest, cost: Cost, passes: str, *, cp: int, dynamic_cp: int
) -> StepBalance:
    costs = prices(asked.lengths, cost, passes)
    work = whole(costs)
    parts = [_part(asked, work, k, s, dynamic_cp) for k, s in enumerate(_divide(asked, work))]
    return _assignment(parts, asked, costs, work, cp, model_of(cost))


@dataclass(frozen=True, slots=True)
class _Part:
    """A mini-batch's samples with the block of each, its grid [ranks, micro-batches] of blocks, the
    degree of each block, and the bound in units of `work`.
    """

    samples: IntArray
    block_of: IntArray
    grid: IntArray
    degree: FloatArray
    bound: float


def _divide(asked: StepRequest, work: FloatArray) -> list[IntArray]:
    """Samples of each mini-batch, ascending."""
    given = asked.labels
    if isinstance(given.mini_batches, int):
        num = given.mini_batches
        if num == 1:
            return [np.arange(work.size)]
        equal = asked.rank_rules.equal_counts and not asked.rank_rules.slack
        label = given.atom if given.group is None else given.group
        part = np.empty(work.size, np.int64)
        # Where samples stay on their ranks, each rank has its share of every mini-batch.
        rank = np.zeros(work.size, np.int64) if given.rank is None else given.rank
        for r in np.unique(rank).tolist():
            mine = np.flatnonzero(rank == r)
            item = np.unique(label[mine], return_inverse=True)[1]
            held = np.bincount(item).astype(np.float64)
            part[mine] = choose(sums_by(item, work[mine]), held, num, equal_counts=equal)[item]
    else:
        part, num = given.mini_batches, int(given.mini_batches.max()) + 1
    return [np.flatnonzero(part == k) for k in range(num)]


def _units(
    asked: StepRequest, work: FloatArray, samples: IntArray, *, is_dynamic: bool
) -> tuple[Units, IntArray]:
    """Atoms of a mini-batch, heaviest first, and the unit of each of its samples.

    One above the cap counts as one that fills it: both are alone in a micro-batch.
    """
    _, atom = np.unique(asked.labels.atom[samples], return_inverse=True)
    first = np.zeros(int(atom.max()) + 1, np.int64)
    first[atom[::-1]] = samples[::-1]
    sums = [sums_by(atom, x) for x in (work[samples], asked.lengths[samples].astype(np.float64))]
    order = np.argsort(-sums[0], kind="stable")
    place = np.empty(order.size, np.int64)
    place[order] = np.arange(order.size)
    group = None
    if asked.labels.group is not None and asked.rank_rules.groups_on == "rank":
        group = np.unique(asked.labels.group[first[order]], return_inverse=True)[1]
    units = Units(
        work=sums[0][order],
        tokens=sums[1][order] if is_dynamic else np.minimum(sums[1][order], asked.max_tokens),
        samples=np.bincount(atom)[order].astype(np.float64),
        group=group,
        rank=None if asked.labels.rank is None else asked.labels.rank[first[order]],
    )
    return units, place[atom]


def _rules(asked: StepRequest, k: int, num_samples: int) -> Rules:
    counts = None
    one = isinstance(asked.labels.mini_batches, int) and asked.labels.mini_batches == 1
    name = "the step" if one else f"mini-batch {k}"
    if asked.rank_rules.equal_counts:
        least, most = num_samples // asked.num_ranks, -(-num_samples // asked.num_ranks)
        if least < most and not asked.rank_rules.slack:
            raise UserError(
                f"{name} has {num_samples} samples, which {asked.num_ranks} ranks cannot hold in "
                f"equal counts; give a multiple of {asked.num_ranks}, or count_slack >= 1"
            )
        counts = max(1, least - asked.rank_rules.slack), most + asked.rank_rules.slack
    return Rules(
        num_ranks=asked.num_ranks,
        cap=asked.max_tokens,
        slots_wait=asked.slots.wait == "micro_batch",
        multiple=asked.slots.multiple,
        at_least=asked.slots.at_least,
        num=asked.slots.num,
        counts=counts,
        name=name,
    )


def _part(
    asked: StepRequest, work: FloatArray, k: int, samples: IntArray, dynamic_cp: int
) -> _Part:
    units, unit_of = _units(asked, work, samples, is_dynamic=dynamic_cp > 1)
    rules = _rules(asked, k, samples.size)
    if dynamic_cp > 1:
        shared = solve_dynamic(units, rules, dynamic_cp)
        return _Part(samples, shared.block_of[unit_of], shared.grid, shared.degree, shared.bound)
    placed = solve(units, rules)
    grid = np.arange(rules.num_ranks * placed.num).reshape(rules.num_ranks, -1)
    return _Part(samples, placed.bin_of[unit_of], grid, np.ones(grid.size), placed.bound)


def _assignment(
    parts: list[_Part],
    asked: StepRequest,
    costs: FloatArray,
    work: FloatArray,
    cp: int,
    model: WorkloadModel | None,
) -> StepBalance:
    starts = np.cumsum([0, *(part.degree.size for part in parts)])
    samples = np.concatenate([part.samples for part in parts])
    block = np.concatenate([p.block_of + s for p, s in zip(parts, starts[:-1], strict=True)])
    order = np.lexsort((samples, block))
    counts = np.bincount(block, minlength=int(starts[-1]))
    degree = np.concatenate([part.degree for part in parts])
    times = np.bincount(block, costs[samples], int(starts[-1])) / degree
    # A bound in whole numbers of work is one in costs, but for their rounding.
    worth = float(costs.sum()) / float(work.sum())
    return StepBalance(
        lengths=asked.lengths,
        order=samples[order],
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        blocks=tuple(p.grid + s for p, s in zip(parts, starts[:-1], strict=True)),
        times=times,
        bounds=np.array([part.bound * worth for part in parts]),
        max_tokens=asked.max_tokens,
        cp=cp,
        wait=asked.slots.wait,
        model=model,
    )
