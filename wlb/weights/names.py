"""Parameters of a model and the tensors of Hugging Face's Llama that hold them.

The model's names are Hugging Face's, nothing is fused, and rotary embedding turns the same pairs of
channels (i, i + D / 2), so a tensor is a parameter's value as it is. One difference remains: our
vocabulary is padded to a multiple of 256 rows, in the embedding and in the head.
"""

from dataclasses import dataclass

import torch

from wlb.model import Llama
from wlb.spec import ModelSpec

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

CHECKPOINT_ROOT = "model"
"""Under which key of a checkpoint's state dict the parameters are."""

NOT_WEIGHTS = (".rotary_emb.inv_freq",)
"""Ends of names of tensors that older files hold and a configuration determines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter: `shape` in a checkpoint, and without the vocabulary's padding elsewhere."""

    name: str
    shape: tuple[int, ...]
    unpadded: tuple[int, ...]

    @property
    def num_padding_rows(self) -> int:
        return self.shape[0] - self.unpadded[0]

    @property
    def saved_as(self) -> str:
        """Its flat name in a checkpoint."""
        return f"{CHECKPOINT_ROOT}.{self.name}"


def parameters_of(spec: ModelSpec) -> dict[str, Parameter]:
    """Every parameter by name, in the order in which they compute; nothing is allocated."""
    with torch.device("meta"):
        model = Llama(spec)
    found: dict[str, Parameter] = {}
    for name, value in model.named_parameters():
        shape = tuple(value.shape)
        has_vocabulary = name in (EMBEDDING, HEAD)
        unpadded = (spec.vocab_size, *shape[1:]) if has_vocabulary else shape
        found[name] = Parameter(name=name, shape=shape, unpadded=unpadded)
    return found
