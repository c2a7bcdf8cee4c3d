"""AdamW over a rank's stages, and the learning rate as a function of the step alone."""

import math

import torch
from torch import nn

from wlb.parallel.data import scale_gradients
from wlb.spec import RunSpec


def learning_rate(spec: RunSpec, step: int) -> float:
    """Linear warm-up to the peak, then a cosine down to the minimum at training.steps.

    Per step, not per token: tokens per step vary with the packing, the schedule does not.
    """
    t = spec.training
    if step < t.warmup_steps:
        return t.learning_rate * (step + 1) / t.warmup_steps
    span = max(1, t.steps - t.warmup_steps)
    progress = min(1.0, (step - t.warmup_steps) / span)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return t.min_learning_rate + (t.learning_rate - t.min_learning_rate) * cosine


class Optimizers:
    """One AdamW a stage (so that a checkpoint of a stage is whole), stepped together.

    Weight decay is on matrices only, norms have none.
    """

    def __init__(self, spec: RunSpec, stages: dict[int, nn.Module]) -> None:
        self.spec = spec
        self.by_stage: dict[int, torch.optim.AdamW] = {}
        for index, stage in stages.items():
            parameters = list(stage.parameters())
            matrices = [p for p in parameters if p.dim() > 1]
            others = [p for p in parameters if p.dim() <= 1]
            self.by_stage[index] = torch.optim.AdamW(
                [{"params": matrices}, {"params": others}], fused=True
            )
        self.configure()
        self.parameters = [p for stage in stages.values() for p in stage.parameters()]

    def step(self, step: int, *, norm: float) -> None:
        """Clip gradients of global norm `norm`, update at the rate of `step`, clear gradients."""
        scale_gradients(self.parameters, norm=norm, max_norm=self.spec.training.clip_norm)
        rate = learning_rate(self.spec, step)
        for optimizer in self.by_stage.values():
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self.clear()

    def configure(self) -> None:
        """Set what the spec says of AdamW; the learning rate follows at each step."""
        t = self.spec.training
        for optimizer in self.by_stage.values():
            for group, decay in zip(optimizer.param_groups, (t.weight_decay, 0.0), strict=True):
                group.update(betas=(t.beta1, t.beta2), eps=t.adam_eps, weight_decay=decay)

    def clear(self) -> None:
        for optimizer in self.by_stage.values():
            optimizer.zero_grad(set_to_none=True)
