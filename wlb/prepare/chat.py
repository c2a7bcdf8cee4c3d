"""Conversations to tokens, with the spans that are trained.

A template renders a conversation in parts (`chat_template.py`). Special tokens are matched only in
the template's own text, so a user who writes "<|im_end|>" gets ordinary tokens. Trained are the
contents of assistants and the token that ends their turn, or what generation blocks hold; text is
cut where training begins and ends, so that no token is half trained.
Guarantees: equal to encoding the rendered text at once wherever contents hold no special token and
no token would cross the beginning of a trained text. Cost: 0.1 ms a message beside the tokenizer.
"""

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from wlb.data.targets import spans_of
from wlb.plan import BoolArray, IntArray, UserError, offsets_of
from wlb.prepare.chat_template import (
    BuiltInTemplate,
    ChatTemplate,
    Rendered,
    TemplatePart,
    Train,
    Turns,
)
from wlb.prepare.conversation import Conversation, Message, Role, conversation_of
from wlb.prepare.encode import add_special_tokens, unknown_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_PROBES = (
    (Role.USER, Role.ASSISTANT, Role.USER, Role.ASSISTANT),
    (Role.SYSTEM, Role.USER, Role.ASSISTANT),
    (Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT),
)
"""Conversations that show which tokens a template uses; it must render the first one."""


class InjectedToken(UserError):
    """Text of a conversation encodes to a special token."""


class TooLong(StrEnum):
    """What happens to a conversation of more than `limit` tokens.

    SPLIT: it becomes documents of as many whole turns as fit. A turn that does not fit is cut after
    `limit` tokens, and the next document repeats one token where its first one is trained, so no
    label is lost; only the first document has the system message. TRUNCATE_LEFT: the oldest turns
    are dropped, or the beginning of a last turn that does not fit; the system message stays.
    """

    SPLIT = "split"
    TRUNCATE_LEFT = "truncate_left"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatTokens:
    """A document of a conversation.

    tokens: int64 [num_tokens]. trained: int64 [k, 2], half-open spans of trained tokens. turns: the
    tokens at which a turn after the first one begins, ascending. prefix: tokens before the first
    turn (start of text, system message); None where the system message is inside it.
    """

    tokens: IntArray
    trained: IntArray
    turns: tuple[int, ...] = ()
    prefix: int | None = 0

    @property
    def num_targets(self) -> int:
        """Tokens that are trained as labels: the first one never is."""
        return int(np.maximum(self.trained[:, 1] - np.maximum(self.trained[:, 0], 1), 0).sum())


@dataclass(slots=True)
class _Run:
    """Text that is encoded at once, or one special token (`token`); part: number of its part."""

    text: str
    token: int | None
    is_trained: bool
    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Special:
    """Added tokens, and the pattern that finds them in a template's text."""

    ids: dict[str, int]
    pattern: re.Pattern[str] | None


class ChatEncoder:
    """Encodes conversations with one tokenizer and one template; call it with a JSON record."""

    def __init__(
        self, tokenizer: "Tokenizer", template: ChatTemplate, *, turns: Turns = Turns.ALL
    ) -> None:
        self.template = template
        self.turns = turns
        _check_built_in(tokenizer, template)
        self._special = _special_of(tokenizer)
        self._tokenizer = self._protected(tokenizer)
        self._tokenizer.encode_special_tokens = True
        added: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special}
        self._forbidden = frozenset(special - {unknown_id(self._tokenizer)})
        _check_parts(self._tokenizer)

    def __call__(self, record: object) -> tuple[IntArray, IntArray]:
        """(tokens int64 [n], trained spans int64 [k, 2]) of one record, however long it is."""
        made = self.encode(conversation_of(record))
        return made.tokens, made.trained

    def encode(self, conversation: Conversation) -> ChatTokens:
        """UserError for a conversation that the template refuses or cannot render exactly."""
        rendered = self.template.render(conversation, self.turns)
        runs = self._runs(rendered)
        ids = [[run.token] if run.token is not None else self._ids(run.text) for run in runs]
        return _assemble(rendered, runs, ids)

    def _ids(self, text: str) -> list[int]:
        # A batch of one runs on one thread and skips the offsets that encode() computes.
        encoded: Any = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded[0].ids
        if not self._forbidden.isdisjoint(ids):
            token = next(token for token in ids if token in self._forbidden)
            raise InjectedToken(
                f"its text encodes to the special token {token}, which only the template may set; "
                f"use a tokenizer without that piece, or take it out of the text"
            )
        return ids

    def _runs(self, rendered: Rendered) -> list[_Run]:
        """Joins neighbouring parts of one kind into runs, except where a turn begins."""
        edges = {*rendered.turns, rendered.prefix}
        runs: list[_Run] = []
        for number, part in enumerate(rendered.parts):
            for run in self._runs_of(part, number):
                last = runs[-1] if runs else None
                if (
                    last is not None
                    and last.token is None
                    and run.token is None
                    and last.is_trained == run.is_trained
                    and not any(last.part < edge <= number for edge in edges if edge is not None)
                ):
                    last.text += run.text
                    last.part = number
                else:
                    runs.append(run)
        return [run for run in runs if run.token is not None or run.text]

    def _runs_of(self, part: TemplatePart, number: int) -> list[_Run]:
        is_trained = part.train != Train.NO
        pattern = self._special.pattern
        texts = [part.text]
        if not part.is_content and pattern is not None:
            texts = pattern.split(part.text)
        if part.train == Train.END and len(texts) == 1:
            raise UserError(
                f"chat template {self.template.name} ends an assistant's turn with {part.text!r}, "
                f"which is no special token of the tokenizer: the model could not learn to stop; "
                f"use the tokenizer that belongs to the template, or add the token to it"
            )
        runs: list[_Run] = []
        for i, text in enumerate(texts):
            if i % 2:
                name = text.strip() if text not in self._special.ids else text
                runs.append(_Run("", self._special.ids[name], is_trained, number))
                is_trained = is_trained and part.train != Train.END
            elif text:
                runs.append(_Run(text, None, is_trained, number))
        return runs

    def _protected(self, tokenizer: "Tokenizer") -> "Tokenizer":
        """A copy in which every added token that the template uses is special.

        Contents would match tokens that were added as ordinary ones.
        """
        from tokenizers import Tokenizer

        used: set[str] = set()
        for roles in _PROBES:
            probe = Conversation(messages=tuple(Message(role=role, content="x") for role in roles))
            try:
                rendered = self.template.render(probe, Turns.LAST)
            except UserError:  # a template may refuse system messages and tools
                if roles == _PROBES[0]:
                    raise
                continue
            text = "\n".join(part.text for part in rendered.parts if not part.is_content)
            if self._special.pattern is not None:
                used |= {found.strip() for found in self._special.pattern.findall(text)}
        data: dict[str, Any] = json.loads(tokenizer.to_str())
        for token in data["added_tokens"]:
            token["special"] = token["special"] or token["content"].strip() in used
        copy = Tokenizer.from_str(json.dumps(data))
        copy.no_truncation()  # runs of text are encoded one by one, whole
        copy.no_padding()
        return copy


def fit(made: ChatTokens, limit: int | None, too_long: TooLong) -> list[ChatTokens]:
    """Documents of at most `limit` tokens; the conversation itself where it fits.

    UserError where it is refused or cannot be truncated.
    """
    num = made.tokens.size
    if limit is None or num <= limit:
        return [made]
    if limit < 2:
        raise UserError(f"limit = {limit} must be at least 2 tokens: one to predict from")
    match too_long:
        case TooLong.SPLIT:
            return _split(made, limit)
        case TooLong.TRUNCATE_LEFT:
            return [_truncate_left(made, limit)]
        case TooLong.REFUSE:
            raise UserError(
                f"the conversation has {num} tokens, more than the limit of {limit}; raise the "
                f'limit, or use too_long = "split" or "truncate_left"'
            )


def _split(made: ChatTokens, limit: int) -> list[ChatTokens]:
    num, start = made.tokens.size, 0
    trained = _mask(made)
    pieces: list[tuple[int, int]] = []
    while num - start > limit:
        # The first token of a document has no label, so repeat one token where it is trained.
        turns = [t for t in made.turns if start < t - int(trained[t]) and t <= start + limit]
        stop = turns[-1] if turns else start + limit
        pieces.append((start, stop))
        start = stop - int(trained[stop])
    pieces.append((start, num))
    return [_document(made.tokens[a:b], trained[a:b]) for a, b in pieces]


def _truncate_left(made: ChatTokens, limit: int) -> ChatTokens:
    num, prefix = made.tokens.size, made.prefix
    if prefix is None:
        raise UserError(
            "this template writes the system message into the first turn, so a conversation "
            'cannot be truncated and keep it; use too_long = "split" or "refuse"'
        )
    room = limit - prefix
    if room < 2:
        raise UserError(
            f"the system message has {prefix} tokens and leaves {max(room, 0)} of the limit of "
            f'{limit}; raise the limit or use too_long = "split"'
        )
    turns = [turn for turn in made.turns if num - turn <= room]
    start = turns[0] if turns else num - room
    rows = np.concatenate([np.arange(prefix), np.arange(start, num)])
    mask = _mask(made)
    mask[start] = False  # it would be predicted from a token that does not precede it
    return _document(made.tokens[rows], mask[rows])


def _document(tokens: IntArray, mask: BoolArray) -> ChatTokens:
    mask = mask.copy()
    mask[0] = False
    return ChatTokens(tokens=tokens, trained=spans_of(mask))


def _mask(made: ChatTokens) -> BoolArray:
    mask = np.zeros(made.tokens.size, bool)
    for start, stop in made.trained.tolist():
        mask[start:stop] = True
    return mask


def _assemble(rendered: Rendered, runs: list[_Run], ids: list[list[int]]) -> ChatTokens:
    sizes = np.array([len(tokens) for tokens in ids], np.int64)
    starts = offsets_of(sizes)
    mask = np.repeat([run.is_trained for run in runs], sizes) if runs else np.zeros(0, bool)
    parts = [run.part for run in runs]

    def token_at(part: int) -> int:
        """First token of part `part`; no run crosses the beginning of a turn."""
        return int(starts[next((i for i, p in enumerate(parts) if p >= part), len(parts))])

    return ChatTokens(
        tokens=np.array([token for tokens in ids for token in tokens], np.int64),
        trained=spans_of(mask),
        turns=tuple(token_at(part) for part in rendered.turns),
        prefix=None if rendered.prefix is None else token_at(rendered.prefix),
    )


def _special_of(tokenizer: "Tokenizer") -> _Special:
    """All added tokens, longest first, with the white space that lstrip and rstrip take in."""
    added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
    ids = {token.content: number for number, token in added.items()}
    if not ids:
        return _Special(ids={}, pattern=None)
    by_name = {token.content: token for token in added.values()}
    patterns: list[str] = []
    for name in sorted(ids, key=len, reverse=True):
        left, right = (r"\s*" if on else "" for on in (by_name[name].lstrip, by_name[name].rstrip))
        patterns.append(f"{left}{re.escape(name)}{right}")
    return _Special(ids=ids, pattern=re.compile(f"({'|'.join(patterns)})"))


def _check_built_in(tokenizer: "Tokenizer", template: ChatTemplate) -> None:
    if not isinstance(template, BuiltInTemplate):
        return
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [name for name in template.special_tokens if name not in added]
    if missing:
        raise UserError(
            f"the tokenizer has no token {', '.join(missing)}, which chat template {template.name} "
            f"needs; use another template, or add them with wlb.prepare.add_chat_tokens"
        )


def _check_parts(tokenizer: "Tokenizer") -> None:
    """UserError for a tokenizer that encodes the parts of a text differently from the whole."""
    encoded: list[list[int]] = [
        tokenizer.encode(text, add_special_tokens=False).ids for text in ("\nword", "\n", "word")
    ]
    if encoded[0] != encoded[1] + encoded[2]:
        raise UserError(
            "the tokenizer puts white space in front of what it encodes, so a conversation cannot "
            "be encoded in parts and contents be kept apart from special tokens; use a tokenizer "
            "without a prefix space (byte-level BPE with add_prefix_space = false)"
        )


def add_chat_tokens(tokenizer: "Tokenizer", template: BuiltInTemplate) -> int:
    """Adds the template's special tokens that the tokenizer lacks; returns how many."""
    return add_special_tokens(tokenizer, template.special_tokens)
