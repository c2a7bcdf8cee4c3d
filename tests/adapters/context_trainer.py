"""Trains with context parallelism in a Hugging Face trainer on local ranks.

`train` returns the numbers by which runs on different ranks are compared.
"""

import dataclasses
import os
from typing import Any

import numpy as np
import torch
from accelerate import DistributedType, PartialState
from datasets import Dataset
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from tests.adapters.context_models import VOCAB, documents, tiny
from wlb.adapters.hugging_face import Balance, balanced
from wlb.parallel.world import World

WINDOW = 96


@dataclasses.dataclass(frozen=True)
class Job:
    """A run to train."""

    cp: int  # context-parallel ranks
    sft: bool = True  # whether TRL's SFTTrainer trains, instead of transformers' Trainer
    family: str = "llama"  # model family
    options: tuple[tuple[str, Any], ...] = ()  # further training arguments
    fsdp: bool = False  # whether FSDP2 shards the model


@dataclasses.dataclass(frozen=True)
class Trained:
    """Results of a run."""

    losses: list[float]  # loss of each step, as the trainer logs it
    norms: list[float]  # gradient norm of each step, as the trainer logs it
    weights: dict[str, Tensor]  # change of each parameter over the run
    evaluated: float  # loss of an evaluation after training
    said: list[int]  # tokens that the trained model generates
    is_fsdp: bool  # whether FSDP2 sharded the model


def lengths() -> tuple[int, ...]:
    drawn = np.random.default_rng(0).lognormal(3.0, 0.9, 40)
    return tuple(np.clip(drawn, 2, WINDOW).astype(int).tolist())


class Steps(TrainerCallback):
    """Records each step's loss and gradient norm before the trainer rounds them."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.logs.append(dict(logs))


def start_as(world: World) -> None:
    """Sets the environment variables of torchrun, from which accelerate learns its rank.

    They stay set, because the process ends after the test.
    """
    os.environ |= {
        "RANK": str(world.rank),
        "LOCAL_RANK": str(world.rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_WORLD_SIZE": str(world.world_size),
    }


def arguments(job: Job, out: str) -> Any:
    given: dict[str, Any] = {
        "output_dir": out,
        "max_steps": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 1.0,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "per_device_eval_batch_size": 2,
        "bf16": False,
        "activation_checkpointing": False,
    }
    if job.fsdp:
        layers = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        given |= {"fsdp": True, "fsdp_config": {"version": 2, **layers}}
    given |= dict(job.options)
    if job.sft:
        given |= {"max_length": WINDOW, "dataset_kwargs": {"skip_prepare_dataset": True}}
    made = (SFTConfig if job.sft else TrainingArguments)(**given)
    if job.fsdp:
        assert made.device.type == "cpu"  # reading the device creates accelerate's state
        # accelerate prepares a model for FSDP2 only if it believes that there are GPUs.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return made


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")


def trainer_of(job: Job, out: str, **given: Any) -> Any:
    rows = Dataset.from_list(documents(lengths()))
    # transformers' own collator does not pad labels.
    held_out = (9, 20, 31, 5) if job.sft else (12,) * 2
    options = {
        "model": tiny(job.family, use_cache=False),
        "args": arguments(job, out),
        "train_dataset": rows,
        "eval_dataset": Dataset.from_list(documents(held_out, seed=1)),
        "balance": Balance(context_window=WINDOW, cp=job.cp, exchange="auto", strategy="balanced"),
    }
    if job.sft:
        options["processing_class"] = tokenizer()
    return balanced(SFTTrainer if job.sft else Trainer)(**(options | given))


def train(world: World, job: Job, out: str) -> Trained:
    """Trains the job, then evaluates and generates with the trained model."""
    start_as(world)
    steps = Steps()
    trainer = trainer_of(job, out, callbacks=[steps])
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() - before[name]
        for name, p in model.named_parameters()
    }
    metrics = trainer.evaluate()
    model.eval()
    prompt = torch.tensor([[3, 7, 11, 2]])
    said = model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=True)
    return Trained(
        losses=[line["loss"] for line in steps.logs],
        norms=[line["grad_norm"] for line in steps.logs],
        weights=weights,
        evaluated=metrics["eval_loss"],
        said=said[0].tolist(),
        is_fsdp=isinstance(model, FSDPModule),
    )
