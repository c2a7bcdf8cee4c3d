"""Rehearses ranks of a run in processes of their own, and proves what concerns several of them."""

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
"""Module of the process that rehearses, and arguments before its own."""
DEVICE = "NVIDIA H100 80GB HBM3"
"""Name of the GPU that is rehearsed; its memory is cluster.memory_gib."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """Results by rank, and what was proven over them."""

    spec: RunSpec
    ranks: tuple[RankResult, ...]
    proof: Proof

    @property
    def faults(self) -> tuple[Fault, ...]:
        return tuple(fault for result in self.ranks for fault in result.faults)

    @property
    def passed(self) -> bool:
        """Whether no rank failed, everything pairs up, and memory suffices."""
        fits = all(r.reserved["expandable"].failed_bytes == 0 for r in self.ranks)
        return not self.faults and not self.proof.problems and fits


def chosen_ranks(text: str, parallel: ParallelSpec) -> tuple[int, ...]:
    """Ranks of "all", "one-per-stage" (TP, CP and DP rank 0 of each pipeline rank) or "0,63"."""
    world_size = parallel.world_size
    if text == ALL:
        return tuple(range(world_size))
    if text == ONE_PER_STAGE:
        return tuple(pp * parallel.tp * parallel.cp for pp in range(parallel.pp))
    try:
        ranks = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise UserError(
            f"--ranks {text!r} is neither {ALL}, {ONE_PER_STAGE} nor numbers as in 0,63"
        ) from None
    if not 0 <= ranks[0] <= ranks[-1] < world_size:
        raise UserError(f"--ranks {text}: the run has ranks 0 to {world_size - 1}")
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
    """Rehearse `steps` steps of a run. jobs: ranks at a time. tell: is given lines of progress.

    UserError for a run that would be refused; a fault of a rank is part of the result.
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
    """`rehearse` for several runs, one after the other, which saves the start of torch for each. A
    run that would be refused has the error as its result. ranks: of all runs, or of each.
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
    refused = request.folder / REFUSED
    if refused.exists():
        return UserError(refused.read_text("utf-8"))
    ranks: tuple[RankResult, ...] = tuple(
        pickle.loads(_path(request, rank).read_bytes()) for rank in request.ranks
    )
    programs = {result.rank: result.messages for result in ranks}
    faulty = any(result.faults for result in ranks)
    world_size = request.spec.parallel.world_size
    proof = Proof(num_ranks=0) if faulty else prove(programs, world_size=world_size)
    return Rehearsed(spec=request.spec, ranks=ranks, proof=proof)


def _work(requests: Sequence[Request], folder: Path, tell: Callable[[str], None]) -> None:
    asked = folder / "requests"
    asked.write_bytes(pickle.dumps(requests))
    log = folder / "log"
    command = [sys.executable, "-m", *WORKER, str(asked)]
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
            worker.kill()
            raise
    if worker.returncode:
        text = log.read_text("utf-8", errors="replace")[-4000:]
        raise RuntimeError(f"rehearsing ended with status {worker.returncode}:\n{text}")


def _wait(worker: "subprocess.Popen[bytes]") -> None:
    try:
        worker.wait(0.2)
    except subprocess.TimeoutExpired:
        return


def _path(request: Request, rank: int) -> Path:
    return request.folder / f"rank-{rank}.pkl"
