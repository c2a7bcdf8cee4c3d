"""Render a conversation as text, and find where its contents are and which text is trained.

A chat template is a program, so where it writes the contents is found by experiment:

1. The conversation is rendered as it is, and once more with marks: in each content and each
   reasoning, one character is replaced by a private-use character that occurs nowhere else. The
   marks show where each content and reasoning is. If the two texts differ in more than the marks,
   the template changes contents or depends on them, and the conversation is refused.
2. If contents have the text of special tokens, the conversation is rendered again with "x" in place
   of that text. If the template then writes anything different outside of the contents, it copies
   text from them that would become special tokens, and the conversation is refused.
3. Text in {% generation %} blocks is trained. Without such blocks, an assistant's reply begins
   where a rendering of only the earlier messages with a generation prompt ends, and its turn ends
   where a rendering without the later messages ends. Both texts must be prefixes of the whole text.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, cast

from wlb.plan import UserError
from wlb.prepare.conversation import Conversation, Message, Role, probe_of
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
    """Which messages of assistants are trained."""

    ALL = "all"
    LAST = "last"  # only the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A part of a rendered text that an assistant generates. Numbers are positions in the text."""

    start: int  # where training begins
    content_end: int  # where the content of the message ends
    # Where the turn or the generation block ends. A generation block is trained up to `stop`, other
    # replies only up to the special token in [content_end, stop) that ends the turn.
    stop: int
    has_calls: bool  # whether the message has tool calls
    is_block: bool = False  # whether the reply is the text of a {% generation %} block


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A rendered conversation. Spans and beginnings are positions in its text."""

    text: str
    contents: tuple[tuple[int, int], ...]  # spans of the contents and reasoning, ascending
    replies: tuple[Reply, ...]  # the trained parts of the text
    # Where turns begin, ascending. The first turn and turns whose beginning is unclear are absent.
    turns: tuple[int, ...]
    # Where the first turn begins. None if this is unknown, or if the system message or the tools
    # are inside it.
    prefix: int | None
    num_dropped: int = 0  # messages not trained because the template leaves out their reasoning

    def template_spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of [start, stop) that the template wrote itself, leaving out contents."""
        for a, b in self.contents:
            if b > start and a < stop:
                if start < a:
                    yield start, a
                start = b
        if start < stop:
            yield start, stop


@dataclass(frozen=True, slots=True, kw_only=True)
class _MarkedText:
    """A rendered conversation in which marks (`FieldMarks`) show where each field is.

    `Rendered` is made from this record. Field 2 * i is the reasoning of message i, and field
    2 * i + 1 its content.
    """

    text: str
    given: dict[str, Any]  # the variables that were rendered: messages and tools
    fields: dict[int, tuple[int, int]]  # span of each field in the text
    blocks: list[tuple[int, int]]  # spans of the generation blocks
    # For each beginning of the conversation that was rendered, the length of its text, or None if
    # `text` does not begin with it (`render_all`).
    lengths: list[int | None]
    replaced: dict[int, str]  # by each mark's code point: the character in whose place the mark is
    dropped: frozenset[int]  # numbers of the messages whose reasoning the template leaves out

    def content_end(self, number: int) -> int:
        """Return where in `text` the content of message `number` ends; 0 if it has no content."""
        return self.fields.get(2 * number + 1, (0, 0))[1]

    def first_field(self, number: int) -> int | None:
        """Return where in `text` the reasoning or content of message `number` begins.

        None means that the message has neither.
        """
        found = [self.fields[n][0] for n in (2 * number, 2 * number + 1) if n in self.fields]
        return min(found, default=None)

    def messages_inside(self, start: int, stop: int) -> list[int]:
        """Return the numbers of the messages with content or reasoning in `text[start:stop]`."""
        return sorted({n // 2 for n, (a, b) in self.fields.items() if start <= a and b <= stop})

    def messages_around(self, start: int, stop: int, num_messages: int) -> list[int]:
        """Return indices of the messages to which `text[start:stop]` may belong, likeliest first.

        This part of the text has no content or reasoning of a message, so its message is guessed.
        Let a be the message with the last content or reasoning before the part, and b the message
        with the first one after it. The result is a + 1, ..., b - 1, then a, then b.

        Args:
            start: Where in `text` the part begins.
            stop: Where in `text` the part ends.
            num_messages: Number of all messages.
        """
        before = max((n // 2 for n, (_, b) in self.fields.items() if b <= start), default=0)
        after = min(
            (n // 2 for n, (a, _) in self.fields.items() if a >= stop), default=num_messages
        )
        return [i for i in (*range(before + 1, after), before, after) if i < num_messages]

    def has_content(self, number: int) -> bool:
        """Return whether message `number` has a content."""
        return 2 * number + 1 in self.fields


class InjectedToken(UserError):
    """Raised if text of a conversation would become a special token."""


class ChatTemplate(TemplateSource):
    """A chat template that renders a conversation and says which text is trained."""

    def render(
        self, conversation: Conversation, turns: Turns, special: re.Pattern[str] | None = None
    ) -> Rendered:
        """Render a conversation, and find which parts of the text are trained.

        Args:
            conversation: The conversation.
            turns: Which messages of assistants are trained.
            special: Pattern that finds special tokens. If given, a template that copies special
                tokens from contents is refused. None leaves out this check.

        Raises:
            UserError: The template refuses the conversation, or it is unclear what is trained.
        """
        conversation = conversation if self.knows_developer else conversation.as_system()
        self._check(conversation)
        # Step 1: render the conversation and several beginnings of it. The lengths of their texts
        # show where turns end and where replies begin.
        messages, trained = conversation.messages, trained_messages(conversation, turns)
        ended = [i for i, m in enumerate(messages[:-1]) if m.role == Role.ASSISTANT or i == 0]
        prompted = [] if self.has_generation_blocks else trained
        asked = [prefix_of(i + 1) for i in ended] + [prefix_of(i, prompt=True) for i in prompted]
        found = self._marked_text(conversation, asked)
        if special is not None:
            self._check_copies(conversation, found, special)
        # Step 2: find where turns end. Render the messages up to the end of a turn. The turn ends
        # where this text ends. If it is not a prefix of the whole text, the end is unknown.
        ends = {
            i: stop
            for i, stop in zip(ended, found.lengths, strict=False)
            if stop is not None and stop >= found.content_end(i)
        }
        ends[len(messages) - 1] = len(found.text)
        # Step 3: find the parts of the text that assistants generate.
        trained = [i for i in trained if i not in found.dropped]
        if self.has_generation_blocks:
            replies = self._in_blocks(messages, found, trained)
        else:
            prompts = dict(zip(prompted, found.lengths[len(ended) :], strict=True))
            begins = self._begins(messages, found, {i: prompts[i] for i in trained}, ends)
            replies = [self._reply(messages, found, i, begins[i], ends[i]) for i in trained]
        # Step 4: find where turns begin, because a long conversation may be split there.
        prefix = self._first_turn(conversation, found, ends)
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

    def _first_turn(
        self, conversation: Conversation, found: "_MarkedText", ends: Mapping[int, int]
    ) -> int | None:
        """Return where in the text the first turn begins: after BOS, system message and tools.

        Args:
            conversation: The conversation.
            found: The rendered text, and where in it contents and reasoning are.
            ends: For each message, where its turn ends. Messages for which it is unknown are
                absent.

        Returns:
            The position. None if it is unknown, which includes templates that write the system
            message or the tools inside the first turn.
        """
        messages = conversation.messages
        has_system = messages[0].role in (Role.SYSTEM, Role.DEVELOPER)
        first, header = int(has_system), self._user_header
        if header is not None and first < len(messages) and messages[first].role == Role.USER:
            content = found.first_field(first)
            # If the first turn begins like later turns, then nothing else is inside it.
            if content is not None and found.text.endswith(header, 0, content):
                return content - len(header)
            # The user's message may be empty, and then its place in the text is not marked.
            if content is None and first in ends and not conversation.tools:
                at = found.text.rfind(header, 0, ends[first])
                return None if at < 0 else at
        # Otherwise tools may be inside the first turn, or a default system message in front of it.
        return ends.get(0) if has_system and not conversation.tools else None

    @cached_property
    def _user_header(self) -> str | None:
        """What the template writes in front of a user's content that is not the first message.

        None if the template refuses the conversations from which this is read.
        """
        # Some templates want the roles to alternate. Others write the last assistant's message
        # differently, so that it is unknown where an earlier one ends.
        for roles in ((Role.USER, Role.ASSISTANT, Role.USER), (Role.USER, Role.USER)):
            last = len(roles) - 1
            try:
                found = self._marked_text(probe_of(roles), [prefix_of(last)])
            except UserError:
                continue
            (end,), content = found.lengths, found.first_field(last)
            if end is not None and content is not None:
                return found.text[end:content]
        return None

    def _begins(
        self,
        messages: Sequence[Message],
        found: "_MarkedText",
        prompts: Mapping[int, int | None],
        ends: Mapping[int, int],
    ) -> dict[int, int]:
        """Find where training begins in each trained message.

        Args:
            messages: All messages.
            found: The rendered text, and where in it contents and reasoning are.
            prompts: For each trained message, the length of the text that the template renders
                from only the messages before it, with a generation prompt. None if the text of all
                messages does not begin with that text.
            ends: For each message, where its turn ends. Messages for which it is unknown are
                absent.

        Returns:
            For each trained message, the position in the text where training begins.
        """
        begins: dict[int, int] = {}
        unsure: dict[int, int | None] = {}
        for number, prompt in prompts.items():
            if number not in ends:
                raise UserError(
                    f"chat template {self.name} writes message {number} differently if other "
                    f"messages follow, so it is unclear where the turn of message {number} ends; "
                    f"change the template to write replies in {{% generation %}} blocks, or train "
                    f"only the last reply (--turns last)"
                )
            # Some templates write a system message only together with the user's first message. A
            # rendering of the messages before the reply may then lack the last of them. Do not use
            # such a rendering, which is too short.
            if prompt is not None and prompt < found.content_end(number - 1):
                prompt = None
            if prompt is not None and prompt == found.first_field(number):
                begins[number] = prompt
            else:
                unsure[number] = prompt
        if not unsure:
            return begins
        # For each message in `unsure`, render the messages before it twice more: once followed by a
        # reply "x", and once by the message itself. If training does not begin where the generation
        # prompt ends, it begins where the content of this last message begins.
        asked: list[dict[str, Any]] = []
        for number in unsure:
            bare = Message(role=Role.ASSISTANT, content="x")
            then = [self.message_for(m, whole=WHOLE) for m in (bare, messages[number])]
            asked.append(prefix_of(number))
            asked += [prefix_of(number, then=[one], cut=WHOLE) for one in then]
        _, lengths = self.render_all([found.given], asked)
        for i, (number, prompt) in enumerate(unsure.items()):
            without, *behind_headers = lengths[3 * i : 3 * i + 3]
            # If the generation prompt adds no text, as after a tool's answer, use the position
            # where the content begins in the other two renderings.
            candidates = [None if prompt == without else prompt, *behind_headers]
            if not found.has_content(number):
                candidates.append(prompt)
            start = next((at for at in candidates if at is not None), None)
            if start is None:
                raise UserError(
                    f"chat template {self.name} does not begin message {number} with its "
                    f"generation prompt, so it is unclear where the assistant's text begins; "
                    f"change the template to write replies in {{% generation %}} blocks"
                )
            begins[number] = start
        return begins

    def _reply(
        self, messages: Sequence[Message], found: "_MarkedText", number: int, start: int, stop: int
    ) -> Reply:
        """Return the reply of message `number`, whose training begins at `start`.

        Args:
            messages: All messages.
            found: The rendered text, and where in it contents and reasoning are.
            number: Index of the message in `messages`.
            start: Position in the rendered text at which training begins.
            stop: Position in the rendered text at which the turn of the message ends.
        """
        has_calls = bool(messages[number].tool_calls)
        content_end = max(start, found.content_end(number))
        return Reply(start=start, content_end=content_end, stop=stop, has_calls=has_calls)

    def _in_blocks(
        self, messages: Sequence[Message], found: "_MarkedText", trained: Sequence[int]
    ) -> list[Reply]:
        """Return a reply for each {% generation %} block that belongs to a trained message.

        Args:
            messages: All messages.
            found: The rendered text, and where in it contents and reasoning are.
            trained: Numbers of the trained messages.
        """
        replies: list[Reply] = []
        for start, stop in found.blocks:
            inside = found.messages_inside(start, stop)
            for number in inside:
                if messages[number].role != Role.ASSISTANT:
                    raise UserError(
                        f"chat template {self.name} writes message {number} in a "
                        f"{{% generation %}} block, so that it would be trained, but its role is "
                        f"{messages[number].role}; change the template to write only assistants' "
                        f"messages in {{% generation %}} blocks"
                    )
            # A block may have no content, for example only tool calls. It then belongs to the first
            # assistant's message among those that `messages_around` returns.
            candidates = inside or found.messages_around(start, stop, len(messages))
            assistants = (i for i in candidates if messages[i].role == Role.ASSISTANT)
            owner = next(assistants, None)
            if owner is not None and owner in trained:
                content_end = min(stop, max(start, found.content_end(owner)))
                has_calls = bool(messages[owner].tool_calls)
                replies.append(
                    Reply(
                        start=start,
                        content_end=content_end,
                        stop=stop,
                        has_calls=has_calls,
                        is_block=True,
                    )
                )
        return replies

    def _check(self, conversation: Conversation) -> None:
        """Raise UserError if the template cannot render a conversation without loss.

        It cannot if the conversation has private-use characters that wlb needs as marks, too many
        messages, or reasoning that the template does not write.
        """
        for i, message in enumerate(conversation.messages):
            if found := RESERVED.search(message.reasoning + message.content):
                raise UserError(
                    f"message {i} contains the private-use character {found[0]!a}, which wlb "
                    f"needs for its own marks; remove the character"
                )
            if message.reasoning and not self.writes_reasoning[0]:
                remedy = (
                    "write it as <think>...</think> in front of the content, or remove it"
                    if self.writes_reasoning[1]
                    else "use a template that writes reasoning, or remove the reasoning"
                )
                raise UserError(
                    f"chat template {self.name} would leave out the reasoning of message {i}; "
                    f"{remedy}"
                )
        if found := RESERVED.search(conversation.literals):
            raise UserError(
                f"the tools or tool calls contain the private-use character {found[0]!a}, which "
                f"wlb needs for its own marks; remove the character"
            )
        if len(conversation.messages) * 2 > MOST_MARKS:
            raise UserError(
                f"the conversation has {len(conversation.messages)} messages, but must have at "
                f"most {MOST_MARKS // 2}; split the conversation"
            )

    def _marked_text(
        self, conversation: Conversation, prefixes: Sequence[dict[str, Any]]
    ) -> "_MarkedText":
        """Render a conversation with marks that show where in the text contents and reasoning are.

        Check also that the template changes or loses nothing.

        Args:
            conversation: The conversation.
            prefixes: Beginnings of the conversation to render too, made by `prefix_of`.

        Raises:
            UserError: The text lacks contents, tool calls or tools, or has them in another form.
        """
        plain = [self.message_for(message) for message in conversation.messages]
        marks = FieldMarks()
        marked = [self.message_for(m, (marks, i)) for i, m in enumerate(conversation.messages)]
        tools = json.loads(conversation.tools) if conversation.tools else None
        given = {"messages": marked, "tools": tools}
        others = self._variants(conversation, given)
        texts, lengths = self.render_all(
            [{"messages": plain, "tools": tools}, *(other for _, other in others), given], prefixes
        )
        text, blocks = cast("tuple[str, list[tuple[int, int]]]", texts[-1])
        for (what, _), (other, _) in zip(others, texts[1:-1], strict=True):
            if other == text:
                raise UserError(
                    f"chat template {self.name} {what}, which would be lost; use a template that "
                    f"writes tools and tool calls, or remove them from the record"
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
        """Raise InjectedToken if the template copies special tokens from contents.

        The conversation is rendered with "x" in place of special tokens in contents. If the text
        outside of the contents changes, the template copies from the contents.
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
                f"chat template {self.name} copies special tokens from the contents of messages "
                f"(or depends on them), so that a message could add special tokens; remove special "
                f"tokens from the messages, or use a template that writes contents unchanged"
            )

    def _fields(
        self, conversation: Conversation, text: str, marks: "FieldMarks"
    ) -> dict[int, tuple[int, int]]:
        """Return where each field is in `text`, as characters [start, stop), by the field's number.

        Field 2 * i is the reasoning of message i, which a template may leave out. Field 2 * i + 1
        is its content, which a template must write.

        Args:
            conversation: The conversation.
            text: The rendered text. In each field, a mark (a character that occurs nowhere else)
                replaces one character.
            marks: The fields' texts with their marks.
        """
        found = [(ord(m[0]) - FIRST_MARK, m.start()) for m in RESERVED.finditer(text)]
        contents = [number for number, _ in found if number % 2]
        owners = [number // 2 for number, _ in found]
        is_ordered = owners == sorted(owners) and len({n for n, _ in found}) == len(found)
        if not is_ordered or contents != [number for number in marks.stripped if number % 2]:
            raise UserError(
                f"chat template {self.name} must write the contents of all "
                f"{len(conversation.messages)} messages ({', '.join(conversation.roles)}) once "
                f"and in order, but writes the contents of messages "
                f"{[number // 2 for number in contents]}, so it is unclear which tokens to "
                f"train; use another template"
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
            f"chat template {self.name} changes the contents{where} of this conversation, so it is "
            f"unclear which tokens to train; use a template that writes contents unchanged (it may "
            f"remove white space around them and <think>...</think> at their beginning)"
        )

    def _variants(
        self, conversation: Conversation, given: dict[str, Any]
    ) -> list[tuple[str, dict[str, Any]]]:
        """Return changed copies of a conversation, which test what the template leaves out.

        One copy has no tools, and for each tool call one copy has other arguments. The rendered
        text of each copy must differ from that of the conversation. If it does not, the template
        leaves out the tools or the arguments.

        Returns:
            For each copy, what the template leaves out if the text is the same (in words, for an
            error message), and the variables to render.
        """
        made: list[tuple[str, dict[str, Any]]] = []
        if conversation.tools:
            made.append(("leaves out the tools", {**given, "tools": None}))
        for i, message in enumerate(conversation.messages):
            for changed in with_other_arguments(message.tool_calls or "[]"):
                messages = [*given["messages"]]
                messages[i] = {**messages[i], "tool_calls": self.calls_for(changed)}
                what = f"leaves out tool calls of message {i} or their arguments"
                made.append((what, {**given, "messages": messages}))
        return made


def trained_messages(conversation: Conversation, turns: Turns) -> list[int]:
    """Return the indices of the messages that are trained.

    They are the messages of assistants (only the last one with `Turns.LAST`) that have text or tool
    calls, except messages that the record marks as not trained.
    """
    messages = conversation.messages
    found = [i for i, m in enumerate(messages) if m.role == Role.ASSISTANT]
    if turns == Turns.LAST:
        found = found[-1:]
    return [i for i in found if messages[i].is_trained and not messages[i].is_empty_reply]
