#!/usr/bin/env bash
# Fine-tunes on conversations:   bash chat.sh FOLDER MODEL CHATS.jsonl [KEY=VALUE ...]
# MODEL is the Hugging Face folder of a Llama with a chat template. Each line of CHATS is {"messages": [{"role", "content"}, ...]}
# (wlb/prepare/README.md lists other formats, such as ShareGPT, Alpaca and tool calls). Only assistants' turns are trained.
# KEY is any that `wlb train --help-all` lists, as in parallel.tp=8 data.context_window=8192 training.dtype=bfloat16.
set -euo pipefail
out=$1 model=$2 chats=$3

# 1. Convert the weights to a checkpoint for any parallel layout, with a model.toml that starts from it.
wlb import "$model" --out "$out/base"

# 2. Tokenize the conversations with the model's chat template and tokenizer.
wlb prepare "$chats" --out "$out/chat" --chat "$model"

# 3. Train about two epochs of short conversations, packed into micro-batches of equal work.
wlb train "$out/base/model.toml" --set "data.store=$out/chat" "run.name=chat" "run.output_dir=$out/runs" \
    data.context_window=512 data.num_windows=4 training.steps=40 training.warmup_steps=4 \
    training.learning_rate=1e-5 eval.steps=0 "${@:4}"

# 4. Export a Hugging Face folder. It includes the chat template, and generation stops at the end of a turn.
wlb export "$out/runs/chat" --out "$out/exported"
python - "$out/exported" <<'END'
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
asked = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Hello"}],
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
)
made = model.generate(**asked, max_new_tokens=64, do_sample=False)[0, asked["input_ids"].shape[1] :]
ended = "ended its turn" if made[-1] in model.generation_config.eos_token_id else "was cut"
print(f"transformers: {tokenizer.decode(made, skip_special_tokens=True)} ({ended})")
END
