"""`wlb export` and `wlb import`: convert weights to and from Hugging Face folders."""

import argparse
import sys
from pathlib import Path
from typing import Any

from wlb.cli.options import add_text, add_value, size
from wlb.cli.output import needs_train_extra
from wlb.spec import Dtype

MOST_NAMES = 5
"""The warning about values that are not finite names at most this many tensors."""


def add_parsers(commands: Any) -> None:
    """Add the parsers of `wlb export` and `wlb import` to the subparsers `commands`."""
    exporting = commands.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face folder",
        description="Write the weights of a checkpoint as a Hugging Face folder that transformers "
        "can load, with safetensors, config.json, generation_config.json and the tokenizer of the "
        "run's token store. The checkpoint may have any parallel layout. After training on "
        "conversations, the folder also has the chat template, and generation stops at the tokens "
        "that end a turn. Padding of the vocabulary is removed. The command runs in one process on "
        "the CPU.",
    )
    exporting.add_argument(
        "source",
        metavar="RUN_OR_CHECKPOINT",
        help="the folder of a checkpoint, or the folder of a run (its newest checkpoint is "
        "exported)",
    )
    add_text(exporting, "--out", "DIR", "the folder to write, which must not exist", required=True)
    exporting.add_argument(
        "--dtype",
        choices=[str(d) for d in Dtype],
        help="dtype of the exported tensors (default: as in the checkpoint)",
    )
    text = "largest size of a safetensors file; the command needs about as much memory"
    add_value(exporting, "--shard-size", "5GB", text, metavar="SIZE", type=size)
    text = "a tokenizer.json to use instead of the token store's"
    add_text(exporting, "--tokenizer", "FILE", text)
    text = "a chat template, as for wlb prepare --chat, to use instead of the token store's"
    add_text(exporting, "--chat", "TEMPLATE", text)
    exporting.set_defaults(run=run_export)
    importing = commands.add_parser(
        "import",
        help="convert a Hugging Face folder to a checkpoint",
        description="Convert a model in a Hugging Face folder to a checkpoint, and write a "
        "model.toml that trains from the checkpoint on any parallel layout: wlb train "
        "DIR/model.toml --set ... Supported are safetensors of Llama, Mistral, Qwen2, Qwen3, Gemma "
        "2 and 3 (text), Qwen3-MoE, Mixtral, OLMoE, Qwen3-Next and Qwen3.5 (text), with sliding "
        "windows, soft caps and RoPE scaling (llama3, linear, yarn). A head that is tied to the "
        "embedding stays tied. Quantised weights, missing or unknown tensors, and biases, "
        "activations and layers that these families do not have are refused with a message that "
        "names them.",
    )
    importing.add_argument(
        "source", metavar="HF_DIR", help="the folder with config.json and safetensors"
    )
    text = "the checkpoint folder to write, which must not exist"
    add_text(importing, "--out", "DIR", text, required=True)
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
    missing = "" if has_one else "no tokenizer.json was copied (give one with --tokenizer FILE): "
    print(f"tokenizer: {missing}{made.tokenizer}")
    stops = ", ".join(map(str, made.stops)) or "no token, because no end-of-text token is known"
    print(f"chat template: {'yes' if made.has_chat else 'none'}; generation stops at {stops}")
    return 0


def run_import(options: argparse.Namespace) -> int:
    """Run `wlb import` and return its exit status."""
    room = _room()
    made = room.import_folder(Path(options.source), Path(options.out))
    spec = made.model.spec
    print(
        f"{made.checkpoint}: {spec.num_parameters:,} parameters in {', '.join(made.dtypes)}; "
        f"vocabulary of {spec.vocab_size:,} tokens, padded with {made.num_padding_rows} rows of "
        f"zeros"
    )
    if made.not_finite:
        print(_not_finite(made.not_finite), file=sys.stderr)
    for what, number in made.left_out.items():
        tensors = "1 tensor" if number == 1 else f"{number} tensors"
        print(f"left out, because not part of the text model: {tensors} of {what}")
    if spec.tied_embeddings:
        print("the output head shares the weights of the embedding (model.tied_embeddings = true)")
    print(f"to prepare data with this tokenizer: wlb prepare ... --tokenizer {options.source}")
    print(f"to train this model: wlb train {made.checkpoint / room.MODEL_FILE} --set ...\n")
    print(made.toml, end="")
    return 0


def _not_finite(counts: dict[str, int]) -> str:
    """Return the warning about weights that are NaN or infinite.

    Args:
        counts: Number of such values in each tensor, by the tensor's name.
    """
    shown = [f"{name} ({number:,})" for name, number in counts.items()][:MOST_NAMES]
    more = f" and {len(counts) - MOST_NAMES} more tensors" if len(counts) > MOST_NAMES else ""
    return (
        f"wlb import: warning: {sum(counts.values()):,} weights are NaN or infinite, in the "
        f"tensors {', '.join(shown)}{more}, so every loss of this model will be NaN; download the "
        f"model again"
    )


def _room() -> Any:
    """Import and return `wlb.weights`; UserError if torch or safetensors is not installed."""
    with needs_train_extra("weights need"):
        from wlb import weights
    return weights
