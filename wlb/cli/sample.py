"""`wlb sample`: the most likely continuation of a text, or answer to it, by a trained model."""

import argparse
import sys
import time
from typing import Any

from wlb.cli.options import add_flag, add_text, add_value
from wlb.cli.output import needs_train_extra
from wlb.plan import check_at_least
from wlb.spec import Dtype


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "sample",
        help="show what a trained model says",
        description="Print the most likely continuation of a text by the model of a checkpoint of "
        "any layout, token by token in one process (greedy). A model that was trained on "
        "conversations answers the text as a user's message, written with its chat template, until "
        "it ends its turn. For more than a look: wlb export. From Python: wlb.weights.load.",
    )
    parser.add_argument(
        "source", metavar="RUN_OR_CHECKPOINT", help="a checkpoint, or a run (its newest)"
    )
    add_text(parser, "--prompt", "TEXT", "what the model goes on from", required=True)
    add_value(parser, "--tokens", 64, "most tokens to make", most=2**20)
    text = "continue the text as it is, although the model was trained on conversations"
    add_flag(parser, "--plain", text)
    add_text(parser, "--tokenizer", "FILE", "a tokenizer.json to use instead of the store's")
    add_text(parser, "--device", "DEVICE", "cpu, or cuda (default: cpu)", default="cpu")
    parser.add_argument(
        "--dtype", choices=[str(d) for d in Dtype], help="dtype of the weights (default: as saved)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_at_least("--tokens", options.tokens, 1, " token")
    with needs_train_extra("a model needs"):
        from wlb import weights
    model = weights.load(
        options.source, dtype=options.dtype, device=options.device, tokenizer=options.tokenizer
    )
    chats = model.chats and not options.plain
    asked = model.encode_plain if options.plain else model.encode
    prompt = asked(options.prompt)
    began = time.perf_counter()
    made = model.greedy(prompt, most=options.tokens)
    took = time.perf_counter() - began
    # What tokens say may depend on those before them (spaces, bytes of a character).
    print(model.decode(made) if chats else model.decode([*prompt, *made]))
    end = "ended by itself" if made[-1] in model.stops else "cut by --tokens"
    print(
        f"{model.folder}: {len(made)} tokens after {len(prompt)}, {end}; {took:.1f} s, the most "
        f"likely token each time",
        file=sys.stderr,
    )
    return 0
