"""The peak memory of a pipeline rank, counted pass by pass.

A forward pass stores a stage's activations and its output, and the backward pass frees both. The
first backward pass of a stage allocates its gradients, and later passes add to them. If backward is
split, the input-gradient pass frees activations and output. But the inputs of linear layers and the
gradients of their outputs remain until the weight-gradient pass. These tensors are assumed to take
as many bytes as the activations that forward would store without recompute.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from wlb.memory import memory_of_rank
from wlb.memory.estimate import (
    FLOAT32_BYTES,
    layer_activation_bytes,
    layer_waiting_bytes,
    stage_gradient_bytes,
    stage_output_bytes,
    stage_parameters,
)
from wlb.memory.expert_sizes import layer_kinds
from wlb.plan import IntArray
from wlb.simulate.order import Action, PassKind, pipeline_order
from wlb.spec import RunSpec


class PassBytes(NamedTuple):
    """Bytes that the passes of each micro-batch store in one layer or in one stage.

    The last axis of each array is the micro-batch.
    """

    kept: IntArray  # activations that the forward pass stores
    output: IntArray  # output of the stage
    waiting: IntArray  # tensors that the input-gradient pass stores for the weight-gradient pass


def pass_bytes(spec: RunSpec, tokens: IntArray) -> PassBytes:
    """Return the bytes that passes store in one layer.

    If only some layers of the model have experts, a layer with experts is counted.

    Args:
        spec: The run.
        tokens: Tokens of each micro-batch on all CP ranks, shape [..., micro-batches].
    """
    return PassBytes(
        kept=_by_length(layer_activation_bytes, spec, tokens),
        output=_by_length(stage_output_bytes, spec, tokens),
        waiting=_by_length(layer_waiting_bytes, spec, tokens),
    )


def stage_bytes(spec: RunSpec, tokens: IntArray) -> list[PassBytes]:
    """Return the bytes that passes store in each stage.

    Args:
        spec: The run.
        tokens: Tokens of each micro-batch on all CP ranks, shape [..., micro-batches].
    """
    kinds = [(pass_bytes(kind, tokens), counts) for kind, counts in layer_kinds(spec)]
    by_stage = list(zip(*(counts for _, counts in kinds), strict=True))
    made = {
        numbers: PassBytes(
            kept=np.sum([one.kept * n for (one, _), n in zip(kinds, numbers, strict=True)], axis=0),
            output=kinds[0][0].output,
            waiting=np.sum(
                [one.waiting * n for (one, _), n in zip(kinds, numbers, strict=True)], axis=0
            ),
        )
        for numbers in set(by_stage)
    }
    return [made[numbers] for numbers in by_stage]


def _by_length(bytes_of: Callable[..., int], spec: RunSpec, tokens: IntArray) -> IntArray:
    """Return an array with the bytes for each number of tokens, in the shape of `tokens`.

    Args:
        bytes_of: Returns bytes; it is called once for each different number of tokens.
        spec: The run.
        tokens: Numbers of tokens.
    """
    values, place = np.unique(tokens, return_inverse=True)
    found = [bytes_of(spec, micro_batch_tokens=int(t)) for t in values]
    return np.array(found, np.int64)[place].reshape(tokens.shape)


def peak_held_bytes(
    order: Sequence[Action], stages: Sequence[PassBytes], gradients: Sequence[int] | None = None
) -> IntArray:
    """Return the peak bytes that a pipeline rank stores while it runs its passes.

    The bytes are those of activations, stage outputs, and gradients of stages that have run a
    backward pass.

    Args:
        order: The rank's passes in order.
        stages: What the passes of each micro-batch store in each stage (`stage_bytes`). Arrays have
            shape [..., n]: any axes, such as steps, before an axis of n micro-batches.
        gradients: Bytes of each stage's gradients; None means that gradients do not count.

    Returns:
        The peak for each index of the axes before the last, shape [...].
    """
    held = np.zeros(stages[0].kept.shape[:-1], np.int64)
    peak = held
    left = dict(enumerate(gradients or ()))
    for stage, kind, i in order:
        kept, output, waiting = (of[..., i] for of in stages[stage])
        match kind:
            case PassKind.FORWARD:
                held = held + kept + output
            case PassKind.BACKWARD:
                held = held - kept - output
            case PassKind.BACKWARD_INPUT:
                held = held + waiting - kept - output
            case PassKind.BACKWARD_WEIGHT:
                held = held - waiting
        # The first backward of a stage allocates its gradients.
        if kind in (PassKind.BACKWARD, PassKind.BACKWARD_WEIGHT):
            held = held + left.pop(stage, 0)
        peak = np.maximum(peak, held)
    return peak


def peak_of_step(spec: RunSpec, *, pp_rank: int, tokens: Sequence[int]) -> int:
    """Return the peak bytes of all tensors on a pipeline rank in one step.

    Args:
        spec: The run.
        pp_rank: The pipeline rank.
        tokens: Tokens of each micro-batch of the rank's pipeline, on all CP ranks.
    """
    lengths = np.array(tokens, np.int64)
    pp = spec.parallel.pp
    order = pipeline_order(spec.pp, pp=pp, num_micro_batches=len(tokens))[pp_rank]
    gradients = stage_gradients(spec)
    held = peak_held_bytes(order, stage_bytes(spec, lengths), gradients)
    return int(held) + rest_bytes(spec, pp_rank=pp_rank, longest=int(lengths.max()))


def rest_bytes(spec: RunSpec, *, pp_rank: int, longest: int) -> int:
    """Return a rank's estimated bytes without activations, stage outputs and parameter gradients.

    Args:
        spec: The run.
        pp_rank: The pipeline rank.
        longest: Tokens of the longest micro-batch.
    """
    estimate = memory_of_rank(spec, pp_rank=pp_rank, micro_batch_tokens=longest)
    held = estimate.activations_bytes + estimate.boundaries_bytes + estimate.gradients_bytes
    return estimate.total_bytes - held


def stage_gradients(spec: RunSpec, *, shards_only: bool = False) -> list[int]:
    """Return the bytes of each stage's gradients on one rank.

    Args:
        spec: The run.
        shards_only: Whether only the FSDP shards of gradients are stored, because every backward
            pass reduces them layer by layer.
    """
    made = [stage_gradient_bytes(spec, stage=stage) for stage in range(spec.num_stages)]
    if not shards_only:
        return made
    whole = (FLOAT32_BYTES * stage_parameters(spec, stage=s) for s in range(spec.num_stages))
    return [a - b for a, b in zip(made, whole, strict=True)]
