"""Updates the weights of a rank's stages with AdamW, and computes each step's learning rate."""

import math
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from wlb.parallel.data import scale_gradients
from wlb.parallel.expert_parallel import rebalance
from wlb.spec import RateSchedule, RunSpec, TrainingSection


def learning_rate(spec: RunSpec, step: int) -> float:
    """Return a step's learning rate: linear warm-up to the peak, then `training.schedule`.

    The schedules `cosine` and `linear` decay from the end of the warm-up. The schedule `wsd` stays
    at the peak, and decays linearly over the last `training.decay_steps` steps. A decay begins at
    the peak. It would reach `training.min_learning_rate` in the step with index `training.steps`,
    which is not trained any more.

    A run with `wsd` that is resumed with more `training.steps` stays at the peak and decays in its
    new last steps. Such a run should be resumed from a checkpoint before the decay, because the
    rate would otherwise rise in the middle of training.

    The rate depends on the number of steps, although steps may have different numbers of tokens.
    This makes little difference, because packing moves tokens only to steps nearby. On the demo's
    documents, the share of all tokens and the share of all steps trained so far differ at any step
    by at most 2.3% in a run of 30 steps, and by at most 1.1% in a run of 300 steps.

    Args:
        spec: The run.
        step: Number of updates before this step.
    """
    t = spec.training
    if step < t.warmup_steps:
        return t.learning_rate * (step + 1) / t.warmup_steps
    is_wsd = t.schedule == RateSchedule.WSD
    begin = t.steps - t.decay_steps if is_wsd else t.warmup_steps
    if t.schedule == RateSchedule.CONSTANT or (is_wsd and step <= begin):
        return t.learning_rate
    progress = min(1.0, (step - begin) / max(1, t.steps - begin))
    is_cosine = t.schedule == RateSchedule.COSINE
    left = 0.5 * (1 + math.cos(math.pi * progress)) if is_cosine else 1 - progress
    return t.min_learning_rate + (t.learning_rate - t.min_learning_rate) * left


def has_decay(parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies to a parameter. It is false for norms and biases."""
    return parameter.dim() > 1


def peak_missed(spec: RunSpec) -> str:
    """Return a warning if the run ends before the learning rate reaches its peak; "" otherwise."""
    t = spec.training
    if t.warmup_steps <= t.steps:
        return ""
    return (
        f"training.warmup_steps = {t.warmup_steps} is more than training.steps = "
        f"{t.steps}, so the learning rate ends at "
        f"{learning_rate(spec, t.steps - 1):.3g} and never reaches "
        f"training.learning_rate = {t.learning_rate:.3g}; lower training.warmup_steps"
    )


def rate_change(spec: RunSpec, before: TrainingSection, step: int) -> str:
    """Return a warning if the learning rate jumps where a run resumes, because keys were changed.

    Without a jump, the result is "".

    Args:
        spec: The run as it is configured now.
        before: The section [training] of the configuration in the checkpoint.
        step: Number of updates before the first resumed step.
    """
    old, new = learning_rate(replace(spec, training=before), step), learning_rate(spec, step)
    if math.isclose(old, new, rel_tol=1e-9):
        return ""
    line = (
        f"the learning rate of step {step + 1} is {new:.3g}, but was {old:.3g} with "
        "the configuration in the checkpoint, because training.* keys have changed"
    )
    begin = before.steps - before.decay_steps
    if new > old and before.schedule == RateSchedule.WSD and step > begin:
        line += (
            ". The checkpoint was saved after the learning rate began to decay; to "
            f"continue at the constant rate, resume from step {begin} or before with "
            "--resume STEP"
        )
    return line


class Optimizers:
    """The optimisers of this rank, one AdamW for each of its pipeline stages.

    With one optimiser per stage, a stage's optimiser state is saved and loaded with its weights.

    Args:
        spec: The run.
        stages: This rank's parts of the model, by the number of their pipeline stage.
    """

    def __init__(self, spec: RunSpec, stages: dict[int, nn.Module]) -> None:
        self.spec, self._stages = spec, list(stages.values())
        self.by_stage: dict[int, torch.optim.AdamW] = {}
        self._decayed: dict[int, list[bool]] = {}
        for index, stage in stages.items():
            # A fused AdamW needs all tensors of a parameter group on one device mesh. Experts and
            # replicated KV heads are on different meshes, so each mesh gets a group.
            groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
            for parameter in stage.parameters():
                mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
                groups.setdefault((has_decay(parameter), mesh), []).append(parameter)
            self._decayed[index] = [decayed for decayed, _ in groups]
            self.by_stage[index] = torch.optim.AdamW(
                [{"params": group} for group in groups.values()], fused=True
            )
        self.configure()
        self.parameters = [p for stage in stages.values() for p in stage.parameters()]

    def step(self, step: int, *, norm: float) -> None:
        """Clip the gradients, update the weights and clear the gradients.

        Args:
            step: Number of updates so far, which determines the learning rate.
            norm: Global norm of the gradients before clipping.
        """
        scale_gradients(self.parameters, norm=norm, max_norm=self.spec.training.clip_norm)
        rate = learning_rate(self.spec, step)
        for optimizer in self.by_stage.values():
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        # With model.experts.balance = bias, routers have a bias for each expert that balances the
        # load. Each update adjusts these biases once.
        rebalance(self._stages)
        self.clear()

    def configure(self) -> None:
        """Set AdamW's options from the spec, except the learning rate, which `step` sets."""
        t = self.spec.training
        for index, optimizer in self.by_stage.items():
            for group, decayed in zip(optimizer.param_groups, self._decayed[index], strict=True):
                decay = t.weight_decay if decayed else 0.0
                group.update(betas=(t.beta1, t.beta2), eps=t.adam_eps, weight_decay=decay)

    def clear(self) -> None:
        """Drop all gradients."""
        for optimizer in self.by_stage.values():
            optimizer.zero_grad(set_to_none=True)
