"""A RunSpec as TOML that `load` reads back as the same spec."""

from collections.abc import Sequence
from typing import Any, cast

from wlb.spec.keys import to_dict
from wlb.spec.run import RunSpec

WHOLE = ("parallel", "pp", "packing", "sharding")
"""Sections of a layout, which is read better whole."""


def to_toml(spec: RunSpec, *, comments: Sequence[str] = (), whole: Sequence[str] = WHOLE) -> str:
    """The file's text, with a line of comment for each of `comments`.

    whole: sections that are written with all their keys; of others what differs from the defaults.
    """
    blocks = ["".join(f"# {' '.join(line.split())}\n" for line in comments)]
    blocks += _tables("", to_dict(spec), to_dict(RunSpec()), whole)
    return "\n".join(block for block in blocks if block)


def _tables(
    prefix: str, values: dict[str, Any], defaults: dict[str, Any], whole: Sequence[str]
) -> list[str]:
    """The tables of a section, its own first; those without a key are left out."""
    own: list[str] = []
    nested: list[str] = []
    for name, value in values.items():
        if isinstance(value, dict):
            inner = cast("dict[str, Any]", value)
            dotted = f"{prefix}.{name}" if prefix else name
            nested += _tables(dotted, inner, defaults[name], whole)
        elif prefix in whole or value != defaults[name]:
            own.append(f"{name} = {_value(value)}\n")
    return [f"[{prefix}]\n{''.join(own)}", *nested] if own else nested


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_value(v) for v in cast('list[Any]', value))}]"
    return _string(value) if isinstance(value, str) else repr(value)


def _string(text: str) -> str:
    """A basic string."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(_escaped(c) if ord(c) < 32 or ord(c) == 127 else c for c in quoted) + '"'


def _escaped(character: str) -> str:
    return f"\\u{ord(character):04X}"
