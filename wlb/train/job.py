"""Arguments that every rank of a run gets: its spec, stores and folders."""

from dataclasses import dataclass
from pathlib import Path

from wlb.data import StoreName
from wlb.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Arguments of a rank. spec: with dp and the vocabulary size filled in. resume: the
    checkpoint to go on from. init_from: the checkpoint whose weights a new run begins with.
    calibrate: the kernel profile to write when training has ended. started_s, ready_s: Unix
    times at which the run began, and at which ranks could begin.
    falls_back: an earlier checkpoint may take the place of a damaged one. verbose: all columns and
    rows are shown.
    """

    spec: RunSpec
    train_store: StoreName
    heldout_store: str
    resume: Path | None
    title: str
    started_s: float
    ready_s: float = 0.0
    calibrate: Path | None = None
    init_from: Path | None = None
    falls_back: bool = False
    verbose: bool = False

    @property
    def directory(self) -> Path:
        return directory_of(self.spec)

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"


def directory_of(spec: RunSpec) -> Path:
    """A run's folder."""
    return Path(spec.run.output_dir) / spec.run.name
