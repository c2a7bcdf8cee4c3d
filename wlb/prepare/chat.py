"""Conversations to tokens, with the spans that are trained (README.md has the rules).

Special tokens are matched only in the template's own text. Text is cut where training begins and
ends, so that every token is trained or not as a whole; if contents hold no special token and no
token would cross a cut, the result equals encoding the rendered text at once.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from wlb.data.targets import spans_of
from wlb.plan import BoolArray, IntArray, UserError, check_at_least, offsets_of
from wlb.prepare.chat_template import ChatTemplate, InjectedToken, Rendered, Reply, Turns
from wlb.prepare.conversation import CONTENT_TAGS, Conversation, Message, Role
from wlb.prepare.encode import add_special_tokens, unknown_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_PROBES = (
    (Role.USER, Role.ASSISTANT, Role.USER, Role.ASSISTANT),
    (Role.SYSTEM, Role.USER, Role.ASSISTANT),
    (Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT),
)
"""Conversations that show which tokens a template uses; it must render the first one."""


class TooLong(StrEnum):
    """Treatment of a conversation of more than `limit` tokens.

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

    tokens: int64 [num_tokens]. is_trained: bool [num_tokens]. turns: the tokens at which a turn
    after the first one begins, ascending. prefix: tokens before the first turn (start of text,
    system message); None where the system message is inside it. num_dropped: messages whose
    reasoning the template left out, which are not trained.
    """

    tokens: IntArray
    is_trained: BoolArray
    turns: tuple[int, ...] = ()
    prefix: int | None = 0
    num_dropped: int = 0

    @property
    def trained(self) -> IntArray:
        """Half-open spans of trained tokens, int64 [k, 2]."""
        return spans_of(self.is_trained)

    @property
    def num_targets(self) -> int:
        """Tokens that are trained as labels: the first one never is."""
        return int(self.is_trained[1:].sum())


class ChatEncoder:
    """Encodes conversations with one tokenizer and one template."""

    def __init__(
        self, tokenizer: "Tokenizer", template: ChatTemplate, *, turns: Turns = Turns.ALL
    ) -> None:
        self.template = template
        self.turns = turns
        added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
        self._ids_by_name = {token.content: number for number, token in added.items()}
        if missing := [n for n in template.special_tokens if n not in self._ids_by_name]:
            raise UserError(
                f"the tokenizer has no token {', '.join(missing)}, which chat template "
                f"{template.name} needs; use another template, or add them with "
                f"wlb.prepare.add_chat_tokens"
            )
        self._pattern = _pattern_of(list(added.values()))
        self._tokenizer = self._protected(tokenizer)
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special}
        self._forbidden = frozenset(special - {unknown_id(self._tokenizer)})
        self._special = _pattern_of([added[number] for number in sorted(self._forbidden)])
        _check_parts(self._tokenizer)

    def encode(self, conversation: Conversation) -> ChatTokens:
        """UserError for a conversation that the template refuses or cannot render exactly."""
        # Tools and calls are part of the template's text, where special tokens are matched.
        if found := self._special.search(conversation.literals):
            raise InjectedToken(
                f"its tools or tool calls contain the special token {found[0].strip()}, which only "
                f"the template may set; take it out of them"
            )
        rendered = self.template.render(conversation, self.turns, self._special)
        spans = [(reply.start, self._stop(rendered.text, reply)) for reply in rendered.replies]
        places = [*rendered.turns, *([] if rendered.prefix is None else [rendered.prefix])]
        edges = [place for span in spans for place in span]
        cuts = sorted({0, len(rendered.text), *places, *edges})
        ids = [self._ids_of(rendered, a, b) for a, b in pairwise(cuts)]
        starts = dict(zip(cuts, offsets_of(np.array([len(i) for i in ids])).tolist(), strict=True))
        is_trained = np.zeros(starts[cuts[-1]], bool)
        for a, b in spans:
            is_trained[starts[a] : starts[b]] = True
        return ChatTokens(
            tokens=np.array([token for tokens in ids for token in tokens], np.int64),
            is_trained=is_trained,
            turns=tuple(starts[turn] for turn in rendered.turns),
            prefix=None if rendered.prefix is None else starts[rendered.prefix],
            num_dropped=rendered.num_dropped,
        )

    def end_of(self, conversation: Conversation) -> tuple[int, str]:
        """Id and text of the trained token that ends its last turn, an assistant's.

        That is the first special token after an answer's content, or the last one of those that
        follow it directly, and the last one after calls. UserError for none.
        """
        rendered = self.template.render(conversation, self.turns)
        for reply in reversed(rendered.replies):
            self._stop(rendered.text, reply)
            if (match := self._ending(rendered.text, reply)) is not None:
                name = self._name(match)
                return self._ids_by_name[name], name
        raise UserError(
            f"chat template {self.template.name} trains no special token after what an assistant "
            f"says, so the model could not learn to stop; put the token that ends its turn into "
            f"the {{% generation %}} block"
        )

    def _stop(self, text: str, reply: Reply) -> int:
        """Where the trained part of a reply ends."""
        if reply.is_block:
            return reply.stop
        if (match := self._ending(text, reply)) is not None:
            return match.end()
        raise UserError(
            f"chat template {self.template.name} ends an assistant's turn with "
            f"{text[reply.said : reply.stop]!r}, which is no special token of the tokenizer: the "
            f"model could not learn to stop; use the tokenizer that belongs to the template, or "
            f"add the token to it"
        )

    def _ending(self, text: str, reply: Reply) -> re.Match[str] | None:
        """The special token that ends a reply: the first one after its content, or the last one of
        those that follow it directly, and the last one after calls.
        """
        found = list(self._pattern.finditer(text, reply.said, reply.stop))
        if not found or reply.has_calls:
            return found[-1] if found else None
        last = found[0]
        for match in found[1:]:
            if match.start() != last.end():
                break
            last = match
        return last

    def _name(self, match: re.Match[str]) -> str:
        """The special token of a match, which may have white space around it."""
        return match[0] if match[0] in self._ids_by_name else match[0].strip()

    def _ids_of(self, rendered: Rendered, start: int, stop: int) -> list[int]:
        """The tokens of [start, stop): special ones in the template's own text only."""
        text, at, ids = rendered.text, start, list[int]()
        for a, b in rendered.template_spans(start, stop):
            for match in self._pattern.finditer(text, a, b):
                ids += self._ids(text[at : match.start()]) if at < match.start() else []
                ids.append(self._ids_by_name[self._name(match)])
                at = match.end()
        return ids + self._ids(text[at:stop]) if at < stop else ids

    def _ids(self, text: str) -> list[int]:
        # encode_batch_fast of one text runs on one thread and, unlike encode(), computes no
        # offsets.
        encoded: Any = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded[0].ids
        if not self._forbidden.isdisjoint(ids):
            token = next(token for token in ids if token in self._forbidden)
            raise InjectedToken(
                f"its text encodes to the special token {token}, which only the template may set; "
                f"use a tokenizer without that piece, or take it out of the text"
            )
        return ids

    def _protected(self, tokenizer: "Tokenizer") -> "Tokenizer":
        """A copy in which every added token that the template uses is special, because contents
        could match added tokens that are not.
        """
        from tokenizers import Tokenizer

        used: set[str] = set()
        for roles in _PROBES:
            try:
                rendered = self.template.render(probe_of(roles), Turns.LAST)
            # A template may refuse system messages and tools.
            except UserError:
                if roles == _PROBES[0]:
                    raise
                continue
            for a, b in rendered.template_spans(0, len(rendered.text)):
                matches = self._pattern.finditer(rendered.text, a, b)
                used |= {self._name(match).strip() for match in matches}
        data: dict[str, Any] = json.loads(tokenizer.to_str())
        for token in data["added_tokens"]:
            is_used = token["content"].strip() in used - set(CONTENT_TAGS)
            token["special"] = token["special"] or is_used
        copy = Tokenizer.from_str(json.dumps(data))
        # Each run of text is encoded as a whole.
        copy.no_truncation()
        copy.no_padding()
        return copy


def probe_of(roles: Sequence[Role]) -> Conversation:
    """A conversation of these roles, for examining a template."""
    return Conversation(messages=tuple(Message(role=role, content="x") for role in roles))


def fit(made: ChatTokens, limit: int | None, too_long: TooLong) -> list[ChatTokens]:
    """Documents of at most `limit` tokens; the conversation itself where it fits.

    UserError where it is refused or cannot be truncated.
    """
    num = made.tokens.size
    if limit is None or num <= limit:
        return [made]
    check_at_least("limit", limit, 2, " tokens: one to predict from")
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
    num, start, trained = made.tokens.size, 0, made.is_trained
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
    is_trained = made.is_trained.copy()
    # The first token after a removed part has no predecessor to be predicted from.
    is_trained[start] = False
    return _document(made.tokens[rows], is_trained[rows])


def _document(tokens: IntArray, is_trained: BoolArray) -> ChatTokens:
    is_first = np.arange(tokens.size) == 0
    return ChatTokens(tokens=tokens, is_trained=is_trained & ~is_first)


def _pattern_of(added: list[Any]) -> re.Pattern[str]:
    """Finds added tokens, the longest first, with the space that lstrip and rstrip take in."""
    patterns: list[str] = []
    for token in sorted(added, key=lambda token: len(token.content), reverse=True):
        left, right = (r"\s*" if on else "" for on in (token.lstrip, token.rstrip))
        patterns.append(f"{left}{re.escape(token.content)}{right}")
    # Without added tokens the pattern never matches.
    return re.compile(f"({'|'.join(patterns) or '(?!)'})")


def _check_parts(tokenizer: "Tokenizer") -> None:
    """UserError for a tokenizer that encodes the parts of a text differently from the whole."""
    encoded: list[list[int]] = [
        tokenizer.encode(text, add_special_tokens=False).ids for text in ("\nword", "\n", "word")
    ]
    if encoded[0] != encoded[1] + encoded[2]:
        raise UserError(
            "the tokenizer puts white space in front of each text, so a conversation cannot "
            "be encoded in parts and contents be kept apart from special tokens; use a tokenizer "
            "without a prefix space (byte-level BPE with add_prefix_space = false)"
        )


def add_chat_tokens(tokenizer: "Tokenizer", template: ChatTemplate) -> int:
    """Adds the template's special tokens that the tokenizer lacks; returns how many."""
    return add_special_tokens(tokenizer, template.special_tokens)
