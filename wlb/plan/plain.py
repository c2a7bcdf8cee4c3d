"""Conversion of records to plain JSON values and back.

Values that are no such record are refused with an error that names the record.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from enum import StrEnum
from typing import Any, cast

import numpy as np

from wlb.plan.errors import UserError


class PlainRecord:
    """A dataclass that is written to JSON as an object with its fields, by name and in order."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`; `from_json` reads them back."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(cast(Any, self))}


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the entries of nested mappings in order, by dotted names ("model.hidden_size")."""
    out: list[tuple[str, Any]] = []
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, Mapping):
            out += flat(cast("Mapping[str, Any]", value), f"{dotted}.")
        else:
            out.append((dotted, value))
    return out


def plain(value: Any) -> Any:
    """Return the JSON value of a field: records by their `to_json`, arrays and tuples as lists."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, np.ndarray):
        return cast(Any, value).tolist()
    if isinstance(value, tuple):
        return [plain(part) for part in cast("tuple[Any, ...]", value)]
    return str(value) if isinstance(value, StrEnum) else value


@contextmanager
def parsing(what: str) -> Generator[None, None, None]:
    """Turn the exception of a missing or misplaced value into a UserError that names the record.

    A ValueError passes unchanged, because the records themselves name the value that is wrong.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"this is not a {what} that `to_json` wrote ({reason}); give the whole value"
        ) from error
