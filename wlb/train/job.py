"""`Job`, the arguments that every rank of a run gets: the spec, token stores and folders."""

from dataclasses import dataclass
from pathlib import Path

from wlb.data import StoreName
from wlb.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The arguments that every rank of a run gets when it is started."""

    spec: RunSpec  # the run, with the data-parallel size and the vocabulary size filled in
    train_store: StoreName  # name of the token store, or of a blend of stores
    heldout_store: str  # prefix of the held-out token store; "" without one
    resume: Path | None  # checkpoint to resume from; None for a new run
    title: str  # title of the table of steps on the screen
    started_s: float  # Unix time at which the command began
    # Unix time at which everything was ready for the ranks to begin: stores were made, and the run
    # was checked. 0 if not known.
    ready_s: float = 0.0
    # Path of the kernel profile that --calibrate writes at the end; None without --calibrate.
    calibrate: Path | None = None
    # Checkpoint whose weights a new run begins with; None for random weights.
    init_from: Path | None = None
    # Whether an older checkpoint may be loaded instead if `resume` is damaged.
    falls_back: bool = False
    # Whether the screen shows all columns of the table of steps and all rows of the summary.
    verbose: bool = False

    @property
    def directory(self) -> Path:
        """The run's folder."""
        return directory_of(self.spec)

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.directory / "checkpoints"


def directory_of(spec: RunSpec) -> Path:
    """Return the folder of a run: `run.output_dir`/`run.name`."""
    return Path(spec.run.output_dir) / spec.run.name
