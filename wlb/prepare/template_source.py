"""Find out which variables and which form of messages a chat template takes, and render it.

`FieldMarks` can replace one character of each content and each reasoning by a private-use character
that occurs nowhere else. The rendered text then shows where each content and reasoning is.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from wlb.plan import UserError
from wlb.plan.errors import shortened
from wlb.prepare.conversation import REASONING_KEYS, Message, Role
from wlb.prepare.renderer import TemplateLimit, renderer
from wlb.prepare.tool_calls import with_text_arguments

MOST_SOURCE = 1 << 20
"""The most characters of a template. Templates of models have a few thousand."""
# The mark of field i (a content or a reasoning, see `FieldMarks`) is the private-use character with
# the code point FIRST_MARK + i. There are MOST_MARKS such characters.
FIRST_MARK, MOST_MARKS = 0x100000, 0xFFF0
RESERVED = re.compile("[\U00100000-\U0010ffff]")
"""Finds the characters that mark fields and generation blocks (Unicode's last private-use plane).

Conversations and templates that contain one of these characters are refused.
"""
WHOLE = chr(FIRST_MARK + MOST_MARKS)
"""The character that replaces a whole content or reasoning in examples."""
_DEVELOPER = re.compile(r"""['"]developer['"]""")
_THOUGHT = re.compile(r"(\s*(?:<think>)?)(.*?)</think>(.*)", re.DOTALL)
_VISIBLE = re.compile(r"\S")
_TAGS_AT_END = re.compile(r"(?:\s|<[^<>\s]*>)*$")


class FieldMarks:
    """Marks fields of messages, so that the place of each field in the rendered text can be found.

    A mark is a private-use character that replaces one character of the field. Field 2 * i is the
    reasoning of message i, and field 2 * i + 1 its content.

    Args:
        masked: Pattern of text to hide from the template, such as special tokens. In each match in
            a field, every visible character becomes "x". None hides nothing.
    """

    def __init__(self, masked: re.Pattern[str] | None = None) -> None:
        self._masked = masked
        # By field number: the field's text with its mark, without white space at both ends.
        self.stripped: dict[int, str] = {}
        # By the mark's code point: the character that the mark replaced.
        self.replaced: dict[int, str] = {}

    def mark(self, text: str, number: int) -> str:
        """Return `text` with one character replaced by a mark that is found again when rendered.

        Args:
            text: A content or a reasoning. If it is only white space, it is returned unchanged.
            number: Number of the field (content or reasoning) that has this text. Each number has
                a mark of its own.
        """
        if not text.strip():
            return text
        # Templates look for tags such as </think> at the end of a text, so mark the character
        # before such tags.
        tags = _TAGS_AT_END.search(text)
        at = (tags.start() if tags and tags.start() else len(text.rstrip())) - 1
        self.replaced[FIRST_MARK + number] = text[at]
        if self._masked is not None:
            text = self._masked.sub(lambda found: _VISIBLE.sub("x", found[0]), text)
        made = f"{text[:at]}{chr(FIRST_MARK + number)}{text[at + 1 :]}"
        self.stripped[number] = made.strip()
        return made


def prefix_of(
    upto: int, *, prompt: bool = False, then: Sequence[dict[str, Any]] = (), cut: str = ""
) -> dict[str, Any]:
    """Describe a beginning of a conversation, for the argument `prefixes` of `render_all`.

    Args:
        upto: How many messages of the conversation are rendered.
        prompt: Whether a generation prompt follows them.
        then: Other messages that follow them.
        cut: If not "", only the text before this string counts.
    """
    return {"upto": upto, "prompt": prompt, "then": list(then), "cut": cut}


class TemplateSource:
    """A chat template with the values of its variables.

    Args:
        source: The Jinja source of the template.
        name: Name of the template for error messages.
        variables: Values of variables such as bos_token and date_string.
        special_tokens: Texts of special tokens that the tokenizer must have.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        variables: Mapping[str, Any],
        special_tokens: tuple[str, ...] = (),
    ) -> None:
        self.name, self.source = name, source
        self.variables = dict(variables)
        self.special_tokens = special_tokens
        self.knows_developer = _DEVELOPER.search(source) is not None

    @cached_property
    def _examined(self) -> dict[str, Any]:
        """The variables that this template uses, and whether it has generation blocks.

        The process that renders templates finds both in the template's source. "used" is the list
        of the variables' names, and "generation" is True if there are {% generation %} blocks.

        Raises:
            UserError: The template is invalid, or a variable has no value.
        """
        if len(self.source) > MOST_SOURCE:
            raise UserError(
                f"chat template {self.name} has {len(self.source)} characters, but must have at "
                f"most {MOST_SOURCE}; give the chat template of a model"
            )
        if found := RESERVED.search(self.source):
            raise UserError(
                f"chat template {self.name} contains the private-use character {found[0]!a}, "
                f"which wlb needs for its own marks; remove the character"
            )
        try:
            about = renderer().ask({"source": self.source})
        except TemplateLimit as error:
            raise TemplateLimit(f"chat template {self.name} cannot be used: {error}") from None
        if reason := about.get("invalid"):
            raise UserError(
                f"chat template {self.name} is not a valid Jinja template: {shortened(reason, 400)}"
            )
        wanted = set(about["used"]) - self.variables.keys()
        if missing := sorted(name for name in wanted if name.endswith("_token")):
            raise UserError(
                f"chat template {self.name} uses {', '.join(missing)} without a value; add the "
                f"value to the tokenizer_config.json beside the template, or pass it as a variable"
            )
        return about

    def check_source(self) -> None:
        """Raise UserError if the template is invalid, or uses a variable that has no value."""
        assert self._examined

    @property
    def variable_names(self) -> frozenset[str]:
        """The names of all variables that the template uses."""
        return frozenset(self._examined["used"])

    @property
    def has_generation_blocks(self) -> bool:
        """Whether the template has {% generation %} blocks."""
        return self._examined["generation"]

    def message_for(
        self, message: Message, marks: "tuple[FieldMarks, int] | None" = None, *, whole: str = ""
    ) -> dict[str, Any]:
        """Return a message in the form in which the template takes it.

        Args:
            message: The message.
            marks: An object that puts a mark into the content and another one into the reasoning,
                and the number of the message in the conversation. None = no marks.
            whole: If not "", this text replaces the whole content and the whole reasoning.
        """

        def field_of(text: str, which: int) -> str:
            if whole:
                return whole if text.strip() else text
            return marks[0].mark(text, 2 * marks[1] + which) if marks else text

        found = None
        if message.role == Role.ASSISTANT and not message.reasoning:
            found = _THOUGHT.fullmatch(message.content)
        if found and "think>" not in found[2] + found[3]:
            content = f"{found[1]}{field_of(found[2], 0)}</think>{field_of(found[3], 1)}"
        else:
            content = field_of(message.content, 1)
        made = self._of_role(message.role, content)
        if message.reasoning:
            # Templates use different keys for reasoning, so set all three, as transformers does.
            made |= dict.fromkeys(REASONING_KEYS, field_of(message.reasoning, 0))
        made |= {"name": message.name} if message.name else {}
        made |= {"tool_call_id": message.call_id} if message.call_id else {}
        made |= {"tool_calls": self.calls_for(message.tool_calls)} if message.tool_calls else {}
        return made

    def _of_role(self, role: Role, content: str) -> dict[str, Any]:
        parts = [{"type": "text", "text": content}] if content else []
        return {"role": str(role), "content": parts if self._takes_content_parts else content}

    def calls_for(self, text: str) -> list[dict[str, Any]]:
        """Parse the JSON text of tool calls, and return them in the form the template takes."""
        calls = json.loads(text)
        return with_text_arguments(calls) if self._takes_arguments_as_text else calls

    @cached_property
    def _takes_content_parts(self) -> bool:
        """Whether contents must be lists of parts, because the template cannot take plain text."""
        said = (WHOLE, [{"type": "text", "text": WHOLE}])
        asked = [[{"role": "user", "content": content}] for content in said]
        text, parts = self._texts_of(asked)
        return WHOLE not in text and WHOLE in parts

    @cached_property
    def _takes_arguments_as_text(self) -> bool:
        """Whether arguments of tool calls must be JSON text.

        They must be text if the template refuses objects, or writes them as Python's repr.
        """
        function = {"name": "f", "arguments": {"wlb": "probe"}}
        calls = [{"type": "function", "function": function}]
        asked = [
            [
                self._of_role(Role.USER, "x"),
                self._of_role(Role.ASSISTANT, "") | {"tool_calls": given},
            ]
            for given in (calls, with_text_arguments(calls))
        ]
        objects, texts = self._texts_of(asked)
        return bool(texts) and (not objects or "{'wlb': 'probe'}" in objects)

    @cached_property
    def writes_reasoning(self) -> tuple[bool, bool]:
        """Whether the template writes reasoning.

        The first value is for reasoning under a key such as reasoning_content, the second value for
        <think>...</think> in front of the content.
        """
        answers = [
            self._of_role(Role.ASSISTANT, "x") | dict.fromkeys(REASONING_KEYS, WHOLE),
            self._of_role(Role.ASSISTANT, f"<think>{WHOLE}</think>x"),
        ]
        asked = [[self._of_role(Role.USER, "x"), answer] for answer in answers]
        under_key, in_tags = self._texts_of(asked)
        return WHOLE in under_key, WHOLE in in_tags

    def _texts_of(self, conversations: Sequence[list[dict[str, Any]]]) -> list[str]:
        """Render conversations, and return their texts. The text is "" if the template refuses."""
        given = [{"messages": messages, "tools": None} for messages in conversations]
        texts, _ = self.render_all(given, may_fail=True)
        return [text or "" for text, _ in texts]

    def render_all(
        self,
        given: Sequence[dict[str, Any]],
        prefixes: Sequence[dict[str, Any]] = (),
        *,
        may_fail: bool = False,
    ) -> tuple[list[tuple[str | None, Any]], list[int | None]]:
        """Render conversations, and beginnings of the last conversation, in a child process.

        Args:
            given: For each conversation, the variables "messages" and "tools".
            prefixes: Beginnings of the last conversation, made by `prefix_of`.
            may_fail: Whether the template may refuse conversations without an error.

        Returns:
            For each conversation, its text and the spans of its generation blocks, or None and the
            reason why it cannot be rendered. For each prefix, the length of its text, or None if
            the last conversation's text does not begin with it.

        Raises:
            UserError: `may_fail` is False, and the first or the last conversation cannot be
                rendered. A failure of one in between only gives None.
        """
        # transformers always passes `documents`, so templates may test whether it is None.
        base = {**self.variables, "add_generation_prompt": False, "documents": None}
        asked = {
            "source": self.source,
            "given": [{**base, **one} for one in given],
            "prefixes": list(prefixes),
        }
        self.check_source()
        try:
            answer = renderer().ask(asked)
        except TemplateLimit as error:
            raise TemplateLimit(f"chat template {self.name} cannot be used: {error}") from None
        texts = answer["texts"]
        failed = [reason for text, reason in (texts[0], texts[-1]) if text is None]
        if failed and not may_fail:
            reason = shortened(failed[0], 400)
            if "strftime_now" in reason:
                reason += (
                    " here, because with today's date a store would differ from day to day; write "
                    "a date in place of strftime_now(...) in a copy of the template"
                )
            raise UserError(f"chat template {self.name} refuses the conversation: {reason}")
        return texts, answer["lengths"]
