"""Fine-tunes on two processes with TRL's SFTTrainer; wlb divides each step's rows by work.

Every step trains its own rows: nothing is delayed. `python -m experiments.hosts.trl_sft` needs the
extra [hf].
"""

import numpy as np
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from experiments.hosts.common import in_two_processes, tiny_llama, words_tokenizer


def train(rank: int) -> None:
    from wlb.adapters.trl import balanced_steps

    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(3, 0.8, 96), 120).astype(int) + 2
    rows = [{"input_ids": rng.integers(4, 12, n).tolist()} for n in lengths]
    args = SFTConfig(
        output_dir="runs/adapters/trl_sft",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=3,
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        max_length=None,
    )
    trainer = balanced_steps(SFTTrainer)(
        model=tiny_llama(),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=words_tokenizer(),
        max_tokens=400,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"rank {rank}: loss {losses}")


if __name__ == "__main__":
    in_two_processes(train)
