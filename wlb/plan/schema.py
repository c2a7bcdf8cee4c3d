"""Holds what was read of a file that wlb wrote against the schema of such files, as a whole.

It is held before anything is built from it, so that a reader may take every key as it is. A schema
is plain Python. `int`, `float` (an integer too), `str`, `bool`, `dict`: a value of that type. A
`range`: a whole number in it. `ANYTHING`, `None`: any value, null. A tuple: one of its schemas. A
list of one schema: a list of such values. A dictionary: an object of these keys and no others; a
name that ends in "?" may be absent, `OTHERS` stands for further names.
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
"""A number of things; sums of a few of them stay 64-bit integers."""
_PLAIN: dict[Any, tuple[set[type], str]] = {
    int: ({int}, "a whole number"),
    float: ({int, float}, "a number"),
    str: ({str}, "text"),
    bool: ({bool}, "true or false"),
    dict: ({dict}, "an object"),
}
"""The types that a value of a schema's type may have, and what messages call it."""


def hold_schema(value: Any, schema: Schema, where: object, *, remedy: str) -> None:
    """UserError that names the first value which does not fit `schema`. where: the file."""
    if found := _misfit(value, schema, ""):
        raise UserError(f"{where}: {found}; {remedy}")


def schema_of(record: type, **others: Schema) -> dict[str, Schema]:
    """The schema of a dataclass that is written by its fields' names; those that have defaults may
    be absent. others: schemas of fields that are written otherwise, and of further keys.
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
    # NDArray[int64] is a generic ndarray before numpy 2.5, and since then an alias of its own.
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
    """What is wrong with a value, "" for one that fits. at: its place in the file."""
    match schema:
        case tuple():
            # The first is what is meant, the others are null or older forms.
            found = [_misfit(value, one, at) for one in cast("tuple[Any, ...]", schema)]
            return "" if "" in found else found[0]
        case list():
            return _misfit_of_list(value, cast("list[Any]", schema)[0], at)
        case dict():
            return _misfit_of_object(value, cast("dict[str, Any]", schema), at)
        case range():
            if type(value) is int and value in schema:
                return ""
            return _must(value, at, f"a whole number in [{schema.start}, {schema.stop - 1}]")
        case None:
            return "" if value is None else _must(value, at, "null")
        case _ if schema is ANYTHING:
            return ""
        case _:
            kinds, name = _PLAIN[schema]
            return "" if type(value) in kinds else _must(value, at, name)


def _misfit_of_list(value: Any, inner: Schema, at: str) -> str:
    # A record's `to_json` has tuples where JSON has lists.
    if not isinstance(value, list | tuple):
        return _must(value, at, "a list")
    items = cast("list[Any]", value)
    # Millions of waiting pieces are numbers of one type.
    if inner in (int, float, str) and set(map(type, items)) <= _PLAIN[inner][0]:
        return ""
    found = (_misfit(item, inner, f"{at}[{i}]") for i, item in enumerate(items))
    return next(filter(None, found), "")


def _misfit_of_object(value: Any, schema: Mapping[str, Schema], at: str) -> str:
    if not isinstance(value, dict):
        return _must(value, at, "an object")
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
            return f"{at or 'it'} has the key {said}, which wlb does not write there"
        if found := _misfit(item, schema[OTHERS], f"{at}[{said}]"):
            return found
    return ""


def _must(value: Any, at: str, what: str) -> str:
    return f"{at or 'it'} = {shortened(repr(value), 100)} must be {what}"
