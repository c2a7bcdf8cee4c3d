"""Encode conversations as tokens, and decide which tokens are trained.

Text becomes special tokens only where the template itself wrote it, never in the contents of
messages. The rendered text is cut where trained text begins and ends, and each part is encoded
separately, so that every token is either trained or not. The result is the same as encoding the
whole text at once, unless contents have the text of special tokens, or a token would cross a cut.
"""

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from wlb.data.targets import spans_of
from wlb.plan import BoolArray, IntArray, UserError, check_at_least, offsets_of
from wlb.prepare.chat_template import ChatTemplate, InjectedToken, Rendered, Reply, Turns
from wlb.prepare.conversation import CONTENT_TAGS, Conversation, Role, probe_of
from wlb.prepare.encode import add_special_tokens, unknown_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# Roles of example conversations. Rendering them shows which special tokens a template uses. A
# template must render the first example, and may refuse the others.
_PROBES = (
    (Role.USER, Role.ASSISTANT, Role.USER, Role.ASSISTANT),
    (Role.SYSTEM, Role.USER, Role.ASSISTANT),
    (Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT),
)


class TooLong(StrEnum):
    """What to do with a conversation of more than `limit` tokens."""

    # Split the conversation into documents, each with as many whole turns as fit. A turn that does
    # not fit is cut after `limit` tokens. If the first token after a cut is trained, the next
    # document repeats the token before the cut, from which it is predicted. Only the first document
    # has the system message.
    SPLIT = "split"
    # Drop the oldest turns, and keep what is in front of the first one: BOS, system message and
    # tools. If the last turn alone does not fit, drop its beginning.
    TRUNCATE_LEFT = "truncate_left"
    # Raise a UserError.
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatTokens:
    """The tokens of a conversation, or of a part of one."""

    tokens: IntArray  # shape [num_tokens]
    is_trained: BoolArray  # whether each token is trained, shape [num_tokens]
    turns: tuple[int, ...] = ()  # first token of each turn except the first turn, ascending
    # Number of tokens before the first turn: BOS, system message and tools. None if this is
    # unknown, or if the template writes the system message or the tools inside the first turn.
    prefix: int | None = 0
    num_dropped: int = 0  # messages not trained because the template leaves out their reasoning

    @property
    def trained(self) -> IntArray:
        """Half-open spans of trained tokens, shape [k, 2]."""
        return spans_of(self.is_trained)

    @property
    def num_targets(self) -> int:
        """Number of trained tokens except the first token, which no token predicts."""
        return int(self.is_trained[1:].sum())


class ChatEncoder:
    """Encodes conversations with one tokenizer and one chat template.

    Args:
        tokenizer: The tokenizer.
        template: The chat template.
        turns: Which messages of assistants are trained.

    Raises:
        UserError: The tokenizer lacks a special token of the template, or it cannot encode a text
            in parts.
    """

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
                f"{template.name} needs; use another template, or add the tokens with "
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
        """Encode a conversation.

        Raises:
            InjectedToken: Text of a message or of a tool would become a special token.
            UserError: The template refuses the conversation, or it is unclear what is trained.
        """
        # The template itself writes tools and tool calls, so the text of a special token in them
        # would become this token.
        if found := self._special.search(conversation.literals):
            raise InjectedToken(
                f"the tools or tool calls of the conversation contain the special token "
                f"{found[0].strip()}, which only the chat template may write; remove the token"
            )
        rendered = self.template.render(conversation, self.turns, self._special)
        spans = [(reply.start, self._stop(rendered.text, reply)) for reply in rendered.replies]
        # Encode the text between adjacent cuts. `starts` maps the position of each cut to the index
        # of the first token after the cut.
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
        """Return the trained special token that ends the assistant's last turn.

        Returns:
            The id and the text of the token.

        Raises:
            UserError: There is no such token, so a model could not learn to stop.
        """
        rendered = self.template.render(conversation, self.turns)
        for reply in reversed(rendered.replies):
            self._stop(rendered.text, reply)
            if (match := self._ending(rendered.text, reply)) is not None:
                name = self._name(match)
                return self._ids_by_name[name], name
        raise UserError(
            f"chat template {self.template.name} trains no special token at the end of an "
            f"assistant's turn, so the model could not learn to end its turn; move the special "
            f"token that ends the turn into the {{% generation %}} block"
        )

    def _stop(self, text: str, reply: Reply) -> int:
        """Return the position in the text where training of a reply ends.

        Raises:
            UserError: No special token ends the reply.
        """
        if reply.is_block:
            return reply.stop
        if (match := self._ending(text, reply)) is not None:
            return match.end()
        raise UserError(
            f"chat template {self.template.name} ends an assistant's turn with "
            f"{text[reply.content_end : reply.stop]!r}, which contains no special token of "
            f"the tokenizer, so the model could not learn to end its turn; use the tokenizer that "
            f"belongs to the template, or add the token to the tokenizer"
        )

    def _ending(self, text: str, reply: Reply) -> re.Match[str] | None:
        """Return the match of the special token that ends a reply, or None if there is none.

        Only special tokens between the end of the content and the end of the turn are considered.
        If the reply has tool calls, the last of these tokens ends it. Otherwise the first one does.
        If further special tokens follow the first one without a gap, the last of them ends it.
        """
        found = list(self._pattern.finditer(text, reply.content_end, reply.stop))
        if not found or reply.has_calls:
            return found[-1] if found else None
        last = found[0]
        for match in found[1:]:
            if match.start() != last.end():
                break
            last = match
        return last

    def _name(self, match: re.Match[str]) -> str:
        """Return the text of a matched token, without white space that the match may include."""
        return match[0] if match[0] in self._ids_by_name else match[0].strip()

    def _ids_of(self, rendered: Rendered, start: int, stop: int) -> list[int]:
        """Encode the characters [start, stop) of the rendered text.

        Only text that the template wrote itself can become special tokens.
        """
        text, at, ids = rendered.text, start, list[int]()
        for a, b in rendered.template_spans(start, stop):
            for match in self._pattern.finditer(text, a, b):
                ids += self._ids(text[at : match.start()]) if at < match.start() else []
                ids.append(self._ids_by_name[self._name(match)])
                at = match.end()
        return ids + self._ids(text[at:stop]) if at < stop else ids

    def _ids(self, text: str) -> list[int]:
        # encode_batch_fast is faster than encode(), because it computes no character offsets. With
        # one text it uses one thread.
        encoded: Any = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded[0].ids
        if not self._forbidden.isdisjoint(ids):
            token = next(token for token in ids if token in self._forbidden)
            raise InjectedToken(
                f"a text of the conversation encodes to the special token with the id {token}, "
                f"which only the chat template may write; remove that part of the text, or use "
                f"another tokenizer"
            )
        return ids

    def _protected(self, tokenizer: "Tokenizer") -> "Tokenizer":
        """Return a copy of a tokenizer that never turns contents into tokens of the template.

        With `encode_special_tokens` a tokenizer never turns text into added tokens that are marked
        as special. So in the copy all added tokens that occur in the template are marked as
        special, except CONTENT_TAGS.
        """
        from tokenizers import Tokenizer

        used: set[str] = set()
        for roles in _PROBES:
            try:
                rendered = self.template.render(probe_of(roles), Turns.LAST)
            # A template may refuse system messages or tools. Then these have no tokens to protect.
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
        # The parts of a text are encoded separately, and must be neither truncated nor padded.
        copy.no_truncation()
        copy.no_padding()
        return copy


def fit(made: ChatTokens, limit: int | None, too_long: TooLong) -> list[ChatTokens]:
    """Split, truncate or refuse an encoded conversation that has more than `limit` tokens.

    Args:
        made: The encoded conversation.
        limit: The most tokens of a document, None for any number.
        too_long: What to do if the conversation has more tokens.

    Returns:
        The documents. A conversation that fits is one unchanged document.

    Raises:
        UserError: The conversation is refused, or it cannot be truncated.
    """
    num = made.tokens.size
    if limit is None or num <= limit:
        return [made]
    check_at_least("limit", limit, 2, " tokens, because the first one is never trained")
    match too_long:
        case TooLong.SPLIT:
            return _split(made, limit)
        case TooLong.TRUNCATE_LEFT:
            return [_truncate_left(made, limit)]
        case TooLong.REFUSE:
            raise UserError(
                f"the conversation has {num} tokens, more than the limit of {limit}; raise "
                f"--limit, or use --too-long split or truncate_left"
            )


def _split(made: ChatTokens, limit: int) -> list[ChatTokens]:
    num, start, trained = made.tokens.size, 0, made.is_trained
    pieces: list[tuple[int, int]] = []
    while num - start > limit:
        # The first token of a document cannot be trained. So if the token at `stop` is trained, the
        # next document starts one token earlier.
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
            "--too-long truncate_left cannot drop the oldest turns of this conversation, because "
            "the system message or the tools could be lost: the chat template writes them inside "
            "the first turn, or does not show where this turn begins; use --too-long split or "
            "refuse"
        )
    left = limit - prefix
    if left < 2:
        raise UserError(
            f"the text before the first turn, such as a system message and tools, has {prefix} of "
            f"the {limit} tokens that a document may have, but at least 2 must remain for the "
            f"turns; raise --limit, or use --too-long split"
        )
    turns = [turn for turn in made.turns if num - turn <= left]
    start = turns[0] if turns else num - left
    rows = np.concatenate([np.arange(prefix), np.arange(start, num)])
    is_trained = made.is_trained.copy()
    # The first token after the cut is not trained, because the tokens that would predict it were
    # removed.
    is_trained[start] = False
    return _document(made.tokens[rows], is_trained[rows])


def _document(tokens: IntArray, is_trained: BoolArray) -> ChatTokens:
    is_first = np.arange(tokens.size) == 0
    return ChatTokens(tokens=tokens, is_trained=is_trained & ~is_first)


def _pattern_of(added: list[Any]) -> re.Pattern[str]:
    """Return a pattern that finds the texts of added tokens.

    A match includes the white space that a token with lstrip or rstrip absorbs.
    """
    patterns: list[str] = []
    # Try longer tokens first, because a shorter token may be the beginning of a longer one.
    for token in sorted(added, key=lambda token: len(token.content), reverse=True):
        left, right = (r"\s*" if on else "" for on in (token.lstrip, token.rstrip))
        patterns.append(f"{left}{re.escape(token.content)}{right}")
    # Without added tokens the pattern never matches.
    return re.compile(f"({'|'.join(patterns) or '(?!)'})")


def _check_parts(tokenizer: "Tokenizer") -> None:
    """Raise UserError if encoding parts of a text gives other tokens than encoding the whole."""
    encoded: list[list[int]] = [
        tokenizer.encode(text, add_special_tokens=False).ids for text in ("\nword", "\n", "word")
    ]
    if encoded[0] != encoded[1] + encoded[2]:
        raise UserError(
            "the tokenizer adds a space in front of each text, so the parts in which wlb encodes a "
            "conversation would begin with spaces that are not in it; use a tokenizer that "
            "adds no space, such as a byte-level BPE with add_prefix_space = false"
        )


def add_chat_tokens(tokenizer: "Tokenizer", template: ChatTemplate) -> int:
    """Add the template's special tokens to a tokenizer that lacks them.

    Returns:
        How many tokens were added.
    """
    return add_special_tokens(tokenizer, template.special_tokens)
