"""Conversations as records of `prepare_store`: template, trained messages, limit of tokens.

`Encoded.counts` has `empty_replies` and messages of `dropped_reasoning`, which the template leaves
out: both are not trained; conversations with `developer_as_system`, whose template has no
developer's role; messages with a KEY that says something and is not read, as
`unread:KEY`; conversations `split` and their
`split_documents`; `untrained_parts` that were left out, with `untrained_part_tokens`; conversations
`truncated`, with `truncated_tokens` and, of them trained, `truncated_targets`.
"""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, cast

from wlb.data.store import file_checksum
from wlb.plan import UserError, check_at_least
from wlb.prepare.chat import ChatEncoder, ChatTokens, TooLong, fit, probe_of
from wlb.prepare.chat_template import InjectedToken, Turns
from wlb.prepare.conversation import (
    Conversation,
    Message,
    Role,
    conversation_columns,
    conversation_of,
)
from wlb.prepare.encode import BPE, Encoded, EncoderChoice, Vocabulary, count_of, load_tokenizer
from wlb.prepare.load_template import BUILT_IN, load_template, template_files
from wlb.prepare.records import BadRecord, OnError, Record
from wlb.prepare.text import Skip
from wlb.prepare.tool_calls import calls_text

_VERSION = 3
"""Of what is made of a conversation: stores and parts of another version are not used again. The
first did not read the marks of other trainers (`wlb.prepare.marks`), the second found what is
trained in another way."""
UNREAD = "unread:"
"""In front of a key's name in `Encoded.counts`."""
_PROBE = probe_of((Role.USER, Role.ASSISTANT))
_CALL_PROBE = Conversation(
    messages=(
        *probe_of((Role.USER,)).messages,
        Message(role=Role.ASSISTANT, content="", tool_calls=calls_text({"name": "f"}, "probe")),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChoice(EncoderChoice):
    """Conversations, for `prepare_store(options, encoder=ChatChoice(...))`.

    template: chatml, llama3, a model's folder, a file with a Jinja template or a
    tokenizer_config.json. limit: most
    tokens of a document, None for any length. on_untrained: for conversations without a trained
    token. add_tokens: whether a tokenizer.json gets the special tokens of a built-in template that
    it lacks (the model's embedding must have room); a BPE that is trained here has them.
    """

    template: str = "chatml"
    turns: Turns = Turns.ALL
    limit: int | None = None
    too_long: TooLong = TooLong.SPLIT
    on_untrained: OnError = OnError.SKIP
    add_tokens: bool = False

    def __post_init__(self) -> None:
        if self.limit is not None:
            check_at_least("--limit", self.limit, 2, " tokens: one to predict from")
        # This raises UserError for a template that cannot be used.
        load_template(self.template)
        if self.add_tokens and self.template not in BUILT_IN:
            raise UserError(
                f"--add-tokens is for built-in templates ({', '.join(BUILT_IN)}), not "
                f"{self.template}; add the tokens that it needs to the tokenizer.json"
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """Template files count by checksum, so that an edited template is another argument, and
        what is made of a conversation counts by its version.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {"chat": given.pop("template"), "version": _VERSION, **given}
        if self.template not in BUILT_IN:
            for file in set(template_files(self.template)):
                if file.is_file():
                    given[f"checksum of {file.name}"] = file_checksum(file)
        return given

    @property
    def actions(self) -> Mapping[Skip, OnError]:
        return {Skip.UNTRAINED: self.on_untrained}

    def columns(self, names: Sequence[str]) -> tuple[str, ...]:
        return conversation_columns(names)

    def texts(self, record: Record) -> Sequence[str]:
        messages = _conversation(record).messages
        return [text for m in messages for text in (m.reasoning, m.content) if text]

    def special_tokens(self, tokenizer: str) -> tuple[str, ...]:
        if tokenizer != BPE and not self.add_tokens:
            return ()
        if self.template not in BUILT_IN:
            raise UserError(
                f"--tokenizer {BPE} knows the special tokens of built-in templates "
                f"({', '.join(BUILT_IN)}), not those of {self.template}; give the tokenizer.json "
                f"that belongs to it"
            )
        return BUILT_IN[self.template].special_tokens

    def open(self, tokenizer: str, vocabulary: Vocabulary) -> "ChatRecordEncoder":
        """Encodes a conversation, so that a tokenizer without the template's tokens is refused."""
        if not tokenizer:
            raise UserError(
                f"--tokenizer bytes has no special tokens for --chat {self.template}; use a "
                f"tokenizer.json, or --tokenizer {BPE}"
            )
        try:
            encoder = ChatRecordEncoder(self, tokenizer, vocabulary)
            encoder.encoder.end_of(_PROBE)
        except UserError as error:
            raise UserError(f"--chat {self.template}: {error}") from None
        return encoder

    def about(self, tokenizer: str, vocabulary: Vocabulary) -> dict[str, Any]:
        """Under "chat": `ChatFormat` as JSON."""
        encoder = self.open(tokenizer, vocabulary).encoder
        template, ends = encoder.template, [encoder.end_of(_PROBE)]
        # Some templates end a turn that calls tools with another token; others have no form for it.
        with suppress(UserError):
            ends.append(encoder.end_of(_CALL_PROBE))
        variables = {k: v for k, v in template.variables.items() if k.endswith("_token")}
        # A template may have another use for the variable.
        if "eos_token" not in template.variable_names:
            variables["eos_token"] = ends[0][1]
        ids = {name: number for number, name in ends}
        made = ChatFormat(template=template.source, variables=variables, ends=ids)
        return {"chat": asdict(made)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """What a model that was trained on conversations needs in order to chat and to stop.

    template: in Jinja. variables: its tokens by name (bos_token, ...). ends: id of each token that
    ends an assistant's turn, by its text; that of an answer first.
    """

    template: str
    variables: dict[str, str]
    ends: dict[str, int]


class ChatRecordEncoder:
    """Documents of a record that is a conversation."""

    def __init__(self, choice: ChatChoice, tokenizer: str, vocabulary: Vocabulary) -> None:
        self._choice = choice
        self._unknown = vocabulary.unknown_id
        self.encoder = ChatEncoder(
            load_tokenizer(tokenizer), load_template(choice.template), turns=choice.turns
        )

    def encode(self, record: Record) -> Sequence[Encoded]:
        with left_out_as(Skip.NOT_RENDERED):
            conversation = _conversation(record)
            made = self.encoder.encode(conversation)
        num_empty = conversation.num_empty_replies
        if not made.num_targets:
            why = f"{num_empty} empty replies" if num_empty else "no assistant's content"
            if made.num_dropped:
                why = (
                    f"the template leaves out the reasoning of {made.num_dropped} messages, which "
                    f"are not trained without it; use a template that writes it"
                )
            raise BadRecord(
                Skip.UNTRAINED, f"no token of it is trained ({made.tokens.size} tokens, {why})"
            )
        with left_out_as(Skip.TOO_LONG):
            parts = fit(made, self._choice.limit, self._choice.too_long)
        kept = [part for part in parts if part.num_targets]
        if not kept:
            raise BadRecord(
                Skip.UNTRAINED,
                f"no trained token is left of its {made.tokens.size} tokens when truncated",
            )
        documents = [
            Encoded(
                tokens=part.tokens,
                trained=part.trained,
                num_unknown=count_of(self._unknown, part.tokens),
            )
            for part in kept
        ]
        is_renamed = conversation.has_developer and not self.encoder.template.knows_developer
        counts = {
            "empty_replies": num_empty,
            "dropped_reasoning": made.num_dropped,
            "developer_as_system": int(is_renamed),
        }
        counts = {name: number for name, number in counts.items() if number}
        counts |= Counter(f"{UNREAD}{key}" for m in conversation.messages for key in m.unread)
        if parts[0] is not made:
            counts |= _counts(made, parts, self._choice.too_long)
        documents[0] = replace(documents[0], counts=counts)
        return documents


@contextmanager
def left_out_as(reason: Skip) -> Generator[None]:
    """BadRecord with `reason` for a UserError in the block; an injected token has its own."""
    try:
        yield
    except BadRecord:
        raise
    except UserError as error:
        is_injected = isinstance(error, InjectedToken)
        raise BadRecord(Skip.SPECIAL_TOKEN if is_injected else reason, str(error)) from None


def _counts(made: ChatTokens, parts: Sequence[ChatTokens], too_long: TooLong) -> dict[str, int]:
    """Statistics of a conversation that did not fit; see the module."""
    kept = [part for part in parts if part.num_targets]
    if too_long == TooLong.TRUNCATE_LEFT:
        return {
            "truncated": 1,
            "truncated_tokens": made.tokens.size - kept[0].tokens.size,
            "truncated_targets": made.num_targets - kept[0].num_targets,
        }
    counts = {"split": 1, "split_documents": len(kept)}
    if len(kept) < len(parts):
        empty = [part.tokens.size for part in parts if not part.num_targets]
        counts |= {"untrained_parts": len(empty), "untrained_part_tokens": sum(empty)}
    return counts


def _conversation(record: Record) -> Conversation:
    """BadRecord for a record that is no conversation."""
    if set(record) == {"text"}:
        raise BadRecord(
            Skip.NOT_A_CONVERSATION,
            "text, not a conversation; conversations are read from JSONL (.jsonl, .ndjson), JSON "
            "lists (.json) and Parquet, so name the file by its kind",
        )
    with left_out_as(Skip.NOT_A_CONVERSATION):
        return conversation_of(_decoded(record))


def _decoded(value: object) -> object:
    """The value with text for bytes, at any depth; BadRecord for bytes that are not UTF-8."""
    match value:
        case bytes():
            try:
                return value.decode("utf-8")
            except UnicodeDecodeError as error:
                start = max(0, error.start - 10)
                raise BadRecord(
                    Skip.NOT_UTF8,
                    f"not UTF-8: byte {value[error.start]:#04x} in {value[start : start + 20]!r}",
                ) from None
        case list():
            return [_decoded(item) for item in cast("list[object]", value)]
        case Mapping():
            given = cast("Mapping[str, object]", value)
            return {key: _decoded(item) for key, item in given.items()}
        case _:
            return value
