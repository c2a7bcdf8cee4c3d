"""Measures collectives and fits alpha + bytes on the wire / bandwidth.

Buffer sizes follow nccl-tests (gathered, or before scattering); calls are the trainer's own
(`wlb.parallel.collectives`). A time is the slowest rank's, median over repeats: wall time after a
barrier on CPU, events after a small all-reduce on CUDA. Under torchrun or srun rank 0 runs the
tasks and the others `follow` (intra_node: rank 0's node; inter_node: one rank of each node); a
process alone starts local ranks once.
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
CPU_LARGEST_BYTES = 1 << 24
CUDA_LARGEST_BYTES = 1 << 30
SHARE_OF_FREE_MEMORY = 8
"""The largest buffer takes at most one part in this many of a GPU's free memory, because it is
copied."""
LOCAL_RANKS = 2
WARM_UPS = 3
HEAD_START_CYCLES = 400_000
"""The device spins for about 200 us while the host issues the barrier and the collective."""
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePoint:
    """A collective to measure. size_bytes: a multiple of ranks x the bytes of a value."""

    op: Collective
    scope: Scope
    num_ranks: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A group, this rank's device, and how collectives between its ranks are measured."""

    group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype
    repeats: Repeats


@dataclass(slots=True, kw_only=True)
class CollectiveSweep:
    """Tasks of rank 0 (none on other ranks) and a note on what is measured.

    A context manager: the other ranks are released when rank 0 leaves the block.

        with collective_tasks(world, device, dtype=dtype) as sweep:
            sweep.follow()  # other ranks measure along until rank 0 leaves; rank 0 passes
            for record in file.run(sweep.tasks): ...
    """

    tasks: list[Task]
    note: str
    follow: Callable[[], None] = lambda: None
    release: Callable[[], None] = lambda: None
    """Releases the other ranks, also before the block ends."""

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
    """Tasks of kind "collective", point {op, scope, ranks, bytes}, numbers ns, low_ns, high_ns,
    count.

    world: this process among started ranks (`worlds.init` done; every rank calls this), or None.
    device: the rank's own; for local ranks only its kind counts. sizes: buffer bytes, rounded down
    to whole values a rank; default powers of 4 from 4 KiB to 16 MiB on CPU, 1 GiB on CUDA.
    budget_s, least, most: repeats of one point.
    """
    repeats = Repeats(budget_s=budget_s, least=least, most=most)
    if world is not None and world.world_size > 1:
        return _sweep_of_world(world, device, dtype, sizes, repeats)
    num_ranks = LOCAL_RANKS
    if device.type == "cuda":
        num_ranks = torch.cuda.device_count()
        if num_ranks < 2:
            note = (
                "collectives were not measured: they need two GPUs, and there is 1 here; start the "
                "sweep under torchrun on several, or keep figures of another profile"
            )
            return CollectiveSweep(tasks=[], note=note)
    points = _points({Scope.INTRA_NODE: num_ranks}, sizes or default_sizes(device), dtype.itemsize)
    measure_locally = _of_local_ranks(device.type, num_ranks, dtype, points, repeats)
    note = f"collectives: {num_ranks} local ranks on {device.type}; nothing between nodes"
    return CollectiveSweep(tasks=[_task(point, measure_locally) for point in points], note=note)


def default_sizes(device: torch.device) -> list[int]:
    largest = CPU_LARGEST_BYTES
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        largest = min(CUDA_LARGEST_BYTES, free // SHARE_OF_FREE_MEMORY)
    count = (largest // SMALLEST_BYTES).bit_length()
    return [SMALLEST_BYTES << i for i in range(0, count, 2)]


def _points(
    scopes: dict[Scope, int], sizes: Sequence[int], value_bytes: int
) -> list[CollectivePoint]:
    """Return all points. scopes: number of ranks in each scope's group."""
    points: list[CollectivePoint] = []
    for (scope, num_ranks), op, size in product(scopes.items(), Collective, sorted(sizes)):
        whole = size // (num_ranks * value_bytes) * num_ranks * value_bytes
        if whole < 1:
            raise UserError(
                f"a buffer of {size} bytes is less than a value a rank on {num_ranks} ranks"
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


# The following functions measure on local ranks, which are launched once for all points.


def _of_local_ranks(
    kind: str, num_ranks: int, dtype: torch.dtype, points: list[CollectivePoint], repeats: Repeats
) -> Callable[[CollectivePoint], Numbers]:
    """Measures a point on local ranks, which the first one starts and which measure all points."""

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


# The following functions measure on ranks that a launcher started; rank 0 broadcasts each point.


def _sweep_of_world(
    world: worlds.World,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sequence[int] | None,
    repeats: Repeats,
) -> CollectiveSweep:
    mine = sizes or default_sizes(device)
    told: list[Any] = [None] * world.world_size
    dist.all_gather_object(told, (world.node_rank, mine), group=host_group())
    agreed = [size for size in told[0][1] if all(size in there for _, there in told)]
    scopes = _scopes([node for node, _ in told])
    places: dict[Scope, _Place] = {}
    for scope, members in scopes.items():
        # Ranks outside a group must create it too.
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
    """Ranks of each scope's group; nodes: by rank. Groups of one rank are left out."""
    own = tuple(rank for rank, node in enumerate(nodes) if node == nodes[0])
    firsts = tuple(sorted({node: rank for rank, node in reversed(list(enumerate(nodes)))}.values()))
    groups = {Scope.INTRA_NODE: own, Scope.INTER_NODE: firsts}
    return {scope: ranks for scope, ranks in groups.items() if len(ranks) > 1}


@dataclass(slots=True, kw_only=True)
class _LedRanks:
    """Ranks that rank 0 leads; they wait in a broadcast, at most for the group's timeout."""

    world: worlds.World
    places: dict[Scope, _Place]
    released: bool = False

    def measure(self, point: CollectivePoint) -> Numbers:
        """Measures on rank 0, which is in every scope's group, and on the ranks that follow."""
        self._tell(point)
        return _numbers(measure(point, self.places[point.scope]))

    def follow(self) -> None:
        """Measures along on other ranks until they are released; returns at once on rank 0."""
        while self.world.rank and not self.released:
            point = self._tell(None)
            if point is None:
                self.released = True
            elif point.scope in self.places:
                measure(point, self.places[point.scope])

    def release(self) -> None:
        if not self.world.rank and not self.released:
            self._tell(None)
            self.released = True

    def _tell(self, point: CollectivePoint | None) -> CollectivePoint | None:
        told = [point]
        dist.broadcast_object_list(told, src=0, group=host_group())
        return told[0]


# The following functions measure a point; every rank of the group calls them at the same time.


def measure(point: CollectivePoint, place: _Place) -> Numbers | str:
    """Times of one point, equal on all ranks of the group, or an error text if one lacks memory."""
    problem, call = "", None
    try:
        call = _call(point, place)
        # Reserve room for the result: a rank that ran out of memory inside the collective would
        # leave the others waiting there.
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
    """Sends from the group's first rank to its second, as the pipeline does."""
    if rank > 1:
        return
    act = dist.irecv if rank else dist.isend
    peer = dist.get_global_rank(group, 1 - rank)
    for request in dist.batch_isend_irecv([dist.P2POp(act, whole, peer, group)]):
        request.wait()


def _times(call: Callable[[], Any], place: _Place) -> np.ndarray:
    """Ns of the slowest rank in each repeat; ranks agree on the number of repeats."""
    sample = _cuda_samples if place.device.type == "cuda" else _cpu_samples
    start = time.perf_counter()
    sample(call, place, WARM_UPS)
    took_s = (time.perf_counter() - start) / WARM_UPS
    count = place.repeats.count(float(_slowest(np.array([took_s]), place)[0]))
    return _slowest(sample(call, place, count), place)


def _slowest(values: np.ndarray, place: _Place) -> np.ndarray:
    """Maximum of each value over the ranks."""
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
    """Issues all repeats ahead of the device and waits once, at the end."""
    flag = torch.zeros(1, device=place.device)
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(count):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        spin(HEAD_START_CYCLES)
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
    """Fitted costs: time = alpha_ns + bytes on the wire / bytes_per_s, as in `CollectiveCost`.

    residuals: relative errors of the fit, and of each time as predicted by a fit to the others
    (leave one out).
    """

    alpha_ns: float
    bytes_per_s: float
    residuals: tuple[tuple[str, float], ...]


def fit_alpha_beta(
    sizes: Sequence[int], times_ns: Sequence[float], op: Collective, num_ranks: int
) -> AlphaBeta:
    """Non-negative least squares of relative errors, because sizes span six orders of magnitude.

    Raises UserError with fewer than 3 sizes, or where times do not grow with size.
    """
    wire = np.asarray(sizes, np.float64) * op.wire_share(num_ranks)
    times = np.asarray(times_ns, np.float64)
    if wire.shape != times.shape or np.unique(wire).size < 3 or not (times > 0).all():
        raise UserError(
            f"{op}: sizes {list(sizes)} and times {list(times_ns)} ns must be at least 3 different "
            f"sizes of more than one rank ({num_ranks}) with a time above 0 each"
        )
    alpha, beta = _solve(wire, times)
    if beta <= 0:
        raise UserError(
            f"{op}: times {list(times_ns)} ns do not grow with sizes {list(sizes)}; measure larger "
            f"buffers"
        )
    fit = np.abs((alpha + beta * wire) / times - 1)
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
    """(alpha in ns, ns a byte); columns are scaled to equal size for precision."""
    scale = times.max() / wire.max()
    design = np.stack([1 / times, scale * wire / times], axis=1)
    height = times.min()
    (alpha, beta), _ = nnls(design * np.array([height, 1.0]), np.ones(times.size))
    return float(alpha * height), float(beta * scale)
