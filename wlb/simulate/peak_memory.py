"""Peak memory of a pipeline rank, from the order of its passes.

Forward keeps a stage's activations and its output; backward frees both, and the first one of a
stage leaves gradients, to which later ones add. With a split backward, the inputs' pass frees them
and leaves the inputs of linear layers and the gradients of their outputs for the weights' pass: as
many bytes as forward keeps without recompute.
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
    """Bytes by micro-batch, [..., n]. kept: activations of a layer, or of a stage's layers, that
    forward keeps. output: of a stage. waiting: what the inputs' pass of a layer, or of a stage's
    layers, keeps for the weights' pass.
    """

    kept: IntArray
    output: IntArray
    waiting: IntArray


def pass_bytes(spec: RunSpec, tokens: IntArray) -> PassBytes:
    """Bytes of one layer's passes, of one with experts if there are any. tokens: of micro-batches
    on all CP ranks, shape [..., n].
    """
    return PassBytes(
        kept=_by_length(layer_activation_bytes, spec, tokens),
        output=_by_length(stage_output_bytes, spec, tokens),
        waiting=_by_length(layer_waiting_bytes, spec, tokens),
    )


def stage_bytes(spec: RunSpec, tokens: IntArray) -> list[PassBytes]:
    """Bytes of the passes of each stage; tokens as in `pass_bytes`."""
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
    values, place = np.unique(tokens, return_inverse=True)
    found = [bytes_of(spec, micro_batch_tokens=int(t)) for t in values]
    return np.array(found, np.int64)[place].reshape(tokens.shape)


def peak_held_bytes(
    order: Sequence[Action], stages: Sequence[PassBytes], gradients: Sequence[int] | None = None
) -> IntArray:
    """Peak bytes of a rank with this order of passes, shape [...]: of activations and outputs, and
    of gradients that a stage's first backward leaves. stages: their passes (`stage_bytes`).
    gradients: bytes, by stage.
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
        if kind in (PassKind.BACKWARD, PassKind.BACKWARD_WEIGHT):
            held = held + left.pop(stage, 0)
        peak = np.maximum(peak, held)
    return peak


def peak_of_step(spec: RunSpec, *, pp_rank: int, tokens: Sequence[int]) -> int:
    """Peak bytes of a pipeline rank in a step whose micro-batches have these lengths, with the
    memory that attention kernels allocate. tokens: of its pipeline's micro-batches, on all CP
    ranks.
    """
    lengths = np.array(tokens, np.int64)
    pp = spec.parallel.pp
    order = pipeline_order(spec.pp, pp=pp, num_micro_batches=len(tokens))[pp_rank]
    gradients = stage_gradients(spec)
    held = peak_held_bytes(order, stage_bytes(spec, lengths), gradients)
    return int(held) + rest_bytes(spec, pp_rank=pp_rank, longest=int(lengths.max()))


def rest_bytes(spec: RunSpec, *, pp_rank: int, longest: int) -> int:
    """Bytes of a rank without activations, stage outputs and gradients; longest: tokens of a
    micro-batch.
    """
    estimate = memory_of_rank(spec, pp_rank=pp_rank, micro_batch_tokens=longest)
    held = estimate.activations_bytes + estimate.boundaries_bytes + estimate.gradients_bytes
    return estimate.total_bytes - held


def stage_gradients(spec: RunSpec, *, shards_only: bool = False) -> list[int]:
    """Bytes of each stage's gradients on one rank. shards_only: every pass reduces them layer by
    layer, so that no stage's are whole.
    """
    made = [stage_gradient_bytes(spec, stage=stage) for stage in range(spec.num_stages)]
    if not shards_only:
        return made
    whole = (FLOAT32_BYTES * stage_parameters(spec, stage=s) for s in range(spec.num_stages))
    return [a - b for a, b in zip(made, whole, strict=True)]
