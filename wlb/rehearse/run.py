"""Rehearse ranks of a run in separate processes, and compare what they did.

A worker process (`worker.py`) plans the run once and forks a process for each rank. The process
that calls this module imports no torch. It reports progress, collects results and calls `prove` on
the messages of the ranks.
"""

import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wlb.data.leftovers import temporary_folder
from wlb.plan import UserError
from wlb.rehearse import shim
from wlb.rehearse.prove import Proof, prove
from wlb.rehearse.results import Fault, RankResult
from wlb.rehearse.worker import REFUSED, Request
from wlb.spec import ParallelSpec, RunSpec, resolve_dp

ALL, ONE_PER_STAGE = "all", "one-per-stage"
WORKER = ("wlb.rehearse.worker",)
"""Arguments of `python -m` that start the worker process; the file of requests follows them."""
DEVICE = "NVIDIA H100 80GB HBM3"
"""Name of the rehearsed GPU. Its memory is cluster.memory_gib."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """Results of a rehearsed run."""

    spec: RunSpec  # with parallel.dp filled in
    ranks: tuple[RankResult, ...]  # results of the rehearsed ranks, by ascending rank
    proof: Proof  # whether the ranks' messages agree

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Faults of all ranks."""
        return tuple(fault for result in self.ranks for fault in result.faults)

    @property
    def passed(self) -> bool:
        """Whether no rank failed, all messages match, and every rank fits in the GPU's memory."""
        fits = all(r.reserved["expandable"].failed_bytes == 0 for r in self.ranks)
        return not self.faults and not self.proof.problems and fits


def chosen_ranks(text: str, parallel: ParallelSpec) -> tuple[int, ...]:
    """Return the ranks that the option --ranks names.

    Args:
        text: "all", "one-per-stage" (the first rank of each pipeline rank in pipeline 0), or
            numbers such as "0,63".
        parallel: Layout of the run.

    Raises:
        UserError: If the text has another form or names a rank that does not exist.
    """
    world_size = parallel.world_size
    if text == ALL:
        return tuple(range(world_size))
    if text == ONE_PER_STAGE:
        return tuple(pp * parallel.tp * parallel.cp for pp in range(parallel.pp))
    try:
        ranks = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise UserError(
            f"--ranks {text!r} is not valid; give {ALL}, {ONE_PER_STAGE}, or numbers such as 0,63"
        ) from None
    if not 0 <= ranks[0] <= ranks[-1] < world_size:
        raise UserError(
            f"--ranks {text} names a rank that the run does not have; give numbers from 0 to "
            f"{world_size - 1}"
        )
    return ranks


def rehearse(
    spec: RunSpec,
    *,
    ranks: str = ONE_PER_STAGE,
    steps: int = 3,
    jobs: int = 1,
    traces: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Rehearsed:
    """Rehearse the first steps of a run.

    Args:
        spec: Configuration of the run.
        ranks: Ranks to rehearse: "all", "one-per-stage" or numbers such as "0,63".
        steps: Number of steps.
        jobs: Number of ranks to rehearse at the same time.
        traces: Whether to record begin and duration of all kernels and transfers.
        tell: Called with a line of text whenever a rank is done.

    Returns:
        The results, which include the errors of ranks.

    Raises:
        UserError: If the run would be refused on the cluster.
    """
    (found,) = rehearse_each([spec], ranks=ranks, steps=steps, jobs=jobs, traces=traces, tell=tell)
    if isinstance(found, UserError):
        raise found
    return found


def rehearse_each(
    specs: Sequence[RunSpec],
    *,
    ranks: str | Sequence[str] = ONE_PER_STAGE,
    steps: int = 3,
    jobs: int = 1,
    traces: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Rehearsed | UserError]:
    """Rehearse several runs one after the other, and import torch only once for all of them.

    Args:
        specs: Configuration of each run.
        ranks: Ranks to rehearse, as in `chosen_ranks`: one text for all runs, or one for each run.
        steps: Number of steps.
        jobs: Number of ranks to rehearse at the same time.
        traces: Whether to record begin and duration of all kernels and transfers.
        tell: Called with a line of text whenever a rank is done.

    Returns:
        The results of each run, or the error if the run would be refused on the cluster.
    """
    wanted = [ranks] * len(specs) if isinstance(ranks, str) else ranks
    with temporary_folder("rehearse") as name:
        requests: list[Request] = []
        for i, (spec, text) in enumerate(zip(specs, wanted, strict=True)):
            folder = name / str(i)
            folder.mkdir()
            spec = resolve_dp(spec, spec.parallel.world_size)
            request = Request(
                spec=spec,
                ranks=chosen_ranks(text, spec.parallel),
                steps=steps,
                jobs=jobs,
                traces=traces,
                device=DEVICE,
                library=shim.build(),
                folder=folder,
            )
            requests.append(request)
        _work(requests, name, tell)
        return [_found(request) for request in requests]


def _found(request: Request) -> Rehearsed | UserError:
    """Read the results that the worker wrote for a request, and compare the ranks' messages.

    If the run was refused, return the error.
    """
    refused = request.folder / REFUSED
    if refused.exists():
        return UserError(refused.read_text("utf-8"))
    ranks: tuple[RankResult, ...] = tuple(
        pickle.loads(_path(request, rank).read_bytes()) for rank in request.ranks
    )
    programs = {result.rank: result.messages for result in ranks}
    # A rank that failed issued no further messages, so comparing messages would only report the
    # same fault again.
    faulty = any(result.faults for result in ranks)
    world_size = request.spec.parallel.world_size
    proof = Proof(num_ranks=0) if faulty else prove(programs, world_size=world_size)
    return Rehearsed(spec=request.spec, ranks=ranks, proof=proof)


def _work(requests: Sequence[Request], folder: Path, tell: Callable[[str], None]) -> None:
    """Run the worker process on all requests, and call `tell` for each rank that is done.

    Args:
        requests: Runs to rehearse.
        folder: Temporary folder for the file of requests and the worker's log.
        tell: Called with a line of text.
    """
    request_file = folder / "requests"
    request_file.write_bytes(pickle.dumps(requests))
    log = folder / "log"
    command = [sys.executable, "-m", *WORKER, str(request_file)]
    waiting = [(request, rank) for request in requests for rank in request.ranks]
    total = len(waiting)
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as worker,
    ):
        try:
            while worker.poll() is None:
                _wait(worker)
                for one in [one for one in waiting if _path(*one).exists()]:
                    waiting.remove(one)
                    tell(f"rank {one[1]} ({total - len(waiting)} of {total})")
        except BaseException:
            # Do not leave the worker behind after Ctrl-C.
            worker.kill()
            raise
    if worker.returncode:
        text = log.read_text("utf-8", errors="replace")[-4000:]
        raise RuntimeError(
            f"the worker process of the rehearsal ended with status {worker.returncode}:\n{text}"
        )


def _wait(worker: "subprocess.Popen[bytes]") -> None:
    try:
        worker.wait(0.2)
    except subprocess.TimeoutExpired:
        return


def _path(request: Request, rank: int) -> Path:
    return request.folder / f"rank-{rank}.pkl"
