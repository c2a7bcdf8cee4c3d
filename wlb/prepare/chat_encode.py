"""Encode records that are conversations, for `prepare_store`.

A record's statistics (`Encoded.counts`) are summed over all records:

    empty_replies          messages of assistants without text or calls, which are not trained
    dropped_reasoning      messages that are not trained because the template drops their reasoning
    developer_as_system    conversations whose developer message became a system message
    unread:KEY             messages with a key KEY that wlb does not read
    split                  conversations that were split because they were too long
    split_documents        documents that these conversations became
    untrained_parts        parts of split conversations that are skipped, as no token is trained
    untrained_part_tokens  tokens of the parts that are skipped
    truncated              conversations that were truncated because they were too long
    truncated_tokens       tokens that truncation removed
    truncated_targets      trained tokens that truncation removed
"""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, cast

from wlb.data.store import file_checksum
from wlb.plan import UserError, check_at_least
from wlb.prepare.chat import ChatEncoder, ChatTokens, TooLong, fit
from wlb.prepare.chat_template import InjectedToken, Turns
from wlb.prepare.conversation import (
    Conversation,
    Message,
    Role,
    conversation_columns,
    conversation_of,
    probe_of,
)
from wlb.prepare.encode import BPE, Encoded, EncoderChoice, Vocabulary, count_of, load_tokenizer
from wlb.prepare.load_template import BUILT_IN, load_template, template_files
from wlb.prepare.records import BadRecord, OnError, Record
from wlb.prepare.text import Skip
from wlb.prepare.tool_calls import calls_text

# Increase this when a conversation is encoded differently, so that old stores and parts are not
# reused. Version 1 ignored the keys with which other trainers mark trained messages, and version 2
# had other rules for where trained text begins and ends.
_VERSION = 3
UNREAD = "unread:"
"""Prefix of the statistics that count messages with a key that wlb does not read."""
# Example conversations, to find the tokens that end an assistant's answer and tool call.
_PROBE = probe_of((Role.USER, Role.ASSISTANT))
_CALL_PROBE = Conversation(
    messages=(
        *probe_of((Role.USER,)).messages,
        Message(role=Role.ASSISTANT, content="", tool_calls=calls_text({"name": "f"}, "probe")),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChoice(EncoderChoice):
    """Records that are conversations, for `prepare_store(options, encoder=ChatChoice(...))`."""

    # The chat template: "chatml", "llama3", the folder of a model, or the path of a Jinja template
    # or of a tokenizer_config.json.
    template: str = "chatml"
    turns: Turns = Turns.ALL  # which messages of assistants are trained
    limit: int | None = None  # the most tokens of a document, None for any number
    too_long: TooLong = TooLong.SPLIT  # what to do with conversations above the limit
    on_untrained: OnError = OnError.SKIP  # what to do with a conversation without trained tokens
    # Whether to add the special tokens of a built-in template that a tokenizer.json lacks. The
    # vocabulary grows by these tokens. A BPE that wlb trains always has them.
    add_tokens: bool = False

    def __post_init__(self) -> None:
        if self.limit is not None:
            check_at_least("--limit", self.limit, 2, " tokens, as the first one is never trained")
        # Loading the template raises UserError if it cannot be used.
        load_template(self.template)
        if self.add_tokens and self.template not in BUILT_IN:
            raise UserError(
                f"--add-tokens works only with the built-in chat templates "
                f"({', '.join(BUILT_IN)}), not with {self.template}; leave out --add-tokens, and "
                f"give a tokenizer.json that has the special tokens of this template"
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """All settings, the checksums of the template's files, and the version of this encoder."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {"chat": given.pop("template"), "version": _VERSION, **given}
        if self.template not in BUILT_IN:
            for file in set(template_files(self.template)):
                if file.is_file():
                    given[f"checksum of {file.name}"] = file_checksum(file)
        return given

    @property
    def actions(self) -> Mapping[Skip, OnError]:
        """For the reason "no token is trained": what to do with the record (`--on-untrained`)."""
        return {Skip.UNTRAINED: self.on_untrained}

    def columns(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return which of the columns `names` of a Parquet file contain conversations."""
        return conversation_columns(names)

    def texts(self, record: Record) -> Sequence[str]:
        """Return the contents and the reasoning of all messages."""
        messages = _conversation(record).messages
        return [text for m in messages for text in (m.reasoning, m.content) if text]

    def special_tokens(self, tokenizer: str) -> tuple[str, ...]:
        """Return the special tokens that must be added to the tokenizer for the chat template.

        These are the tokens of a built-in template. They are always added to a BPE that wlb trains,
        and to an existing tokenizer only with `add_tokens`; otherwise the result is empty.

        Args:
            tokenizer: The option --tokenizer: "bpe" (wlb trains a BPE) or a path.

        Raises:
            UserError: Tokens are to be added, but the template is not built in.
        """
        if tokenizer != BPE and not self.add_tokens:
            return ()
        if self.template not in BUILT_IN:
            raise UserError(
                f"--tokenizer {BPE} works only with the built-in chat templates "
                f"({', '.join(BUILT_IN)}), whose special tokens wlb knows; give the tokenizer.json "
                f"that belongs to {self.template}"
            )
        return BUILT_IN[self.template].special_tokens

    def open(self, tokenizer: str, vocabulary: Vocabulary) -> "ChatRecordEncoder":
        """Return an encoder that uses this tokenizer, after testing that it fits the template.

        Args:
            tokenizer: Path of a tokenizer.json. "" (the tokenizer "bytes") is refused.
            vocabulary: Size and special tokens of the tokenizer.

        Raises:
            UserError: The tokenizer lacks a special token, or no special token ends a turn.
        """
        if not tokenizer:
            raise UserError(
                f"--tokenizer bytes has no special tokens, but --chat {self.template} needs "
                f"some; give a tokenizer.json, or use --tokenizer {BPE}"
            )
        try:
            encoder = ChatRecordEncoder(self, tokenizer, vocabulary)
            encoder.encoder.end_of(_PROBE)
        except UserError as error:
            raise UserError(f"--chat {self.template}: {error}") from None
        return encoder

    def about(self, tokenizer: str, vocabulary: Vocabulary) -> dict[str, Any]:
        """Return {"chat": ...} with the chat format of the store as JSON values (`ChatFormat`).

        Args:
            tokenizer: Path of the tokenizer.json.
            vocabulary: Size and special tokens of the tokenizer.
        """
        encoder = self.open(tokenizer, vocabulary).encoder
        template, ends = encoder.template, [encoder.end_of(_PROBE)]
        # In some templates, turns with tool calls end with another token. `end_of` raises UserError
        # for a template that cannot write tool calls.
        with suppress(UserError):
            ends.append(encoder.end_of(_CALL_PROBE))
        variables = {k: v for k, v in template.variables.items() if k.endswith("_token")}
        # Programs that use the model stop at eos_token, so set it to the end of a turn, unless the
        # template itself uses that variable.
        if "eos_token" not in template.variable_names:
            variables["eos_token"] = ends[0][1]
        ids = {name: number for number, name in ends}
        made = ChatFormat(template=template.source, variables=variables, ends=ids)
        return {"chat": asdict(made)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """What a program must know to chat with a model that was trained on the store."""

    template: str  # the chat template in Jinja
    variables: dict[str, str]  # special tokens that the template uses, such as bos_token
    # Maps the text of each token that ends an assistant's turn to its id. The first one ends turns
    # without tool calls.
    ends: dict[str, int]


class ChatRecordEncoder:
    """Encodes each conversation as a document. A long conversation may become several."""

    def __init__(self, choice: ChatChoice, tokenizer: str, vocabulary: Vocabulary) -> None:
        self._choice = choice
        self._unknown = vocabulary.unknown_id
        self.encoder = ChatEncoder(
            load_tokenizer(tokenizer), load_template(choice.template), turns=choice.turns
        )

    def encode(self, record: Record) -> Sequence[Encoded]:
        """Return the documents of a record that is a conversation.

        Raises:
            BadRecord: The record is no conversation, or no token of it is trained.
        """
        with bad_record_for_errors(Skip.NOT_RENDERED):
            conversation = _conversation(record)
            made = self.encoder.encode(conversation)
        num_empty = conversation.num_empty_replies
        if not made.num_targets:
            why = (
                f"{num_empty} assistants' messages are empty"
                if num_empty
                else "no assistant's message is to be trained"
            )
            if made.num_dropped:
                why = (
                    f"{made.num_dropped} messages are not trained, because the chat template "
                    f"leaves out their reasoning; use a template that writes reasoning"
                )
            raise BadRecord(
                Skip.UNTRAINED,
                f"none of the conversation's {made.tokens.size} tokens is trained ({why})",
            )
        with bad_record_for_errors(Skip.TOO_LONG):
            parts = fit(made, self._choice.limit, self._choice.too_long)
        with_targets = [part for part in parts if part.num_targets]
        if not with_targets:
            raise BadRecord(
                Skip.UNTRAINED,
                f"the conversation has {made.tokens.size} tokens, and truncating it to --limit "
                f"{self._choice.limit} would remove all trained tokens",
            )
        documents = [
            Encoded(
                tokens=part.tokens,
                trained=part.trained,
                num_unknown=count_of(self._unknown, part.tokens),
            )
            for part in with_targets
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
def bad_record_for_errors(reason: Skip) -> Generator[None]:
    """Turn a UserError in the `with` block into a `BadRecord` with the given reason.

    An `InjectedToken` becomes a `BadRecord` with the reason SPECIAL_TOKEN instead.
    """
    try:
        yield
    except BadRecord:
        raise
    except UserError as error:
        is_injected = isinstance(error, InjectedToken)
        raise BadRecord(Skip.SPECIAL_TOKEN if is_injected else reason, str(error)) from None


def _counts(made: ChatTokens, parts: Sequence[ChatTokens], too_long: TooLong) -> dict[str, int]:
    """Return the statistics of a conversation that was too long (listed in the module's docstring).

    Args:
        made: The encoded conversation.
        parts: The documents that `fit` made of it.
        too_long: Whether `fit` split or truncated the conversation.
    """
    with_targets = [part for part in parts if part.num_targets]
    if too_long == TooLong.TRUNCATE_LEFT:
        return {
            "truncated": 1,
            "truncated_tokens": made.tokens.size - with_targets[0].tokens.size,
            "truncated_targets": made.num_targets - with_targets[0].num_targets,
        }
    counts = {"split": 1, "split_documents": len(with_targets)}
    if len(with_targets) < len(parts):
        empty = [part.tokens.size for part in parts if not part.num_targets]
        counts |= {"untrained_parts": len(empty), "untrained_part_tokens": sum(empty)}
    return counts


def _conversation(record: Record) -> Conversation:
    """Return the conversation in a record; raise `BadRecord` if the record has none."""
    if set(record) == {"text"}:
        raise BadRecord(
            Skip.NOT_A_CONVERSATION,
            "the record is text, not a conversation; write conversations as JSON Lines "
            "(.jsonl, .ndjson), a JSON list (.json) or Parquet (.parquet)",
        )
    with bad_record_for_errors(Skip.NOT_A_CONVERSATION):
        return conversation_of(_decoded(record))


def _decoded(value: object) -> object:
    """Decode all bytes inside a JSON-like value to text.

    Raises:
        BadRecord: Some bytes are not UTF-8.
    """
    match value:
        case bytes():
            try:
                return value.decode("utf-8")
            except UnicodeDecodeError as error:
                start = max(0, error.start - 10)
                raise BadRecord(
                    Skip.NOT_UTF8,
                    f"not UTF-8: byte {value[error.start]:#04x} in {value[start : start + 20]!r}; "
                    f"convert the text to UTF-8",
                ) from None
        case list():
            return [_decoded(item) for item in cast("list[object]", value)]
        case Mapping():
            given = cast("Mapping[str, object]", value)
            return {key: _decoded(item) for key, item in given.items()}
        case _:
            return value
