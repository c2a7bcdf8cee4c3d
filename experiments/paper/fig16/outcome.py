"""Reads the results of a finished run: loss curves, gradient norms, losses by document length."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.harness.pages import commit
from experiments.paper.fig16.bookkeeping import check_covered
from wlb.launch.local import run_local
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World
from wlb.plan import IntArray
from wlb.report.run.records import RunRecords
from wlb.spec import RunSpec
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.checkpoint import saver
from wlb.train.evaluate import Evaluator
from wlb.train.telemetry.ledger import lineage

NUM_BINS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Results of a run. Losses are in nats per label."""

    curve: tuple[tuple[int, float], ...]  # (tokens trained, held-out loss) of each evaluation
    num_steps: int
    num_tokens: int
    num_labels: int
    # (tokens trained, mean training loss) of NUM_BINS parts of the epoch with equally many labels.
    trained: tuple[tuple[int, float], ...]
    # Mean and standard deviation over steps of the gradient norm before clipping, in the second
    # half of training.
    norm_mean: float
    norm_std: float
    # Held-out loss after training by class of document length; None for classes without documents.
    # Empty: it was not evaluated.
    class_losses: tuple[float | None, ...]
    made_by: int  # digest of settings and corpus (`Study.digest`)
    commit: str  # commit of the code that trained it

    @property
    def train_loss(self) -> float:
        """Returns the training loss, as a mean over all labels of the epoch.

        Every run trains the same labels, so the values of different runs can be compared.
        """
        return float(np.mean([loss for _, loss in self.trained]))

    @property
    def final(self) -> float:
        """Returns the held-out loss of the last evaluation."""
        return self.curve[-1][1]


def result_of(run: RunRecords, *, class_losses: Sequence[float | None], made_by: int) -> Result:
    """Summarises the records of a finished run.

    Args:
        run: The records.
        class_losses: Held-out losses by class of document length.
        made_by: Digest of settings and corpus.

    Raises:
        ValueError: If the run has not reached the end of its data.
    """
    done = np.cumsum([0, *(step.measured.num_tokens for step in run.steps)])
    if run.evaluations[-1][0] != run.steps[-1].steps_done:
        raise ValueError(f"{run.folder} was not evaluated after its last step; it did not end")
    norms = [step.measured.grad_norm for step in run.steps[len(run.steps) // 2 :]]
    late = [norm for norm in norms if norm is not None]  # skipped steps have no gradient norm
    return Result(
        curve=tuple((int(done[step]), loss) for step, loss in run.evaluations),
        num_steps=len(run.steps),
        num_tokens=int(done[-1]),
        num_labels=sum(step.measured.num_targets for step in run.steps),
        trained=train_curve(run),
        norm_mean=float(np.mean(late)),
        norm_std=float(np.std(late)),
        class_losses=tuple(class_losses),
        made_by=made_by,
        commit=commit(),
    )


def train_curve(run: RunRecords) -> tuple[tuple[int, float], ...]:
    """Returns (tokens trained, mean training loss) for NUM_BINS parts of the run.

    Parts have equally many labels. A step at the border of two parts is divided between them.
    """
    labels = np.array([step.measured.num_targets for step in run.steps], np.float64)
    tokens = np.array([step.measured.num_tokens for step in run.steps], np.float64)
    losses = run.column(lambda step: step.measured.loss)
    done = np.concatenate([[0.0], labels.cumsum()])
    ends = np.linspace(0, done[-1], NUM_BINS + 1)
    sums = np.interp(ends, done, np.concatenate([[0.0], (losses * labels).cumsum()]))
    at = np.interp(ends, done, np.concatenate([[0.0], tokens.cumsum()]))
    means = np.diff(sums) / np.diff(ends)
    return tuple((round(n), float(loss)) for n, loss in zip(at[1:], means, strict=True))


def result_from_json(data: dict[str, Any]) -> Result:
    values: dict[str, Any] = dict(data)
    for name in ("curve", "trained"):
        values[name] = tuple((n, loss) for n, loss in data[name])
    return Result(**values | {"class_losses": tuple(data["class_losses"])})


def check_steps(folder: Path, lengths: IntArray) -> None:
    """Checks, from a run's ledger, that its steps trained every token exactly once.

    Args:
        folder: Folder of the run.
        lengths: Tokens of each document.

    Raises:
        ValueError: If a token was not trained exactly once, or a step did not update the weights.
    """
    steps, _, _ = lineage(folder)
    document, start, stop = (
        np.concatenate([np.array(line[name], np.int64) for line in steps.values()])
        for name in ("document", "start", "stop")
    )
    if not all(line["updated"] for line in steps.values()):
        raise ValueError(f"{folder}: a step did not move the weights")
    check_covered(document, start, stop, lengths)


def class_losses(
    run: RunRecords, stores: Sequence[str | None], checkpoints: Path
) -> tuple[float | None, ...]:
    """Evaluates the newest checkpoint on several stores.

    Args:
        run: The run's records.
        stores: Prefixes of stores. None: no evaluation.
        checkpoints: Folder of the run's checkpoints.

    Returns:
        Held-out loss on each store, or None.
    """
    newest = checkpoint.list_complete(checkpoints)[-1]
    return run_local(_evaluate, 1, run.spec, str(newest), tuple(stores), start_group=True)[0]


def _evaluate(
    world: World, spec: RunSpec, saved_in: str, stores: tuple[str | None, ...]
) -> tuple[float | None, ...]:
    torch.set_num_threads(1)
    mesh = build_mesh(spec.parallel, torch.device("cpu"))
    executor = Executor(spec, mesh)
    saver.load_weights(Path(saved_in), mesh, stages=executor.stages)
    return tuple(Evaluator(spec, store, executor).run() if store else None for store in stores)
