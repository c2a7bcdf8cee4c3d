"""Read tensors of a Hugging Face folder: `model.safetensors`, or shards with their index.

Only the files' headers are read until a tensor is requested. Pickled weights are never opened,
because loading them can run code. In the folder of a vision-language model, or of a model with
multi-token prediction, only the tensors of the plain language model are read.
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

_PICKLED = ("*.bin", "*.pt", "*.pth")  # file name patterns of pickled weights
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Supported dtypes, by their names in safetensors files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor, or a part of a larger tensor, is in a file."""

    name: str  # name of the whole tensor in the file
    file: Path  # the safetensors file
    shape: tuple[int, ...]  # shape of the part
    dtype: torch.dtype
    at: tuple[int | slice, ...] = ()  # which part of the whole tensor; () means all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class HubTensors:
    """The tensors of a Hugging Face folder, as listed in the headers of the folder's files."""

    # Where each tensor is, by name. In the folder of a larger model, which for example also reads
    # images, names are changed to those that the language model has in a folder of its own.
    tensors: dict[str, StoredTensor] = field(repr=False)
    # How many tensors are not read, by the part of the model to which they belong (`LEFT_OUT`).
    left_out: dict[str, int] = field(default_factory=dict[str, int])

    def stored(self, name: str) -> StoredTensor:
        """Return in which file a tensor is, and where in the file."""
        return self.tensors[name]

    def read(self, name: str) -> Tensor:
        """Read one tensor; raise UserError if its file is corrupt."""
        source = self.stored(name)
        with _opened(source.file) as file:
            if source.at:
                return file.get_slice(source.name)[source.at]
            return file.get_tensor(source.name)

    def read_parameter(self, parameter: Parameter) -> Tensor:
        """Read the value of a parameter of the model, without vocabulary padding."""
        return parameter.value_of([self.read(name) for name in parameter.in_files])


def open_tensors(
    folder: Path,
    parameters: Iterable[Parameter],
    *,
    is_tied: bool,
    config: Path,
    is_hybrid: bool = False,
) -> HubTensors:
    """Find the tensors of a folder, and check that they are exactly the tensors of the model.

    Args:
        folder: The Hugging Face folder.
        parameters: The model's parameters.
        is_tied: Whether the output head is the embedding (tie_word_embeddings). The folder may then
            contain the same tensor under both names.
        config: Path of the model's config.json, for error messages.
        is_hybrid: Whether the model is a Qwen3-Next or Qwen3.5, whose folder may contain more than
            the language model.

    Raises:
        UserError: A file is missing or corrupt, or the names or shapes of tensors are not those of
            the model.
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
    """Select the language model's tensors from the folder of a larger model.

    Args:
        tensors: All tensors of the folder, by name.

    Returns:
        The language model's tensors by name, and the number of other tensors by the part of the
        model to which they belong. Names are changed to those that the language model has in a
        folder of its own. Stacks of experts are split into one tensor per expert.
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
    """Split a stack of experts' matrices [E, out, in] into one tensor per expert and matrix.

    If the stack fuses gate and up matrices, each expert gets a gate tensor and an up tensor. A
    tensor that is no such stack is returned unchanged.

    Args:
        name: Name of the tensor.
        stored: Where the tensor is in its file.

    Returns:
        Where each matrix is in the file. The keys are the names that the matrices have in model
        folders that store each expert separately.
    """
    block, _, last = name.rpartition(".")
    if not block.endswith(".mlp.experts") or len(stored.shape) != 3:
        return {name: stored}
    num, columns, rows = stored.shape
    half = columns // 2
    # For each matrix, which output rows of an expert's [out, in] matrix it consists of.
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
    """Remove the output head from the tensors, after checking that it equals the embedding.

    Args:
        tensors: The folder's tensors by name, from which the head is removed.
        config: Path of the model's config.json, for the error message.

    Raises:
        UserError: Head and embedding have different values.
    """
    found = HubTensors(tensors=tensors)
    if EMBEDDING in tensors and not torch.equal(found.read(HEAD), found.read(EMBEDDING)):
        raise UserError(
            f"{config} has tie_word_embeddings = true, but {HEAD} in {tensors[HEAD].file} is not "
            f"equal to {EMBEDDING}; set tie_word_embeddings to false if the head was trained "
            "separately, otherwise download the weights again"
        )
    del tensors[HEAD]


def _files(folder: Path) -> Mapping[Path, set[str] | None]:
    """Return the weights files of a folder, and the names of the tensors to read from each.

    None in place of names means all tensors of the file.
    """
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
    """Open a safetensors file within this context; raise UserError if the file is corrupt.

    The opened file has type Any, because the type stubs of safetensors are incomplete.
    """
    try:
        with cast(Any, safe_open)(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise UserError(
            f"{path} is not a complete safetensors file ({error}); download it again"
        ) from None


def _some(names: list[str], most: int = 3) -> str:
    """Return the first `most` names as text, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
