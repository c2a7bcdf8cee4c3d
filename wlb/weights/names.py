"""Map a model's parameters to the tensors of Hugging Face folders.

`wlb.model` has the parameter names of Hugging Face, does not fuse projections, and RoPE rotates the
same pairs of channels (i, i + D / 2). So tensors are copied unchanged, with three exceptions: wlb
pads the vocabulary to a multiple of 256 rows; it stacks the experts of a layer in one tensor, while
files have one tensor per expert; and it splits the fused tensors of linear-attention layers
(`hybrids.py`).
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
"""Name suffixes of tensors in older files that are ignored, because config.json implies them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a model, and the tensors of a Hugging Face folder that contain its values."""

    name: str  # name in wlb.model and in checkpoints
    shape: tuple[int, ...]  # shape in wlb.model and in checkpoints
    unpadded: tuple[int, ...]  # shape without the padding of the vocabulary
    in_files: tuple[str, ...]  # names of the parameter's tensors in the folder: 1, or 1 per expert
    # Which part of the tensor in the folder this parameter is, if the tensor fuses several
    # parameters; None if not.
    part: TensorPart | None = field(default=None, repr=False)

    @property
    def is_stack(self) -> bool:
        """Return whether the parameter is a stack of one matrix per expert of a layer."""
        return len(self.shape) == 3

    @property
    def shape_in_files(self) -> tuple[int, ...]:
        """Return the shape of each tensor of the parameter in the Hugging Face folder."""
        if self.part is not None:
            return self.part.shape
        return self.unpadded[1:] if self.is_stack else self.unpadded

    def value_of(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the parameter's value without vocabulary padding.

        Args:
            tensors: The Hugging Face folder's tensors with the names `in_files`, in that order.
        """
        if self.is_stack:
            return torch.stack(tensors)
        return tensors[0] if self.part is None else tensors[0].flatten(1)[self.part.rows]

    def add_to(self, tensors: dict[str, torch.Tensor], value: torch.Tensor) -> None:
        """Store the parameter's value in the tensors of a Hugging Face folder that will be written.

        Args:
            tensors: The folder's tensors by name, which are extended. A tensor that fuses several
                parameters is created when the first of them is stored.
            value: Value of this parameter without vocabulary padding.
        """
        if self.part is None:
            parts = value.unbind() if self.is_stack else [value]
            tensors.update(zip(self.in_files, parts, strict=True))
            return
        name = self.in_files[0]
        whole = tensors.setdefault(name, value.new_empty(self.part.shape))
        whole[self.part.rows] = value.view(len(value), *self.part.shape[1:])

    @property
    def num_padding_rows(self) -> int:
        """Return how many rows pad the vocabulary; 0 unless this is the embedding or the head."""
        return self.shape[0] - self.unpadded[0]

    @property
    def saved_as(self) -> str:
        """Return the parameter's name in a checkpoint, with the prefix "model."."""
        return f"{CHECKPOINT_ROOT}.{self.name}"


def parameters_of(spec: ModelSpec, model_type: str = "") -> dict[str, Parameter]:
    """Return every parameter of a model by name, in the order of the forward pass.

    The model is built on the meta device, without memory for its parameters.

    Args:
        spec: The model.
        model_type: Hugging Face model_type of the folder. Only models with linear-attention layers
            need it, because their model types name tensors differently.
    """
    with torch.device("meta"):
        model = Llama(spec)
    hybrid_type = chosen_type(spec, model_type) if is_hybrid(spec) else ""
    found: dict[str, Parameter] = {}
    # Use the state dict, because the experts' biases are a buffer, which checkpoints save as well.
    for name, value in model.state_dict().items():
        shape = tuple(value.shape)
        has_vocabulary = name in (EMBEDDING, HEAD)
        unpadded = (spec.vocab_size, *shape[1:]) if has_vocabulary else shape
        in_files, part = names_in_files(name, spec), None
        if hybrid_type and len(shape) < 3:
            in_file, part = name_in_files(name, spec, hybrid_type)
            in_files = (in_file,)
        found[name] = Parameter(
            name=name, shape=shape, unpadded=unpadded, in_files=in_files, part=part
        )
    return found


def shards_of(
    parameters: Iterable[Parameter], num_bytes: Callable[[Parameter], int], most_bytes: int
) -> Iterator[list[Parameter]]:
    """Divide parameters into shards of limited size, in order; yield each shard.

    A parameter that is larger than the limit gets a shard of its own. Parameters that Hugging Face
    stores fused in one tensor stay in one shard.

    Args:
        parameters: All parameters.
        num_bytes: Returns the size of a parameter.
        most_bytes: Most bytes of a shard.
    """
    shard: list[Parameter] = []
    shard_bytes = 0
    for _, group in groupby(parameters, key=lambda p: p.in_files):
        together = list(group)
        size = sum(map(num_bytes, together))
        if shard and shard_bytes + size > most_bytes:
            yield shard
            shard, shard_bytes = [], 0
        shard += together
        shard_bytes += size
    if shard:
        yield shard
