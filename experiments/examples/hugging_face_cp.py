"""Fine-tunes with TRL's SFTTrainer on packed long documents; two GPUs share each micro-batch.

    torchrun --nproc-per-node 8 -m experiments.examples.hugging_face_cp MODEL DATA.jsonl OUT

Each line of DATA is {"text": ...} or {"messages": [...]}. Documents may have any length, and
attention never crosses from one to another.
"""

import argparse

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from wlb.adapters.hugging_face import Balance, balanced

# Context window in tokens; a micro-batch has about as many. On GPUs take for example 131072, with
# gradient checkpointing.
WINDOW = 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "data", "out"):
        parser.add_argument(name)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    config = SFTConfig(
        options.out, num_train_epochs=1, gradient_accumulation_steps=2, learning_rate=1e-4,
        max_length=WINDOW, logging_steps=1, report_to=[], use_cpu=options.cpu, bf16=not options.cpu,
    )  # fmt: skip
    trainer = balanced(SFTTrainer)(
        model=AutoModelForCausalLM.from_pretrained(options.model),
        args=config,
        train_dataset=load_dataset("json", data_files=options.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        balance=Balance(context_window=WINDOW, cp=2),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
