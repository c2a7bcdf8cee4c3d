"""Export a checkpoint as a Hugging Face folder, which transformers, vLLM and others can load.

This runs in one process on a CPU, with about one shard of the weights in memory at a time. The
checkpoint may have been saved by any number of ranks.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch

from wlb.model.expert_layer import BALANCE
from wlb.plan import check_at_least
from wlb.prepare import load_tokenizer
from wlb.prepare.encode import token_text
from wlb.prepare.load_template import TEMPLATE_FILE
from wlb.spec import Dtype, RunSpec, apply
from wlb.train.checkpoint import folder as checkpoint
from wlb.weights.config import config_json, one_or_many
from wlb.weights.folder import new_folder, refuse_existing
from wlb.weights.hub import INDEX, SINGLE
from wlb.weights.hub_import import name_of
from wlb.weights.names import Parameter, shards_of
from wlb.weights.saved import SavedModel, open_saved
from wlb.weights.tokenizer import FoundTokenizer, check_tokenizer, tokenizer_of_run, write_tokenizer

DEFAULT_SHARD_BYTES = 5 * 10**9
"""Default size limit of a weights file, in bytes."""

_save_file = cast(Any, safetensors.torch.save_file)  # pyright: ignore[reportUnknownMemberType]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What `export` wrote."""

    folder: Path  # the new folder
    checkpoint: Path  # the checkpoint that was exported
    num_shards: int  # number of weights files
    num_bytes: int  # size of all weights
    dtype: str  # dtype of the weights, such as "bfloat16"
    tokenizer: str  # where the tokenizer was found, or why there is none
    stops: tuple[int, ...]  # ids of the tokens that end generation
    has_chat: bool  # whether a chat template was written


def export(
    source: Path,
    out: Path,
    *,
    dtype: Dtype | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    tokenizer: Path | None = None,
    chat: str | None = None,
) -> Exported:
    """Export a checkpoint to a new Hugging Face folder.

    Args:
        source: A checkpoint, or the folder of a run, whose newest checkpoint is exported.
        out: The new folder.
        dtype: Dtype of the weights. None keeps the saved dtype (float32 if tensors differ).
        shard_bytes: Most bytes of a weights file; a larger tensor gets a file of its own.
        tokenizer: A tokenizer.json or the folder that contains it. None means the tokenizer that
            the run's token store names.
        chat: A chat template, a value of `wlb prepare --chat`. None means the template with which
            the run's token store was prepared.
    """
    refuse_existing(out)
    check_at_least("--shard-size", shard_bytes, 1, " byte")
    saved = open_saved(checkpoint.resolve(source, str(source)))
    taken = tensor_dtype(saved, dtype)
    found = tokenizer_of_run(saved.run, chat=chat)
    found = found if tokenizer is None else found.with_file(tokenizer)
    found = found if chat is None else found.with_chat(chat)
    if found.file is not None:
        check_tokenizer(found.file, saved.spec.vocab_size)

    def num_bytes(parameter: Parameter) -> int:
        return prod(parameter.unpadded) * taken.itemsize

    # Leave out the buffers with each expert's share of tokens, which only the auxiliary loss needs.
    weights = [p for p in saved.parameters.values() if not p.name.endswith(BALANCE)]
    shards = list(shards_of(weights, num_bytes, shard_bytes))
    with new_folder(out) as folder:
        _write_shards(saved, shards, taken, folder)
        stops = stops_of(saved.run, found)
        _write_configs(saved, taken, found, stops, folder)
        if found.file is not None:
            write_tokenizer(found, folder)
        has_chat = (folder / TEMPLATE_FILE).is_file()
    return Exported(
        folder=out,
        checkpoint=saved.folder,
        num_shards=len(shards),
        num_bytes=sum(map(num_bytes, weights)),
        dtype=name_of(taken),
        tokenizer=found.why,
        stops=stops,
        has_chat=has_chat,
    )


def tensor_dtype(saved: SavedModel, dtype: Dtype | None) -> torch.dtype:
    """Return the torch dtype in which to read a checkpoint's weights.

    Args:
        saved: The checkpoint.
        dtype: The requested dtype. None means the saved dtype, or float32 if tensors differ.
    """
    if dtype is not None:
        return torch.bfloat16 if dtype == Dtype.BFLOAT16 else torch.float32
    stored = {kind for name, kind in saved.dtypes.items() if not name.endswith(BALANCE)}
    return stored.pop() if len(stored) == 1 else torch.float32


def _write_shards(
    saved: SavedModel, shards: list[list[Parameter]], dtype: torch.dtype, folder: Path
) -> None:
    """Write the weights files and, if there are several, their index.

    Args:
        saved: The checkpoint.
        shards: The parameters of each file.
        dtype: Dtype of the weights.
        folder: The new folder.
    """
    where: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        name = SINGLE
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        read = saved.read((p.name for p in shard), dtype)
        values: dict[str, torch.Tensor] = {}
        for parameter in shard:
            parameter.add_to(values, read.pop(parameter.name))
        # transformers cannot load files without this metadata.
        _save_file(values, folder / name, metadata={"format": "pt"})
        # Newer versions of safetensors create files that only the user can read. Let those read and
        # write the file who can read and write the folder.
        (folder / name).chmod(folder.stat().st_mode & 0o666)
        where |= dict.fromkeys(values, name)
        total += sum(value.nbytes for value in values.values())
        # Free this shard's memory before the next shard is read.
        del values
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        _write_json(folder / INDEX, index)


def stops_of(run: dict[str, Any], found: FoundTokenizer) -> tuple[int, ...]:
    """Return the ids of the tokens that end generation.

    For a model that was trained on conversations, these are the tokens that end a turn, followed by
    those that end a text.

    Args:
        run: Contents of the checkpoint's run.json.
        found: The model's tokenizer.
    """
    imported: dict[str, Any] = run.get("imported", {})
    eos_ids: tuple[int, ...] = tuple(imported.get("eos_token_ids", ()))
    if found.chat is not None:
        return tuple(dict.fromkeys((*found.chat.ends.values(), *eos_ids)))
    # An imported model may have several such tokens: one that ends a text, and others that end a
    # turn. Keep all of them, unless the store's documents end with another token, because the model
    # has then learned to end with that token.
    return (found.eos_id,) if found.eos_id not in (None, *eos_ids) else eos_ids


def _write_configs(
    saved: SavedModel,
    dtype: torch.dtype,
    found: FoundTokenizer,
    stops: tuple[int, ...],
    folder: Path,
) -> None:
    run = saved.run
    imported: dict[str, Any] = run.get("imported", {})
    bos_id = imported.get("bos_token_id")
    # Take the larger of the imported model's context and the training's context window, because
    # training on shorter documents does not shorten the context.
    window = 0
    if (data := run["spec"].get("data")) is not None:
        trained = apply(RunSpec(), {"data": data}, source=checkpoint.RUN, is_stored=True)
        window = trained.data.context_window
    positions = max(imported.get("max_position_embeddings", 0), window)
    config = config_json(
        saved.spec,
        max_positions=positions,
        bos_id=bos_id,
        eos_ids=stops,
        dtype=name_of(dtype),
        model_type=imported.get("model_type", ""),
    )
    _write_json(folder / "config.json", config)
    pad = token_text(found.config.get("pad_token"))
    pad_id = load_tokenizer(found.file).token_to_id(pad) if found.file and pad else None
    tokens = {"bos_token_id": bos_id, "eos_token_id": one_or_many(stops), "pad_token_id": pad_id}
    known = {name: token for name, token in tokens.items() if token is not None}
    if generation := imported.get("generation_config", {}) | known:
        _write_json(folder / "generation_config.json", generation)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", "utf-8")
