"""The tensors of a Hugging Face folder: `model.safetensors`, or shards with their index.

Only headers are read until a tensor is asked for. Pickled weights are never opened.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wlb.weights.config import read_json
from wlb.weights.names import EMBEDDING, HEAD, NOT_WEIGHTS, Parameter

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_PICKLED = ("*.bin", "*.pt", "*.pth")
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class HubTensors:
    """Tensors by name, as their files' headers say. is_tied: the head's value is the embedding."""

    tensors: dict[str, StoredTensor] = field(repr=False)
    is_tied: bool

    def stored(self, name: str) -> StoredTensor:
        return self.tensors[EMBEDDING if self.is_tied and name == HEAD else name]

    def read(self, name: str) -> Tensor:
        """One tensor's value; ValueError naming a file that cannot be read."""
        source = EMBEDDING if self.is_tied and name == HEAD else name
        path = self.tensors[source].file
        try:
            with _opened(path) as file:
                return file.get_tensor(source)
        except SafetensorError as error:
            raise _corrupt(path, error) from None


def open_tensors(
    folder: Path, parameters: Iterable[Parameter], *, is_tied: bool, config: Path
) -> HubTensors:
    """The tensors of `folder`, which must be exactly those of a model, of the right shapes.

    config: the file that says which model, for messages.
    """
    expected = {p.name: p for p in parameters}
    tensors: dict[str, StoredTensor] = {}
    for path, listed in _files(folder).items():
        header = _header(path)
        if absent := sorted((listed or set()) - header.keys()):
            raise ValueError(
                f"{path} does not have {_some(absent)}, which {folder / INDEX} says it has; "
                f"download the folder again"
            )
        tensors |= header if listed is None else {name: header[name] for name in listed}
    tensors = {n: t for n, t in tensors.items() if not n.endswith(NOT_WEIGHTS)}
    needed = expected.keys() - ({HEAD} if is_tied else set())
    if missing := [name for name in expected if name in needed and name not in tensors]:
        hint = ""
        if missing == [HEAD]:
            hint = "; if the head is the embedding, set tie_word_embeddings = true in config.json"
        raise ValueError(f"{folder} lacks {_some(missing)} of the model of {config}{hint}")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise ValueError(
            f"{folder} has {_some(unknown)}, which the model of {config} does not; this is another "
            f"architecture than its config.json says"
        )
    for name, stored in tensors.items():
        if stored.shape != expected[name].unpadded:
            raise ValueError(
                f"{stored.file}: {name} has shape {list(stored.shape)}, the model of {config} "
                f"wants {list(expected[name].unpadded)}"
            )
    found = HubTensors(tensors=tensors, is_tied=is_tied)
    if is_tied and HEAD in tensors:
        _refuse_untied(found, config)
    return found


def _refuse_untied(found: HubTensors, config: Path) -> None:
    head = HubTensors(tensors=found.tensors, is_tied=False).read(HEAD)
    if not torch.equal(head, found.read(EMBEDDING)):
        raise ValueError(
            f"{config}: tie_word_embeddings = true, but {HEAD} in {found.tensors[HEAD].file} is "
            f"not equal to {EMBEDDING}; set it to false if the head was trained apart"
        )


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The files of a folder and which tensors to take of each; None = all that it has."""
    if (folder / INDEX).is_file():
        return _indexed(folder)
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    pickled = sorted(p.name for pattern in _PICKLED for p in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"{folder} has pickled weights only ({_some(pickled)}), which can run code when they "
            f"are read; convert them to safetensors (transformers' save_pretrained)"
        )
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    if shards:
        raise ValueError(f"{folder} has {_some(shards)} but neither {SINGLE} nor {INDEX}")
    raise ValueError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")


def _indexed(folder: Path) -> dict[Path, set[str] | None]:
    index = folder / INDEX
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(f"{index}: weight_map must say which tensor is in which file")
    files: dict[Path, set[str] | None] = {}
    for name, file in cast("dict[str, Any]", where).items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index}: {name} is in {file!r}, which is not a file's name")
        if not file.endswith(".safetensors"):
            raise ValueError(f"{index}: {name} is in {file!r}; wlb reads only .safetensors")
        names = files.setdefault(folder / file, set())
        assert names is not None
        names.add(name)
    if gone := sorted(path.name for path in files if not path.is_file()):
        raise ValueError(f"{folder} lacks {_some(gone)} of {index.name}; download it again")
    return files


def _header(path: Path) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    try:
        with _opened(path) as file:
            names: list[str] = list(file.keys())
            for name in names:
                part = file.get_slice(name)
                dtype = str(part.get_dtype())
                if dtype not in _DTYPES and not name.endswith(NOT_WEIGHTS):
                    raise ValueError(
                        f"{path}: {name} has dtype {dtype}; wlb reads {', '.join(_DTYPES)}, not "
                        f"quantised weights: import the original ones"
                    )
                shape = tuple(int(n) for n in part.get_shape())
                dtype = _DTYPES.get(dtype, torch.float32)
                found[name] = StoredTensor(file=path, shape=shape, dtype=dtype)
    except SafetensorError as error:
        raise _corrupt(path, error) from None
    return found


def _opened(path: Path) -> Any:
    """An open file, to be used as a context; untyped, as its stubs are partial."""
    return cast(Any, safe_open)(path, framework="pt")


def _corrupt(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is not a whole safetensors file ({error}); download it again")


def _some(names: list[str], most: int = 3) -> str:
    """The first of `names`, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
