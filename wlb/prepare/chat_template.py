"""Chat templates: a conversation as text, in parts with an owner, each trained or not.

ChatML and Llama 3 are built in; `jinja_template.py` renders any Jinja template.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from wlb.plan import UserError
from wlb.prepare.conversation import Conversation, Role


class Train(StrEnum):
    """Tokens of a part that are trained."""

    NO = "no"
    ALL = "all"
    END = "end"
    """The text up to and including its first special token, which ends the turn, and those that
    follow it directly."""
    CALLS = "calls"
    """The text up to and including its last special token: tool calls, and what ends the turn."""


class Turns(StrEnum):
    """Assistant messages that are trained."""

    ALL = "all"
    LAST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplatePart:
    """Consecutive rendered text of the template, or (is_content) of a message."""

    text: str
    is_content: bool = False
    train: Train = Train.NO


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A rendered conversation.

    turns: parts at which a turn after the first one begins, where known. prefix: number of parts
    before the first turn (start of text, system message); None where the system message is inside
    the first turn. num_dropped: messages whose reasoning the template left out.
    """

    parts: tuple[TemplatePart, ...]
    turns: tuple[int, ...]
    prefix: int | None
    num_dropped: int = 0

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


class ChatTemplate(Protocol):
    """name: for messages and the store's description. source: the same template in Jinja, for
    transformers. variables: what it takes besides messages (bos_token, ...), by name. used: the
    names of all variables that the source mentions. knows_developer: whether it has a form for
    messages of a developer, which are else those of the system."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def variables(self) -> Mapping[str, Any]: ...
    @property
    def knows_developer(self) -> bool: ...
    @property
    def used(self) -> frozenset[str]: ...

    def render(self, conversation: Conversation, turns: Turns) -> Rendered:
        """UserError for a conversation that the template cannot render in exact parts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInTemplate:
    """Every message is begin + role + after_role + content + end + after_end.

    start: of the whole text. roles: names that differ from ours. is_stripped: white space around
    contents is removed.
    """

    name: str
    start: str
    begin: str
    after_role: str
    end: str
    after_end: str
    roles: tuple[tuple[Role, str], ...] = ()
    is_stripped: bool = False

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts that must each be one special token of the tokenizer."""
        names = [self.start, self.begin, self.after_role.strip(), self.end]
        return tuple(dict.fromkeys(name for name in names if name.strip()))

    @property
    def source(self) -> str:
        role = "m['role']"
        for known, name in self.roles:
            role = f"({name!r} if m['role'] == {str(known)!r} else {role})"
        content = "m['content']" + (" | trim" if self.is_stripped else "")
        start = f"{{{{ {self.start!r} }}}}" if self.start else ""
        end, prompt = self.end + self.after_end, self.begin + Role.ASSISTANT + self.after_role
        return (
            f"{start}{{% for m in messages %}}"
            f"{{{{ {self.begin!r} + {role} + {self.after_role!r} }}}}"
            f"{{{{ {content} }}}}{{{{ {end!r} }}}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {prompt!r} }}}}{{% endif %}}"
        )

    @property
    def variables(self) -> Mapping[str, Any]:
        return {}

    @property
    def knows_developer(self) -> bool:
        return False

    @property
    def used(self) -> frozenset[str]:
        return frozenset({"messages", "add_generation_prompt"})

    def render(self, conversation: Conversation, turns: Turns) -> Rendered:
        if conversation.tools or any(m.tool_calls for m in conversation.messages):
            raise UserError(
                f"chat template {self.name} has no form for tools and tool calls; use the template "
                f"of a model that has one: --chat FOLDER"
            )
        if any(m.reasoning for m in conversation.messages):
            raise UserError(
                f"chat template {self.name} has no form for reasoning; use the template of a model "
                f"that has one (--chat FOLDER), write it as <think>...</think> in front of the "
                f"content, or remove it"
            )
        conversation = conversation.as_system()
        names, trained = dict(self.roles), trained_messages(conversation, turns)
        parts = [TemplatePart(text=self.start)] if self.start else []
        starts: list[int] = []
        prefix = len(parts)
        for i, message in enumerate(conversation.messages):
            if message.role == Role.USER:
                starts.append(len(parts))
            header = f"{self.begin}{names.get(message.role, message.role)}{self.after_role}"
            content = message.content.strip() if self.is_stripped else message.content
            is_trained = i in trained
            body, end = (Train.ALL, Train.END) if is_trained else (Train.NO, Train.NO)
            parts += [
                TemplatePart(text=header),
                TemplatePart(text=content, is_content=True, train=body),
                TemplatePart(text=self.end + self.after_end, train=end),
            ]
            if message.role == Role.SYSTEM:
                prefix = len(parts)
        return Rendered(parts=tuple(parts), turns=tuple(starts[1:]), prefix=prefix)


CHATML = BuiltInTemplate(
    name="chatml", start="", begin="<|im_start|>", after_role="\n", end="<|im_end|>", after_end="\n"
)
"""ChatML. It adds no system message; the newline after a message is not trained."""

LLAMA3 = BuiltInTemplate(
    name="llama3",
    start="<|begin_of_text|>",
    begin="<|start_header_id|>",
    after_role="<|end_header_id|>\n\n",
    end="<|eot_id|>",
    after_end="",
    roles=((Role.TOOL, "ipython"),),
    is_stripped=True,
)
"""The template of Llama 3, without the date that 3.1 adds to the system message."""

BUILT_IN = {template.name: template for template in (CHATML, LLAMA3)}


def trained_messages(conversation: Conversation, turns: Turns) -> Sequence[int]:
    """Indices of the assistant's messages that are trained: not those that say nothing."""
    messages = conversation.messages
    found = [i for i, m in enumerate(messages) if m.role == Role.ASSISTANT]
    if turns == Turns.LAST:
        found = found[-1:]
    return [i for i in found if messages[i].is_trained and not messages[i].is_empty_reply]
