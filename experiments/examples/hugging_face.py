"""Fine-tunes with TRL's SFTTrainer on micro-batches of equal work.

    torchrun --nproc-per-node 8 -m experiments.examples.hugging_face MODEL DATA.jsonl OUT

With `python -m` instead of torchrun it runs in one process. Each line of DATA is {"text": ...} or
{"messages": [...]}.
"""

import argparse

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from wlb.adapters.hugging_face import Balance, balanced

WINDOW = 512
"""Tokens of a micro-batch, roughly. wlb forms them; per_device_train_batch_size has no effect."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("model", "data", "out"):
        parser.add_argument(name)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    # Attention must not cross from one document of a micro-batch to another. The first step checks
    # this (wlb/adapters/README.md). With use_cache, masks of transformers would not separate them.
    attention = "sdpa" if options.cpu else "flash_attention_2"
    model = AutoModelForCausalLM.from_pretrained(
        options.model, attn_implementation=attention, use_cache=False
    )
    config = SFTConfig(
        output_dir=options.out,
        num_train_epochs=1,
        gradient_accumulation_steps=4,
        learning_rate=1e-4,
        max_length=WINDOW,
        logging_steps=1,
        report_to=[],
        use_cpu=options.cpu,
        bf16=not options.cpu,
    )
    trainer = balanced(SFTTrainer)(
        model=model,
        args=config,
        train_dataset=load_dataset("json", data_files=options.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        balance=Balance(context_window=WINDOW),
    )
    trainer.train()
    trainer.save_model()
    even = trainer.balanced_batches.rank_balance()
    print(f"slowest over mean rank of a step, predicted: {even.imbalance:.3f}")


if __name__ == "__main__":
    main()
