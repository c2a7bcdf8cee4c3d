"""`wlb export` and `wlb import`: convert weights to and from Hugging Face folders."""

import argparse
import sys
from pathlib import Path
from typing import Any

from wlb.cli.options import add_text, add_value, size
from wlb.cli.output import needs_train_extra
from wlb.spec import Dtype

MOST_NAMES = 5
"""Most tensors that a warning lists."""


def add_parsers(commands: Any) -> None:
    """Add the parsers of `wlb export` and `wlb import`."""
    exporting = commands.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face folder",
        description="Write the weights of a checkpoint of any layout as a Hugging Face folder that "
        "transformers loads: safetensors, config.json, generation_config.json and the tokenizer of "
        "the run's token store; after training on conversations also the chat template, with the "
        "tokens that end its turns as EOS. The padding of the vocabulary is removed. Runs in one "
        "CPU process.",
    )
    exporting.add_argument(
        "source", metavar="RUN_OR_CHECKPOINT", help="a checkpoint, or a run (its newest)"
    )
    add_text(exporting, "--out", "DIR", "new folder", required=True)
    exporting.add_argument(
        "--dtype", choices=[str(d) for d in Dtype], help="dtype of the tensors (default: as saved)"
    )
    text = "size of the largest file, about equal to the memory needed"
    add_value(exporting, "--shard-size", "5GB", text, metavar="SIZE", type=size)
    text = "a tokenizer.json to use instead of the store's"
    add_text(exporting, "--tokenizer", "FILE", text)
    text = "a chat template, as wlb prepare --chat takes it, to use instead of the store's"
    add_text(exporting, "--chat", "TEMPLATE", text)
    exporting.set_defaults(run=run_export)
    importing = commands.add_parser(
        "import",
        help="make a checkpoint of a Hugging Face folder",
        description="Convert a model in a Hugging Face folder to a checkpoint, with a model.toml "
        "that trains from it on any layout: wlb train DIR/model.toml --set ... Reads safetensors "
        "of Llama, Mistral, Qwen2, Qwen3, Gemma 2 and 3 (text), Qwen3-MoE, Mixtral and OLMoE, "
        "with sliding windows, soft caps and RoPE scaling (llama3, linear, yarn); a tied head "
        "stays the embedding. Other biases, activations and layers, quantised weights, and "
        "missing or unknown tensors are refused by name.",
    )
    importing.add_argument("source", metavar="HF_DIR", help="folder with config.json and weights")
    add_text(importing, "--out", "DIR", "new checkpoint folder", required=True)
    importing.set_defaults(run=run_import)


def run_export(options: argparse.Namespace) -> int:
    """Run `wlb export` and return its exit status."""
    made = _room().export(
        Path(options.source),
        Path(options.out),
        dtype=Dtype(options.dtype) if options.dtype else None,
        shard_bytes=options.shard_size,
        tokenizer=Path(options.tokenizer) if options.tokenizer else None,
        chat=options.chat,
    )
    files = "1 file" if made.num_shards == 1 else f"{made.num_shards} files"
    print(f"{made.folder}: {made.checkpoint} in {made.dtype}, {made.num_bytes:,} bytes in {files}")
    has_one = (made.folder / "tokenizer.json").is_file()
    print(f"tokenizer: {'' if has_one else 'none copied (--tokenizer FILE): '}{made.tokenizer}")
    stops = ", ".join(map(str, made.stops)) or "nothing: no token that ends a text is known"
    print(f"chat template: {'yes' if made.has_chat else 'none'}; generation stops at {stops}")
    return 0


def run_import(options: argparse.Namespace) -> int:
    """Run `wlb import` and return its exit status."""
    room = _room()
    made = room.import_folder(Path(options.source), Path(options.out))
    spec = made.model.spec
    print(
        f"{made.checkpoint}: {spec.num_parameters:,} parameters in {', '.join(made.dtypes)}; "
        f"{made.num_padding_rows} rows of zeros after the vocabulary's {spec.vocab_size:,}"
    )
    if made.not_finite:
        print(_not_finite(made.not_finite), file=sys.stderr)
    for what, number in made.left_out.items():
        tensors = "1 tensor" if number == 1 else f"{number} tensors"
        print(f"left out, as no part of the text model: {tensors} of {what}")
    if spec.tied_embeddings:
        print("its head is its embedding, and stays so (model.tied_embeddings)")
    print(f"prepare data with its tokenizer: wlb prepare ... --tokenizer {options.source}")
    print(f"train from it: wlb train {made.checkpoint / room.MODEL_FILE} --set ...\n")
    print(made.toml, end="")
    return 0


def _not_finite(counts: dict[str, int]) -> str:
    """Return the warning about weights that are NaN or infinite."""
    shown = [f"{name} ({number:,})" for name, number in counts.items()][:MOST_NAMES]
    more = f" and {len(counts) - MOST_NAMES} more tensors" if len(counts) > MOST_NAMES else ""
    return (
        f"wlb import: warning: {sum(counts.values()):,} values are NaN or infinite, in "
        f"{', '.join(shown)}{more}: losses of this model will not be numbers; download it again"
    )


def _room() -> Any:
    """Import `wlb.weights`, which needs torch and safetensors."""
    with needs_train_extra("weights need"):
        from wlb import weights
    return weights
