"""Use torch.distributed.checkpoint (DCP) in one process, without process groups."""

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

from wlb.plan import UserError

# DCP's signatures are typed incompletely.
_load = cast(Any, state_dict_loader.load)  # pyright: ignore[reportUnknownMemberType]
_save = cast(Any, state_dict_saver.save)  # pyright: ignore[reportUnknownMemberType]


def load_tensors(state: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    """Fill the tensors of `state` from a checkpoint of any layout, reading nothing else."""
    with _single_process(f"the checkpoint {folder} cannot be read; use another one"):
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
    """Write a checkpoint with the values that `planner` gives for the tensors of `state`.

    files: number of each tensor's file, from 1; one file at a time is held in memory.
    """
    with _single_process(f"the checkpoint {folder} cannot be written"):
        _save(
            {key: dict(value) for key, value in state.items()},
            storage_writer=HuggingFaceStorageWriter(
                str(folder), fqn_to_index_mapping=dict(files), save_distributed=True
            ),
            planner=planner,
            no_dist=True,
        )


@contextmanager
def _single_process(failed: str) -> Generator[None]:
    """Silence DCP's warning about a single process, and turn its exception into a UserError.

    CheckpointException derives from BaseException, so other handlers would not see it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        try:
            yield
        except CheckpointException as error:
            cause = next((failure for failure, _ in error.failures.values()), error)
            raise UserError(f"{failed}: {cause!r}") from error
