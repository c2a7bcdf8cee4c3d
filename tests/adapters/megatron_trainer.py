"""Runs one rank of Megatron-Core's training loop on CPU, fed by `PackedSteps`.

torchrun starts it with a JSON object as its argument (`Run`). The model has Megatron's local
layers, because Transformer Engine needs a GPU. Local attention does not support packed sequences,
so a mask separates the documents. Tensors that Megatron creates on "cuda" are created on the CPU,
and its GPU random states, which only dropout uses, are left out.

The rank writes OUT/rank<r>.json. It has the losses of all steps, a digest of the final weights, and
for the step `checked` the errors of loss and gradients: they are compared with one process that
trains the same documents one by one.
"""

import dataclasses
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

# Megatron warns that Transformer Engine and Apex are missing.
warnings.simplefilter("ignore", UserWarning)

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig

from wlb import Planner, TokenStore
from wlb.adapters.megatron import PackedSteps, PlannedP2P
from wlb.data.reader import StoreReader

HIDDEN, VOCAB, WINDOW = 32, 320, 256
Batch = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The run of all ranks."""

    out: str  # folder of results and checkpoints
    store: str  # prefix of the token store
    steps: int  # last step; a resumed run counts from the start of the first run
    micro_batches: int = 4  # micro-batches of a data-parallel rank in a step
    pp: int = 1  # pipeline stages; all other parallelism is data-parallel
    checked: int = 1  # step that is compared with one process
    save_at: int = 0  # step after which a checkpoint is saved; 0 for none
    resume: bool = False  # whether the run resumes from the checkpoint in `out`


class OnCpu(TorchFunctionMode):
    """Creates tensors on the CPU that Megatron creates on "cuda"."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if "cuda" in str(options.get("device")):
            options["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **options)


def on_cpu() -> None:
    """Replaces the functions by which Megatron uses a GPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()


def config_of(pp: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_query_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,
        moe_token_dispatcher_type="alltoall",  # the other one refuses variable lengths
    )


def model_of(config: TransformerConfig, *, first: bool, last: bool) -> GPTModel:
    """Returns a stage of the model: the first, the last, or with both flags the whole model."""
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCAB,
        max_sequence_length=2 * WINDOW,
        pre_process=first,
        post_process=last,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def hidden_pairs(batch: Batch) -> torch.Tensor:
    """Returns Megatron's attention mask, true where a query must not attend to a key."""
    lengths = batch["cu_seqlens_padded"].diff().long()
    document = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    seen = (document[:, None] == document) & torch.ones(
        document.numel(), document.numel()
    ).tril().bool()
    return ~seen[None, None]


def forward(
    batches: Iterator[Batch], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Runs the forward pass of a micro-batch; it is Megatron's `forward_step_func`."""
    batch = next(batches)
    out = model(batch["tokens"], batch["position_ids"], hidden_pairs(batch), labels=batch["labels"])

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        total = (losses * batch["loss_mask"]).sum()
        return total, batch["loss_mask"].sum().int(), {"loss": total.detach()}

    return out, loss


class Job:
    """The model, its optimizer and its steps on this rank, and the losses that are recorded."""

    def __init__(self, run: Run) -> None:
        self.run, self.config = run, config_of(run.pp)
        first, last = (
            parallel_state.is_pipeline_first_stage(),
            parallel_state.is_pipeline_last_stage(),
        )
        torch.manual_seed(0)
        self.stage = model_of(self.config, first=first, last=last)
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(self.config, options, self.stage)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=3e-3, clip_grad=0.0), [self.model]
        )
        dp = dist.get_world_size() // run.pp
        planner = Planner.for_lengths(
            TokenStore(run.store),
            context_window=WINDOW,
            num_micro_batches=run.micro_batches * dp,
            dp=dp,
            epochs=20,
        )
        rank = parallel_state.get_data_parallel_rank()
        reader = StoreReader(run.store, VOCAB)
        self.steps = PackedSteps(planner, reader, dp_rank=rank, config=self.config)
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.losses: dict[int, float] = {}
        self.compared: dict[str, float] = {}

    def train_step(self, step: int) -> None:
        made, num, _, _ = self.steps.next()
        batches = list(made)
        before = self.parameters() if step == self.run.checked else {}
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        more: dict[str, Any] = {}
        if self.run.pp > 1:
            link = PlannedP2P(self.groups.pp, self.config)
            link.begin(self.steps.shapes(hidden_size=HIDDEN))
            more = {"p2p_communicator": link, "pg_collection": self.groups}
        reports = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=self.model,
            num_microbatches=num,
            seq_length=2 * WINDOW,
            micro_batch_size=1,
            **more,
        )
        every: list[Any] = [None] * dist.get_world_size()
        here = sum(float(r["loss"]) for r in reports)
        dist.all_gather_object(every, (here, batches))
        # The first ranks are those of the first stage; the last stage has the losses.
        first_stage = every[: dist.get_world_size() // self.run.pp]
        steps = [batch for _, part in first_stage for batch in part]
        labels = sum(float(b["loss_mask"].sum()) for b in steps)
        self.losses[step] = sum(loss for loss, _ in every) / labels
        if before:
            self.compare(before, steps, self.losses[step], labels)
        self.optimizer.step()

    def parameters(self, *, grad: bool = False) -> dict[str, torch.Tensor]:
        """Returns all stages' parameters, or their gradients, by names in the whole model."""
        offset = 2 // self.run.pp * parallel_state.get_pipeline_model_parallel_rank()
        mine: dict[str, torch.Tensor] = {}
        for name, p in self.stage.named_parameters():
            words = name.split(".")
            if words[:2] == ["decoder", "layers"]:
                words[2] = str(int(words[2]) + offset)
            mine[".".join(words)] = (p.main_grad if grad else p).detach().clone()
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        return {name: value for part in parts for name, value in part.items()}

    def compare(
        self, before: dict[str, torch.Tensor], batches: list[Batch], trained: float, labels: float
    ) -> None:
        """Compares a step with one process that trains the same documents one by one.

        Args:
            before: Parameters before the step.
            batches: Micro-batches of all data-parallel ranks.
            trained: Loss of the step.
            labels: Number of labels of the step.
        """
        got, model = self.parameters(grad=True), model_of(config_of(1), first=True, last=True)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(before[name])
        loss, documents = 0.0, 0
        for batch in batches:
            for i, j in pairwise(batch["cu_seqlens_padded"].tolist()):
                one = {
                    k: batch[k][:, i:j] for k in ("tokens", "labels", "position_ids", "loss_mask")
                }
                one["cu_seqlens_padded"] = torch.tensor([0, j - i])
                out, loss_of = forward(iter([one]), model)
                (total, _, _) = loss_of(out)
                (total / labels).backward()
                loss, documents = loss + float(total.detach()) / labels, documents + 1
        worst = max(
            float((p.grad - got[n]).norm() / p.grad.norm()) for n, p in model.named_parameters()
        )
        lengths = len({b["tokens"].shape[1] for b in batches})
        self.compared = {
            "documents": documents,
            "lengths": lengths,
            "loss": abs(trained - loss) / loss,
            "gradient": worst,
        }

    def sharded(self, *, is_loading: bool) -> dict[str, Any]:
        """Returns Megatron's sharded state dict of model and optimizer."""
        model = self.stage.sharded_state_dict()
        return {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading),
        }

    def save(self) -> None:
        folder = Path(self.run.out) / "checkpoint"
        folder.mkdir(exist_ok=True)
        state = self.steps.state_dict()
        dist_checkpointing.save({**self.sharded(is_loading=False), "steps": state}, str(folder))

    def load(self) -> None:
        folder = str(Path(self.run.out) / "checkpoint")
        asked = self.sharded(is_loading=True)
        found = dist_checkpointing.load(asked, folder)
        self.stage.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.steps.load_state_dict(found["steps"])

    def digest(self) -> str:
        """Returns a hash of the bits of all parameters."""
        found = hashlib.sha256()
        for name, value in sorted(self.parameters().items()):
            found.update(name.encode() + value.numpy().tobytes())
        return found.hexdigest()


def main() -> None:
    run = Run(**json.loads(sys.argv[1]))
    on_cpu()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=run.pp)
    with OnCpu():
        job = Job(run)
        start = 1
        if run.resume:
            job.load()
            start = run.save_at + 1
        for step in range(start, run.steps + 1):
            job.train_step(step)
            if step == run.save_at and not run.resume:
                job.save()
        found = {"losses": job.losses, "compared": job.compared, "digest": job.digest()}
    file = Path(run.out) / f"rank{os.environ['RANK']}.json"
    file.write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
