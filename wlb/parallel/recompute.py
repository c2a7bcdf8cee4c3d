"""Activation recompute: backward runs parts of each decoder layer again instead of keeping them.

    full         the whole layer, attention and its collectives included; its input is kept
    selective    the second norm and the MLP; kept are attention's tensors and this half's input

torch's checkpoint without reentrance, which stops as soon as it has what backward needs. The last
product of a layer (down projection) keeps only its input, so neither it nor its reduce-scatter is
run again, in any build: linear layers keep their input before they compute (`deferred.Product`).
All else of the part is, so that a layer's forward work is done once more but for that.

The results are the same bits: no operator of the model draws random numbers. A layer's forward is
replaced inside the module, so hooks on it (FSDP's, the clock's) run once, in the forward pass.
"""

from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

from wlb.model import Llama
from wlb.spec import Recompute

_run_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def recompute_layers(stage: Llama, how: Recompute) -> None:
    """Have backward run the layers of `stage` again as far as `how` says, in place."""
    for layer in stage.model.layers.values():
        match how:
            case Recompute.NONE:
                pass
            case Recompute.SELECTIVE:
                _replace(layer, "second_half")
            case Recompute.FULL:
                _replace(layer, "forward")


def _replace(layer: Any, method: str) -> None:
    setattr(layer, method, partial(_run_again, getattr(layer, method)))
