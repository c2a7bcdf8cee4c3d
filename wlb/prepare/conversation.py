"""Conversations: messages with roles, in the four shapes that records of them usually have.

README.md lists the shapes. Text under "system" is a system message before the others, and null is
a key that is absent, as in Parquet. Nothing is guessed: messages that are out of order, have no
text or would lose a part are refused with their number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, cast

from wlb.plan import UserError
from wlb.prepare.marks import RECORD_MARKS, check_record, is_trained, unread_keys
from wlb.prepare.tool_calls import calls_text, tools_text


class Role(StrEnum):
    """Author of a message."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    """OpenAI's name of who instructs the assistant; the system, to templates that have none."""
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


_ROLE = {str(role): role for role in Role}
_FROM = {
    "system": Role.SYSTEM,
    "developer": Role.DEVELOPER,
    "human": Role.USER,
    "user": Role.USER,
    "gpt": Role.ASSISTANT,
    "chatgpt": Role.ASSISTANT,
    "assistant": Role.ASSISTANT,
    "function_call": Role.ASSISTANT,
    "tool": Role.TOOL,
    "observation": Role.TOOL,
}
_CALL = "function_call"
"""A message from it is an assistant's whose value is the JSON of tool calls."""
_FOLLOWS: dict[Role, tuple[Role | None, ...]] = {
    Role.SYSTEM: (None,),
    Role.DEVELOPER: (None,),
    Role.USER: (None, Role.SYSTEM, Role.DEVELOPER, Role.ASSISTANT),
    Role.ASSISTANT: (Role.USER, Role.TOOL),
    Role.TOOL: (Role.ASSISTANT, Role.TOOL),
}
_MORE = ("function_call", "functions", "history", "documents", "images", "audio", "videos")
"""Keys with parts of a conversation that text messages cannot hold."""

_SHAPES = (("messages",), ("conversations",), ("prompt", "completion"))
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of an assistant's message that hold what it thought; a template may take another one."""
CONTENT_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
                "</tool_response>")  # fmt: skip
"""Tags that end no turn, and that data sets write in contents as templates do beside them (the form
of Hermes' calls). Where a tokenizer does not mark them as special, contents have their tokens."""
_ANSWER = (("name", "name"), ("call_id", "tool_call_id"))
"""Fields of a message and the keys that they have in a record."""
_PART_TEXT = ("text", "value")
"""Keys of the text of a part of a content; LLaMA-Factory v1 writes the second."""
_ALPACA = ("instruction", "output")
"""Read where a record has none of the other shapes, as data sets keep these columns beside them."""
_NEEDED = "messages, or conversations, or prompt and completion, or instruction and output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """is_trained: whether an assistant's content may be trained; nobody else's ever is. reasoning:
    what an assistant thought before the content, "" for none. tool_calls: JSON list of an
    assistant's calls, "" for none. name, call_id: of a tool's answer, "" if absent. unread: keys
    that say something and are not read.
    """

    role: Role
    content: str
    is_trained: bool = True
    reasoning: str = ""
    tool_calls: str = ""
    name: str = ""
    call_id: str = ""
    unread: tuple[str, ...] = ()

    @property
    def is_empty_reply(self) -> bool:
        """An assistant's message from which a model would learn to say nothing."""
        is_empty = not self.content.strip() and not self.tool_calls
        return self.role == Role.ASSISTANT and is_empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages in order: at most one of the system or a developer, then turns of a user and an
    assistant.

    Tools may answer an assistant, who then continues. Any role may have the last message. tools:
    JSON list of the tools that the assistant may call, "" for none.
    """

    messages: tuple[Message, ...]
    tools: str = ""

    def __post_init__(self) -> None:
        if not self.messages:
            raise UserError("the conversation has no message")
        before: Role | None = None
        for i, message in enumerate(self.messages):
            allowed = _FOLLOWS[message.role]
            if before not in allowed:
                names = [str(role) if role else "the start" for role in allowed]
                place = f"after {before}" if before else "at the start"
                raise UserError(
                    f"message {i} is of role {message.role} {place}; {message.role} may follow "
                    f"{' or '.join(names)}: merge or reorder the messages"
                )
            before = message.role

    @property
    def has_developer(self) -> bool:
        return self.messages[0].role == Role.DEVELOPER

    def as_system(self) -> "Conversation":
        """The same with the developer's message as the system's."""
        first = replace(self.messages[0], role=Role.SYSTEM)
        return replace(self, messages=(first, *self.messages[1:])) if self.has_developer else self

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(message.role for message in self.messages)

    @property
    def num_empty_replies(self) -> int:
        return sum(message.is_empty_reply for message in self.messages)

    @property
    def literals(self) -> str:
        """All text besides contents that a template may write: tools, calls, names, ids."""
        texts = [text for m in self.messages for text in (m.tool_calls, m.name, m.call_id)]
        return "\n".join(filter(None, [self.tools, *texts]))


def conversation_of(record: object) -> Conversation:
    """The conversation that a JSON object holds; UserError names the problem."""
    if not isinstance(record, Mapping):
        raise UserError(f"{_short(record)} is not a JSON object with messages")
    given = cast("Mapping[str, Any]", record)
    data = {key: value for key, value in given.items() if value is not None}
    check_record(data)
    _refuse_more(data, "the record", REASONING_KEYS)
    match [shape for shape in _SHAPES if set(shape) <= set(data)]:
        case [] if set(_ALPACA) <= set(data):
            messages = _instruction_and_output(data)
        case []:
            raise UserError(f"the record has the keys {sorted(data)}; it needs {_NEEDED}")
        case [("prompt", "completion")]:
            messages = _prompt_and_completion(data["prompt"], data["completion"])
        case [(key,)]:
            messages = _messages(data[key], key)
        case several:
            names = "; ".join(" and ".join(shape) for shape in several)
            raise UserError(
                f"the record holds more than one conversation ({names}); keep the one that is to "
                f"be trained"
            )
    if data.get("system"):
        messages = (Message(role=Role.SYSTEM, content=_text(data["system"], "system")), *messages)
    tools = tools_text(data["tools"]) if data.get("tools") else ""
    return Conversation(messages=messages, tools=tools)


def conversation_columns(names: Sequence[str]) -> tuple[str, ...]:
    """The columns of a table that `conversation_of` reads or refuses; UserError without a shape."""
    if not any(set(shape) <= set(names) for shape in (*_SHAPES, _ALPACA)):
        raise UserError(
            f"has no column of conversations; its columns are {', '.join(names)}, and it needs "
            f"{_NEEDED}"
        )
    shapes = {name for shape in (*_SHAPES, _ALPACA) for name in shape}
    known = {*shapes, "input", "system", "tools", *_MORE, *REASONING_KEYS, *RECORD_MARKS}
    return tuple(name for name in names if name in known)


def _prompt_and_completion(prompt: object, completion: object) -> tuple[Message, ...]:
    if isinstance(prompt, str) and isinstance(completion, str):
        return (
            Message(role=Role.USER, content=_text(prompt, "prompt")),
            Message(role=Role.ASSISTANT, content=_text(completion, "completion")),
        )
    if isinstance(prompt, list) and isinstance(completion, list):
        given = _messages(cast(object, prompt), "prompt")
        context = tuple(replace(m, is_trained=False) for m in given)
        return context + _messages(cast(object, completion), "completion")
    shown = [_short(value) for value in cast(list[object], [prompt, completion])]
    raise UserError(
        f"prompt is {shown[0]} and completion {shown[1]}; both must be text, or both lists of "
        f"messages"
    )


def _instruction_and_output(data: Mapping[str, Any]) -> tuple[Message, ...]:
    """A row of Alpaca: the input, if there is one, follows the instruction on a line of its own."""
    asked = [_text(data[key], key) for key in ("instruction", "input") if data.get(key)]
    return (
        Message(role=Role.USER, content="\n".join(asked)),
        Message(role=Role.ASSISTANT, content=_text(data["output"], "output")),
    )


def _messages(value: object, key: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise UserError(f"{key} is {_short(value)}, not a list of messages")
    return tuple(_message(item, f"message {i}") for i, item in enumerate(cast(list[object], value)))


def _message(value: object, name: str) -> Message:
    if not isinstance(value, dict):
        raise UserError(f"{name} is {_short(value)}, not an object with role and content")
    data = cast(dict[str, Any], value)
    _refuse_more(data, name)
    is_from = data.get("from") is not None
    keys, known = (("from", "value"), _FROM) if is_from else (("role", "content"), _ROLE)
    missing = [key for key in keys if key not in data]
    # A message that only calls tools has no content, or null.
    if missing and not (missing == ["content"] and data.get("tool_calls")):
        raise UserError(f"{name} has the keys {sorted(data)}; {' and '.join(missing)} is missing")
    role = data[keys[0]]
    if not isinstance(role, str) or role not in known:
        raise UserError(f"{name} has {keys[0]} {_short(role)}; known: {', '.join(known)}")
    is_assistant = known[role] == Role.ASSISTANT
    is_call = is_from and role == _CALL
    calls = data[keys[1]] if is_call else data.get("tool_calls")
    if calls and not is_assistant:
        raise UserError(f"{name} is of role {role} and has tool_calls; only an assistant calls")
    content = "" if is_call or (calls and data.get(keys[1]) is None) else data[keys[1]]
    answers = [(field, key) for field, key in _ANSWER if known[role] == Role.TOOL and data.get(key)]
    return Message(
        role=known[role],
        content=_content(content, f"{keys[1]} of {name}"),
        is_trained=is_trained(data, name, is_assistant=is_assistant),
        reasoning=_reasoning(data, known[role], name),
        tool_calls=calls_text(calls, name) if calls else "",
        **{field: _text(data[key], f"{key} of {name}") for field, key in answers},
        unread=_unread(data, name, keys, is_call=is_call, role=known[role]),
    )


def _unread(
    data: dict[str, Any], name: str, keys: tuple[str, str], *, is_call: bool, role: Role
) -> tuple[str, ...]:
    """The keys of a message and of the parts of its content that say something and are not read."""
    read = {*keys, *_MORE}
    if role == Role.ASSISTANT:
        read |= {*REASONING_KEYS} if is_call else {*REASONING_KEYS, "tool_calls"}
    if role == Role.TOOL:
        read |= {key for _, key in _ANSWER}
    found = list(unread_keys(data, name, read=read))
    for key in (keys[1], *REASONING_KEYS):
        parts = data.get(key)
        for part in cast("list[object]", parts) if isinstance(parts, list) else ():
            if isinstance(part, dict):
                given = cast("dict[str, Any]", part)
                read = {"type", _text_key(given)}
                found += unread_keys(given, f"a part of {key} of {name}", read=read, is_part=True)
    return tuple(found)


def _content(value: object, name: str) -> str:
    """Text, or the texts of a list of parts one after the other."""
    if not isinstance(value, list):
        return _text(value, name)
    texts: list[str] = []
    for item in cast("list[object]", value):
        part = cast("dict[str, Any]", item) if isinstance(item, dict) else {"type": item}
        if part.get("type") != "text":
            kind = _short(part.get("type"))
            raise UserError(f"{name} has a part {kind}; only parts of type text are read")
        texts.append(_text(part.get(_text_key(part)), name))
    return "".join(texts)


def _text_key(part: Mapping[str, Any]) -> str:
    """The key that has the text of a part, "" for none."""
    return next((key for key in _PART_TEXT if part.get(key) is not None), "")


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{name} is {_short(value)}; only text is read")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} is not valid Unicode ({error.reason})") from error
    return value


def _reasoning(data: dict[str, Any], role: Role, name: str) -> str:
    """The reasoning of a message, "" for none; UserError for that of others than assistants."""
    if role != Role.ASSISTANT:
        _refuse_more(data, name, REASONING_KEYS)
        return ""
    found = {
        key: _content(data[key], f"{key} of {name}") for key in REASONING_KEYS if data.get(key)
    }
    if len(set(found.values())) > 1:
        raise UserError(f"{name} has different texts under {' and '.join(found)}; keep one of them")
    text = next(iter(found.values()), "")
    return text if text.strip() else ""


def _refuse_more(data: dict[str, Any], name: str, keys: Sequence[str] = ()) -> None:
    for key in (*_MORE, *keys):
        if data.get(key):
            raise UserError(
                f"{name} has {key} = {_short(data[key])}, which would be lost; write it into a "
                f"message's content as the model is to see it, or remove it"
            )


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
