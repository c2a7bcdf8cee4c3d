"""Runs one rank of transformers' Trainer on the CPU.

torchrun starts it with a folder OUT, and optionally a checkpoint or the word "dispatch". It writes
OUT/rank<r>.json with the rows that this rank trained, in order, and the losses.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from wlb.adapters.collate import PaddingFreeCollator
from wlb.adapters.hugging_face import Balance, BalancedBatchSampler, BalancedCollator, balanced
from wlb.parallel import world as worlds

WINDOW, VOCAB, EPOCHS = 256, 64, 3


def lengths() -> list[int]:
    drawn = np.random.default_rng(0).lognormal(3.5, 1.0, 120)
    return np.clip(drawn, 3, WINDOW).astype(int).tolist()


class Rows(Dataset[dict[str, Any]]):
    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.rows = [rng.integers(0, VOCAB, n).tolist() for n in lengths()]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.rows[i], "row": i}


class Recorder(BalancedCollator):
    """Records the rows that are collated. The loader is at most one batch ahead of training."""

    seen: ClassVar[list[int]] = []

    def __call__(self, features: Any) -> dict[str, Any]:
        Recorder.seen += [feature["row"] for feature in features]
        return super().__call__([{"input_ids": f["input_ids"]} for f in features])


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=WINDOW,
        )
    )


def arguments(out: str, **options: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "num_train_epochs": EPOCHS,
        "gradient_accumulation_steps": 2,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(out, **(given | options))


def dispatched(out: str) -> None:
    """Checks accelerate's mode in which the first process reads the batches of all ranks.

    Writes whether this rank got the batches that `BalancedBatchSampler` planned for it.
    """
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from torch.utils.data import DataLoader

    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
    )
    longest = WINDOW * 3 // 2
    batches = BalancedBatchSampler(
        lengths(), Balance(context_window=WINDOW), num_ranks=2, accumulation_steps=2
    )
    collator = BalancedCollator(collator=PaddingFreeCollator(pad_to_multiple_of=longest))
    rows = Rows()
    plain = [{"input_ids": row["input_ids"]} for row in (rows[i] for i in range(len(rows)))]
    loader = accelerator.prepare(DataLoader(plain, batch_sampler=batches, collate_fn=collator))
    got = [batch["input_ids"].tolist() for batch in loader]
    expected = [
        collator([plain[i] for i in batch])["input_ids"].tolist()
        for batch in batches.of_rank(accelerator.process_index)
    ]
    same = {"same": got == expected, "batches": len(got), "announced": len(loader)}
    Path(out, f"rank{accelerator.process_index}.json").write_text(json.dumps(same), "utf-8")


def main(out: str, checkpoint: str | None = None) -> None:
    if checkpoint == "dispatch":
        dispatched(out)
        return
    trainer = balanced(Trainer)(
        model=tiny_model(),
        args=arguments(out, save_strategy="steps", save_steps=3, learning_rate=1e-2),
        train_dataset=Rows(),
        data_collator=Recorder(),
        balance=Balance(context_window=WINDOW),
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    found = {
        "seen": Recorder.seen,
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "steps": trainer.state.global_step,
        "steps_per_epoch": trainer.balanced_batches.steps_per_epoch,
    }
    Path(out, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    worlds.one_gloo_worker(is_one_machine=True)  # before accelerate starts Gloo
    try:
        main(*sys.argv[1:])
    finally:
        # A process that exits while Gloo's threads work can abort ("terminate called").
        worlds.shutdown()
