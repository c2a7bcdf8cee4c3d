"""Schemas of JSON files that wlb writes, and a check that a whole file fits its schema.

The file is checked before records are built from it, so that a reader may use every key without
further checks. A schema is plain Python:

- `int`, `float` (integers included), `str`, `bool`, `dict`: a value of this type
- a `range`: a whole number within the range
- `ANYTHING`: any value; `None`: null
- a tuple of schemas: a value that fits one of them
- a list with one schema: a list whose items all fit this schema
- a dictionary: an object with these keys and no others. A key that ends in "?" is optional. The key
  `OTHERS` gives the schema of all keys that are not listed.
"""

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from enum import StrEnum
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from wlb.plan.errors import UserError, shortened

Schema = Any
ANYTHING = object()
OTHERS = "*"
COUNT = range(2**62 + 1)
"""Schema of a count. It allows at most 2^62, so that the sum of a few counts fits in 64 bits."""
_PLAIN: dict[Any, tuple[set[type], str]] = {
    int: ({int}, "a whole number"),
    float: ({int, float}, "a number"),
    str: ({str}, "text"),
    bool: ({bool}, "true or false"),
    dict: ({dict}, "an object"),
}
"""For each schema that is a type: the Python types it accepts, and its name in error messages."""


def check_schema(value: Any, schema: Schema, where: object, *, remedy: str) -> None:
    """Raise a UserError that names the first part of `value` that does not fit `schema`.

    Args:
        value: The parsed content of a JSON file.
        schema: The schema, in the form that this module's docstring describes.
        where: Name of the file, which the message begins with.
        remedy: What the user can do, which the message ends with.
    """
    if found := _misfit(value, schema, ""):
        raise UserError(f"{where}: {found}; {remedy}")


def schema_of(record: type, **others: Schema) -> dict[str, Schema]:
    """Return the schema of the JSON object whose keys are the fields of a dataclass.

    Fields that have a default are optional keys.

    Args:
        record: The dataclass.
        **others: Schemas of fields whose JSON form does not follow from their type, and of keys
            that are not fields.
    """
    hints = get_type_hints(record)
    out: dict[str, Schema] = {}
    for field in fields(record):
        is_needed = field.default is MISSING and field.default_factory is MISSING
        name = field.name if is_needed else f"{field.name}?"
        given = field.name in others
        out[name] = others.pop(field.name) if given else _of_type(hints[field.name])
    return out | others


def _of_type(hint: Any) -> Schema:
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return tuple(None if one is types.NoneType else _of_type(one) for one in inside)
    # The origin of NDArray[int64] is np.ndarray before numpy 2.5, and NDArray since then.
    if origin in (np.ndarray, npt.NDArray):
        return [int]
    if origin is tuple:
        return [_of_type(inside[0])]
    if origin is dict:
        return dict
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return str
    if hint in _PLAIN:
        return cast("Schema", hint)
    raise TypeError(f"{hint} needs a schema of its own")


def _misfit(value: Any, schema: Schema, at: str) -> str:
    """Return what is wrong with a value, or "" if it fits `schema`.

    Args:
        value: The value.
        schema: The schema that it must fit.
        at: Dotted path of the value in the file, such as "carry.slot[3]"; "" for the whole file.
    """
    match schema:
        case tuple():
            # If no schema fits, report the mismatch with the first one. It is the current format;
            # the others are null or formats of earlier versions.
            found = [_misfit(value, one, at) for one in cast("tuple[Any, ...]", schema)]
            return "" if "" in found else found[0]
        case list():
            return _misfit_of_list(value, cast("list[Any]", schema)[0], at)
        case dict():
            return _misfit_of_object(value, cast("dict[str, Any]", schema), at)
        case range():
            if type(value) is int and value in schema:
                return ""
            return _message(value, at, f"a whole number in [{schema.start}, {schema.stop - 1}]")
        case None:
            return "" if value is None else _message(value, at, "null")
        case _ if schema is ANYTHING:
            return ""
        case _:
            kinds, name = _PLAIN[schema]
            return "" if type(value) in kinds else _message(value, at, name)


def _misfit_of_list(value: Any, inner: Schema, at: str) -> str:
    # Accept tuples too, because the value may come from a record's `to_json` directly. A JSON file
    # has only lists.
    if not isinstance(value, list | tuple):
        return _message(value, at, "a list")
    items = cast("list[Any]", value)
    # Check all items at once if they are scalars, because a carry may list millions of pieces, for
    # which a check of each item would be slow.
    if inner in (int, float, str) and set(map(type, items)) <= _PLAIN[inner][0]:
        return ""
    found = (_misfit(item, inner, f"{at}[{i}]") for i, item in enumerate(items))
    return next(filter(None, found), "")


def _misfit_of_object(value: Any, schema: Mapping[str, Schema], at: str) -> str:
    if not isinstance(value, dict):
        return _message(value, at, "an object")
    left = dict(cast("dict[str, Any]", value))
    for name, inner in schema.items():
        key = name.removesuffix("?")
        if name == OTHERS:
            continue
        if key not in left:
            if name == key:
                return f"{at or 'it'} lacks the key {key!r}"
            continue
        if found := _misfit(left.pop(key), inner, f"{at}.{key}" if at else key):
            return found
    for key, item in left.items():
        said = shortened(repr(key), 60)
        if OTHERS not in schema:
            return f"{at or 'it'} has the unknown key {said}"
        if found := _misfit(item, schema[OTHERS], f"{at}[{said}]"):
            return found
    return ""


def _message(value: Any, at: str, what: str) -> str:
    return f"{at or 'it'} = {shortened(repr(value), 100)} must be {what}"
