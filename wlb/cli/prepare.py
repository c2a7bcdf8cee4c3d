"""`wlb prepare`: make token stores from text or conversations, or check stores; needs no torch."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from wlb.cli.options import MOST_PROCESSES, add_flag, add_text, add_value, number
from wlb.data import TokenStore, verify_store
from wlb.data.lengths import FAMILIES
from wlb.plan import UserError
from wlb.prepare import ChatChoice, PrepareOptions, Status, StoreReport, prepare_store
from wlb.prepare.chat_encode import UNREAD
from wlb.prepare.synthetic import prepare_synthetic
from wlb.report.tables import console, facts_table

DEFAULTS = PrepareOptions(inputs=("-",), out="-")
CHAT_DEFAULTS = ChatChoice()

SYNTHETIC_WINDOW = 131072
"""Default of --window, in tokens: the longest document that --synthetic makes."""
MOST_WINDOW = 1 << 28
"""Largest value of --window, in tokens. A document is made in memory as 64-bit integers, so a
longer one would take more than 2 GiB."""
READING_OPTIONS = {
    "--vocab-size": "vocab_size",
    "--sample-bytes": "sample_bytes",
    "--on-error": "on_error",
    "--heldout-fraction": "heldout_fraction",
    "--processes": "processes",
}
"""Options about reading files, each with its field of PrepareOptions. They are refused with
--synthetic, which reads no files."""
MOST_KEYS = 8
"""Of the keys of chat messages that `wlb prepare` does not know, its output names at most this
many."""
TEXT_OPTIONS = {
    "--documents": "policy",
    "--text-key": "text_key",
    "--one-per": "text_unit",
    "--bos": "bos",
    "--eos": "eos",
}
"""Options for plain text, each with its field of PrepareOptions. --chat refuses them."""

CHAT_OPTIONS = {
    f"--{field.name.replace('_', '-')}": field.name
    for field in fields(ChatChoice)
    if field.name != "template"
}
"""Options for conversations, each with its field of ChatChoice. They need --chat, and are None if
they are not given."""


def add_parser(commands: Any) -> None:
    """Add the parser of `wlb prepare` to the subparsers `commands`."""
    parser = commands.add_parser(
        "prepare",
        help="turn text, JSONL, JSON or Parquet into a token store",
        description="Turn files into a token store (.bin, .idx and .json) for data.store. Inputs "
        "may be JSONL (.jsonl, .ndjson), JSON lists or lines (.json), Parquet, and text (any other "
        "name). All except Parquet may be compressed (.gz, .bz2, .xz). With --chat, turn "
        "conversations into a store that marks which tokens are trained. To resume an interrupted "
        "preparation, repeat the command.",
    )
    text = (
        "files, folders (read recursively) or quoted glob patterns. With --verify but without "
        "--out: paths of token stores without their suffix. With --synthetic: none"
    )
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help=text)
    text = (
        "path of the store without its suffix: PREFIX.bin, PREFIX.idx and PREFIX.json are written"
    )
    add_text(parser, "--out", "PREFIX", text)
    add_flag(
        parser,
        "--verify",
        "check the checksum of the finished store, and that all its tokens are in the vocabulary; "
        "without --out, check the stores that INPUT names",
    )
    _add_tokenizer(parser.add_argument_group("tokenizer"))
    _add_documents(parser.add_argument_group("documents"))
    _add_chat(parser.add_argument_group("conversations"))
    _add_synthetic(parser.add_argument_group("documents of drawn lengths"))
    text = "number of worker processes; the store does not depend on it"
    add_value(parser, "--processes", DEFAULTS.processes, text, most=MOST_PROCESSES)
    text = "replace a finished or unfinished store that was made from other inputs or options"
    add_flag(parser, "--overwrite", text)
    parser.set_defaults(run=run)


def _add_tokenizer(group: Any) -> None:
    text = (
        "a tokenizer.json file or its folder; bytes = a token for each byte, and the tokens BOS "
        "and EOS; bpe = a byte-level BPE that is trained on a sample of the input. Default: "
        f"{DEFAULTS.tokenizer}, or with --chat FOLDER the tokenizer in FOLDER"
    )
    add_text(group, "--tokenizer", "FILE|bytes|bpe", text)
    text = "largest vocabulary of the trained BPE, including the special tokens of --chat"
    add_value(group, "--vocab-size", DEFAULTS.vocab_size, text, most=10**6)
    text = "bytes of text on which the BPE is trained"
    add_value(group, "--sample-bytes", DEFAULTS.sample_bytes, text, most=2**40)
    text = (
        "special tokens around each document: eos_bos = BOS before and EOS after it, separator = "
        "EOS after it, none = no special tokens"
    )
    add_value(group, "--documents", DEFAULTS.policy, text, dest="policy")
    for name in ("bos", "eos"):
        text = (
            f"the {name.upper()} token (default: the token that tokenizer_config.json names, or "
            f"the only special token that has a usual {name.upper()} name)"
        )
        add_text(group, f"--{name}", "TOKEN", text, default="")


def _add_documents(group: Any) -> None:
    text = "key of JSON objects, or column of Parquet files, that has the text of a document"
    add_value(group, "--text-key", DEFAULTS.text_key, text)
    text = "which part of a text file becomes one document"
    add_value(group, "--one-per", DEFAULTS.text_unit, text, dest="text_unit")
    text = (
        "what to do with a record that has malformed JSON, invalid UTF-8, no text, or (with "
        "--chat) no conversation: stop with an error that names its place, or skip the record "
        "(skipped records are counted, and the first of them are shown)"
    )
    add_value(group, "--on-error", DEFAULTS.on_error, text)
    text = "fraction of documents that go to the held-out store PREFIX-heldout"
    add_value(group, "--heldout-fraction", DEFAULTS.heldout_fraction, text)
    text = "seed for choosing the held-out documents and the sample on which the BPE is trained"
    add_value(group, "--seed", DEFAULTS.seed, text, most=2**64 - 1)


def _add_chat(group: Any) -> None:
    text = (
        "read records as conversations (keys messages, conversations, prompt and completion, or "
        "instruction, input and output), and write them with this chat template. TEMPLATE may be "
        "chatml, llama3, a model's folder (with tokenizer.json, and chat_template.jinja or "
        "tokenizer_config.json), a Jinja file or a tokenizer_config.json. Only messages of "
        "assistants are trained. A record can mark messages as not trained (with keys such as "
        "weight, train, loss or loss_mask)"
    )
    add_text(group, "--chat", "TEMPLATE", text)
    for option, text in (
        ("--turns", "which messages of the assistant are trained"),
        ("--too-long", "what to do with conversations of more than --limit tokens"),
        ("--on-untrained", "what to do with a conversation in which no token is trained"),
    ):
        add_value(group, option, getattr(CHAT_DEFAULTS, CHAT_OPTIONS[option]), text, default=None)
    text = "most tokens that a conversation may have (default: no limit)"
    add_text(group, "--limit", "TOKENS", text, type=number(int))
    group.add_argument(
        "--add-tokens",
        action="store_true",
        default=None,
        help="add the template's special tokens to a tokenizer that lacks them; use this only for "
        "a model that is trained from scratch. A BPE that is trained here always has these tokens",
    )


def _add_synthetic(group: Any) -> None:
    text = (
        f"instead of reading INPUT, draw the lengths of documents from a distribution "
        f"({', '.join(FAMILIES)}) and fill the documents with source text of Python's standard "
        f"library, one token for each byte"
    )
    add_text(group, "--synthetic", "FAMILY", text)
    text = "number of tokens of the store that --synthetic makes"
    add_text(group, "--tokens", "TOKENS", text, type=number(int))
    text = (
        f"context window in tokens, to which --synthetic scales the lengths; no document is longer "
        f"(default: {SYNTHETIC_WINDOW})"
    )
    add_text(group, "--window", "TOKENS", text, type=number(int, MOST_WINDOW))


def _chat(options: argparse.Namespace) -> ChatChoice | None:
    """Return the values of the options for conversations, or None if --chat is not given.

    Raises:
        UserError: An option for conversations is given without --chat, or an option for plain text
            with --chat.
    """
    if options.chat is None:
        if given := _written(options, CHAT_OPTIONS):
            raise UserError(
                f"{given} has an effect only for conversations; add --chat TEMPLATE if the records "
                f"are conversations, or remove {given}"
            )
        return None
    if given := _written(options, TEXT_OPTIONS):
        raise UserError(
            f"{given} has an effect only for plain text: with --chat {options.chat}, the template "
            f"determines the special tokens, and the keys of records are fixed; remove {given}"
        )
    if options.too_long and options.limit is None:
        raise UserError(
            f"--too-long {options.too_long} has no effect without a limit; add --limit TOKENS"
        )
    chosen = {name: getattr(options, name) for name in CHAT_OPTIONS.values()}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    return ChatChoice(template=options.chat, **chosen)


def _written(options: argparse.Namespace, names: dict[str, str]) -> str:
    """Return the options that differ from their defaults, as a user would type them.

    Args:
        options: The parsed command line.
        names: The options to look at, each with the name of its value in `options`.
    """
    words: list[str] = []
    for option, name in names.items():
        value = getattr(options, name)
        if value != getattr(DEFAULTS, name, None):
            words.append(option if value is True else f"{option} {value}")
    return " ".join(words)


def run(options: argparse.Namespace) -> int:
    """Run `wlb prepare` and return its exit status."""
    # Turn off rich's markup, because names of files may contain brackets.
    screen = console(markup=False)
    if options.synthetic is not None:
        return _synthetic(options, screen)
    for option in ("tokens", "window"):
        if getattr(options, option) is not None:
            raise UserError(
                f"--{option} has an effect only with --synthetic FAMILY; add --synthetic FAMILY, "
                f"or remove --{option}"
            )
    if not options.inputs:
        raise UserError(
            "no INPUT is given; give files or folders, or make documents of random lengths with "
            "--synthetic wlb_paper --tokens N"
        )
    if options.out is not None:
        return _texts(options, screen)
    if not options.verify:
        raise UserError(
            "--out is missing; add --out PREFIX to make a store, or --verify to check the stores "
            "that INPUT names"
        )
    for prefix in options.inputs:
        _verify(prefix, screen)
    return 0


def _texts(options: argparse.Namespace, screen: Console) -> int:
    """Make a store from the files of INPUT, print a description, and return the exit status."""
    chat = _chat(options)
    # If --chat names the folder of a model, use the tokenizer of that folder by default.
    if options.tokenizer is None:
        is_folder = chat is not None and Path(chat.template).is_dir()
        options.tokenizer = chat.template if chat and is_folder else DEFAULTS.tokenizer
    given = {f.name: getattr(options, f.name) for f in fields(PrepareOptions) if f.name in options}
    asked = PrepareOptions(**{**given, "inputs": tuple(options.inputs)})
    try:
        made = _prepare(asked, chat)
    except RuntimeError as failure:  # a worker process died
        screen.print(f"wlb prepare: {failure}")
        return 1
    screen.print(_table(made))
    for reason, shown in made.examples.items():
        screen.print(
            f"records left out ({reason}): {made.skipped[reason]:,} in all; the first of them:"
        )
        for line in shown:
            screen.print(f"  {line}")
    if options.verify:
        for prefix in filter(None, (made.prefix, made.heldout)):
            _verify(prefix, screen)
    return 0


def _synthetic(options: argparse.Namespace, screen: Console) -> int:
    """Make a store of documents of random lengths (--synthetic), and return the exit status.

    Raises:
        UserError: A required option is missing, or an option is given that --synthetic ignores.
    """
    if options.out is None or options.tokens is None:
        raise UserError(
            "--synthetic needs --out PREFIX and --tokens N (the number of tokens of the store); "
            "add both"
        )
    if options.inputs:
        raise UserError(
            f"--synthetic makes its documents itself and reads no INPUT; remove "
            f"{' '.join(map(str, options.inputs))}"
        )
    given = _written(options, TEXT_OPTIONS | CHAT_OPTIONS | READING_OPTIONS)
    for option in ("chat", "tokenizer"):
        if (value := getattr(options, option)) is not None:
            given += f" --{option} {value}"
    if given:
        raise UserError(
            f"{given.strip()} has no effect with --synthetic, which always makes one token of "
            f"each byte; remove {given.strip()}"
        )
    prepare_synthetic(
        options.out,
        family=options.synthetic,
        num_tokens=options.tokens,
        window=SYNTHETIC_WINDOW if options.window is None else options.window,
        seed=options.seed,
        overwrite=options.overwrite,
    )
    store = TokenStore(options.out)
    p50, p99 = (int(n) for n in np.percentile(store.lengths, [50, 99]))
    longest = int(store.lengths.max())
    screen.print(
        f"{options.out}: {store.summary}; lengths in tokens drawn from {options.synthetic}: p50 "
        f"{p50:,}, p99 {p99:,}, longest {longest:,}. To train on this store, add --set "
        f"data.store={options.out}"
    )
    if options.verify:
        _verify(options.out, screen)
    return 0


def _prepare(options: PrepareOptions, chat: ChatChoice | None) -> StoreReport:
    """Make the store while showing a progress bar on stderr, and return what was done.

    Args:
        options: Inputs and settings of the preparation.
        chat: Settings for conversations; None for plain text.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(stderr=True)) as bar:
        task = bar.add_task("listing inputs", total=None, counts="")

        def show(status: Status) -> None:
            counts = f"{status.num_documents:,} documents" if status.num_documents else ""
            if status.skipped:
                counts += f", {status.skipped:,} left out"
            total = status.size if status.done else None
            bar.update(
                task, description=status.stage, total=total, completed=status.done, counts=counts
            )

        return prepare_store(options, encoder=chat, progress=show)


def _verify(prefix: str, screen: Console) -> None:
    """Check the store with this prefix and print that it is intact; raise if it is not."""
    verify_store(prefix)
    summary = TokenStore(prefix).summary
    screen.print(f"{prefix}: {summary}; the checksum is correct, all tokens are in the vocabulary")


def _table(made: StoreReport) -> Table:
    """Return a table that describes the stores that were made."""
    megabytes = made.num_bytes / 1e6
    heldout = f"{made.num_heldout_documents:,} documents, {made.num_heldout_tokens:,} tokens"
    trained = unknown = text = ""
    if made.num_text_files:
        text = f" ({made.num_text_files:,} read as text)"
    # Say how many tokens have labels, except for plain text, where every token of a document but
    # the last one has a label.
    if made.num_targets != made.num_tokens - made.num_documents:
        trained = f"{made.num_targets:,} tokens, {made.num_targets / made.num_tokens:.1%}"
    if made.num_unknown:
        unknown = f"{made.num_unknown:,} tokens, for characters that the tokenizer does not know"
    counts = {name: n for name, n in made.counts.items() if not name.startswith(UNREAD)}
    if made.reused:
        work = "the store existed already, so nothing was encoded"
    else:
        kept = f", {made.num_kept} of them from an interrupted run" if made.num_kept else ""
        work = f"{megabytes / made.time_s:.2f} MB/s; {made.num_shards} shards{kept}"
    rows = {
        "store": made.prefix,
        "tokenizer": f"{made.tokenizer or 'bytes'}, vocabulary {made.vocab_size:,}",
        "documents": f"{made.num_documents:,}",
        "tokens": f"{made.num_tokens:,}",
        "trained": trained,
        "length": f"p50 {made.lengths_p50:,}, p99 {made.lengths_p99:,}, longest {made.longest:,}",
        "held out": f"{heldout} in {made.heldout}" if made.heldout else "none",
        "counts": _counted(counts).replace("_", " "),
        "not read": _unread(made.counts),
        "left out": _counted(made.skipped) or "nothing",
        "unknown": unknown,
        "checksum": made.checksum,
        "input": f"{made.num_files:,} files{text}, {megabytes:,.1f} MB",
        "time": f"{made.time_s:.1f} s{'; ' if made.reused else ', '}{work}",
    }
    table = facts_table("Token store")
    for name, text in rows.items():
        if text:
            table.add_row(name, text)
    return table


def _unread(counts: dict[str, int]) -> str:
    """Return a text that lists keys of chat messages that were ignored, the most frequent first.

    Args:
        counts: Counters of the preparation; those whose name begins with `UNREAD` are used.
    """
    found = {n.removeprefix(UNREAD): counts[n] for n in counts if n.startswith(UNREAD)}
    names = sorted(found, key=lambda name: (-found[name], name))
    shown = [f"{n!r} of {found[n]:,} messages" for n in names[:MOST_KEYS]]
    more = [f"{len(names) - MOST_KEYS:,} more keys"] if len(names) > MOST_KEYS else []
    return ", ".join(shown + more)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())
