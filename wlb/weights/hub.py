"""Read tensors of a Hugging Face folder: `model.safetensors`, or shards with their index.

Only the files' headers are read until a tensor is requested. Pickled weights are never opened,
because loading them can run code. In the folder of a model with images or with a layer for
multi-token prediction, only the tensors of the text model are read.
"""

from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wlb.model.llama import EMBEDDING, HEAD
from wlb.plan import UserError
from wlb.plan.read_file import read_object
from wlb.train.checkpoint.headers import read_header
from wlb.weights.hybrids import LEFT_OUT, TEXT_PREFIX
from wlb.weights.names import NOT_WEIGHTS, Parameter

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_PICKLED = ("*.bin", "*.pt", "*.pth")  # file names of weights that are refused
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Supported dtypes, by their name in safetensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor, or a part of one, in a file."""

    name: str  # name of the whole tensor in the file
    file: Path
    shape: tuple[int, ...]  # shape of the part
    dtype: torch.dtype
    at: tuple[int | slice, ...] = ()  # which part of the whole tensor; () means all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class HubTensors:
    """The tensors of a folder, known from the files' headers."""

    # Where each tensor is, by its name in the model.
    tensors: dict[str, StoredTensor] = field(repr=False)
    # Numbers of tensors outside of the text model, by what they belong to (`hybrids.LEFT_OUT`).
    left_out: dict[str, int] = field(default_factory=dict[str, int])

    def stored(self, name: str) -> StoredTensor:
        """Return where a tensor is."""
        return self.tensors[name]

    def read(self, name: str) -> Tensor:
        """Read one tensor; raise UserError with the file's name if it is corrupt."""
        source = self.stored(name)
        with _opened(source.file) as file:
            if source.at:
                return file.get_slice(source.name)[source.at]
            return file.get_tensor(source.name)

    def read_parameter(self, parameter: Parameter) -> Tensor:
        """Read a parameter: one tensor, a part of one, or a stack of all experts."""
        return parameter.value_of([self.read(name) for name in parameter.in_files])


def open_tensors(
    folder: Path,
    parameters: Iterable[Parameter],
    *,
    is_tied: bool,
    config: Path,
    is_hybrid: bool = False,
) -> HubTensors:
    """Open the tensors of a folder, which must be exactly the tensors of the model.

    Args:
        folder: The folder.
        parameters: The model's parameters.
        is_tied: Whether the head is the embedding. The folder may then have it under both names.
        config: The model's config.json, for error messages.
        is_hybrid: Whether the model is a Qwen3-Next or Qwen3.5, whose folder may have more than the
            text model.

    Raises:
        UserError: A file is missing or corrupt, or names or shapes of its tensors differ from the
            model's.
    """
    expected = {name: p for p in parameters for name in p.in_files}
    tensors: dict[str, StoredTensor] = {}
    for path, listed in _files(folder).items():
        header = _header(path)
        if absent := sorted((listed or set()) - header.keys()):
            raise UserError(
                f"{path} does not contain tensors that {folder / INDEX} places there: "
                f"{_some(absent)}; download the folder again"
            )
        tensors |= header if listed is None else {name: header[name] for name in listed}
    tensors = {n: t for n, t in tensors.items() if not n.endswith(NOT_WEIGHTS)}
    left_out: dict[str, int] = {}
    if is_hybrid:
        tensors, left_out = _text_model(tensors)
    if is_tied and HEAD in tensors:
        _drop_tied_head(tensors, config)
    if missing := [name for name in expected if name not in tensors]:
        hint = ""
        if missing == [HEAD]:
            hint = (
                "; if the output head shares the embedding's weights, set tie_word_embeddings = "
                "true in config.json"
            )
        raise UserError(
            f"{folder} does not contain tensors that the model of {config} requires: "
            f"{_some(missing)}{hint}"
        )
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise UserError(
            f"{folder} contains tensors that the model of {config} does not have: "
            f"{_some(unknown)}; correct config.json, which describes another architecture"
        )
    for name, stored in tensors.items():
        if stored.shape != expected[name].shape_in_files:
            raise UserError(
                f"{stored.file}: {name} has shape {list(stored.shape)}, but {config} requires "
                f"{list(expected[name].shape_in_files)}; download the folder again or correct "
                "config.json"
            )
    return HubTensors(tensors=tensors, left_out=left_out)


def _text_model(tensors: dict[str, StoredTensor]) -> tuple[dict[str, StoredTensor], dict[str, int]]:
    """Return the text model's tensors by their names in a folder of text alone.

    Fused stacks of experts are split. The second value counts the other tensors, by what they
    belong to.
    """
    found: dict[str, StoredTensor] = {}
    left_out: dict[str, int] = {}
    for name, stored in tensors.items():
        if (what := next((w for p, w in LEFT_OUT.items() if name.startswith(p)), None)) is not None:
            left_out[what] = left_out.get(what, 0) + 1
            continue
        if name.startswith(TEXT_PREFIX):
            name = f"model.{name.removeprefix(TEXT_PREFIX)}"
        found |= _experts_apart(name, stored)
    return found, left_out


def _experts_apart(name: str, stored: StoredTensor) -> dict[str, StoredTensor]:
    """Split a stack of experts [E, out, in] into one entry per expert and matrix.

    The matrices of gate and up are fused in the stack and are split, too. Other tensors are
    returned as they are.
    """
    block, _, last = name.rpartition(".")
    if not block.endswith(".mlp.experts") or len(stored.shape) != 3:
        return {name: stored}
    num, columns, rows = stored.shape
    half = columns // 2
    # The rows of each matrix within an expert's part of the stack.
    if last == "gate_up_proj":
        ranges = {"gate_proj": slice(0, half), "up_proj": slice(half, columns)}
    else:
        ranges = {last: slice(0, columns)}
    return {
        f"{block}.{i}.{matrix}.weight": replace(
            stored, shape=(taken.stop - taken.start, rows), at=(i, taken)
        )
        for i in range(num)
        for matrix, taken in ranges.items()
    }


def _drop_tied_head(tensors: dict[str, StoredTensor], config: Path) -> None:
    """Remove a head that equals the embedding; raise UserError if it does not."""
    found = HubTensors(tensors=tensors)
    if EMBEDDING in tensors and not torch.equal(found.read(HEAD), found.read(EMBEDDING)):
        raise UserError(
            f"{config} has tie_word_embeddings = true, but {HEAD} in {tensors[HEAD].file} is not "
            f"equal to {EMBEDDING}; set tie_word_embeddings to false if the head was trained "
            "separately"
        )
    del tensors[HEAD]


def _files(folder: Path) -> Mapping[Path, set[str] | None]:
    """Return the files of a folder, and the tensors to read from each; None means all."""
    if (folder / INDEX).is_file():
        return _indexed(folder)
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    pickled = sorted(p.name for pattern in _PICKLED for p in folder.glob(pattern))
    if pickled:
        raise UserError(
            f"{folder} has only pickled weights ({_some(pickled)}), which wlb does not load "
            "because they can run code; convert them to safetensors (transformers' "
            "save_pretrained)"
        )
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    if shards:
        raise UserError(
            f"{folder} has {_some(shards)}, but neither {SINGLE} nor {INDEX}, which says which "
            "tensor is in which file; download the folder again"
        )
    raise UserError(
        f"{folder} has no weights, neither {SINGLE} nor {INDEX}; give the folder of a Hugging "
        "Face model"
    )


def _indexed(folder: Path) -> Mapping[Path, set[str]]:
    index = folder / INDEX
    where = read_object(index, wide=True).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise UserError(
            f"{index}: weight_map must be a JSON object that names the file of each tensor; "
            "download the folder again"
        )
    files: defaultdict[Path, set[str]] = defaultdict(set)
    for name, file in cast("dict[str, Any]", where).items():
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(
                f"{index}: weight_map places {name} in {file!r}, which must be a file name "
                "without a folder; correct the index"
            )
        if not file.endswith(".safetensors"):
            raise UserError(
                f"{index}: weight_map places {name} in {file!r}, but wlb reads only .safetensors "
                "files; convert the weights to safetensors"
            )
        files[folder / file].add(name)
    if gone := sorted(path.name for path in files if not path.is_file()):
        raise UserError(
            f"{folder} does not contain files that {index.name} names: {_some(gone)}; download "
            "the folder again"
        )
    return files


def _header(path: Path) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for name, entry in read_header(path, remedy="download it again").items():
        if entry.dtype not in _DTYPES and not name.endswith(NOT_WEIGHTS):
            raise UserError(
                f"{path}: {name} has dtype {entry.dtype}, but wlb reads only "
                f"{', '.join(_DTYPES)}; import the model's original weights, which are not "
                "quantised"
            )
        dtype = _DTYPES.get(entry.dtype, torch.float32)
        found[name] = StoredTensor(name=name, file=path, shape=entry.shape, dtype=dtype)
    return found


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    """Open a safetensors file; raise UserError if it is corrupt.

    The result is untyped, because the type stubs of safetensors are incomplete.
    """
    try:
        with cast(Any, safe_open)(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise UserError(
            f"{path} is not a complete safetensors file ({error}); download it again"
        ) from None


def _some(names: list[str], most: int = 3) -> str:
    """Return the first of `names`, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
