"""Convert the tools and tool calls of a conversation to the JSON that chat templates take.

A call becomes {"type": "function", "function": {"name", "arguments"}}, with an "id" if the record
has one. The arguments are an object. A key whose value is null counts as absent, because rows of
Parquet have all columns. If a record has tools or calls as JSON text, null in this text is kept.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

from wlb.plan import UserError
from wlb.plan.read_file import parse_json


def calls_text(value: object, name: str) -> str:
    """Return the tool calls of a message as a JSON list, or "" if there are none.

    Args:
        value: A list of calls, or JSON text of a call or of a list.
        name: Name of the message for error messages.

    Raises:
        UserError: `value` is anything else.
    """
    what = f"tool_calls of {name}"
    given = _parsed(value, what)
    listed = cast("list[object]", given) if isinstance(given, list) else [given]
    calls = [_call(item, f"{what}, call {i}") for i, item in enumerate(listed)]
    return json_text(calls) if calls else ""


def tools_text(value: object) -> str:
    """Return the tools of a record as a JSON list of objects, or "" if there are none.

    Args:
        value: A list of JSON schemas or of their JSON texts, or the JSON text of a list.

    Raises:
        UserError: `value` is anything else.
    """
    given = _parsed(value, "tools")
    if not isinstance(given, list):
        raise UserError(
            f"tools must be a JSON list of schemas, but is of type {type(given).__name__}"
        )
    tools: list[object] = []
    for i, item in enumerate(cast("list[object]", given)):
        tool = _parsed(item, f"tool {i} of tools")
        if not isinstance(tool, Mapping):
            raise UserError(
                f"tool {i} of tools must be a JSON object (a schema), but is of type "
                f"{type(tool).__name__}"
            )
        tools.append(cast("object", tool))
    return json_text(tools) if tools else ""


def json_text(value: object) -> str:
    """Return `value` as JSON text, without escaping characters that are not ASCII."""
    return json.dumps(value, ensure_ascii=False)


def with_text_arguments(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of tool calls in which the arguments are JSON text instead of objects."""
    return [
        {**call, "function": {**call["function"], "arguments": json_text(_arguments_of(call))}}
        for call in calls
    ]


def with_other_arguments(text: str) -> list[str]:
    """Return variants of a JSON list of calls, one for each call.

    In variant i, the arguments of call i are {"wlb": "probe"}. Nothing else differs.
    """
    calls: list[dict[str, Any]] = json.loads(text)
    changed: list[str] = []
    for i, call in enumerate(calls):
        other = {**call, "function": {**call["function"], "arguments": {"wlb": "probe"}}}
        changed.append(json_text([*calls[:i], other, *calls[i + 1 :]]))
    return changed


def _arguments_of(call: dict[str, Any]) -> object:
    return call["function"]["arguments"]


def _call(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{what} must be a JSON object, but is of type {type(value).__name__}")
    call = cast("Mapping[str, Any]", value)
    function: Any = call.get("function", call)
    name: Any = cast("Any", function).get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise UserError(f'{what} has no name; write it as {{"name": ..., "arguments": {{...}}}}')
    arguments = _parsed(cast("Any", function).get("arguments", {}), f"arguments of {what}")
    if not isinstance(arguments, Mapping):
        raise UserError(
            f"the arguments of {what} must be a JSON object, but are of type "
            f"{type(arguments).__name__}"
        )
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if call.get("id") is None else {"id": str(call["id"]), **made}


def _parsed(value: object, what: str) -> object:
    """Return the value of JSON text, or an already parsed value without keys that are null.

    Parsed values may come from Parquet, whose rows have all columns: a key that a record lacks is
    null there. In JSON text a null is meant, so it is kept.

    Args:
        value: JSON text, or a value that is already parsed.
        what: Name of the value for error messages.
    """
    if not isinstance(value, str):
        return _without_nulls(value)
    return parse_json(value, f"{what} is text that", remedy="give its JSON", wide=True)


def _without_nulls(value: object) -> object:
    if isinstance(value, list):
        return [_without_nulls(item) for item in cast("list[object]", value)]
    if isinstance(value, Mapping):
        items = cast("Mapping[str, object]", value).items()
        return {key: _without_nulls(item) for key, item in items if item is not None}
    return value
