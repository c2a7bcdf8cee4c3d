"""Parse records as conversations, which are lists of messages with roles.

Records may have one of four shapes: messages (OpenAI), conversations (ShareGPT), prompt and
completion, or instruction and output (Alpaca). A record's text under "system" becomes a system
message before the others. A key whose value is null counts as absent, because rows of
Parquet have all columns. wlb guesses nothing. It refuses a conversation if messages are out of
order, have no text, or have parts that would be lost. The error names the message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, cast

from wlb.plan import UserError
from wlb.prepare.marks import RECORD_MARKS, check_record, is_trained, unread_keys
from wlb.prepare.tool_calls import calls_text, tools_text


class Role(StrEnum):
    """Who wrote a message."""

    SYSTEM = "system"
    # OpenAI's newer name for the system. Templates that do not know it get "system" instead.
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


# Roles by their names: values of the key "role", and of the key "from" in ShareGPT records.
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
# If "from" has this value, an assistant wrote the message, and "value" is the JSON of tool calls.
_CALL = "function_call"
# For each role, the roles after which it may come. None means the start of the conversation.
_FOLLOWS: dict[Role, tuple[Role | None, ...]] = {
    Role.SYSTEM: (None,),
    Role.DEVELOPER: (None,),
    Role.USER: (None, Role.SYSTEM, Role.DEVELOPER, Role.ASSISTANT),
    Role.ASSISTANT: (Role.USER, Role.TOOL),
    Role.TOOL: (Role.ASSISTANT, Role.TOOL),
}
# Keys of data that wlb cannot show to a model. Records and messages in which they have a value are
# refused.
_MORE = ("function_call", "functions", "history", "documents", "images", "audio", "videos")

# Shapes of records with conversations. A record has a shape if it has all keys of the shape.
_SHAPES = (("messages",), ("conversations",), ("prompt", "completion"))
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which records and chat templates put the reasoning of an assistant's message."""
CONTENT_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
                "</tool_response>")  # fmt: skip
"""Tags that may come from the template or from a message's content (as in Hermes' tool calls).

None of them ends a turn. Contents may be encoded as these tokens unless the tokenizer marks them as
special.
"""
# Fields of the `Message` of a tool, and the keys from which they are read.
_ANSWER = (("name", "name"), ("call_id", "tool_call_id"))
# Keys under which a part of a content has its text. LLaMA-Factory v1 writes "value".
_PART_TEXT = ("text", "value")
# The keys of an Alpaca record. They are ignored in records that also have a shape in `_SHAPES`,
# because data sets often keep the Alpaca columns beside a conversation.
_ALPACA = ("instruction", "output")
_NEEDED = "messages, or conversations, or prompt and completion, or instruction and output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str
    # Whether the record allows the message to be trained. Only assistants' messages ever are.
    is_trained: bool = True
    reasoning: str = ""  # what an assistant thought before its content, "" if nothing
    tool_calls: str = ""  # JSON list of an assistant's calls, "" if none
    # For a tool's answer: name of the tool, and id of the call that is answered. "" if absent.
    name: str = ""
    call_id: str = ""
    unread: tuple[str, ...] = ()  # keys of the message in the record that wlb does not read

    @property
    def is_empty_reply(self) -> bool:
        """Whether this is an assistant's message with neither text nor tool calls (not trained)."""
        is_empty = not self.content.strip() and not self.tool_calls
        return self.role == Role.ASSISTANT and is_empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation whose messages are in a valid order.

    It may start with one message of the system or a developer. Then users and assistants alternate.
    Tools may answer an assistant, who then continues. Any role may have the last message.
    """

    messages: tuple[Message, ...]
    tools: str = ""  # JSON list of the tools that the assistant may call, "" if none

    def __post_init__(self) -> None:
        if not self.messages:
            raise UserError("the conversation has no message; give at least one")
        before: Role | None = None
        for i, message in enumerate(self.messages):
            allowed = _FOLLOWS[message.role]
            if before not in allowed:
                names = [f"after {role}" if role else "at the start" for role in allowed]
                place = f"after {before}" if before else "at the start"
                raise UserError(
                    f"message {i} has the role {message.role} and comes {place}, but a message of "
                    f"this role must come {' or '.join(names)}; merge or reorder the messages"
                )
            before = message.role

    @property
    def has_developer(self) -> bool:
        """Whether the conversation starts with a developer's message."""
        return self.messages[0].role == Role.DEVELOPER

    def as_system(self) -> "Conversation":
        """Return the conversation with a developer's first message turned into a system message."""
        first = replace(self.messages[0], role=Role.SYSTEM)
        return replace(self, messages=(first, *self.messages[1:])) if self.has_developer else self

    @property
    def roles(self) -> tuple[Role, ...]:
        """The role of each message."""
        return tuple(message.role for message in self.messages)

    @property
    def num_empty_replies(self) -> int:
        """Number of assistants' messages with neither text nor tool calls."""
        return sum(message.is_empty_reply for message in self.messages)

    @property
    def literals(self) -> str:
        """Text that is not in messages' contents: tools, tool calls, tool names and call ids."""
        texts = [text for m in self.messages for text in (m.tool_calls, m.name, m.call_id)]
        return "\n".join(filter(None, [self.tools, *texts]))


def probe_of(roles: Sequence[Role]) -> Conversation:
    """Return a conversation with these roles and the content "x" everywhere, to test a template."""
    return Conversation(messages=tuple(Message(role=role, content="x") for role in roles))


def conversation_of(record: object) -> Conversation:
    """Parse a record, which is a JSON object, as a conversation.

    Raises:
        UserError: The record is not a conversation, or has data that wlb would not train.
    """
    if not isinstance(record, Mapping):
        raise UserError(
            f"the record {_short(record)} is not a JSON object; write each record as an object, "
            'such as {"messages": [...]}'
        )
    given = cast("Mapping[str, Any]", record)
    data = {key: value for key, value in given.items() if value is not None}
    check_record(data)
    _refuse_more(data, "the record", REASONING_KEYS)
    match [shape for shape in _SHAPES if set(shape) <= set(data)]:
        case [] if set(_ALPACA) <= set(data):
            messages = _instruction_and_output(data)
        case []:
            raise UserError(
                f"the record must have the keys {_NEEDED}, but has the keys {sorted(data)}"
            )
        case [("prompt", "completion")]:
            messages = _prompt_and_completion(data["prompt"], data["completion"])
        case [(key,)]:
            messages = _messages(data[key], key)
        case several:
            names = "; ".join(" and ".join(shape) for shape in several)
            raise UserError(
                f"the record has several conversations, under the keys ({names}); keep only the "
                f"conversation to train"
            )
    if data.get("system"):
        messages = (Message(role=Role.SYSTEM, content=_text(data["system"], "system")), *messages)
    tools = tools_text(data["tools"]) if data.get("tools") else ""
    return Conversation(messages=messages, tools=tools)


def conversation_columns(names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of a table that must be read to make conversations of its rows.

    `conversation_of` uses some of these columns, and refuses rows with a value in the others.

    Args:
        names: Names of all columns of the table.

    Raises:
        UserError: The table lacks the columns of a conversation.
    """
    if not any(set(shape) <= set(names) for shape in (*_SHAPES, _ALPACA)):
        raise UserError(
            f"must have the columns {_NEEDED} to be read as conversations, but has the columns "
            f"{', '.join(names)}"
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
        f"prompt and completion must both be text or both be lists of messages, but prompt is "
        f"{shown[0]} and completion is {shown[1]}"
    )


def _instruction_and_output(data: Mapping[str, Any]) -> tuple[Message, ...]:
    """Turn an Alpaca record into two messages. "input" comes on a line after "instruction"."""
    asked = [_text(data[key], key) for key in ("instruction", "input") if data.get(key)]
    return (
        Message(role=Role.USER, content="\n".join(asked)),
        Message(role=Role.ASSISTANT, content=_text(data["output"], "output")),
    )


def _messages(value: object, key: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise UserError(f"{key} must be a list of messages, but is {_short(value)}")
    return tuple(_message(item, f"message {i}") for i, item in enumerate(cast(list[object], value)))


def _message(value: object, name: str) -> Message:
    if not isinstance(value, dict):
        raise UserError(
            f"{name} must be a JSON object with the keys role and content, but is {_short(value)}"
        )
    data = cast(dict[str, Any], value)
    _refuse_more(data, name)
    is_from = data.get("from") is not None
    keys, known = (("from", "value"), _FROM) if is_from else (("role", "content"), _ROLE)
    missing = [key for key in keys if key not in data]
    # A message that only calls tools may have no content.
    if missing and not (missing == ["content"] and data.get("tool_calls")):
        raise UserError(
            f"{name} must have the keys {' and '.join(keys)}, but has the keys {sorted(data)}"
        )
    role = data[keys[0]]
    if not isinstance(role, str) or role not in known:
        raise UserError(
            f"{name} has {keys[0]} = {_short(role)}, which is not a known role; use one of "
            f"{', '.join(known)}"
        )
    is_assistant = known[role] == Role.ASSISTANT
    is_call = is_from and role == _CALL
    calls = data[keys[1]] if is_call else data.get("tool_calls")
    if calls and not is_assistant:
        raise UserError(
            f"{name} has tool_calls and the role {role}, but only an assistant may call tools; "
            f"correct the role, or remove the tool calls"
        )
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
    """Return the keys of a message, and of the parts of its content, that wlb does not read.

    Args:
        data: The message in the record.
        name: Name of the message for error messages, such as "message 2".
        keys: The two keys under which the message has its role and its content.
        is_call: Whether the message consists of tool calls (role "function_call").
        role: Role of the message.
    """
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
    """Return a message's content as text, joining the texts of a list of parts.

    Args:
        value: The content in the record: text or a list of parts.
        name: Name of the content for error messages.

    Raises:
        UserError: The content, or a part of it, is not text.
    """
    if not isinstance(value, list):
        return _text(value, name)
    texts: list[str] = []
    for item in cast("list[object]", value):
        part = cast("dict[str, Any]", item) if isinstance(item, dict) else {"type": item}
        if part.get("type") != "text":
            kind = _short(part.get("type"))
            raise UserError(
                f"{name} has a part of the type {kind}, but only parts of the type text can be "
                f"trained; remove the part"
            )
        texts.append(_text(part.get(_text_key(part)), name))
    return "".join(texts)


def _text_key(part: Mapping[str, Any]) -> str:
    """Return the key under which a part of a content has its text, or "" if it has no text."""
    return next((key for key in _PART_TEXT if part.get(key) is not None), "")


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{name} must be text, but is {_short(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name} is not valid Unicode ({error.reason}); correct the text"
        ) from error
    return value


def _reasoning(data: dict[str, Any], role: Role, name: str) -> str:
    """Return the reasoning of an assistant's message, or "" if it has none.

    Args:
        data: The message in the record.
        role: Role of the message.
        name: Name of the message for error messages, such as "message 2".

    Raises:
        UserError: A message of another role has reasoning, or two keys have different texts.
    """
    if role != Role.ASSISTANT:
        _refuse_more(data, name, REASONING_KEYS)
        return ""
    found = {
        key: _content(data[key], f"{key} of {name}") for key in REASONING_KEYS if data.get(key)
    }
    if len(set(found.values())) > 1:
        raise UserError(
            f"{name} has different reasoning under {' and '.join(found)}; keep only one of these "
            f"keys"
        )
    text = next(iter(found.values()), "")
    return text if text.strip() else ""


def _refuse_more(data: dict[str, Any], name: str, keys: Sequence[str] = ()) -> None:
    for key in (*_MORE, *keys):
        if data.get(key):
            raise UserError(
                f"{name} has {key} = {_short(data[key])}, but wlb cannot show {key} to the model; "
                f"move what the model should see into the content of a message, or remove the key"
            )


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
