"""Map parameters of a model to the tensors of Hugging Face's Llama, Mistral, Qwen and Mixtral.

`wlb.model` uses Hugging Face's names, fuses nothing and rotates the same pairs of channels (i, i +
D / 2), so tensors are equal except for the vocabulary, which wlb pads to a multiple of 256 rows,
and for experts, which wlb stacks.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from wlb.model import Llama
from wlb.model.llama import EMBEDDING, HEAD
from wlb.spec import ModelSpec
from wlb.weights.expert_weights import names_in_files

CHECKPOINT_ROOT = "model"
"""Key of the parameters in a checkpoint's state dict."""

NOT_WEIGHTS = (".rotary_emb.inv_freq",)
"""Name suffixes of tensors in older files that follow from the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter. shape: in a checkpoint. unpadded: shape without the vocabulary's padding.
    in_files: names of a folder's tensors, of experts one each, which are stacked."""

    name: str
    shape: tuple[int, ...]
    unpadded: tuple[int, ...]
    in_files: tuple[str, ...]

    @property
    def is_stack(self) -> bool:
        """Whether it has the matrices of all experts of a layer."""
        return len(self.shape) == 3

    @property
    def shape_in_files(self) -> tuple[int, ...]:
        return self.unpadded[1:] if self.is_stack else self.unpadded

    def parts(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """A whole value as a folder's tensors, by name."""
        parts = value.unbind() if self.is_stack else [value]
        return dict(zip(self.in_files, parts, strict=True))

    @property
    def num_padding_rows(self) -> int:
        return self.shape[0] - self.unpadded[0]

    @property
    def saved_as(self) -> str:
        """Flat name in a checkpoint."""
        return f"{CHECKPOINT_ROOT}.{self.name}"


def parameters_of(spec: ModelSpec) -> dict[str, Parameter]:
    """Return every parameter by name, in the order of the forward pass; nothing is allocated."""
    with torch.device("meta"):
        model = Llama(spec)
    found: dict[str, Parameter] = {}
    # A buffer of experts' biases is part of a checkpoint too.
    for name, value in model.state_dict().items():
        shape = tuple(value.shape)
        has_vocabulary = name in (EMBEDDING, HEAD)
        unpadded = (spec.vocab_size, *shape[1:]) if has_vocabulary else shape
        found[name] = Parameter(
            name=name, shape=shape, unpadded=unpadded, in_files=names_in_files(name, spec)
        )
    return found


def shards_of(
    parameters: Iterable[Parameter], num_bytes: Callable[[Parameter], int], most_bytes: int
) -> Iterator[list[Parameter]]:
    """Fill shards with parameters in order; a parameter larger than a shard gets its own."""
    shard: list[Parameter] = []
    held = 0
    for parameter in parameters:
        size = num_bytes(parameter)
        if shard and held + size > most_bytes:
            yield shard
            shard, held = [], 0
        shard.append(parameter)
        held += size
    if shard:
        yield shard
