#!/usr/bin/env bash
# Pre-trains on JSONL, from text to transformers:   bash pretrain.sh FOLDER FILE.jsonl ...
# A line is {"text": "..."}; `wlb prepare --help` has other keys, Parquet, plain text. FOLDER gets the store, the
# run and the exported model.
set -euo pipefail
out=$1 here=$(dirname "$0")

# 1. Documents to tokens. A BPE is trained on them; --tokenizer FILE takes one that you have.
wlb prepare "${@:2}" --out "$out/store" --vocab-size 1024 --heldout-fraction 0.1

# 2. Train. The table shows the imbalance beside that of a usual loader's windows of equal tokens.
settings=("data.store=$out/store" "data.heldout_store=$out/store-heldout" "run.output_dir=$out")
wlb train "$here/pretrain.toml" --set "${settings[@]}"

# 3. Go on from the last checkpoint, with more steps. Another layout would do as well: parallel.cp=1 parallel.dp=2
wlb train "$here/pretrain.toml" --resume --set "${settings[@]}" training.steps=30

# 4. A Hugging Face folder, with the tokenizer.
wlb export "$out/pretrain" --out "$out/exported"
python - "$out/exported" <<'END'
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
made = model.generate(**tokenizer("The ", return_tensors="pt"), max_new_tokens=16, do_sample=False)
print("transformers:", tokenizer.decode(made[0], skip_special_tokens=True))
END
