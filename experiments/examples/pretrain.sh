#!/usr/bin/env bash
# Pre-trains on JSONL, from text to transformers:   bash pretrain.sh FOLDER FILE.jsonl ...
# Each line of FILE is {"text": "..."}; `wlb prepare --help` lists other keys and formats. The token store, the run
# and the exported model go to FOLDER.
set -euo pipefail
out=$1 here=$(dirname "$0")

# 1. Tokenize the documents. This trains a BPE tokenizer on them; --tokenizer FILE uses an existing one.
wlb prepare "${@:2}" --out "$out/store" --vocab-size 1024 --heldout-fraction 0.1

# 2. Train. The table compares the imbalance with that of a usual loader, which makes windows of equal tokens.
settings=("data.store=$out/store" "data.heldout_store=$out/store-heldout" "run.output_dir=$out")
wlb train "$here/pretrain.toml" --set "${settings[@]}"

# 3. Resume from the last checkpoint, with more steps. Another layout may be set too: parallel.cp=1 parallel.dp=2
wlb train "$here/pretrain.toml" --resume --set "${settings[@]}" training.steps=30

# 4. Export a Hugging Face folder with the tokenizer, and load it in transformers.
wlb export "$out/pretrain" --out "$out/exported"
python - "$out/exported" <<'END'
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
made = model.generate(**tokenizer("The ", return_tensors="pt"), max_new_tokens=16, do_sample=False)
print("transformers:", tokenizer.decode(made[0], skip_special_tokens=True))
END
