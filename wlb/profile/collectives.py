"""Measure collectives and fit time = alpha + bytes on the wire / bandwidth.

- As in nccl-tests, the size of an all-gather is the size of the gathered buffer, and the size of a
  reduce-scatter is the size of the buffer before scattering.
- The measured functions are those of the trainer (`wlb.parallel.collectives`).
- In each repeat the slowest rank's time counts, and the result is the median over repeats. A time
  on a CPU is wall time after a barrier. A time on CUDA lies between two events, after a small
  all-reduce.
- Under torchrun or srun, rank 0 runs the tasks and the other ranks take part (`follow`).
  Collectives within a node are measured on rank 0's node. Collectives between nodes are measured
  with one rank of each node.
- A process without a launcher starts local ranks once, which then measure all points.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls
from torch import Tensor

from wlb.cost.profile import Collective, Scope
from wlb.launch.local import run_local
from wlb.parallel import collectives
from wlb.parallel import world as worlds
from wlb.parallel.host import host_group
from wlb.plan import UserError
from wlb.profile.tasks import Numbers, Task
from wlb.profile.timing import Repeats, Timing, spin

SMALLEST_BYTES = 1 << 12
"""Size of the smallest buffer that is measured."""
CPU_LARGEST_BYTES = 1 << 24
CUDA_LARGEST_BYTES = 1 << 30
SHARE_OF_FREE_MEMORY = 8
"""The largest buffer has at most the free memory of a GPU divided by this number.

Collectives need further buffers of the same size."""
LOCAL_RANKS = 2
"""Number of local ranks that a process without a launcher starts on a CPU."""
WARM_UPS = 3
HEAD_START_CYCLES = 400_000
"""Cycles for which the device spins (about 200 us) while the host issues a repeat."""
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePoint:
    """A collective to measure, with its group and the size of its buffer."""

    op: Collective
    scope: Scope  # whether the group is within a node or between nodes
    num_ranks: int  # size of the group
    size_bytes: int  # size of the buffer, a multiple of num_ranks x bytes of a value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The process group and device with which this rank measures."""

    group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype
    repeats: Repeats


@dataclass(slots=True, kw_only=True)
class CollectiveSweep:
    """The tasks that rank 0 runs, and the function with which the other ranks take part.

    A sweep is a context manager. When rank 0 leaves the block, `follow` returns on the other ranks.

        with collective_tasks(world, device, dtype=dtype) as sweep:
            sweep.follow()  # rank 0: returns at once; others: returns when rank 0 leaves the block
            for record in file.run(sweep.tasks): ...
    """

    tasks: list[Task]  # empty on ranks other than 0
    note: str  # a sentence for the user on what is measured
    # Takes part in rank 0's tasks until rank 0 calls `release`. Returns at once on rank 0.
    follow: Callable[[], None] = lambda: None
    # Makes `follow` return on the other ranks. Only rank 0 calls this.
    release: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def collective_tasks(
    world: worlds.World | None,
    device: torch.device,
    *,
    dtype: torch.dtype,
    sizes: Sequence[int] | None = None,
    budget_s: float = 0.1,
    least: int = 10,
    most: int = 200,
) -> CollectiveSweep:
    """Return the tasks that measure collectives, of kind "collective".

    `Task.point` has op, scope, ranks and bytes. The measured numbers are ns (the median), low_ns
    and high_ns (10th and 90th percentile) and count (of repeats).

    Args:
        world: Place of this process among the ranks that a launcher started, which must all call
            this function; None if there is no launcher.
        device: Device of this rank. Without a launcher, only the type of the device matters.
        dtype: Data type of buffers.
        sizes: Sizes of buffers in bytes, rounded down to whole values on each rank. Defaults to
            powers of 4 from 4 KiB to 16 MiB on a CPU, and to 1 GiB on CUDA.
        budget_s: Seconds for the repeats of a task.
        least: Fewest repeats of a task.
        most: Most repeats of a task.
    """
    repeats = Repeats(budget_s=budget_s, least=least, most=most)
    if world is not None and world.world_size > 1:
        return _sweep_of_world(world, device, dtype, sizes, repeats)
    num_ranks = LOCAL_RANKS
    if device.type == "cuda":
        num_ranks = torch.cuda.device_count()
        if num_ranks < 2:
            note = (
                "collectives are not measured, because this process sees only one GPU; the profile "
                "gets their costs from a profile that comes with wlb; to measure them, start the "
                "sweep under torchrun on several GPUs"
            )
            return CollectiveSweep(tasks=[], note=note)
    points = _points({Scope.INTRA_NODE: num_ranks}, sizes or default_sizes(device), dtype.itemsize)
    measure_locally = _of_local_ranks(device.type, num_ranks, dtype, points, repeats)
    note = (
        f"collectives are measured between {num_ranks} ranks of this machine on {device.type}, but "
        f"not between nodes"
    )
    return CollectiveSweep(tasks=[_task(point, measure_locally) for point in points], note=note)


def default_sizes(device: torch.device) -> list[int]:
    """Return the sizes of buffers for which collectives are measured by default, in bytes."""
    largest = CPU_LARGEST_BYTES
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        largest = min(CUDA_LARGEST_BYTES, free // SHARE_OF_FREE_MEMORY)
    count = (largest // SMALLEST_BYTES).bit_length()
    return [SMALLEST_BYTES << i for i in range(0, count, 2)]


def _points(
    scopes: dict[Scope, int], sizes: Sequence[int], value_bytes: int
) -> list[CollectivePoint]:
    """Return all collectives and sizes to measure.

    Args:
        scopes: Number of ranks in the group of each scope.
        sizes: Sizes of buffers in bytes.
        value_bytes: Bytes of a value. Sizes are rounded down so that ranks get equally many values.
    """
    points: list[CollectivePoint] = []
    for (scope, num_ranks), op, size in product(scopes.items(), Collective, sorted(sizes)):
        whole = size // (num_ranks * value_bytes) * num_ranks * value_bytes
        if whole < 1:
            raise UserError(
                f"a buffer of {size} bytes is too small for {num_ranks} ranks; use at least "
                f"{num_ranks * value_bytes} bytes, one value of {value_bytes} bytes for each rank"
            )
        points.append(CollectivePoint(op=op, scope=scope, num_ranks=num_ranks, size_bytes=whole))
    return list(dict.fromkeys(points))


def _task(point: CollectivePoint, measure: Callable[[CollectivePoint], Numbers]) -> Task:
    named = {
        "op": str(point.op),
        "scope": str(point.scope),
        "ranks": point.num_ranks,
        "bytes": point.size_bytes,
    }
    return Task(kind="collective", point=named, run=lambda: measure(point))


# The following functions measure on local ranks, which are started once for all points.


def _of_local_ranks(
    kind: str, num_ranks: int, dtype: torch.dtype, points: list[CollectivePoint], repeats: Repeats
) -> Callable[[CollectivePoint], Numbers]:
    """Return a function that returns what was measured for a point (a collective and a size).

    The first call of that function starts local ranks, which measure all points at once.

    Args:
        kind: Type of the device: "cpu" or "cuda".
        num_ranks: Number of local ranks.
        dtype: Data type of buffers.
        points: All points with which the function will be called.
        repeats: How often each point is repeated.
    """

    @cache
    def found() -> dict[CollectivePoint, Numbers | str]:
        call = (_measure_locally, num_ranks, kind, dtype, points, repeats)
        results = run_local(*call, device=kind, start_group=True, timeout_s=TIMEOUT_S)
        return dict(zip(points, results[0], strict=True))

    return lambda point: _numbers(found()[point])


def _measure_locally(
    world: worlds.World,
    kind: str,
    dtype: torch.dtype,
    points: Sequence[CollectivePoint],
    repeats: Repeats,
) -> list[Numbers | str]:
    group, device = dist.group.WORLD, worlds.rank_device(world, kind)
    assert group is not None
    place = _Place(group=group, device=device, dtype=dtype, repeats=repeats)
    return [measure(point, place) for point in points]


def _numbers(found: Numbers | str) -> Numbers:
    if isinstance(found, str):
        raise torch.OutOfMemoryError(found)
    return found


# The following functions measure on ranks that a launcher has started. Rank 0 broadcasts each
# point.


def _sweep_of_world(
    world: worlds.World,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sequence[int] | None,
    repeats: Repeats,
) -> CollectiveSweep:
    mine = sizes or default_sizes(device)
    # GPUs may have unequal free memory, so measure only the sizes for which all ranks have memory.
    of_ranks: list[Any] = [None] * world.world_size
    dist.all_gather_object(of_ranks, (world.node_rank, mine), group=host_group())
    agreed = [size for size in of_ranks[0][1] if all(size in there for _, there in of_ranks)]
    scopes = _scopes([node for node, _ in of_ranks])
    places: dict[Scope, _Place] = {}
    for scope, members in scopes.items():
        # new_group is collective, so ranks outside the group must call it too.
        group = dist.new_group(list(members))
        if isinstance(group, dist.ProcessGroup):
            places[scope] = _Place(group=group, device=device, dtype=dtype, repeats=repeats)
    ranks = _LedRanks(world=world, places=places)
    counts = {scope: len(members) for scope, members in scopes.items() if scope in places}
    points = _points(counts, agreed, dtype.itemsize) if world.rank == 0 else []
    note = "collectives: " + ", ".join(f"{s} over {num} ranks" for s, num in counts.items())
    tasks = [_task(point, ranks.measure) for point in points]
    return CollectiveSweep(tasks=tasks, note=note, follow=ranks.follow, release=ranks.release)


def _scopes(nodes: Sequence[int]) -> dict[Scope, tuple[int, ...]]:
    """Return the ranks of the group within a node, and of the group between nodes.

    The group within a node has all ranks of rank 0's node. The group between nodes has the first
    rank of each node. A group of a single rank is left out.

    Args:
        nodes: Number of the node of each rank.
    """
    first_node = tuple(rank for rank, node in enumerate(nodes) if node == nodes[0])
    firsts = tuple(sorted({node: rank for rank, node in reversed(list(enumerate(nodes)))}.values()))
    groups = {Scope.INTRA_NODE: first_node, Scope.INTER_NODE: firsts}
    return {scope: ranks for scope, ranks in groups.items() if len(ranks) > 1}


@dataclass(slots=True, kw_only=True)
class _LedRanks:
    """Measures collectives on all ranks that a launcher started.

    Rank 0 broadcasts which collective is next and of what size (a point). The other ranks wait for
    this broadcast, and fail if it times out before the next point comes.
    """

    world: worlds.World  # this rank and its launcher
    # for each scope (inside a node, between nodes) to which this rank belongs, its process group
    places: dict[Scope, _Place]
    released: bool = False  # whether rank 0 has called `release`

    def measure(self, point: CollectivePoint) -> Numbers:
        """Measure a collective together with the other ranks, and return statistics of its time.

        Only rank 0 calls this, because it belongs to every group. The other ranks are in `follow`.
        """
        self._broadcast(point)
        return _numbers(measure(point, self.places[point.scope]))

    def follow(self) -> None:
        """Measure each point that rank 0 broadcasts, until rank 0 calls `release`.

        A point is a collective and a size. On rank 0 this returns at once.
        """
        while self.world.rank and not self.released:
            point = self._broadcast(None)
            if point is None:
                self.released = True
            elif point.scope in self.places:
                measure(point, self.places[point.scope])

    def release(self) -> None:
        """Tell the other ranks that nothing more is measured, so that they return from `follow`.

        Has no effect on ranks other than 0.
        """
        if not self.world.rank and not self.released:
            self._broadcast(None)
            self.released = True

    def _broadcast(self, point: CollectivePoint | None) -> CollectivePoint | None:
        """Send the point that is measured next from rank 0 to all ranks, and return it.

        None says that nothing more is measured. The argument of other ranks does not matter.
        """
        points = [point]
        dist.broadcast_object_list(points, src=0, group=host_group())
        return points[0]


# The following functions measure a point. Every rank of the group calls them at the same time.


def measure(point: CollectivePoint, place: _Place) -> Numbers | str:
    """Return statistics of a collective's time, or an error text if any rank lacks memory.

    Args:
        point: Collective and size of the buffer.
        place: Process group and device of this rank.
    """
    problem, call = "", None
    try:
        call = _call(point, place)
        # Test whether there is memory for the result. If a rank ran out of memory inside the
        # collective, the other ranks would wait for it until their timeout.
        torch.empty(2 * point.size_bytes, dtype=torch.uint8, device=place.device)
    except torch.OutOfMemoryError as error:
        problem = str(error).partition("\n")[0] or "out of memory"
    if _slowest(np.array([float(bool(problem))]), place)[0]:
        return problem or "another rank of the group is out of memory"
    assert call is not None
    took = Timing.of(_times(call, place))
    return {
        "ns": took.median_ns,
        "low_ns": took.low_ns,
        "high_ns": took.high_ns,
        "count": took.count,
    }


def _call(point: CollectivePoint, place: _Place) -> Callable[[], Any]:
    """Return a function that calls the collective of `point` once."""
    num_values = point.size_bytes // place.dtype.itemsize
    group, rank = place.group, dist.get_rank(place.group)

    if point.op == Collective.ALL_GATHER:
        num_values //= point.num_ranks
    values = torch.ones(num_values, dtype=place.dtype, device=place.device)
    match point.op:
        case Collective.ALL_GATHER:
            return lambda: collectives.all_gather(values, group)
        case Collective.REDUCE_SCATTER:
            return lambda: collectives.reduce_scatter(values, group)
        case Collective.ALL_REDUCE:
            return lambda: collectives.all_reduce(values, group)
        case Collective.P2P:
            return lambda: _send(values, rank, group)


def _send(whole: Tensor, rank: int, group: dist.ProcessGroup) -> None:
    """Send a tensor from the first rank of a group to the second, as a pipeline stage does.

    Args:
        whole: Tensor to send, or to receive into.
        rank: This rank in the group. Ranks above 1 do nothing.
        group: The group.
    """
    if rank > 1:
        return
    act = dist.irecv if rank else dist.isend
    peer = dist.get_global_rank(group, 1 - rank)
    for request in dist.batch_isend_irecv([dist.P2POp(act, whole, peer, group)]):
        request.wait()


def _times(call: Callable[[], Any], place: _Place) -> np.ndarray:
    """Repeat a call on all ranks, and return the slowest rank's nanoseconds in each repeat."""
    sample = _cuda_samples if place.device.type == "cuda" else _cpu_samples
    start = time.perf_counter()
    sample(call, place, WARM_UPS)
    took_s = (time.perf_counter() - start) / WARM_UPS
    # All ranks must make the same number of calls, so compute it from the slowest rank's time.
    count = place.repeats.count(float(_slowest(np.array([took_s]), place)[0]))
    return _slowest(sample(call, place, count), place)


def _slowest(values: np.ndarray, place: _Place) -> np.ndarray:
    """Return the maximum of each entry of `values` over the ranks of the group."""
    tensor = torch.from_numpy(values.astype(np.float64)).to(place.device)
    return collectives.all_reduce(tensor, place.group, "max").cpu().numpy()


def _cpu_samples(call: Callable[[], Any], place: _Place, count: int) -> np.ndarray:
    took = np.zeros(count)
    for i in range(count):
        dist.barrier(place.group)
        start = time.perf_counter_ns()
        call()
        took[i] = time.perf_counter_ns() - start
    return took


def _cuda_samples(call: Callable[[], Any], place: _Place, count: int) -> np.ndarray:
    """Issue `count` calls, wait for the device once at the end, and return ns of each call."""
    flag = torch.zeros(1, device=place.device)
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(count):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        spin(HEAD_START_CYCLES)
        # A small all-reduce makes the ranks' devices start together.
        dist.all_reduce(flag, group=place.group)
        before.record()
        call()
        after.record()
        pairs.append((before, after))
    torch.cuda.synchronize(place.device)
    return np.array([before.elapsed_time(after) * 1e6 for before, after in pairs])


# The following functions fit alpha and bandwidth to the measured times.


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaBeta:
    """Fitted cost: time = alpha_ns + bytes on the wire / bytes_per_s, as in `CollectiveCost`."""

    alpha_ns: float
    bytes_per_s: float
    # Median and maximum of two kinds of relative errors. "fit" compares each time with the fit to
    # all times. "leave_one_out" compares each time with a fit to all other times.
    residuals: tuple[tuple[str, float], ...]


def fit_alpha_beta(
    sizes: Sequence[int], times_ns: Sequence[float], op: Collective, num_ranks: int
) -> AlphaBeta:
    """Fit alpha and bandwidth to the times of a collective by non-negative least squares.

    The fit minimises relative errors, because sizes span six orders of magnitude.

    Args:
        sizes: Buffer sizes in bytes.
        times_ns: Measured time for each size.
        op: The collective.
        num_ranks: Number of ranks that took part.

    Raises:
        UserError: If there are fewer than 3 sizes, or if times do not grow with size.
    """
    wire = np.asarray(sizes, np.float64) * op.wire_share(num_ranks)
    times = np.asarray(times_ns, np.float64)
    if wire.shape != times.shape or np.unique(wire).size < 3 or not (times > 0).all():
        raise UserError(
            f"the cost of {op} on {num_ranks} ranks cannot be fitted to times {list(times_ns)} ns "
            f"of buffers of {list(sizes)} bytes; measure at least 3 different sizes on at least 2 "
            f"ranks, with times above 0"
        )
    alpha, beta = _solve(wire, times)
    if beta <= 0:
        raise UserError(
            f"{op}: the times {list(times_ns)} ns do not grow with the buffers' sizes "
            f"{list(sizes)} bytes; measure again on an idle machine, or with larger buffers"
        )
    fit = np.abs((alpha + beta * wire) / times - 1)
    # Predict each time with a fit to all other times.
    left_out = np.zeros(times.size)
    for i in range(times.size):
        others = np.arange(times.size) != i
        a, b = _solve(wire[others], times[others])
        left_out[i] = abs((a + b * wire[i]) / times[i] - 1)
    residuals = [
        (f"{name}_{what}", float(of(errors)))
        for name, errors in (("fit", fit), ("leave_one_out", left_out))
        for what, of in (("median", np.median), ("max", np.max))
    ]
    return AlphaBeta(alpha_ns=alpha, bytes_per_s=1e9 / beta, residuals=tuple(residuals))


def _solve(wire: np.ndarray, times: np.ndarray) -> tuple[float, float]:
    """Return alpha (ns) and beta (ns per byte) of the fit times = alpha + beta * wire.

    The unknowns are scaled to about equal size, for precision.

    Args:
        wire: Bytes on the wire of each measurement.
        times: Nanoseconds of each measurement.
    """
    scale = times.max() / wire.max()
    design = np.stack([1 / times, scale * wire / times], axis=1)
    height = times.min()
    (alpha, beta), _ = nnls(design * np.array([height, 1.0]), np.ones(times.size))
    return float(alpha * height), float(beta * scale)
