"""Compares the batches of transformers' Trainer and TRL's SFTTrainer with ours.

`python -m experiments.hosts.hugging_face` needs the extra [hf]. For each way of making batches it
trains a tiny LLaMA for one epoch on two Gloo processes on the CPU. It prints how evenly the ranks
worked. Nothing is downloaded.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from experiments.harness.arguments import experiment_parser
from experiments.harness.pages import ROOT, show
from experiments.hosts.common import (
    ACCUMULATION,
    COST,
    LEARNING_RATE,
    NUM_RANKS,
    VOCABULARY,
    WARM_UP,
    WINDOW,
    Document,
    Row,
    Tokens,
    grouped,
    ledger,
    row_of,
    rows_of,
    shifted,
    stores,
    table_of,
)
from wlb.adapters.collate import PaddingFreeCollator
from wlb.adapters.hugging_face import Balance, BalancedCollator, balanced
from wlb.parallel import world as worlds

LIBRARY = "transformers, TRL"
WAYS = {
    "random": "its random batches",
    "batch_rebalance": "its batch_rebalance",
    "packing": "TRL's packing (bfd)",
    "balanced": "balanced(SFTTrainer) of wlb",
}
ROWS_A_BATCH = 2
"""Rows of a batch in transformers' own two ways; together they have about a window of tokens."""


class Recorder:
    """Wraps a collator and records the documents of each batch that it makes."""

    def __init__(self, collator: Any) -> None:
        self.collator, self.batches = collator, list[list[Document]]()

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Any]:
        documents: list[Document] = []
        for feature in features:
            tokens, at = list(feature["input_ids"]), 0
            for length in feature.get("seq_lengths") or [len(tokens)]:
                documents.append(shifted(tokens[at : at + length]))
                at += length
        self.batches.append(documents)
        return self.collator(features)


def model(seed: int) -> LlamaForCausalLM:
    """Returns a LLaMA of the size that `experiments.hosts.common` trains."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=WINDOW,
        )
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer, because SFTTrainer requires one; the rows are already token ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {str(i): i for i in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), pad_token="0", eos_token="1"
    )


def trainer_of(way: str, out: str, rows: list[Tokens], seed: int) -> Any:
    """Returns a new Trainer that makes its batches in one of the WAYS."""
    given: dict[str, Any] = {
        "output_dir": out,
        "num_train_epochs": 1,
        "per_device_train_batch_size": ROWS_A_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "learning_rate": LEARNING_RATE,
        "warmup_steps": WARM_UP,
        "seed": seed,
        "data_seed": 0,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    dataset = Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])
    if way in ("random", "batch_rebalance"):
        sampling = {"train_sampling_strategy": way} if way == "batch_rebalance" else {}
        return Trainer(
            model=model(seed),
            args=TrainingArguments(**given, **sampling),
            train_dataset=dataset,
            data_collator=Recorder(PaddingFreeCollator()),
        )
    from trl import SFTConfig, SFTTrainer

    given |= {"max_length": WINDOW, "bf16": False, "activation_checkpointing": False}
    ours = way == "balanced"
    if ours:
        config = SFTConfig(**given, dataset_kwargs={"skip_prepare_dataset": True})
        cls: Any = balanced(SFTTrainer)
        more: dict[str, Any] = {"balance": Balance(context_window=WINDOW, cost=COST)}
    else:
        config = SFTConfig(**given | {"per_device_train_batch_size": 1}, packing=True)
        cls, more = SFTTrainer, {}
    trainer = cls(
        model=model(seed), args=config, train_dataset=dataset, processing_class=tokenizer(),
        data_collator=Recorder(BalancedCollator()) if ours else None, **more,
    )  # fmt: skip
    if not ours:
        trainer.data_collator = Recorder(trainer.data_collator)
    return trainer


def work(way: str, out: str, seed: int) -> None:
    """Trains as one rank and writes its batches to a file; rank 0 adds the held-out loss."""
    found = stores()
    trainer = trainer_of(way, out, rows_of(found.train), seed)
    trainer.train()
    rank = int(os.environ["RANK"])
    loss = heldout_loss(trainer.model, rows_of(found.heldout)) if rank == 0 else 0.0
    made = {"batches": trainer.data_collator.batches, "loss": loss}
    Path(out, f"rank{rank}.json").write_text(json.dumps(made), "utf-8")


def heldout_loss(trained: Any, rows: list[Tokens]) -> float:
    """Returns the held-out loss in nats per label, computed one row at a time."""
    total = 0.0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row])
            total += float(trained(input_ids=ids, labels=ids).loss) * (len(row) - 1)
    return total / sum(len(row) - 1 for row in rows)


def run(way: str, seed: int) -> tuple[list[list[list[Document]]], float]:
    """Trains on all ranks in one of the WAYS and returns (batches of each rank, held-out loss)."""
    stores()  # make the stores now, before two ranks would write the same files at once
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={NUM_RANKS}", "-m", "experiments.hosts.hugging_face",
            "--worker", way, "--out", out, "--seed", str(seed),
        ]  # fmt: skip
        env = os.environ | {"OMP_NUM_THREADS": "1", "TRANSFORMERS_OFFLINE": "1"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{way} failed:\n{done.stderr[-3000:]}")
        made = [
            json.loads(Path(out, f"rank{rank}.json").read_text("utf-8"))
            for rank in range(NUM_RANKS)
        ]
    return [m["batches"] for m in made], made[0]["loss"]


def compare(seeds: int = 1) -> list[Row]:
    """Returns a row of the table for each of the WAYS."""
    expected = ledger(map(shifted, rows_of(stores().train)))
    out: list[Row] = []
    for way, how in WAYS.items():
        ranks, losses = [], []
        for seed in range(seeds):
            print(f"{how}, seed {seed} ...", flush=True)
            ranks, loss = run(way, seed)
            losses.append(loss)
        out.append(row_of(LIBRARY, how, grouped(ranks), expected, losses))
    return out


if __name__ == "__main__":
    parser = experiment_parser(__doc__)
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        # accelerate starts Gloo, whose groups must have one worker thread (`wlb.parallel.gloo`).
        worlds.one_gloo_worker(is_one_machine=True)
        try:
            work(options.worker, options.out, options.seed)
        finally:
            worlds.shutdown()  # otherwise Gloo's threads could abort the process at exit
    else:
        show(table_of(compare()))
