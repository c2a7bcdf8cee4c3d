"""The worker process of a rehearsal, which plans each run once and forks a process for each rank.

`wlb rehearse` starts it as `python -m wlb.rehearse.worker REQUESTS`, where REQUESTS is a file of
pickled `Request`s. Before torch, the worker loads the library that lets autograd run without a
GPU (`shim.py`). Into the folder of each request it writes rank-N.pkl for each rank, or refused.txt
if the run would be refused on the cluster.
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
"""File with the error message of a run that would be refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A run to rehearse."""

    spec: RunSpec
    ranks: tuple[int, ...]  # ranks to rehearse
    steps: int  # number of steps to rehearse
    jobs: int  # number of ranks to rehearse at the same time
    traces: bool  # whether to record begin and duration of all kernels and transfers
    device: str  # name of the GPU
    library: Path  # compiled shim, with which autograd runs without a GPU (`shim.py`)
    folder: Path  # folder for results and for the run's files


def main(arguments: list[str]) -> int:
    """Rehearse all requests in a file, and return exit status 0.

    Args:
        arguments: The path of the file.
    """
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
    """Plan a run, then rehearse each of its ranks in a fork of this process."""
    from wlb.rehearse import cuda
    from wlb.rehearse.job import prepare

    importlib.import_module("wlb.rehearse.rank")  # import once, before forking
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
    """Wait until a forked process ends, and remove it from `running`, which maps pid to rank."""
    child, status = os.wait()
    rank = running.pop(child)
    if status:
        raise RuntimeError(f"the process of rank {rank} ended with status {status}")


def _child(rank: int, rehearsal: "object", request: Request) -> None:
    """Rehearse a rank in a forked process, write its result and end the process."""
    from wlb.rehearse.job import Rehearsal
    from wlb.rehearse.rank import rehearse_rank

    status = 1
    try:
        assert isinstance(rehearsal, Rehearsal)
        job = rehearsal.job
        result = rehearse_rank(rank, job, rehearsal.items, traces=request.traces)
        # Write a partial file and rename it when it is complete, because the parent process takes a
        # file with the final name for a complete result.
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
