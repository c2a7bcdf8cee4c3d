"""Runs one rank of torchtitan's own Trainer on CPU, fed by `BalancedDataLoader`.

torchrun starts it with a JSON object as its argument (`Run`). torchtitan 0.3 is made for GPUs, so
some of its parts are replaced:

- the choice of a device, the monitor of GPU memory, and NCCL's timeouts,
- FlexAttention's compiled kernel, which has no backward pass on a CPU,
- FSDP's scaling of gradients in the reduction, which Gloo does not support,
- the splitting of a batch in torch's pipeline schedule. torchtitan passes a list of micro-batches,
  but torch 2.13 expects a whole batch.

The rank writes OUT/rank<r>.json. It has the losses of all steps, a digest of the final weights, and
for the step `checked` the errors of loss and gradients: they are compared with one process that
trains the same documents one by one.
"""

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import AuxOutput, create_mask
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

# torchtitan chooses its device when it is imported.
torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components import metrics
from torchtitan.distributed import utils as distributed
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import config_registry, model_registry
from torchtitan.trainer import Trainer

from wlb.adapters.torchtitan import BalancedDataLoader

WINDOW = 256
IGNORE = -100
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The run of all ranks."""

    out: str  # folder of results, checkpoints and logs
    store: str  # prefix of the token store
    steps: int  # last step; a resumed run counts from the start of the first run
    micro_batches: int = 2  # micro-batches of a data-parallel rank in a step
    shard: int = 1  # FSDP ranks
    pp: int = 1  # pipeline stages
    checked: int = 1  # step that is compared with one process; 0 for none
    save_at: int = 0  # steps between checkpoints; 0: no checkpoint is saved or loaded


class NoMemory:
    """Replaces the monitor of GPU memory."""

    device_name = "cpu"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(*[0] * 6)

    def reset_peak_stats(self) -> None: ...


class NoTokenizer:
    """Replaces the tokenizer, which is not needed because the store has tokens."""

    def build(self, **_: Any) -> None: ...

    def to_dict(self) -> dict[str, Any]:
        return {}


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_mask: Any,
    scale: float | None = None,
    enable_gqa: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, AuxOutput]:
    """Computes FlexAttention with a dense mask instead of its compiled kernel."""
    mask = create_mask(block_mask.mask_mod, 1, 1, q.shape[2], k.shape[2], device="cpu")
    out = scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    return out, AuxOutput()


def on_cpu() -> None:
    """Replaces the parts of torchtitan that need a GPU."""
    metrics.build_device_memory_monitor = lambda *_, **__: NoMemory()
    distributed.set_pg_timeouts = lambda *_, **__: None
    FlexAttention._compiled_flex_attn = staticmethod(attend)
    schedules.PipelineScheduleSingle.step = step
    schedules.PipelineScheduleMulti.step = step


def step(
    schedule: Any,
    *,
    arg_mbs: list[Any] | None,
    kwarg_mbs: list[Any],
    target_mbs: list[Any] | None,
    losses: list[Any] | None,
    loss_kwargs: dict[str, Any],
    return_outputs: bool,
) -> None:
    """Runs a step of torch's schedule on a list of micro-batches, without splitting a batch."""
    for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
        stage.has_backward = True
        stage.clear_runtime_states()
    schedule._step_microbatches(
        arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs
    )


def summed(parallelize: Any, model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """Applies torchtitan's parallelism, with an FSDP reduction that Gloo supports."""
    made = parallelize(model, **options)
    for module in made.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return made


def config_of(run: Run) -> Any:
    """Returns torchtitan's configuration of its LLaMA 3 debug model in float32."""
    config = config_registry.llama3_debugmodel()
    spec = model_registry("debugmodel", attn_backend="flex")
    config.model_spec = dataclasses.replace(
        spec, parallelize_fn=partial(summed, spec.parallelize_fn)
    )
    training, parallelism = config.training, config.parallelism
    training.seq_len, training.steps = WINDOW, run.steps
    training.local_batch_size = run.micro_batches if run.pp > 1 else 1
    training.global_batch_size = run.micro_batches * run.shard
    training.mixed_precision_param = "float32"
    training.disable_cuda_graphs = True
    training.max_norm = 1e9  # never clip, because gradients are compared
    parallelism.data_parallel_shard_degree = run.shard
    parallelism.pipeline_parallel_degree = run.pp
    parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = None
    config.validator.enable = False
    config.metrics.log_freq = 1
    config.dump_folder = run.out
    config.tokenizer = NoTokenizer()
    config.lr_scheduler.warmup_steps = 2
    config.checkpoint.enable = run.save_at > 0
    config.checkpoint.interval = max(1, run.save_at)
    config.checkpoint.keep_latest_k = 0
    config.checkpoint.last_save_model_only = False
    config.dataloader = BalancedDataLoader.Config(
        dataset_path=run.store,
        micro_batches_per_step=run.micro_batches,
        equal_lengths=run.pp > 1,
        pad_to_multiple=128,
        epochs=0,
        seed=3,
    )
    return config


class Recorded(Trainer):
    """torchtitan's Trainer, which also records batches, losses and gradients."""

    run: Run
    losses: dict[int, float]
    compared: dict[str, float]

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        seen: list[Batch] = []
        log = self.metrics_processor.log
        self.metrics_processor.log = partial(self._noted, log)
        is_checked = self.step == self.run.checked
        before = self._parameters() if is_checked else {}
        super().train_step(_spied(data_iterator, seen))
        self.metrics_processor.log = log
        if is_checked:
            self._compare(before, seen)

    def _noted(self, log: Any, step: int, loss: float, *rest: Any, **more: Any) -> None:
        self.losses[step] = loss
        log(step, loss, *rest, **more)

    def _parameters(self, *, grad: bool = False) -> dict[str, torch.Tensor]:
        """Returns the whole parameters, or their gradients, of all stages on every rank."""
        mine = {
            name: whole(p.grad if grad else p)
            for part in self.model_parts
            for name, p in part.named_parameters()
        }
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        return {name: value for part in parts for name, value in part.items()}

    def _compare(self, before: dict[str, torch.Tensor], seen: list[Batch]) -> None:
        """Compares a step with one process that trains the same documents one by one.

        Args:
            before: Parameters before the step.
            seen: Micro-batches of this rank.
        """
        got, parts = self._parameters(grad=True), [None] * dist.get_world_size()
        dist.all_gather_object(parts, seen)
        # All stages of a pipeline have the same micro-batches, so take those of the first.
        batches = [batch for part in parts[:: self.run.pp] for batch in part or []]
        model = self.config.model_spec.model.build()
        with torch.no_grad():
            model.init_weights(buffer_device=None)
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])
        labels = sum(int((y != IGNORE).sum()) for _, y in batches)
        loss, documents = 0.0, 0
        for inputs, y in batches:
            for x, positions, targets in alone(inputs, y):
                if not (targets != IGNORE).any():
                    continue  # padding
                masks = model.get_attention_masks(positions=positions)
                logits = model(x, positions=positions, attention_masks=masks)
                one = cross_entropy(logits[0].float(), targets[0], reduction="sum")
                (one / labels).backward()
                loss, documents = loss + float(one.detach()) / labels, documents + 1
        worst = max(
            float((p.grad - got[n]).norm() / p.grad.norm()) for n, p in model.named_parameters()
        )
        trained = self.losses.get(self.step, -1.0)
        self.compared = {
            "documents": documents,
            "rows": len({y.shape[1] for _, y in batches}),
            "loss": abs(trained - loss) / loss,
            "gradient": worst,
        }

    def digest(self) -> str:
        """Returns a hash of the bits of all parameters."""
        found = hashlib.sha256()
        for name, value in sorted(self._parameters().items()):
            found.update(name.encode() + value.numpy().tobytes())
        return found.hexdigest()


def whole(tensor: Any) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def _spied(batches: Iterable[Batch], seen: list[Batch]) -> Iterator[Batch]:
    for inputs, labels in batches:
        seen.append(({k: v.clone() for k, v in inputs.items()}, labels.clone()))
        yield inputs, labels


def alone(inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """Yields each document of a packed row as a separate row."""
    positions = inputs["positions"]
    ends = [*torch.nonzero(positions[0] == 0).flatten().tolist(), positions.numel()]
    for i, j in pairwise(ends):
        yield inputs["input"][:, i:j], positions[:, i:j], labels[:, i:j]


def main() -> None:
    run = Run(**json.loads(sys.argv[1]))
    on_cpu()
    trainer = Recorded(config_of(run))
    trainer.run, trainer.losses, trainer.compared = run, {}, {}
    trainer.train()
    found = {
        "losses": trainer.losses,
        "compared": trainer.compared,
        "step": trainer.step,
        "digest": trainer.digest(),
    }
    file = Path(run.out) / f"rank{os.environ['RANK']}.json"
    file.write_text(json.dumps(found), "utf-8")
    trainer.close()


if __name__ == "__main__":
    main()
