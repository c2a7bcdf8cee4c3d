"""Chat templates: a conversation as text, with the places of contents and of what is trained.

1. The text is rendered with marks in contents and reasoning, so that it says where each of them is,
and without them: where more than the marks differ, the template changes contents or decides by
them, and is refused.
2. Where contents hold the text of special tokens, it is rendered once more with other characters in
their place. A template that then writes anything else beside the contents copies from them what
would become special tokens, and is refused.
3. The contents of {% generation %} blocks are trained. Without them what an assistant generates
begins where the text with a generation prompt ends, and its turn ends where the text of the
messages up to there ends, if the whole text begins with these texts.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from wlb.plan import UserError
from wlb.prepare.conversation import Conversation, Message, Role
from wlb.prepare.template_source import (
    FIRST_MARK,
    MOST_MARKS,
    RESERVED,
    WHOLE,
    FieldMarks,
    TemplateSource,
    prefix_of,
)
from wlb.prepare.tool_calls import with_other_arguments


class Turns(StrEnum):
    """Assistant messages that are trained."""

    ALL = "all"
    LAST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an assistant generates, as places in a rendering.

    It is trained from `start` up to the special token in [said, stop) that ends the turn; what a
    generation block holds is trained as a whole.
    """

    start: int
    said: int  # where the content ends
    stop: int
    has_calls: bool
    is_block: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A rendered conversation, with places in its text."""

    text: str
    contents: tuple[tuple[int, int], ...]  # spans that messages wrote, ascending
    replies: tuple[Reply, ...]  # of the messages that are trained
    turns: tuple[int, ...]  # where a turn after the first one begins, where known
    prefix: int | None  # where the first turn begins; None if the system message is inside it
    num_dropped: int = 0  # messages whose reasoning the template left out

    def template_spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The spans of [start, stop) that the template wrote itself."""
        for a, b in self.contents:
            if b > start and a < stop:
                if start < a:
                    yield start, a
                start = b
        if start < stop:
            yield start, stop


@dataclass(frozen=True, slots=True, kw_only=True)
class _MarkedText:
    """A rendering with marks, as `FieldMarks` numbers the fields."""

    text: str
    given: dict[str, Any]  # what it was rendered from
    fields: dict[int, tuple[int, int]]  # their places
    blocks: list[tuple[int, int]]  # places of generation blocks
    lengths: list[int | None]  # of the prefixes that were asked for
    replaced: dict[int, str]  # characters by the code points that stand for them
    dropped: frozenset[int]  # messages whose reasoning is left out

    def said(self, number: int) -> int:
        """Where the content of a message ends, 0 for none."""
        return self.fields.get(2 * number + 1, (0, 0))[1]

    def begin(self, number: int) -> int | None:
        """Where the first field of a message begins, None for a message without text."""
        found = [self.fields[n][0] for n in (2 * number, 2 * number + 1) if n in self.fields]
        return min(found, default=None)

    def inside(self, start: int, stop: int) -> list[int]:
        """The messages with a field in [start, stop)."""
        return sorted({n // 2 for n, (a, b) in self.fields.items() if start <= a and b <= stop})

    def around(self, start: int, stop: int, num_messages: int) -> list[int]:
        """The messages between the fields before and after [start, stop), then those of them."""
        before = max((n // 2 for n, (_, b) in self.fields.items() if b <= start), default=0)
        after = min(
            (n // 2 for n, (a, _) in self.fields.items() if a >= stop), default=num_messages
        )
        return [i for i in (*range(before + 1, after), before, after) if i < num_messages]

    def has_content(self, number: int) -> bool:
        return 2 * number + 1 in self.fields


class InjectedToken(UserError):
    """Text of a conversation would become a special token."""


class ChatTemplate(TemplateSource):
    """Renders conversations in exact places."""

    def render(
        self, conversation: Conversation, turns: Turns, special: re.Pattern[str] | None = None
    ) -> Rendered:
        """UserError for a conversation of which it is not exactly known what is trained.

        special: finds special tokens, which the template may not copy from contents; None where
        contents are known to hold none.
        """
        conversation = conversation if self.knows_developer else conversation.as_system()
        self._check(conversation)
        messages, trained = conversation.messages, trained_messages(conversation, turns)
        ended = [i for i, m in enumerate(messages[:-1]) if m.role == Role.ASSISTANT or i == 0]
        prompted = [] if self.has_generation_blocks else trained
        asked = [prefix_of(i + 1) for i in ended] + [prefix_of(i, prompt=True) for i in prompted]
        found = self._marked_text(conversation, asked)
        if special is not None:
            self._check_copies(conversation, found, special)
        ends = {
            i: stop
            for i, stop in zip(ended, found.lengths, strict=False)
            if stop is not None and stop >= found.said(i)
        }
        ends[len(messages) - 1] = len(found.text)
        trained = [i for i in trained if i not in found.dropped]
        if self.has_generation_blocks:
            replies = self._in_blocks(messages, found, trained)
        else:
            prompts = dict(zip(prompted, found.lengths[len(ended) :], strict=True))
            begins = self._begins(messages, found, {i: prompts[i] for i in trained}, ends)
            replies = [self._reply(messages, found, i, begins[i], ends[i]) for i in trained]
        has_system = messages[0].role in (Role.SYSTEM, Role.DEVELOPER)
        has_start = bool(self.start) and found.text.startswith(self.start)
        prefix = ends.get(0) if has_system else len(self.start) * has_start
        asks = [i for i in range(1, len(messages)) if messages[i].role == Role.USER]
        starts = [ends[i - 1] for i in asks if i - 1 in ends]
        return Rendered(
            text=found.text.translate(found.replaced),
            contents=tuple(sorted(found.fields.values())),
            replies=tuple(replies),
            turns=tuple(start for start in starts if start > (prefix or 0)),
            prefix=prefix,
            num_dropped=len(found.dropped),
        )

    def _begins(
        self,
        messages: Sequence[Message],
        found: "_MarkedText",
        prompts: Mapping[int, int | None],
        ends: Mapping[int, int],
    ) -> dict[int, int]:
        """Where what is trained of each message begins. prompts: where the text with a generation
        prompt ends, for the messages that are trained, where the whole text begins with it. ends:
        where turns end.
        """
        begins: dict[int, int] = {}
        unsure: dict[int, int | None] = {}
        for number, prompt in prompts.items():
            if number not in ends:
                raise UserError(
                    f"chat template {self.name} writes message {number} differently when more "
                    f"messages follow, so where its turn ends is not known; put what the assistant "
                    f"generates into {{% generation %}} blocks, or train only the last turn"
                )
            # Some templates write a system message only together with the user's first message.
            if prompt is not None and prompt < found.said(number - 1):
                prompt = None
            if prompt is not None and prompt == found.begin(number):
                begins[number] = prompt
            else:
                unsure[number] = prompt
        if not unsure:
            return begins
        asked: list[dict[str, Any]] = []
        for number in unsure:
            bare = Message(role=Role.ASSISTANT, content="x")
            then = [self.message_for(m, whole=WHOLE) for m in (bare, messages[number])]
            asked.append(prefix_of(number))
            asked += [prefix_of(number, then=[one], cut=WHOLE) for one in then]
        _, lengths = self.render_all([found.given], asked)
        for i, (number, prompt) in enumerate(unsure.items()):
            without, *behind_headers = lengths[3 * i : 3 * i + 3]
            # Where the prompt adds nothing, as after a tool's answer, the header is no reply.
            candidates = [None if prompt == without else prompt, *behind_headers]
            if not found.has_content(number):
                candidates.append(prompt)
            start = next((at for at in candidates if at is not None), None)
            if start is None:
                raise UserError(
                    f"chat template {self.name} writes message {number} otherwise than after its "
                    f"generation prompt, so where the assistant begins is not known; put what the "
                    f"assistant generates into {{% generation %}} blocks"
                )
            begins[number] = start
        return begins

    def _reply(
        self, messages: Sequence[Message], found: "_MarkedText", number: int, start: int, stop: int
    ) -> Reply:
        """What is trained of a message between `start` and the end of its turn."""
        has_calls = bool(messages[number].tool_calls)
        said = max(start, found.said(number))
        return Reply(start=start, said=said, stop=stop, has_calls=has_calls)

    def _in_blocks(
        self, messages: Sequence[Message], found: "_MarkedText", trained: Sequence[int]
    ) -> list[Reply]:
        """The generation blocks of the messages that are trained."""
        replies: list[Reply] = []
        for start, stop in found.blocks:
            inside = found.inside(start, stop)
            for number in inside:
                if messages[number].role != Role.ASSISTANT:
                    raise UserError(
                        f"chat template {self.name} has the {messages[number].role}'s message "
                        f"{number} in a {{% generation %}} block, which would train it"
                    )
            # A block without a field is of an assistant between those around it, or next to it.
            near = inside or found.around(start, stop, len(messages))
            said_by = (i for i in near if messages[i].role == Role.ASSISTANT)
            owner = next(said_by, None)
            if owner is not None and owner in trained:
                said = min(stop, max(start, found.said(owner)))
                has_calls = bool(messages[owner].tool_calls)
                replies.append(
                    Reply(start=start, said=said, stop=stop, has_calls=has_calls, is_block=True)
                )
        return replies

    def _check(self, conversation: Conversation) -> None:
        """UserError for marks in the conversation, and for reasoning that would be lost."""
        for i, message in enumerate(conversation.messages):
            if found := RESERVED.search(message.reasoning + message.content):
                raise UserError(f"message {i} contains {found[0]!a}, which marks contents here")
            if message.reasoning and not self.writes_reasoning[0]:
                remedy = (
                    "write it as <think>...</think> in front of the content, or remove it"
                    if self.writes_reasoning[1]
                    else "use a template that writes it, or remove it"
                )
                raise UserError(
                    f"chat template {self.name} leaves out the reasoning of message {i}, which "
                    f"would be lost; {remedy}"
                )
        if found := RESERVED.search(conversation.literals):
            raise UserError(
                f"its tools or tool calls contain {found[0]!a}, which marks contents here"
            )
        if len(conversation.messages) * 2 > MOST_MARKS:
            raise UserError(
                f"it has {len(conversation.messages)} messages, must have at most "
                f"{MOST_MARKS // 2}; split the conversation"
            )

    def _marked_text(
        self, conversation: Conversation, prefixes: Sequence[dict[str, Any]]
    ) -> "_MarkedText":
        """The rendering with marks. UserError for contents, calls or tools that are not in it as
        they are.
        """
        plain = [self.message_for(message) for message in conversation.messages]
        marks = FieldMarks()
        marked = [self.message_for(m, (marks, i)) for i, m in enumerate(conversation.messages)]
        tools = json.loads(conversation.tools) if conversation.tools else None
        given = {"messages": marked, "tools": tools}
        others = self._without(conversation, given)
        texts, lengths = self.render_all(
            [{"messages": plain, "tools": tools}, *(other for _, other in others), given], prefixes
        )
        text, blocks = cast("tuple[str, list[tuple[int, int]]]", texts[-1])
        for (what, _), (other, _) in zip(others, texts[1:-1], strict=True):
            if other == text:
                raise UserError(
                    f"chat template {self.name} {what}, which would be lost; use the template of a "
                    f"model that has a form for them, or remove them"
                )
        fields = self._fields(conversation, text, marks)
        if text.translate(marks.replaced) != texts[0][0]:
            raise self._changes("")
        return _MarkedText(
            text=text,
            given=given,
            fields=fields,
            blocks=blocks,
            lengths=lengths,
            replaced=marks.replaced,
            dropped=frozenset(n // 2 for n in marks.stripped if n % 2 == 0 and n not in fields),
        )

    def _check_copies(
        self, conversation: Conversation, found: "_MarkedText", special: re.Pattern[str]
    ) -> None:
        """InjectedToken for a template that writes another text beside contents where their
        special tokens are replaced by other characters.
        """
        messages = conversation.messages
        if not any(special.search(m.reasoning) or special.search(m.content) for m in messages):
            return
        marks = FieldMarks(special)
        masked = [self.message_for(m, (marks, i)) for i, m in enumerate(messages)]
        ((text, _),), _ = self.render_all([{**found.given, "messages": masked}])
        expected, at = "", 0
        for number, (start, stop) in sorted(found.fields.items(), key=lambda field: field[1]):
            expected += found.text[at:start] + marks.stripped[number]
            at = stop
        if text != expected + found.text[at:]:
            raise InjectedToken(
                f"chat template {self.name} copies text of contents that hold special tokens, or "
                f"decides by it, so that a message could set special tokens, which only the "
                f"template may set; take them out of the messages, or use a template that writes "
                f"contents only as they are"
            )

    def _fields(
        self, conversation: Conversation, text: str, marks: "FieldMarks"
    ) -> dict[int, tuple[int, int]]:
        """The places of the fields by number; a reasoning may be left out."""
        found = [(ord(m[0]) - FIRST_MARK, m.start()) for m in RESERVED.finditer(text)]
        contents = [number for number, _ in found if number % 2]
        owners = [number // 2 for number, _ in found]
        is_ordered = owners == sorted(owners) and len({n for n, _ in found}) == len(found)
        if not is_ordered or contents != [number for number in marks.stripped if number % 2]:
            raise UserError(
                f"chat template {self.name} writes the contents of messages "
                f"{[number // 2 for number in contents]} of {len(conversation.messages)} "
                f"({', '.join(conversation.roles)}): it repeats, leaves out or "
                f"changes some, so what is trained is not exactly known"
            )
        fields: dict[int, tuple[int, int]] = {}
        for number, at in found:
            core = marks.stripped[number]
            start = at - core.index(chr(FIRST_MARK + number))
            if start < 0 or not text.startswith(core, start):
                raise self._changes(f" of message {number // 2}")
            fields[number] = (start, start + len(core))
        return fields

    def _changes(self, where: str) -> UserError:
        return UserError(
            f"chat template {self.name} changes the contents{where} of this conversation (it does "
            f"more than remove white space around them, or take <think>...</think> from their "
            f"beginning), so what is trained is not exactly known; use a template that writes "
            f"contents as they are"
        )

    def _without(
        self, conversation: Conversation, given: dict[str, Any]
    ) -> list[tuple[str, dict[str, Any]]]:
        """What a template leaves out that writes the same text of this: no tools, and other
        arguments of each call.
        """
        made: list[tuple[str, dict[str, Any]]] = []
        if conversation.tools:
            made.append(("does not write tools", {**given, "tools": None}))
        for i, message in enumerate(conversation.messages):
            for changed in with_other_arguments(message.tool_calls or "[]"):
                messages = [*given["messages"]]
                messages[i] = {**messages[i], "tool_calls": self.calls_for(changed)}
                what = f"leaves out tool calls of message {i}"
                made.append((what, {**given, "messages": messages}))
        return made


def trained_messages(conversation: Conversation, turns: Turns) -> list[int]:
    """Indices of the assistant's messages that are trained: not those that say nothing."""
    messages = conversation.messages
    found = [i for i, m in enumerate(messages) if m.role == Role.ASSISTANT]
    if turns == Turns.LAST:
        found = found[-1:]
    return [i for i in found if messages[i].is_trained and not messages[i].is_empty_reply]
