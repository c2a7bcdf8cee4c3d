"""Token stores of conversations: JSONL to `<prefix>-train` and `<prefix>-heldout`.

Conversations are read, rendered, encoded and written as they come; memory holds a few hundred of
them. Each is held out if the hash of (seed, its text) is below `heldout_fraction`, so a file that
grows keeps its split, and a conversation that comes twice is on one side.

Nothing is dropped silently. What cannot be read (`on_invalid`) and what has no trained token
(`on_untrained`) ends the preparation, or is skipped and counted, with the line of the first ones;
`too_long` says what becomes of conversations longer than `limit` tokens, and what was split, cut
away or left out is in `ChatCounts`, which the sidecars keep as well.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wlb.corpus.chat import ChatEncoder, ChatTokens, TooLong, add_chat_tokens, fit
from wlb.corpus.chat_template import BuiltInTemplate, ChatTemplate, Rendered, Turns
from wlb.corpus.conversation import conversation_of, read_records
from wlb.corpus.jinja_template import load_template
from wlb.corpus.parts import OnError
from wlb.corpus.prepare import draw, load_tokenizer, write_text
from wlb.corpus.store import TokenStoreWriter, file_checksum, store_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_GROUP = 256
_SHOWN = 20


@dataclass(slots=True, kw_only=True)
class ChatCounts:
    """What became of the conversations; documents, tokens and targets are of both stores.

    num_too_long: conversations above the limit, of which num_split became num_split_documents, and
    num_truncated lost num_truncated_tokens with num_truncated_targets. num_invalid, num_untrained:
    skipped. num_untrained_parts: parts of split conversations without a trained token, left out,
    with num_untrained_part_tokens. problems: the first of the skipped ones, with their lines.
    """

    num_records: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    num_heldout_documents: int = 0
    num_too_long: int = 0
    num_split: int = 0
    num_split_documents: int = 0
    num_truncated: int = 0
    num_truncated_tokens: int = 0
    num_truncated_targets: int = 0
    num_invalid: int = 0
    num_untrained: int = 0
    num_untrained_parts: int = 0
    num_untrained_part_tokens: int = 0
    problems: list[str] = field(default_factory=list[str])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """Prefixes of the two stores and the tokenizer's file."""

    train: str
    heldout: str
    tokenizer: str
    vocab_size: int
    counts: ChatCounts


@dataclass(slots=True, kw_only=True)
class ChatDocuments:
    """Documents to be stored out of records, counting as it goes.

    source: of messages, a file name. limit: most tokens of a document, None = any length.
    """

    encoder: ChatEncoder
    source: str
    limit: int | None = None
    too_long: TooLong = TooLong.SPLIT
    on_invalid: OnError = OnError.FAIL
    on_untrained: OnError = OnError.SKIP
    counts: ChatCounts = field(default_factory=ChatCounts)

    def encode(
        self, records: Iterable[tuple[int, object | ValueError]]
    ) -> Iterator[tuple[str, list[ChatTokens]]]:
        """(rendered text, its documents) of each (line number, record); may have no document."""
        for group in _groups(self._render(records)):
            tokens = self.encoder.encode_rendered([rendered for _, rendered in group])
            for (line, rendered), made in zip(group, tokens, strict=True):
                yield rendered.text, self._fit(line, made)

    def _render(
        self, records: Iterable[tuple[int, object | ValueError]]
    ) -> Iterator[tuple[int, Rendered]]:
        for line, record in records:
            self.counts.num_records += 1
            try:
                if isinstance(record, ValueError):
                    raise record
                yield line, self.encoder.render(conversation_of(record))
            except ValueError as error:
                self._problem(line, str(error), self.on_invalid, name="on_invalid")
                self.counts.num_invalid += 1

    def _fit(self, line: int, made: ChatTokens) -> list[ChatTokens]:
        counts = self.counts
        if not made.num_targets:
            text = f"no token of it is trained ({made.tokens.size} tokens, no assistant's content)"
            self._problem(line, text, self.on_untrained, name="on_untrained")
            counts.num_untrained += 1
            return []
        try:
            parts = fit(made, self.limit, self.too_long)
        except ValueError as error:
            raise ValueError(f"{self.source}, line {line}: {error}") from error
        if len(parts) == 1 and parts[0] is made:
            return parts
        counts.num_too_long += 1
        if self.too_long == TooLong.TRUNCATE_LEFT:
            kept = parts[0]
            if not kept.num_targets:
                text = f"no trained token is left of its {made.tokens.size} tokens when truncated"
                self._problem(line, text, self.on_untrained, name="on_untrained")
                counts.num_untrained += 1
                return []
            counts.num_truncated += 1
            counts.num_truncated_tokens += made.tokens.size - kept.tokens.size
            counts.num_truncated_targets += made.num_targets - kept.num_targets
            return parts
        filled = [part for part in parts if part.num_targets]
        counts.num_split += 1
        counts.num_split_documents += len(filled)
        counts.num_untrained_parts += len(parts) - len(filled)
        empty = [part for part in parts if not part.num_targets]
        counts.num_untrained_part_tokens += sum(part.tokens.size for part in empty)
        return filled

    def _problem(self, line: int, text: str, action: OnError, *, name: str) -> None:
        message = f"{self.source}, line {line}: {text}"
        if action == OnError.FAIL:
            raise ValueError(f'{message}; {name} = "skip" leaves such conversations out')
        if len(self.counts.problems) < _SHOWN:
            self.counts.problems.append(message)


def prepare_conversations(
    path: str | Path,
    prefix: str | Path,
    *,
    tokenizer: "str | Path | Tokenizer",
    template: str | Path | ChatTemplate = "chatml",
    turns: Turns = Turns.ALL,
    limit: int | None = None,
    too_long: TooLong = TooLong.SPLIT,
    on_invalid: OnError = OnError.FAIL,
    on_untrained: OnError = OnError.SKIP,
    add_tokens: bool = False,
    heldout_fraction: float = 0.0,
    seed: int = 0,
) -> PreparedChat:
    """Writes `<prefix>-train`, `<prefix>-heldout` and `<prefix>-tokenizer.json` from a JSONL file.

    tokenizer: a tokenizer.json or a loaded tokenizer. add_tokens: gives it the special tokens of a
    built-in template that it lacks (for a model that is trained from the start, or whose embedding
    is enlarged). ValueError names the line of what cannot be used.
    """
    if not 0 <= heldout_fraction < 1:
        raise ValueError(f"heldout_fraction = {heldout_fraction} must be in [0, 1)")
    if limit is not None and limit < 2:
        raise ValueError(f"limit = {limit} must be at least 2 tokens")
    loaded, chosen = _loaded(tokenizer, template, add_tokens=add_tokens)
    documents = ChatDocuments(
        encoder=ChatEncoder(loaded, chosen, turns=turns),
        source=str(path),
        limit=limit,
        too_long=too_long,
        on_invalid=on_invalid,
        on_untrained=on_untrained,
    )
    tokenizer_path = store_path(prefix, "-tokenizer.json")
    write_text(tokenizer_path, loaded.to_str(pretty=True))
    preparation = {
        "template": chosen.name,
        "turns": str(turns),
        "limit": limit,
        "too_long": str(too_long),
        "heldout_fraction": heldout_fraction,
        "seed": seed,
        "tokenizer_checksum": file_checksum(tokenizer_path),
    }
    sides = (f"{prefix}-train", f"{prefix}-heldout")
    about: dict[str, Any] = {
        "vocab_size": loaded.get_vocab_size(),
        "tokenizer": tokenizer_path.name,
        "source": str(path),
        "preparation": preparation,
    }
    _write(documents, path, sides, about)
    return PreparedChat(
        train=sides[0],
        heldout=sides[1],
        tokenizer=str(tokenizer_path),
        vocab_size=about["vocab_size"],
        counts=documents.counts,
    )


def _loaded(
    tokenizer: "str | Path | Tokenizer", template: str | Path | ChatTemplate, *, add_tokens: bool
) -> "tuple[Tokenizer, ChatTemplate]":
    chosen = load_template(template) if isinstance(template, str | Path) else template
    loaded = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    if add_tokens:
        if not isinstance(chosen, BuiltInTemplate):
            raise ValueError(f"add_tokens is for built-in templates, not {chosen.name}")
        add_chat_tokens(loaded, chosen)
    return loaded, chosen


def _write(
    documents: ChatDocuments,
    path: str | Path,
    sides: tuple[str, str],
    about: dict[str, Any],
) -> None:
    counts, preparation = documents.counts, about["preparation"]
    seed, fraction = preparation["seed"], preparation["heldout_fraction"]
    with ExitStack() as stack:
        writers: list[TokenStoreWriter] = [
            stack.enter_context(TokenStoreWriter(side, **about)) for side in sides
        ]
        for text, parts in documents.encode(read_records(path)):
            is_heldout = draw(seed, text) < fraction
            for part in parts:
                writers[int(is_heldout)].add(part.tokens, part.trained)
                counts.num_documents += 1
                counts.num_heldout_documents += is_heldout
                counts.num_tokens += part.tokens.size
                counts.num_targets += part.num_targets
        if not writers[0].num_documents:
            raise ValueError(
                f"no conversation of {path} is left to train on ({_summary(counts)}); lower "
                f"heldout_fraction, or add conversations"
            )
        for writer in writers:
            writer.preparation["counts"] = counts.to_json()


def _summary(counts: ChatCounts) -> str:
    named = {name: value for name, value in counts.to_json().items() if value}
    return json.dumps(named) if named else "it is empty"


def _groups(items: Iterable[tuple[int, Rendered]]) -> Iterator[list[tuple[int, Rendered]]]:
    iterator = iter(items)
    while group := list(islice(iterator, _GROUP)):
        yield group
