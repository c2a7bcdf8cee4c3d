"""A chat template in Jinja: its variables, the form in which it takes messages, and its renderings.

In every content and reasoning one character can be replaced by a private-use character of its own,
so that a rendering says where each of them is.
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
"""Most characters of a template; models' have some thousand."""
FIRST_MARK, MOST_MARKS = 0x100000, 0xFFF0
RESERVED = re.compile("[\U00100000-\U0010ffff]")
"""The last plane of private-use characters: the marks of fields and of generation blocks.
Conversations and templates that contain one are refused."""
WHOLE = chr(FIRST_MARK + MOST_MARKS)
"""Stands for a whole field."""
_DEVELOPER = re.compile(r"""['"]developer['"]""")
_THOUGHT = re.compile(r"(\s*(?:<think>)?)(.*?)</think>(.*)", re.DOTALL)
_VISIBLE = re.compile(r"\S")
_TAGS_AT_END = re.compile(r"(?:\s|<[^<>\s]*>)*$")


class FieldMarks:
    """Replaces one character of each field of messages: field 2 * i is the reasoning of message i,
    field 2 * i + 1 its content.

    masked: the texts of a field whose visible characters become "x" as well; None for none.
    """

    def __init__(self, masked: re.Pattern[str] | None = None) -> None:
        self._masked = masked
        self.stripped: dict[int, str] = {}  # marked fields without white space around them
        self.replaced: dict[int, str] = {}  # characters by the code points that stand for them

    def mark(self, text: str, number: int) -> str:
        """The text with its mark; a text of white space has none."""
        if not text.strip():
            return text
        # Templates look for tags at both ends of a content.
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
    """A conversation that begins like another one, as `render_process` takes it."""
    return {"upto": upto, "prompt": prompt, "then": list(then), "cut": cut}


class TemplateSource:
    """A template's source and its variables (bos_token, date_string, ...).

    special_tokens: texts that must each be one special token of the tokenizer. start: the text that
    every rendering begins with, if it does.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        variables: Mapping[str, Any],
        special_tokens: tuple[str, ...] = (),
        start: str = "",
    ) -> None:
        self.name, self.source = name, source
        self.variables = dict(variables)
        self.special_tokens = special_tokens
        self.knows_developer = _DEVELOPER.search(source) is not None
        self.start = start or str(self.variables.get("bos_token", ""))

    @cached_property
    def _examined(self) -> dict[str, Any]:
        """Whether it has generation blocks, and the variables it uses."""
        if len(self.source) > MOST_SOURCE:
            raise UserError(
                f"{self.name} is not a Jinja template: it has {len(self.source)} characters, must "
                f"have at most {MOST_SOURCE}; give the template of a model"
            )
        if found := RESERVED.search(self.source):
            raise UserError(
                f"chat template {self.name} contains {found[0]!a}, which marks contents here"
            )
        try:
            about = renderer().ask({"source": self.source})
        except TemplateLimit as error:
            raise TemplateLimit(f"chat template {self.name} refuses it: {error}") from None
        if reason := about.get("invalid"):
            raise UserError(f"{self.name} is not a Jinja template: {shortened(reason, 400)}")
        wanted = set(about["used"]) - self.variables.keys()
        if missing := sorted(name for name in wanted if name.endswith("_token")):
            raise UserError(
                f"chat template {self.name} uses {', '.join(missing)}, which nothing gives; put it "
                f"into the tokenizer_config.json beside it, or give it as a variable"
            )
        return about

    def check_source(self) -> None:
        """UserError for a template that cannot be used."""
        assert self._examined

    @property
    def variable_names(self) -> frozenset[str]:
        """The names of all variables that the source mentions."""
        return frozenset(self._examined["used"])

    @property
    def has_generation_blocks(self) -> bool:
        """Whether it has generation blocks."""
        return self._examined["generation"]

    def message_for(
        self, message: Message, marks: "tuple[FieldMarks, int] | None" = None, *, whole: str = ""
    ) -> dict[str, Any]:
        """The message as the template gets it.

        marks: what marks its fields, and its number. whole: what stands for each of its fields.
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
            # Three names are in use, and transformers gives them all too.
            made |= dict.fromkeys(REASONING_KEYS, field_of(message.reasoning, 0))
        made |= {"name": message.name} if message.name else {}
        made |= {"tool_call_id": message.call_id} if message.call_id else {}
        made |= {"tool_calls": self.calls_for(message.tool_calls)} if message.tool_calls else {}
        return made

    def _of_role(self, role: Role, content: str) -> dict[str, Any]:
        parts = [{"type": "text", "text": content}] if content else []
        return {"role": str(role), "content": parts if self._takes_content_parts else content}

    def calls_for(self, text: str) -> list[dict[str, Any]]:
        calls = json.loads(text)
        return with_text_arguments(calls) if self._takes_arguments_as_text else calls

    @cached_property
    def _takes_content_parts(self) -> bool:
        """Whether contents must be lists of parts: a text is left out or refused."""
        said = (WHOLE, [{"type": "text", "text": WHOLE}])
        asked = [[{"role": "user", "content": content}] for content in said]
        text, parts = self._texts_of(asked)
        return WHOLE not in text and WHOLE in parts

    @cached_property
    def _takes_arguments_as_text(self) -> bool:
        """Whether arguments of calls must be JSON text: objects are refused, or written as Python
        writes them.
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
        """Whether reasoning is written that is under its key, and in tags before the content."""
        answers = [
            self._of_role(Role.ASSISTANT, "x") | dict.fromkeys(REASONING_KEYS, WHOLE),
            self._of_role(Role.ASSISTANT, f"<think>{WHOLE}</think>x"),
        ]
        asked = [[self._of_role(Role.USER, "x"), answer] for answer in answers]
        under_key, in_tags = self._texts_of(asked)
        return WHOLE in under_key, WHOLE in in_tags

    def _texts_of(self, conversations: Sequence[list[dict[str, Any]]]) -> list[str]:
        """The texts of conversations, "" where the template refuses one."""
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
        """Render each of `given`, as `render_process` describes it.

        UserError if the first or the last one fails, unless `may_fail`.
        """
        # transformers gives tools and documents to every template.
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
            raise TemplateLimit(f"chat template {self.name} refuses it: {error}") from None
        texts = answer["texts"]
        failed = [reason for text, reason in (texts[0], texts[-1]) if text is None]
        if failed and not may_fail:
            reason = shortened(failed[0], 400)
            if "strftime_now" in reason:
                reason += (
                    " here, because with today's date a store would differ from day to day; write "
                    "a date in place of strftime_now(...) in a copy of the template"
                )
            raise UserError(f"chat template {self.name} refuses it: {reason}")
        return texts, answer["lengths"]
