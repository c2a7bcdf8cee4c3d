"""Trains on two processes with TRL's GRPOTrainer, whose completions wlb balances by length.

`python -m experiments.hosts.trl_grpo` needs the extra [hf].
"""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from experiments.hosts.common import in_two_processes, tiny_llama, words_tokenizer


def train(rank: int) -> None:
    from wlb.adapters.rl.trl import balanced_grpo

    def short(completions: list[str], **_: object) -> list[float]:
        return [-float(len(text.split())) for text in completions]

    args = GRPOConfig(
        output_dir="runs/adapters/trl_grpo",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=24,
        max_steps=3,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        learning_rate=1e-3,
    )
    trainer = balanced_grpo(GRPOTrainer)(
        model=tiny_llama(),
        args=args,
        reward_funcs=short,
        train_dataset=Dataset.from_list([{"prompt": f"w{i % 8} w{i % 5}"} for i in range(32)]),
        processing_class=words_tokenizer(),
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"rank {rank}: reward {rewards}")


if __name__ == "__main__":
    in_two_processes(train)
