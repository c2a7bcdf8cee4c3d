"""Declare, set, check and list configuration keys.

A section is a frozen dataclass whose fields are made by `key(default, "what it does", unit=...)`;
`RunSpec` nests sections. `apply` sets keys from nested values and refuses unknown names and wrong
types with the value and the nearest known key.
"""

import difflib
import types
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from functools import reduce
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from wlb.plan import UserError
from wlb.plan.plain import plain

T = TypeVar("T")

RENAMED = {"data.num_micro_batches": "data.num_windows", "data.token_quantum": "data.row_multiple"}
"""Old names of keys, which still work with a RenamedKeyWarning."""


class RenamedKeyWarning(FutureWarning):
    """A user's settings hold an old name of a key; the command line prints it as one line."""


def key(default: Any, doc: str, *, unit: str = "") -> Any:
    """A configuration field with its help text and unit."""
    return field(default=default, metadata={"doc": doc, "unit": unit})


@dataclass(frozen=True, slots=True)
class KeyHelp:
    """One line of `wlb train --help`."""

    name: str
    type: str
    default: str
    unit: str
    doc: str


def list_keys(section: type[Any], prefix: str = "") -> list[KeyHelp]:
    """List every key below `section` by dotted name, in declaration order."""
    hints = get_type_hints(section)
    out: list[KeyHelp] = []
    for f in fields(section):
        name = f"{prefix}{f.name}"
        if is_dataclass(hints[f.name]):
            out += list_keys(hints[f.name], f"{name}.")
        else:
            texts = cast("dict[str, str]", f.metadata)
            out.append(KeyHelp(name, _type_name(hints[f.name]), _show(f.default), **texts))
    return out


def apply(
    spec: T,
    values: dict[str, Any],
    *,
    source: str,
    prefix: str = "",
    is_stored: bool = False,
    whole: type[Any] | None = None,
) -> T:
    """Return `spec` with nested `values` set; UserError naming `source`, the key and the remedy.

    is_stored: wlb wrote the values (checkpoint, metrics.jsonl), so old names of keys are no reason
    for a warning. whole: type of the outermost section, in which a misplaced key is looked for.
    """
    section = cast("type[Any]", type(spec))
    whole = whole or section
    hints = get_type_hints(section)
    changes: dict[str, Any] = {}
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        if dotted in RENAMED:
            new = RENAMED[dotted]
            if not is_stored:
                warnings.warn(f"{source}: {dotted} is now {new}", RenamedKeyWarning, stacklevel=2)
            dotted, name = new, new.removeprefix(prefix)
            if name in values:
                raise UserError(f"{source}: {new} is given twice; remove its old name")
        if name not in hints:
            raise UserError(
                f"{source}: unknown key {dotted!r}{_nearest(dotted, hints, prefix, whole)}"
            )
        kind = hints[name]
        if is_dataclass(kind):
            if not isinstance(value, dict):
                raise UserError(f"{source}: {dotted} is a section, got {value!r}")
            nested = cast("dict[str, Any]", value)
            changes[name] = apply(
                getattr(spec, name),
                nested,
                source=source,
                prefix=f"{dotted}.",
                is_stored=is_stored,
                whole=whole,
            )
        else:
            changes[name] = _convert(value, kind, f"{source}: {dotted}")
    return cast(T, replace(cast(Any, spec), **changes))


def nest(dotted: str, value: Any) -> dict[str, Any]:
    """Return `{"a": {"b": value}}` for "a.b"."""
    out = value
    for part in reversed(dotted.split(".")):
        out = {part: out}
    return cast("dict[str, Any]", out)


def to_dict(spec: Any) -> dict[str, Any]:
    """Return nested plain values (TOML and JSON types)."""
    return asdict(spec, dict_factory=lambda pairs: {name: plain(value) for name, value in pairs})


def check_bounds(
    section: Any,
    names: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    prefix: str = "",
) -> None:
    """UserError for the first of `names` (dotted, separated by spaces) that is out of bounds."""
    for name in names.split():
        value = reduce(getattr, name.split("."), section)
        if at_least is not None and not value >= at_least:
            raise UserError(f"{prefix}{name} = {value} must be at least {at_least}")
        if above is not None and not value > above:
            raise UserError(f"{prefix}{name} = {value} must be above {above}")


def _convert(value: Any, kind: Any, where: str) -> Any:
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise UserError(f"{where} must be a list, got {value!r}")
        inner = get_args(kind)[0]
        items = list(cast("list[Any]", value))
        return tuple(_convert(v, inner, f"{where}[{i}]") for i, v in enumerate(items))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        try:
            return kind(value)
        except ValueError:
            choices = ", ".join(repr(str(c)) for c in kind)
            raise UserError(f"{where} = {value!r}: choose one of {choices}") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"{where} must be {_type_name(kind)}, got {value!r}")
    return value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" with the known name that is most like `name`, else ""."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _nearest(dotted: str, hints: dict[str, Any], prefix: str, whole: type[Any]) -> str:
    """The known key that was probably meant: of this section, or of the same name in another."""
    here = [prefix + name for name in hints]
    name = dotted.removeprefix(prefix)
    keys = [key.name for key in list_keys(whole)]
    elsewhere = [key for key in keys if key.rsplit(".", 1)[-1] == name]
    if elsewhere:
        return f"; did you mean {' or '.join(map(repr, elsewhere))}?"
    close = difflib.get_close_matches(name, hints, n=1)
    if close:
        return f"; did you mean {prefix + close[0]!r}?"
    anywhere = "" if prefix else did_you_mean(dotted, keys)
    return anywhere or f"; known here: {', '.join(here)}"


def _type_name(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"list of {_type_name(get_args(kind)[0])}"
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return "|".join(str(c) for c in kind)
    if isinstance(kind, types.UnionType):
        return str(kind)
    return cast(str, kind.__name__)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(cast("tuple[Any, ...]", value)))
    return repr(str(value)) if isinstance(value, str) else str(value)
