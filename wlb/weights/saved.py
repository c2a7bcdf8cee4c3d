"""Read the weights of a checkpoint of any layout in one process.

Verifies checksums first, then reads only the requested tensors.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from wlb.plan import UserError
from wlb.spec import ModelSpec, apply
from wlb.train import checkpoint
from wlb.weights.names import CHECKPOINT_ROOT, Parameter, parameters_of
from wlb.weights.one_process import load_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    """Model of a checkpoint. run: its run.json. dtypes: dtype of each parameter, as saved."""

    folder: Path
    run: dict[str, Any] = field(repr=False)
    spec: ModelSpec
    parameters: dict[str, Parameter] = field(repr=False)
    dtypes: dict[str, torch.dtype] = field(repr=False)

    def read(self, names: Iterable[str], dtype: torch.dtype) -> dict[str, Tensor]:
        """Read whole tensors, converted to `dtype`, without the vocabulary's padding."""
        state = {name: torch.empty(self.parameters[name].shape, dtype=dtype) for name in names}
        load_tensors({CHECKPOINT_ROOT: state}, self.folder)
        return {n: value[: self.parameters[n].unpadded[0]] for n, value in state.items()}


def open_saved(folder: Path) -> SavedModel:
    """Open a checkpoint; UserError if it does not hold the model of its run.json."""
    file = folder / checkpoint.RUN
    checkpoint.check_files(folder)
    checkpoint.check_share(folder, index=0, num=1)
    try:
        run = json.loads(file.read_text("utf-8"))
        spec = apply(ModelSpec(), run["spec"]["model"], source=str(file), is_stored=True)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise UserError(f"{file} does not describe its model ({error!r})") from None
    parameters = parameters_of(spec)
    saved = _metadata(folder)
    dtypes: dict[str, torch.dtype] = {}
    for parameter in parameters.values():
        found = saved.get(parameter.saved_as)
        if not isinstance(found, TensorStorageMetadata):
            raise UserError(f"the checkpoint {folder} lacks {parameter.name} of {file}'s model")
        if tuple(found.size) != parameter.shape:
            raise UserError(
                f"the checkpoint {folder} has {parameter.name} in shape {list(found.size)}, "
                f"{file}'s model wants {list(parameter.shape)}"
            )
        dtypes[parameter.name] = found.properties.dtype
    return SavedModel(folder=folder, run=run, spec=spec, parameters=parameters, dtypes=dtypes)


def _metadata(folder: Path) -> dict[str, Any]:
    try:
        reader = HuggingFaceStorageReader(str(folder))
        return dict(reader.read_metadata().state_dict_metadata)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{folder} is not a whole checkpoint ({error!r}); use another one"
        ) from None
