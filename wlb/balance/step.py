"""`balance_step`, the function with which trainers balance a step.

1. `_divide` chooses the mini-batch of each sample.
2. `_units` joins samples that must share a micro-batch (an atom) into one unit.
3. `_part` assigns the units of each mini-batch to ranks and micro-batches, by `solve`, or by
   `solve_dynamic` if `dynamic_cp` is given.
4. `_assignment` collects the mini-batches in a `StepBalance`.
"""

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
    """Assign the samples of one training step to ranks and micro-batches with nearly equal work.

    No sample is delayed, dropped or repeated. All ranks get the same number of micro-batches, as
    few as `max_tokens` permits. Equal arguments give the same assignment on every host. Arguments
    that are sequences have one entry for each sample. A label is an integer; samples with equal
    labels belong together.

    Args:
        lengths: Tokens of each sample.
        num_ranks: Number of data-parallel ranks (of CP groups, if `cp` is set).
        max_tokens: Most tokens of a micro-batch, over all ranks of its CP group.
        cost: How to predict work. One of: a `WorkloadModel`; a `KernelProfile` (for a 7B model);
            "llama2_7b", "verl" or "slime" for the formula that goes by this name; the path of a
            Hugging Face config.json; the length in tokens at which attention costs as much as
            linear layers; the cost of each sample; or a function that returns the costs of samples
            for an array of their lengths.
        passes: "train" balances forward and backward, "forward" only forward passes, such as the
            computation of log-probabilities. Only workload models distinguish them.
        mini_batches: Number of mini-batches (optimiser steps), or a label for each sample. With a
            number, the mini-batch of each sample is chosen such that all mini-batches have equal
            work and similar lengths. With labels, samples with equal labels form a mini-batch, and
            mini-batches come in ascending order of labels.
        equal_counts: Whether all ranks get equally many samples of a mini-batch.
        count_slack: With `equal_counts`, by how many samples a rank may be above or below an equal
            share.
        groups: A label for each sample. Samples with equal labels form a group, and stay in one
            mini-batch.
        groups_on: "rank" also keeps the samples of a group on one rank; "mini_batch" does not.
        atoms: A label for each sample. Samples with equal labels form an atom, and share a
            micro-batch.
        ranks: The rank of each sample, if samples must stay on their ranks. None = any rank.
        num_micro_batches: Number of micro-batches of every rank. None = as few as fit.
        at_least: Least number of micro-batches of every rank.
        multiple: The number of micro-batches of every rank is to be a multiple of this.
        too_long: What to do with samples above `max_tokens`: "refuse" them, or let them be "alone"
            in a micro-batch.
        wait: When ranks wait for each other: after every "micro_batch" (FSDP, ZeRO-3, pipelines) or
            once in a "step" (DDP, ZeRO-1 and 2).
        cp: Number of ranks of a CP group, for `StepBalance.shard`.
        dynamic_cp: Up to this many ranks (a power of two) may share a micro-batch. `max_tokens` is
            then the limit of one rank. A value above 1 cannot be combined with `ranks`,
            `equal_counts` or groups_on = "rank".

    Raises:
        UserError: If the arguments cannot be satisfied; the message names the sample and the limit.
    """
    tokens = int_array("lengths", lengths)
    fixed, dynamic = whole_number("cp", cp, 1), whole_number("dynamic_cp", dynamic_cp, 1)
    request = StepRequest(
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
    return _balanced(request, cost, passes, cp=fixed, dynamic_cp=dynamic)


def _balanced(
    request: StepRequest, cost: Cost, passes: str, *, cp: int, dynamic_cp: int
) -> StepBalance:
    costs = prices(request.lengths, cost, passes)
    work = whole(costs)
    parts = [_part(request, work, k, s, dynamic_cp) for k, s in enumerate(_divide(request, work))]
    return _assignment(parts, request, costs, work, cp, model_of(cost))


@dataclass(frozen=True, slots=True)
class _Part:
    """The assignment of one mini-batch. A block is the set of samples of one micro-batch."""

    samples: IntArray  # indices of the mini-batch's samples, ascending
    block_of: IntArray  # block of each of these samples
    # grid[r, m] is the block that rank r trains as its m-th micro-batch. Shape [num_ranks,
    # num_micro_batches].
    grid: IntArray
    degree: FloatArray  # number of ranks that train each block together, shape [num_blocks]
    bound: float  # lower bound on the time of any assignment, in the unit of work


def _divide(request: StepRequest, work: FloatArray) -> list[IntArray]:
    """Choose the mini-batch of each sample, unless the caller did.

    Args:
        request: The arguments of `balance_step`.
        work: Work of each sample, shape [num_samples].

    Returns:
        The indices of each mini-batch's samples, ascending.
    """
    given = request.labels
    if isinstance(given.mini_batches, int):
        num = given.mini_batches
        if num == 1:
            return [np.arange(work.size)]
        equal = request.rank_rules.equal_counts and not request.rank_rules.slack
        label = given.atom if given.group is None else given.group
        part = np.empty(work.size, np.int64)
        # If samples stay on their ranks, divide the samples of each rank over all mini-batches.
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
    request: StepRequest, work: FloatArray, samples: IntArray, *, is_dynamic: bool
) -> tuple[Units, IntArray]:
    """Join samples that must share a micro-batch into units, and sort units by descending work.

    A unit of more than `max_tokens` tokens counts as a unit of exactly `max_tokens` tokens. The
    effect is the same, because a unit of either size is alone in its micro-batch.

    Args:
        request: The arguments of `balance_step`.
        work: Work of each sample of the step.
        samples: Indices of the samples of one mini-batch.
        is_dynamic: Whether several ranks may share a micro-batch (`dynamic_cp`). Tokens are not
            capped then.

    Returns:
        The units, and the unit of each sample.
    """
    _, atom = np.unique(request.labels.atom[samples], return_inverse=True)
    first = np.zeros(int(atom.max()) + 1, np.int64)
    first[atom[::-1]] = samples[::-1]
    sums = [sums_by(atom, x) for x in (work[samples], request.lengths[samples].astype(np.float64))]
    order = np.argsort(-sums[0], kind="stable")
    place = np.empty(order.size, np.int64)
    place[order] = np.arange(order.size)
    group = None
    if request.labels.group is not None and request.rank_rules.groups_on == "rank":
        group = np.unique(request.labels.group[first[order]], return_inverse=True)[1]
    units = Units(
        work=sums[0][order],
        tokens=sums[1][order] if is_dynamic else np.minimum(sums[1][order], request.max_tokens),
        samples=np.bincount(atom)[order].astype(np.float64),
        group=group,
        rank=None if request.labels.rank is None else request.labels.rank[first[order]],
    )
    return units, place[atom]


def _rules(request: StepRequest, k: int, num_samples: int) -> Rules:
    counts = None
    one = isinstance(request.labels.mini_batches, int) and request.labels.mini_batches == 1
    name = "the step" if one else f"mini-batch {k}"
    if request.rank_rules.equal_counts:
        least, most = num_samples // request.num_ranks, -(-num_samples // request.num_ranks)
        if least < most and not request.rank_rules.slack:
            raise UserError(
                f"{name} has {num_samples} samples, which equal_counts cannot divide equally among "
                f"num_ranks = {request.num_ranks} ranks; add or remove samples, or set count_slack "
                "= 1"
            )
        counts = max(1, least - request.rank_rules.slack), most + request.rank_rules.slack
    return Rules(
        num_ranks=request.num_ranks,
        cap=request.max_tokens,
        slots_wait=request.slots.wait == "micro_batch",
        multiple=request.slots.multiple,
        at_least=request.slots.at_least,
        num=request.slots.num,
        counts=counts,
        name=name,
    )


def _part(
    request: StepRequest, work: FloatArray, k: int, samples: IntArray, dynamic_cp: int
) -> _Part:
    """Assign the samples of mini-batch k to ranks and micro-batches.

    Args:
        request: The arguments of `balance_step`.
        work: Work of each sample of the step.
        k: Index of the mini-batch, for error messages.
        samples: Indices of its samples.
        dynamic_cp: Most ranks that may share a micro-batch.
    """
    units, unit_of = _units(request, work, samples, is_dynamic=dynamic_cp > 1)
    rules = _rules(request, k, samples.size)
    if dynamic_cp > 1:
        shared = solve_dynamic(units, rules, dynamic_cp)
        return _Part(samples, shared.block_of[unit_of], shared.grid, shared.degree, shared.bound)
    placed = solve(units, rules)
    grid = np.arange(rules.num_ranks * placed.num).reshape(rules.num_ranks, -1)
    return _Part(samples, placed.bin_of[unit_of], grid, np.ones(grid.size), placed.bound)


def _assignment(
    parts: list[_Part],
    request: StepRequest,
    costs: FloatArray,
    work: FloatArray,
    cp: int,
    model: WorkloadModel | None,
) -> StepBalance:
    """Collect the assignments of all mini-batches in one record, and number blocks consecutively.

    A block is the set of samples of one micro-batch.

    Args:
        parts: The assignment of each mini-batch.
        request: The arguments of `balance_step`.
        costs: Predicted cost of each sample, in the unit of the argument `cost`.
        work: The same costs, scaled and rounded to integers (`whole`).
        cp: Number of ranks of a CP group.
        model: Predicts the work of parts of samples. None if `cost` is no workload model.
    """
    starts = np.cumsum([0, *(part.degree.size for part in parts)])
    samples = np.concatenate([part.samples for part in parts])
    block = np.concatenate([p.block_of + s for p, s in zip(parts, starts[:-1], strict=True)])
    order = np.lexsort((samples, block))
    counts = np.bincount(block, minlength=int(starts[-1]))
    degree = np.concatenate([part.degree for part in parts])
    times = np.bincount(block, costs[samples], int(starts[-1])) / degree
    # Lower bounds are in the unit of integer work; convert them to the unit of costs.
    worth = float(costs.sum()) / float(work.sum())
    return StepBalance(
        lengths=request.lengths,
        order=samples[order],
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        blocks=tuple(p.grid + s for p, s in zip(parts, starts[:-1], strict=True)),
        times=times,
        bounds=np.array([part.bound * worth for part in parts]),
        max_tokens=request.max_tokens,
        cp=cp,
        wait=request.slots.wait,
        model=model,
    )
