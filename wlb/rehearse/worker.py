"""The process that rehearses: loads the shim, plans each run once, and forks a process for each of
its ranks.

`python -m wlb.rehearse.worker REQUESTS` reads pickled `Request`s and writes rank-N.pkl into the
folder of each, or refused.txt for a run that cannot work. It is not started by hand: `wlb rehearse`
does that.
"""

import importlib
import os
import pickle
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from wlb.memory.budget import cluster_gib
from wlb.plan import UserError
from wlb.rehearse import shim
from wlb.spec import RunSpec

REFUSED = "refused.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """spec: of the run. ranks: which are rehearsed. jobs: how many at a time. traces: keep spans of
    every kernel. device: name of the GPU. folder: for results and the run's files.
    """

    spec: RunSpec
    ranks: tuple[int, ...]
    steps: int
    jobs: int
    traces: bool
    device: str
    library: Path
    folder: Path


def main(arguments: list[str]) -> int:
    requests: list[Request] = pickle.loads(Path(arguments[0]).read_bytes())
    shim.load(requests[0].library)
    from wlb.rehearse import cuda

    cuda.install()
    for request in requests:
        try:
            rehearse_ranks(request)
        except UserError as error:
            (request.folder / REFUSED).write_text(str(error), "utf-8", "backslashreplace")
    return 0


def rehearse_ranks(request: Request) -> None:
    """Plan, then rehearse each rank in a fork of this process."""
    from wlb.rehearse import cuda
    from wlb.rehearse.job import prepare

    importlib.import_module("wlb.rehearse.rank")  # here once, and not in each fork
    spec = request.spec
    memory = int(cluster_gib(spec) * 2**30)
    local = min(8, max(1, spec.parallel.world_size))
    cuda.describe(name=request.device, memory_bytes=memory, local_ranks=local)
    rehearsal = prepare(spec, request.folder, steps=request.steps)
    running: dict[int, int] = {}
    for rank in request.ranks:
        if len(running) >= request.jobs:
            _join(running)
        child = os.fork()
        if child == 0:
            _child(rank, rehearsal, request)
        running[child] = rank
    while running:
        _join(running)


def _join(running: dict[int, int]) -> None:
    child, status = os.wait()
    rank = running.pop(child)
    if status:
        raise RuntimeError(f"the process of rank {rank} ended with status {status}")


def _child(rank: int, rehearsal: "object", request: Request) -> None:
    """Never returns: the forked process ends here."""
    from wlb.rehearse.job import Rehearsal
    from wlb.rehearse.rank import rehearse_rank

    status = 1
    try:
        assert isinstance(rehearsal, Rehearsal)
        job = rehearsal.job
        result = rehearse_rank(rank, job, rehearsal.items, traces=request.traces)
        partial = request.folder / f"rank-{rank}.partial"
        partial.write_bytes(pickle.dumps(result))
        partial.rename(request.folder / f"rank-{rank}.pkl")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
