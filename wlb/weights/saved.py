"""Read and write the weights of a checkpoint in one process, however many ranks saved it.

`open_saved` verifies the checksums of all files. Afterwards only requested tensors are read.
"""

import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner

from wlb.plan import UserError
from wlb.plan.read_file import WRONG_SHAPE, malformed
from wlb.spec import ModelSpec, apply
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.checkpoint.reading import TensorFiles, check_headers
from wlb.weights.names import CHECKPOINT_ROOT, Parameter, parameters_of

# Any replaces the types of these functions of DCP, because torch declares them incompletely.
_load = cast(Any, state_dict_loader.load)  # pyright: ignore[reportUnknownMemberType]
_save = cast(Any, state_dict_saver.save)  # pyright: ignore[reportUnknownMemberType]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    """An opened checkpoint: its model, and which parameters it contains."""

    folder: Path  # folder of the checkpoint
    run: dict[str, Any] = field(repr=False)  # contents of run.json
    spec: ModelSpec
    parameters: dict[str, Parameter] = field(repr=False)  # the model's parameters, by name
    dtypes: dict[str, torch.dtype] = field(repr=False)  # dtype of each parameter, as saved

    def read(self, names: Iterable[str], dtype: torch.dtype) -> dict[str, Tensor]:
        """Read whole parameters, converted to `dtype`, without the rows that pad the vocabulary.

        Args:
            names: Names of the parameters.
            dtype: Type of the results.
        """
        state = {name: torch.empty(self.parameters[name].shape, dtype=dtype) for name in names}
        reader = TensorFiles(str(self.folder))
        with _single_process(f"cannot read the checkpoint {self.folder} (use another one)"):
            _load({CHECKPOINT_ROOT: state}, storage_reader=reader, no_dist=True)
        return {n: value[: self.parameters[n].unpadded[0]] for n, value in state.items()}


def open_saved(folder: Path) -> SavedModel:
    """Open a checkpoint, and check that its files are complete and fit the model.

    Args:
        folder: The checkpoint.

    Raises:
        UserError: The checkpoint is corrupt, or its tensors are not those of the model that its
            run.json describes.
    """
    file = folder / checkpoint.RUN
    checkpoint.check_files(folder)
    checkpoint.check_share(folder, index=0, num=1)
    run = checkpoint.read_run(folder)
    with malformed(f"{file} does not describe the checkpoint's model", "use another checkpoint"):
        model = run["spec"]["model"]
        spec = apply(ModelSpec(), model, source=str(file), prefix="model.", is_stored=True)
        spec.check()
        parameters = parameters_of(spec, run.get("imported", {}).get("model_type", ""))
    try:
        check_headers(folder)
        reader = TensorFiles(str(folder))
        saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
    except UserError:
        raise
    except (OSError, SafetensorError, *WRONG_SHAPE) as error:
        raise UserError(
            f"the checkpoint {folder} is incomplete or corrupt ({error!r}); use another checkpoint"
        ) from None
    dtypes: dict[str, torch.dtype] = {}
    for parameter in parameters.values():
        found = saved.get(parameter.saved_as)
        if not isinstance(found, TensorStorageMetadata):
            raise UserError(
                f"the checkpoint {folder} does not contain {parameter.name}, which the model in "
                f"{file} requires; use another checkpoint"
            )
        if tuple(found.size) != parameter.shape:
            raise UserError(
                f"the checkpoint {folder} has {parameter.name} with shape {list(found.size)}, but "
                f"the model in {file} requires {list(parameter.shape)}; use another checkpoint"
            )
        dtypes[parameter.name] = found.properties.dtype
        if found.properties.dtype != torch.float32 and not checkpoint.is_import(folder):
            raise UserError(
                f"the checkpoint {folder} has {parameter.name} with dtype "
                f"{found.properties.dtype}, but runs save torch.float32; use another checkpoint"
            )
    return SavedModel(folder=folder, run=run, spec=spec, parameters=parameters, dtypes=dtypes)


def save_tensors(
    tensors: dict[str, Tensor], folder: Path, planner: SavePlanner, *, files: dict[str, int]
) -> None:
    """Write the tensors of a checkpoint.

    Args:
        tensors: Parameters by name. They may be meta tensors, because `planner` provides values.
        folder: The checkpoint.
        planner: DCP save planner, which provides the value of each tensor when it is written.
        files: For each tensor, the number of the file to write it to, from 1. Only one file's
            tensors are in memory at a time.
    """
    with _single_process(
        f"cannot write the checkpoint {folder} (check the disk's space and permissions)"
    ):
        writer = HuggingFaceStorageWriter(
            str(folder), fqn_to_index_mapping=files, save_distributed=True
        )
        state = {CHECKPOINT_ROOT: tensors}
        _save(state, storage_writer=writer, planner=planner, no_dist=True)


@contextmanager
def _single_process(failed: str) -> Generator[None]:
    """Within this context, silence DCP's warning about a single process, and catch DCP's errors.

    DCP raises CheckpointException, which derives from BaseException, so that `except Exception`
    does not catch it. The context raises a UserError instead.

    Args:
        failed: Beginning of the error message.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        try:
            yield
        except CheckpointException as error:
            cause = next((failure for failure, _ in error.failures.values()), error)
            raise UserError(f"{failed}: {cause!r}") from error
