"""`wlb prepare`: text or conversations, as files or folders, to a token store; or checks one."""

import argparse
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from wlb.data import TokenStore, verify_store
from wlb.plan import UserError
from wlb.prepare import (
    ChatChoice,
    DocumentPolicy,
    OnError,
    PrepareOptions,
    Status,
    StoreReport,
    TextUnit,
    TooLong,
    Turns,
    prepare_store,
)

DEFAULTS = PrepareOptions(inputs=("-",), out="-")
CHAT_DEFAULTS = ChatChoice()


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "prepare",
        help="turn text, JSONL or Parquet into a token store",
        description="Turn text files, JSONL (.jsonl, .ndjson), Parquet, each also .gz, .bz2 or .xz "
        "but Parquet, folders of them and glob patterns into a token store (.bin + .idx + .json) "
        "for data.store; with --chat, conversations into one that says which tokens are trained. "
        "Interrupted, the same command goes on where it was.",
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="files, folders (read recursively), quoted patterns; with --verify alone: stores",
    )
    parser.add_argument("--out", metavar="PREFIX", help="prefix of the store")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read the finished store again: checksum, and every token inside the vocabulary; "
        "without --out the INPUTs are prefixes of stores to check",
    )
    _add_tokenizer(parser)
    _add_documents(parser)
    _add_chat(parser)
    parser.add_argument(
        "--processes",
        type=int,
        default=DEFAULTS.processes,
        help="worker processes; the store is the same for any number (default: %(default)s)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a store, and drop parts, that were made of other inputs or arguments",
    )
    parser.set_defaults(run=run)


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer",
        default=DEFAULTS.tokenizer,
        metavar="FILE|bytes|bpe",
        help="a tokenizer.json or its folder; bytes: 256 bytes, BOS, EOS; bpe: a byte-level BPE "
        "trained on a sample of the input (default: %(default)s)",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        default=DEFAULTS.vocab_size,
        help="most tokens of the trained BPE, those of --chat included (default: %(default)s)",
    )
    group.add_argument(
        "--sample-bytes",
        type=int,
        default=DEFAULTS.sample_bytes,
        help="text the BPE is trained on (default: %(default)s)",
    )
    group.add_argument(
        "--documents",
        type=DocumentPolicy,
        choices=list(DocumentPolicy),
        default=DEFAULTS.policy,
        metavar="|".join(DocumentPolicy),
        help="eos_bos: BOS before and EOS after each document; separator: EOS after; none: only "
        "text (default: %(default)s)",
    )
    for name in ("bos", "eos"):
        group.add_argument(
            f"--{name}",
            default="",
            metavar="TOKEN",
            help=f"the {name.upper()} token; default: as tokenizer_config.json says, or the one "
            f"special token with a usual name",
        )


def _add_documents(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("documents")
    group.add_argument(
        "--text-key",
        default=DEFAULTS.text_key,
        help="key of JSONL objects, column of Parquet (default: %(default)s)",
    )
    group.add_argument(
        "--one-per",
        type=TextUnit,
        choices=list(TextUnit),
        default=DEFAULTS.text_unit,
        metavar="|".join(TextUnit),
        help="what a document of a text file is (default: %(default)s)",
    )
    group.add_argument(
        "--on-error",
        type=OnError,
        choices=list(OnError),
        default=DEFAULTS.on_error,
        metavar="|".join(OnError),
        help="at malformed JSON, invalid UTF-8, a missing text, what is no conversation: stop and "
        "say where, or leave it out, count it and show the first (default: %(default)s)",
    )
    group.add_argument(
        "--heldout-fraction",
        type=float,
        default=DEFAULTS.heldout_fraction,
        help="share of documents that go to PREFIX-heldout, by a hash of seed and name "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=DEFAULTS.seed,
        help="of the held-out choice and the BPE's sample (default: %(default)s)",
    )


def _add_chat(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("conversations")
    group.add_argument(
        "--chat",
        metavar="TEMPLATE",
        help="records are conversations (messages, conversations, or prompt and completion), "
        "written with this template: chatml, llama3, a Jinja file or a tokenizer_config.json; "
        "only what assistants say is trained",
    )
    for name, values, help_text in (
        ("turns", Turns, "which of the assistant's messages are trained"),
        ("too_long", TooLong, "what becomes of conversations above --limit"),
        ("on_untrained", OnError, "at a conversation without a trained token"),
    ):
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=values,
            choices=list(values),
            metavar="|".join(values),
            help=f"{help_text} (default: {getattr(CHAT_DEFAULTS, name)})",
        )
    group.add_argument(
        "--limit", type=int, metavar="TOKENS", help="most tokens of a document (default: any)"
    )
    group.add_argument(
        "--add-tokens",
        action="store_true",
        default=None,
        help="give the tokenizer the special tokens of the template that it lacks, for a model "
        "that is trained from the start; a trained BPE has them",
    )


_OF_CHAT = ("turns", "limit", "too_long", "on_untrained", "add_tokens")
_OF_TEXT = {
    "documents": DEFAULTS.policy,
    "text_key": DEFAULTS.text_key,
    "one_per": DEFAULTS.text_unit,
    "bos": "",
    "eos": "",
}


def _chat(options: argparse.Namespace) -> ChatChoice | None:
    """UserError for options of text with --chat, and of conversations without."""
    given = {name: getattr(options, name) for name in _OF_CHAT}
    given = {name: value for name, value in given.items() if value is not None}
    if options.chat is None:
        if given:
            raise UserError(
                f"{_spoken(given)} is for conversations; say with --chat TEMPLATE that the records "
                f"are such, or leave it out"
            )
        return None
    of_text = {name: getattr(options, name) for name in _OF_TEXT}
    of_text = {name: value for name, value in of_text.items() if value != _OF_TEXT[name]}
    if of_text:
        raise UserError(
            f"{_spoken(of_text)} is for text; with --chat {options.chat} the template says what "
            f"stands around messages, and their keys are known, so leave it out"
        )
    if "too_long" in given and "limit" not in given:
        raise UserError(f"--too-long {options.too_long} needs --limit TOKENS: nothing is too long")
    return ChatChoice(template=options.chat, **given)


def _spoken(given: dict[str, Any]) -> str:
    """Options as they are written."""
    words = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in given.items()
    ]
    return " ".join(words)


def run(options: argparse.Namespace) -> int:
    screen = Console(highlight=False, markup=False)  # names of files may have brackets
    if options.out is None:
        if not options.verify:
            raise UserError("--out PREFIX says where the store goes; give it, or --verify")
        for prefix in options.inputs:
            _verify(prefix, screen)
        return 0
    chat = _chat(options)
    asked = PrepareOptions(
        inputs=tuple(options.inputs),
        out=options.out,
        tokenizer=options.tokenizer,
        vocab_size=options.vocab_size,
        sample_bytes=options.sample_bytes,
        bos=options.bos,
        eos=options.eos,
        policy=options.documents,
        text_key=options.text_key,
        text_unit=options.one_per,
        heldout_fraction=options.heldout_fraction,
        seed=options.seed,
        on_error=options.on_error,
        processes=options.processes,
        overwrite=options.overwrite,
    )
    try:
        made = _prepare(asked, chat)
    except RuntimeError as failure:  # a worker that died
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


def _prepare(options: PrepareOptions, chat: ChatChoice | None) -> StoreReport:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("listing inputs", total=None, counts="")

        def show(status: Status) -> None:
            counts = f"{status.num_documents:,} documents" if status.num_documents else ""
            if status.skipped:
                counts += f", {status.skipped:,} left out"
            bar.update(
                task,
                description=status.stage,
                total=status.size if status.done else None,
                completed=status.done,
                counts=counts,
            )

        return prepare_store(options, encoder=chat, progress=show)


def _verify(prefix: str, screen: Console) -> None:
    verify_store(prefix)
    store = TokenStore(prefix)
    screen.print(
        f"{prefix}: {store.num_documents:,} documents, {store.num_tokens:,} tokens; checksum and "
        f"vocabulary are right"
    )


def _table(made: StoreReport) -> Table:
    table = Table(title="Token store", title_justify="left", show_header=False, box=box.SQUARE)
    table.add_column()
    table.add_column(overflow="fold")
    left_out = _counted(made.skipped)
    heldout = f"{made.num_heldout_documents:,} documents, {made.num_heldout_tokens:,} tokens"
    all_trained = made.num_tokens - made.num_documents
    megabytes = made.num_bytes / 1e6
    rows = {
        "store": made.prefix,
        "tokenizer": f"{made.tokenizer or 'bytes'}, vocabulary {made.vocab_size:,}",
        "documents": f"{made.num_documents:,}",
        "tokens": f"{made.num_tokens:,}",
        "trained": f"{made.num_targets:,} tokens, {made.num_targets / made.num_tokens:.1%}",
        "length": f"p50 {made.lengths_p50:,}, p99 {made.lengths_p99:,}, longest {made.longest:,}",
        "held out": f"{heldout} in {made.heldout}" if made.heldout else "none",
        "counts": _counted(made.counts).replace("_", " "),
        "left out": left_out or "nothing",
        "unknown": f"{made.num_unknown:,} tokens stand for characters the tokenizer does not know",
        "checksum": made.checksum,
        "input": f"{made.num_files:,} files, {megabytes:,.1f} MB",
    }
    for row, is_shown in (
        ("trained", made.num_targets != all_trained),
        ("counts", made.counts),
        ("unknown", made.num_unknown),
    ):
        if not is_shown:
            del rows[row]
    if made.reused:
        rows["time"] = f"{made.time_s:.1f} s; the store was there already, nothing was encoded"
    else:
        kept = f", {made.num_kept} of them from an interrupted call" if made.num_kept else ""
        rows["time"] = (
            f"{made.time_s:.1f} s, {megabytes / made.time_s:.2f} MB/s; {made.num_shards} "
            f"shards{kept}"
        )
    for row in rows.items():
        table.add_row(*row)
    return table


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())
