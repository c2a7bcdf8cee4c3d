"""`wlb prepare`: make a token store of text or conversations, or check stores; needs no torch."""

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
MOST_WINDOW = 1 << 28
"""Most tokens of a drawn document, which is made in memory as 64-bit integers."""
READING_OPTIONS = {
    "--vocab-size": "vocab_size",
    "--sample-bytes": "sample_bytes",
    "--on-error": "on_error",
    "--heldout-fraction": "heldout_fraction",
    "--processes": "processes",
}
"""Options about reading files, which --synthetic does not accept, and their fields of
PrepareOptions."""
MOST_KEYS = 8
"""Most unknown keys of messages that the report lists."""
TEXT_OPTIONS = {
    "--documents": "policy",
    "--text-key": "text_key",
    "--one-per": "text_unit",
    "--bos": "bos",
    "--eos": "eos",
}
"""Options that --chat does not accept, and their fields of PrepareOptions."""

CHAT_OPTIONS = {
    f"--{field.name.replace('_', '-')}": field.name
    for field in fields(ChatChoice)
    if field.name != "template"
}
"""Options that need --chat, and their fields of ChatChoice. An option that is not given is None."""


def add_parser(commands: Any) -> None:
    """Add the parser of `wlb prepare`."""
    parser = commands.add_parser(
        "prepare",
        help="turn text, JSONL, JSON or Parquet into a token store",
        description="Turn JSONL (.jsonl, .ndjson), JSON lists or lines (.json), Parquet and text "
        "(any other file), each also .gz, .bz2 or .xz but Parquet, folders and glob patterns of "
        "records or of text, into a token store (.bin + .idx + .json) for data.store; with --chat, "
        "turn conversations into a store that marks which tokens are trained. The same command "
        "continues an interrupted preparation.",
    )
    text = (
        "files, folders (read recursively), quoted patterns; with --verify alone: stores; none "
        "with --synthetic"
    )
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help=text)
    add_text(parser, "--out", "PREFIX", "prefix of the store")
    add_flag(
        parser,
        "--verify",
        "read the finished store and check its checksum and that all tokens are in the vocabulary; "
        "without --out, INPUTs are prefixes of stores to check",
    )
    _add_tokenizer(parser.add_argument_group("tokenizer"))
    _add_documents(parser.add_argument_group("documents"))
    _add_chat(parser.add_argument_group("conversations"))
    _add_synthetic(parser.add_argument_group("documents of drawn lengths"))
    text = "worker processes; the store is the same for any number"
    add_value(parser, "--processes", DEFAULTS.processes, text, most=MOST_PROCESSES)
    text = "replace a store and parts of a preparation that had other inputs or arguments"
    add_flag(parser, "--overwrite", text)
    parser.set_defaults(run=run)


def _add_tokenizer(group: Any) -> None:
    text = (
        "a tokenizer.json or its folder; bytes: 256 bytes, BOS, EOS; bpe: a byte-level BPE "
        f"trained on a sample of the input (default: {DEFAULTS.tokenizer}, or with --chat FOLDER "
        f"that of the folder)"
    )
    add_text(group, "--tokenizer", "FILE|bytes|bpe", text)
    text = "most tokens of the trained BPE, those of --chat included"
    add_value(group, "--vocab-size", DEFAULTS.vocab_size, text, most=10**6)
    text = "text the BPE is trained on"
    add_value(group, "--sample-bytes", DEFAULTS.sample_bytes, text, most=2**40)
    text = "eos_bos: BOS before and EOS after each document; separator: EOS after; none: only text"
    add_value(group, "--documents", DEFAULTS.policy, text, dest="policy")
    for name in ("bos", "eos"):
        text = (
            f"the {name.upper()} token; default: as tokenizer_config.json says, or the one "
            f"special token with a usual name"
        )
        add_text(group, f"--{name}", "TOKEN", text, default="")


def _add_documents(group: Any) -> None:
    text = "key of JSON objects, column of Parquet; for records only"
    add_value(group, "--text-key", DEFAULTS.text_key, text)
    text = "unit of a text file that becomes a document"
    add_value(group, "--one-per", DEFAULTS.text_unit, text, dest="text_unit")
    text = (
        "reaction to malformed JSON, invalid UTF-8, a missing text or a record that is no "
        "conversation: stop and name its place, or skip it (skipped records are counted, and the "
        "first ones shown)"
    )
    add_value(group, "--on-error", DEFAULTS.on_error, text)
    text = "share of documents that go to PREFIX-heldout, by a hash of seed and name"
    add_value(group, "--heldout-fraction", DEFAULTS.heldout_fraction, text)
    text = "seed of the held-out choice and the BPE's sample"
    add_value(group, "--seed", DEFAULTS.seed, text, most=2**64 - 1)


def _add_chat(group: Any) -> None:
    text = (
        "records are conversations (messages, conversations, or prompt and completion), written "
        "with this template: chatml, llama3, a model's folder (with chat_template.jinja or a "
        "tokenizer_config.json, and its tokenizer.json), a Jinja file or a tokenizer_config.json; "
        "only the messages of assistants are trained, but those marked as not trained (weight, "
        "train, loss, loss_mask, ...); also records of instruction, input and output"
    )
    add_text(group, "--chat", "TEMPLATE", text)
    for option, text in (
        ("--turns", "which of the assistant's messages are trained"),
        ("--too-long", "treatment of conversations of more than --limit tokens"),
        ("--on-untrained", "reaction to a conversation without a trained token"),
    ):
        add_value(group, option, getattr(CHAT_DEFAULTS, CHAT_OPTIONS[option]), text, default=None)
    text = "most tokens of a document (default: any)"
    add_text(group, "--limit", "TOKENS", text, type=number(int))
    group.add_argument(
        "--add-tokens",
        action="store_true",
        default=None,
        help="give the tokenizer the special tokens of the template that it lacks, for a model "
        "that is trained from the start; a trained BPE has them",
    )


def _add_synthetic(group: Any) -> None:
    text = (
        f"instead of INPUTs: draw documents' lengths from a family ({', '.join(FAMILIES)}) and "
        f"fill them with the text of Python's standard library, a token a byte"
    )
    add_text(group, "--synthetic", "FAMILY", text)
    text = "size of the store that --synthetic makes"
    add_text(group, "--tokens", "TOKENS", text, type=number(int))
    text = (
        f"context window that drawn lengths scale with, the longest document (default: "
        f"{SYNTHETIC_WINDOW})"
    )
    add_text(group, "--window", "TOKENS", text, type=number(int, MOST_WINDOW))


def _chat(options: argparse.Namespace) -> ChatChoice | None:
    """Return the choices about conversations, or None without --chat.

    Raises:
        UserError: An option about conversations is given without --chat, or one about plain text
            with it.
    """
    if options.chat is None:
        if given := _written(options, CHAT_OPTIONS):
            raise UserError(
                f"{given} is for conversations; add --chat TEMPLATE if the records are "
                f"conversations, or leave it out"
            )
        return None
    if given := _written(options, TEXT_OPTIONS):
        raise UserError(
            f"{given} is for text; with --chat {options.chat} the template sets the tokens around "
            f"messages, and the keys of conversations are fixed, so leave it out"
        )
    if options.too_long and options.limit is None:
        raise UserError(f"--too-long {options.too_long} needs --limit TOKENS, which is not given")
    chosen = {name: getattr(options, name) for name in CHAT_OPTIONS.values()}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    return ChatChoice(template=options.chat, **chosen)


def _written(options: argparse.Namespace, names: dict[str, str]) -> str:
    """Return the options of `names` that differ from their defaults, as a user would type them."""
    words: list[str] = []
    for option, name in names.items():
        value = getattr(options, name)
        if value != getattr(DEFAULTS, name, None):
            words.append(option if value is True else f"{option} {value}")
    return " ".join(words)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    # rich's markup is off, because file names may contain brackets.
    screen = console(markup=False)
    if options.synthetic is not None:
        return _synthetic(options, screen)
    for option in ("tokens", "window"):
        if getattr(options, option) is not None:
            raise UserError(f"--{option} is for --synthetic FAMILY, which is not given")
    if not options.inputs:
        raise UserError(
            "no INPUT is given; name files or folders, or draw documents' lengths with --synthetic "
            "wlb_paper --tokens N"
        )
    if options.out is not None:
        return _texts(options, screen)
    if not options.verify:
        raise UserError(
            "--out is missing; give --out PREFIX to make a store, or --verify to check stores"
        )
    for prefix in options.inputs:
        _verify(prefix, screen)
    return 0


def _texts(options: argparse.Namespace, screen: Console) -> int:
    """Make a store of the INPUTs, print a description of it, and return the exit status."""
    chat = _chat(options)
    # A model's folder given to --chat also has the tokenizer.
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
        screen.print(f"left out, {reason}, {made.skipped[reason]:,} in all:")
        for line in shown:
            screen.print(f"  {line}")
    if options.verify:
        for prefix in filter(None, (made.prefix, made.heldout)):
            _verify(prefix, screen)
    return 0


def _synthetic(options: argparse.Namespace, screen: Console) -> int:
    """Make a store of documents of drawn lengths.

    Raises:
        UserError: An option is missing, or is given that has no meaning for drawn documents.
    """
    if options.out is None or options.tokens is None:
        raise UserError("--synthetic needs --out PREFIX and --tokens N, the size of the store")
    if options.inputs:
        raise UserError(
            f"--synthetic draws its documents and reads no INPUT; leave out "
            f"{' '.join(map(str, options.inputs))}"
        )
    given = _written(options, TEXT_OPTIONS | CHAT_OPTIONS | READING_OPTIONS)
    for option in ("chat", "tokenizer"):
        if (value := getattr(options, option)) is not None:
            given += f" --{option} {value}"
    if given:
        raise UserError(
            f"--synthetic draws lengths and fills documents with bytes of text, so "
            f"{given.strip()} has no meaning with it; leave it out"
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
        f"{options.out}: {store.summary}; lengths drawn from {options.synthetic}, p50 {p50:,}, p99 "
        f"{p99:,}, longest {longest:,}; train on it with --set data.store={options.out}"
    )
    if options.verify:
        _verify(options.out, screen)
    return 0


def _prepare(options: PrepareOptions, chat: ChatChoice | None) -> StoreReport:
    """Prepare the store, with a progress bar on stderr."""
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
    """Check a store and print that it is intact."""
    verify_store(prefix)
    screen.print(f"{prefix}: {TokenStore(prefix).summary}; checksum and vocabulary are right")


def _table(made: StoreReport) -> Table:
    """Return a table that describes the stores; rows without a value are left out."""
    megabytes = made.num_bytes / 1e6
    heldout = f"{made.num_heldout_documents:,} documents, {made.num_heldout_tokens:,} tokens"
    trained = unknown = text = ""
    if made.num_text_files:
        text = f" ({made.num_text_files:,} read as text)"
    # In plain text every token except each document's last one is trained; no row is needed then.
    if made.num_targets != made.num_tokens - made.num_documents:
        trained = f"{made.num_targets:,} tokens, {made.num_targets / made.num_tokens:.1%}"
    if made.num_unknown:
        unknown = f"{made.num_unknown:,} tokens stand for characters the tokenizer does not know"
    counts = {name: n for name, n in made.counts.items() if not name.startswith(UNREAD)}
    if made.reused:
        work = "the store was there already, nothing was encoded"
    else:
        kept = f", {made.num_kept} of them from an interrupted call" if made.num_kept else ""
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
    """List the keys of messages that were not read, the most frequent first."""
    found = {n.removeprefix(UNREAD): counts[n] for n in counts if n.startswith(UNREAD)}
    names = sorted(found, key=lambda name: (-found[name], name))
    shown = [f"{n!r} of {found[n]:,} messages" for n in names[:MOST_KEYS]]
    more = [f"{len(names) - MOST_KEYS:,} more keys"] if len(names) > MOST_KEYS else []
    return ", ".join(shown + more)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())
