"""Import a Hugging Face folder as a checkpoint, from which training can start.

Set `checkpoint.init_from` to the checkpoint; it can be loaded on any number of ranks. It keeps the
dtypes of the files, which are converted when a run loads them. The rows that pad the vocabulary are
zero: no token has their ids, and the loss ignores their logits.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from wlb.plan import UserError
from wlb.spec import RunSpec, to_dict, to_toml
from wlb.train.checkpoint import folder as checkpoint
from wlb.weights import hybrids
from wlb.weights.config import HubModel, read_config, read_generation
from wlb.weights.folder import new_folder, refuse_existing
from wlb.weights.hub import HubTensors, open_tensors
from wlb.weights.names import Parameter, parameters_of, shards_of
from wlb.weights.saved import save_tensors

MODEL_FILE = "model.toml"
"""File in an imported checkpoint: a configuration for a run that starts from the checkpoint."""
_FILE_BYTES = 1 << 30
"""Most bytes of a file in the checkpoint; a larger tensor gets a file of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What `import_folder` imported."""

    checkpoint: Path  # folder of the new checkpoint
    model: HubModel  # the model that config.json describes
    toml: str  # contents of the checkpoint's `model.toml`
    dtypes: tuple[str, ...]  # dtypes of the checkpoint's tensors, such as "bfloat16"
    num_padding_rows: int  # number of zero rows that pad the vocabulary
    # For each parameter with NaN or infinite values, how many such values it has.
    not_finite: dict[str, int]
    # How many tensors were not imported, by the part of the model to which they belong (LEFT_OUT).
    left_out: dict[str, int]


def import_folder(source: Path, out: Path) -> Imported:
    """Import the model of a Hugging Face folder as a new checkpoint.

    Args:
        source: The Hugging Face folder.
        out: Folder of the new checkpoint.

    Raises:
        UserError: The folder is incomplete or corrupt, or wlb does not support its model.
    """
    refuse_existing(out)
    config = source / "config.json"
    if not config.is_file():
        raise UserError(
            f"{source} is not the folder of a Hugging Face model, because {config} does not "
            "exist; download the model's whole folder"
        )
    model = read_config(config)
    parameters = parameters_of(model.spec, model.model_type)
    tensors = open_tensors(
        source,
        parameters.values(),
        is_tied=model.spec.tied_embeddings,
        config=config,
        is_hybrid=model.model_type in hybrids.ARCHITECTURES,
    )
    spec = RunSpec(model=model.spec)
    spec = replace(spec, checkpoint=replace(spec.checkpoint, init_from=str(out.resolve())))
    comments = [
        f"The model was imported from {source.resolve()}.",
        f"It was trained on texts of up to {model.max_positions} tokens (max_position_embeddings).",
        "Set data.store to a token store that was made with the tokenizer of this model.",
    ]
    if model.spec.experts.never_learns:
        comments.append(
            "Each token goes to one expert, whose score is always 1, so the router cannot be "
            "trained. To train the model, set model.experts.normalised = false: scores then vary."
        )
    toml = to_toml(spec, comments=comments, whole=("model", "model.rope_scaling"))
    generation = read_generation(source / "generation_config.json")
    eos_ids = (*model.eos_ids, *generation.eos_ids) or model.default_eos_ids
    imported: dict[str, Any] = {
        "from": str(source.resolve()),
        "model_type": model.model_type,
        "max_position_embeddings": model.max_positions,
        "bos_token_id": model.bos_id,
        "eos_token_ids": list(dict.fromkeys(eos_ids)),
        "generation_config": generation.settings,
    }
    run = {"step": 0, "spec": {"model": to_dict(model.spec)}, "imported": imported}
    with new_folder(out) as folder:
        not_finite = _save(folder, parameters, tensors)
        checkpoint.write_json(folder / checkpoint.RUN, run)
        (folder / MODEL_FILE).write_text(toml, "utf-8")
        checkpoint.write_manifest(folder)
    return Imported(
        checkpoint=out,
        model=model,
        toml=toml,
        dtypes=tuple(sorted({name_of(stored.dtype) for stored in tensors.tensors.values()})),
        num_padding_rows=model.spec.padded_vocab_size - model.spec.vocab_size,
        not_finite=not_finite,
        left_out=tensors.left_out,
    )


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


class _FromFiles(DefaultSavePlanner):
    """DCP save planner that reads each tensor from the Hugging Face folder when it is written.

    DCP gets meta tensors without values, so only one tensor is in memory at a time. `not_finite`
    counts the NaN and infinite values of each parameter that has any.
    """

    def __init__(self, parameters: dict[str, Parameter], tensors: HubTensors) -> None:
        super().__init__()
        self._by_flat_name = {p.saved_as: p for p in parameters.values()}
        self._tensors = tensors
        self.not_finite: dict[str, int] = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Read the tensor that DCP wants to write, and add the rows that pad the vocabulary."""
        parameter = self._by_flat_name[write_item.index.fqn]
        value = self._tensors.read_parameter(parameter)
        if num := value.numel() - int(value.isfinite().sum()):
            self.not_finite[parameter.name] = num
        if parameter.num_padding_rows:
            padding = value.new_zeros(parameter.num_padding_rows, *parameter.shape[1:])
            value = torch.cat([value, padding])
        return value


def _save(folder: Path, parameters: dict[str, Parameter], tensors: HubTensors) -> dict[str, int]:
    """Write the parameters of the checkpoint.

    Args:
        folder: The new checkpoint.
        parameters: The model's parameters by name.
        tensors: The tensors of the Hugging Face folder.

    Returns:
        For each parameter with NaN or infinite values, how many such values it has.
    """
    planned = {
        name: torch.empty(p.shape, dtype=tensors.stored(p.in_files[0]).dtype, device="meta")
        for name, p in parameters.items()
    }
    shards = shards_of(parameters.values(), lambda p: planned[p.name].nbytes, _FILE_BYTES)
    files = {p.saved_as: number for number, shard in enumerate(shards, 1) for p in shard}
    planner = _FromFiles(parameters, tensors)
    save_tensors(planned, folder, planner, files=files)
    return dict(sorted(planner.not_finite.items()))
