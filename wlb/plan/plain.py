"""Conversion of dataclasses to plain JSON values, and errors for JSON values of the wrong form."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from enum import StrEnum
from typing import Any, cast

import numpy as np

from wlb.plan.errors import UserError


class PlainRecord:
    """A base class of dataclasses whose JSON is an object with one key for each field, in order."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for `json.dumps`, with one key for each field."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(cast(Any, self))}


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the entries of nested mappings as a flat list of (dotted name, value), in order.

    Args:
        values: The mapping, such as {"model": {"hidden_size": 64}}.
        prefix: Text that is put before every name.

    Returns:
        Pairs such as ("model.hidden_size", 64).
    """
    out: list[tuple[str, Any]] = []
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, Mapping):
            out += flat(cast("Mapping[str, Any]", value), f"{dotted}.")
        else:
            out.append((dotted, value))
    return out


def plain(value: Any) -> Any:
    """Return `value` in a form that `json.dumps` accepts.

    A record is converted by its `to_json`, an array or tuple to a list, and an enum to its text.
    """
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, np.ndarray):
        return cast(Any, value).tolist()
    if isinstance(value, tuple):
        return [plain(part) for part in cast("tuple[Any, ...]", value)]
    return str(value) if isinstance(value, StrEnum) else value


@contextmanager
def parsing(what: str) -> Generator[None, None, None]:
    """Turn errors of a `with` block that makes a record from JSON values into a UserError.

    The context manager converts LookupError, TypeError and AttributeError, which mean that a value
    is missing or of the wrong type. A ValueError passes unchanged, because records raise it with a
    message that names the wrong value.

    Args:
        what: Name of the record, for the message.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"the JSON value is not a {what} as `to_json` returns it ({reason}); give the complete "
            f"and unchanged value"
        ) from error
