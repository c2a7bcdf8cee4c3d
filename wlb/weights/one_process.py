"""torch.distributed.checkpoint in one process, without process groups."""

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.planner import SavePlanner

# Their signatures are typed in part only.
_load = cast(Any, state_dict_loader.load)  # pyright: ignore[reportUnknownMemberType]
_save = cast(Any, state_dict_saver.save)  # pyright: ignore[reportUnknownMemberType]


def load_tensors(state: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    """Fills the tensors of `state` from a checkpoint of any layout, reading nothing else."""
    with _alone(f"the checkpoint {folder} cannot be read; use another one"):
        _load(
            {key: dict(value) for key, value in state.items()},
            storage_reader=HuggingFaceStorageReader(str(folder)),
            no_dist=True,
        )


def save_tensors(
    state: Mapping[str, Mapping[str, Tensor]],
    folder: Path,
    planner: SavePlanner,
    *,
    files: Mapping[str, int],
) -> None:
    """Writes a checkpoint of what `planner` gives for the tensors of `state`.

    files: number, from 1, of the file of each tensor; one file at a time is held in memory.
    """
    with _alone(f"the checkpoint {folder} cannot be written"):
        _save(
            {key: dict(value) for key, value in state.items()},
            storage_writer=HuggingFaceStorageWriter(
                str(folder), fqn_to_index_mapping=dict(files), save_distributed=True
            ),
            planner=planner,
            no_dist=True,
        )


@contextmanager
def _alone(failed: str) -> Generator[None]:
    """Without the warning that this is one process, as is meant; failures as ValueError or OSError.

    DCP's own exception is not an Exception, so that no handler would see it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        try:
            yield
        except CheckpointException as error:
            cause = next((failure for failure, _ in error.failures.values()), error)
            raise ValueError(f"{failed}: {cause!r}") from error
