"""Code that ranks run in tests of context parallelism in transformers.

It imports no trainer, because that takes seconds on every rank.
"""

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.adapters.context_models import (
    VOCAB,
    documents,
    num_labels,
    taken_gradients,
    tiny,
    unpacked,
)
from wlb.adapters.collate import PaddingFreeCollator
from wlb.adapters.collate.sharded import ROWS_KEY
from wlb.adapters.transformers_cp import ContextParallel
from wlb.parallel.world import World
from wlb.plan import IGNORE, UserError

LENGTHS = ((37, 1, 9, 2, 53), (2,), (3, 1), (101,), (5, 4, 3, 2, 1, 1, 1, 7, 11, 13, 29, 2, 40))
"""Document lengths of packed batches.

They include lengths that 2 x cp does not divide, and batches with fewer tokens than ranks.
"""
DRAWN = tuple(
    tuple(np.random.default_rng(seed).geometric(1 / (2 + 4 * seed), 1 + seed % 7).tolist())
    for seed in range(1, 13)
)
"""Random document lengths of packed batches."""


def put_together(local: Tensor, rows: Any, group: dist.ProcessGroup | None) -> Tensor:
    """Gathers the rows of all ranks and returns them in packed order, shape [S, ...]."""
    parts = [torch.empty_like(local) for _ in range(rows.plan.cp)]
    dist.all_gather(parts, local.contiguous(), group=group)
    out = local.new_empty((rows.plan.num_tokens, *local.shape[1:]))
    for rank, part in enumerate(parts):
        index = torch.from_numpy(rows.plan.for_rank(rank).token_index)
        out[index] = part[: index.numel()]
    return out


def sharded(model: Any, context: ContextParallel, rows: Any) -> tuple[Tensor, float, Any]:
    """Runs the model on packed documents over CP ranks and returns what `unpacked` returns."""
    batch = context.collator(PaddingFreeCollator())(rows)
    out = model(**batch, num_items_in_batch=num_labels(rows))
    out.loss.backward()
    loss = out.loss.detach().clone()
    dist.all_reduce(loss, group=context.group)
    gradients = taken_gradients(model)
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=context.group)
    logits = put_together(out.logits[0].detach(), batch[ROWS_KEY], context.group)
    return logits, float(loss), gradients


def errors(found: Any, expected: Any) -> dict[str, float]:
    """Returns the relative errors of logits, loss and gradients.

    Each is the largest difference over the largest value (see `gradient_error`).
    """
    (logits, loss, gradients), (logits0, loss0, gradients0) = found, expected
    return {
        "logits": float((logits - logits0).abs().max()) / float(logits0.abs().max()),
        "loss": abs(loss - loss0) / max(1.0, abs(loss0)),
        "gradients": gradient_error(gradients, gradients0),
    }


def gradient_error(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the worst relative error of a gradient.

    The error is relative to the gradient's largest value. For a gradient that nearly vanishes, it
    is relative to a hundredth of the largest value in the model.
    """
    least = max(float(truth.abs().max()) for truth in expected.values()) / 100
    return max(
        float((gradients[name] - truth).abs().max()) / max(least, float(truth.abs().max()))
        for name, truth in expected.items()
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """How a model is trained."""

    family: str = "llama"
    options: tuple[tuple[str, Any], ...] = ()  # options of ContextParallel
    recompute: bool = False  # whether layers are recomputed in backward
    dtype: torch.dtype = torch.float32


Errors = list[tuple[Case, dict[str, float]]]


def parity(world: World, cases: list[Case], batches: tuple[tuple[int, ...], ...]) -> Errors:
    """Compares CP ranks with one process and returns the worst errors of each case."""
    out: Errors = []
    for case in cases:
        model, worst = tiny(case.family).to(case.dtype), dict[str, float]()
        expected = [unpacked(model, documents(lengths)) for lengths in batches]
        context = ContextParallel(model, cp=world.world_size, **dict(case.options))
        if case.recompute:
            model.activation_checkpointing_enable()
        model.train()
        for lengths, truth in zip(batches, expected, strict=True):
            found = errors(sharded(model, context, documents(lengths)), truth)
            worst = {name: max(value, worst.get(name, 0.0)) for name, value in found.items()}
        out.append((case, worst))
    return out


def leaks(model: Any, context: ContextParallel, lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Changes one document of a packed batch after the other and looks where logits change.

    Returns:
        For each document, the number of changed positions in other documents, which must be 0, and
        in the document itself. A position is changed if any bit of its logits differs.
    """
    rows, out = documents(lengths), []
    document = torch.repeat_interleave(torch.tensor(lengths))
    before, *_ = sharded(model, context, rows)
    for i, row in enumerate(rows):
        changed = [*rows]
        changed[i] = row | {"input_ids": [(token + 1) % VOCAB for token in row["input_ids"]]}
        after, *_ = sharded(model, context, changed)
        differs = (after != before).any(-1)
        own = differs[document == i]
        out.append((int(differs.sum() - own.sum()), int(own.sum())))
    return out


def first_checks(world: World) -> tuple[Errors, list[tuple[int, int]], str]:
    """Returns errors, leaks, and the message if ranks of a group have different documents."""
    cases = [Case(), Case(recompute=True), Case(dtype=torch.float64)]
    found = parity(world, cases, LENGTHS[:4])
    model, said = tiny("llama").train(), ""
    context = ContextParallel(model, cp=world.world_size, exchange="needed")
    changed = leaks(model, context, LENGTHS[0])
    context.close()
    strangers = ContextParallel(model, cp=world.world_size).collator(PaddingFreeCollator())
    try:
        model(**strangers(documents((5, 4), seed=world.rank)))
    except UserError as error:
        said = str(error)
    return found, changed, said


STEP = [[(37, 1, 9), (2, 53)], [(5, 4, 3, 40), ()]]
"""Document lengths of a step, as STEP[micro-batch][data-parallel rank].

The last rank has no documents left in its second micro-batch.
"""


def own_loop(world: World, dtype: torch.dtype | None) -> tuple[int, float]:
    """Trains a step with FSDP2 over dp 2 x cp 2, with gradient accumulation and recomputed layers.

    Args:
        world: This rank.
        dtype: Type in which layers compute; None for the parameters'.

    Returns:
        Number of labels of all ranks, and the worst relative error of a gradient.
    """
    model = tiny("llama").train()
    rows = [[documents(n, seed=i) for i, n in enumerate(ranks)] for ranks in STEP]
    _, _, expected = unpacked(model, [row for of in rows for micro in of for row in micro])
    context = ContextParallel(model, cp=2)
    model.activation_checkpointing_enable()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    # accelerate takes seconds to import.
    from wlb.adapters.hugging_face import BalancedCollator

    collate = context.collator(BalancedCollator())
    batches = [collate(of[world.rank // 2]) for of in rows]
    # Count labels and scale losses as transformers' Trainer does.
    labels = torch.tensor(sum(int((b["shift_labels"] != IGNORE).sum()) for b in batches))
    dist.all_reduce(labels)
    for i, batch in enumerate(batches):
        model.set_requires_gradient_sync(i == len(batches) - 1)
        loss = model(**batch, num_items_in_batch=labels).loss * world.world_size
        loss.backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return int(labels), gradient_error(found, expected)
