"""Messages as a chat template sees them: their form, and the fields that are marked in it.

A message has two fields, its reasoning and its content. Field 2 * i is the reasoning of message i,
field 2 * i + 1 its content. What a template writes may depend on everything else, the form.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wlb.prepare.conversation import Message, Role
from wlb.prepare.jinja_compile import MARK, marker
from wlb.prepare.jinja_pieces import TemplatePiece

_REASONING, _CONTENT = f"{MARK}r{MARK}", f"{MARK}c{MARK}"
_THOUGHT = re.compile(r"(\s*(?:<think>)?)(.*?)</think>(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """What the template's own text may depend on in a message: everything but its fields.

    content: the content, with marks in place of fields. has_key: whether its reasoning is under a
    key of its own.
    """

    role: Role
    content: str = ""
    has_key: bool = False
    tool_calls: str = ""
    name: str = ""
    call_id: str = ""

    @property
    def has_content(self) -> bool:
        return _CONTENT in self.content

    @property
    def has_reasoning(self) -> bool:
        return self.has_key or _REASONING in self.content

    def filled(self, reasoning: str, content: str) -> str:
        """The content as the template gets it."""
        return self.content.replace(_REASONING, reasoning).replace(_CONTENT, content)


MessageForms = tuple[MessageForm, ...]


def form_of(message: Message, *, is_split: bool = False) -> tuple[MessageForm, tuple[str, str]]:
    """The form of a message, and its reasoning and content.

    is_split: whether `<think>...</think>` at the beginning of an assistant's content is reasoning,
    for templates that take it out of the content.
    """
    reasoning, text = message.reasoning, message.content
    content = _CONTENT if text else ""
    may_split = is_split and message.role == Role.ASSISTANT and not reasoning
    if may_split and (found := _THOUGHT.fullmatch(text)) and "think>" not in found[2] + found[3]:
        # Templates treat reasoning of white space only as none, so that it belongs to the form.
        said = [(part, mark) for part, mark in ((found[2], _REASONING), (found[3], _CONTENT))]
        blank = [mark if part.strip() else part for part, mark in said]
        content = f"{found[1]}{blank[0]}</think>{blank[1]}"
        reasoning, text = (part if part.strip() else "" for part, _ in said)
    form = MessageForm(
        role=message.role,
        content=content,
        has_key=bool(message.reasoning),
        tool_calls=message.tool_calls,
        name=message.name,
        call_id=message.call_id,
    )
    return form, (reasoning, text)


def markers_of(forms: Sequence[MessageForm]) -> list[str]:
    """A marker for every field that the messages have, "" for others."""
    return [
        marker(2 * i + k) if is_there else ""
        for i, form in enumerate(forms)
        for k, is_there in enumerate((form.has_reasoning, form.has_content))
    ]


def as_written(pieces: Sequence[TemplatePiece], texts: Sequence[str], real: str) -> list[str]:
    """The texts of the fields as a template writes them in `real`: as they are, or stripped.

    Empty if the pieces do not add up to `real` in any way.
    """
    # For each piece the places in `real` at which it may end, with where it begins.
    ways: list[dict[int, int]] = [{0: 0}]
    for piece in pieces:
        made: dict[int, int] = {}
        for at in ways[-1]:
            for text in _choices(texts[piece.field]) if piece.is_content else (piece.text,):
                if real.startswith(text, at):
                    made.setdefault(at + len(text), at)
        ways.append(made)
    if len(real) not in ways[-1]:
        return []
    written, stop = list(texts), len(real)
    for piece, made in zip(reversed(pieces), reversed(ways), strict=False):
        start = made[stop]
        if piece.is_content:
            written[piece.field] = real[start:stop]
        stop = start
    return written


def _choices(text: str) -> Iterable[str]:
    """A text as it is, and without white space or newlines at either side or both."""
    if text == text.strip():
        return (text,)
    made = [text, text.strip(), text.lstrip(), text.rstrip()]
    made += [text.lstrip("\n"), text.rstrip("\n"), text.strip("\n")]
    return dict.fromkeys(made)
