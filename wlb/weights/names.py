"""Map parameters of a model to the tensors of Hugging Face's Llama, Mistral, Qwen and Mixtral.

`wlb.model` uses Hugging Face's names, fuses nothing and rotates the same pairs of channels (i, i +
D / 2), so tensors are equal except for the vocabulary, which wlb pads to a multiple of 256 rows,
for experts, which wlb stacks, and for linear layers, of which files fuse some tensors.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch

from wlb.model import Llama
from wlb.model.llama import EMBEDDING, HEAD
from wlb.spec import ModelSpec
from wlb.weights.expert_weights import names_in_files
from wlb.weights.hybrids import TensorPart, chosen_type, is_hybrid, name_in_files

CHECKPOINT_ROOT = "model"
"""Key of the parameters in a checkpoint's state dict."""

NOT_WEIGHTS = (".rotary_emb.inv_freq",)
"""Name suffixes of tensors in older files that follow from the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a model."""

    name: str
    shape: tuple[int, ...]  # in a checkpoint
    unpadded: tuple[int, ...]  # without the vocabulary's padding
    in_files: tuple[str, ...]  # tensors of a folder that hold it: of experts one each
    part: TensorPart | None = field(default=None, repr=False)  # its rows, if a tensor holds more

    @property
    def is_stack(self) -> bool:
        """Whether it has the matrices of all experts of a layer."""
        return len(self.shape) == 3

    @property
    def shape_in_files(self) -> tuple[int, ...]:
        """Shape of each tensor of a folder that holds it."""
        if self.part is not None:
            return self.part.shape
        return self.unpadded[1:] if self.is_stack else self.unpadded

    def value_of(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Its value, of the tensors `in_files`."""
        if self.is_stack:
            return torch.stack(tensors)
        return tensors[0] if self.part is None else tensors[0].flatten(1)[self.part.rows]

    def add_to(self, tensors: dict[str, torch.Tensor], value: torch.Tensor) -> None:
        """Add its value to a folder's tensors, by name."""
        if self.part is None:
            parts = value.unbind() if self.is_stack else [value]
            tensors.update(zip(self.in_files, parts, strict=True))
            return
        name = self.in_files[0]
        whole = tensors.setdefault(name, value.new_empty(self.part.shape))
        whole[self.part.rows] = value.view(len(value), *self.part.shape[1:])

    @property
    def num_padding_rows(self) -> int:
        return self.shape[0] - self.unpadded[0]

    @property
    def saved_as(self) -> str:
        """Flat name in a checkpoint."""
        return f"{CHECKPOINT_ROOT}.{self.name}"


def parameters_of(spec: ModelSpec, model_type: str = "") -> dict[str, Parameter]:
    """Return every parameter by name, in the order of the forward pass; nothing is allocated.

    model_type: The family in whose files a hybrid model is; others do not need it.
    """
    with torch.device("meta"):
        model = Llama(spec)
    hybrid_type = chosen_type(spec, model_type) if is_hybrid(spec) else ""
    found: dict[str, Parameter] = {}
    # A buffer of experts' biases is part of a checkpoint too.
    for name, value in model.state_dict().items():
        shape = tuple(value.shape)
        has_vocabulary = name in (EMBEDDING, HEAD)
        unpadded = (spec.vocab_size, *shape[1:]) if has_vocabulary else shape
        in_files, part = names_in_files(name, spec), None
        if hybrid_type and len(shape) < 3:
            one, part = name_in_files(name, spec, hybrid_type)
            in_files = (one,)
        found[name] = Parameter(
            name=name, shape=shape, unpadded=unpadded, in_files=in_files, part=part
        )
    return found


def shards_of(
    parameters: Iterable[Parameter], num_bytes: Callable[[Parameter], int], most_bytes: int
) -> Iterator[list[Parameter]]:
    """Fill shards with parameters in order; a parameter larger than a shard gets its own. Those
    that one tensor of a folder holds stay together.
    """
    shard: list[Parameter] = []
    held = 0
    for _, group in groupby(parameters, key=lambda p: p.in_files):
        together = list(group)
        size = sum(map(num_bytes, together))
        if shard and held + size > most_bytes:
            yield shard
            shard, held = [], 0
        shard += together
        held += size
    if shard:
        yield shard
