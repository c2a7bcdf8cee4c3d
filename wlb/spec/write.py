"""Write a RunSpec as TOML that `load` reads back as the same spec."""

from collections.abc import Sequence
from typing import Any, cast

from wlb.spec.keys import to_dict
from wlb.spec.run import RunSpec

WHOLE = ("parallel", "pp", "packing", "sharding")
"""Sections that describe a layout; they are written with all keys."""


def to_toml(spec: RunSpec, *, comments: Sequence[str] = (), whole: Sequence[str] = WHOLE) -> str:
    """Return the file's text, with one comment line for each of `comments`.

    whole: sections written with all keys; other sections hold only what differs from defaults.
    """
    blocks = ["".join(f"# {' '.join(line.split())}\n" for line in comments)]
    blocks += _tables("", to_dict(spec), to_dict(RunSpec()), whole)
    return "\n".join(block for block in blocks if block)


def _tables(
    prefix: str, values: dict[str, Any], defaults: dict[str, Any], whole: Sequence[str]
) -> list[str]:
    """Return the TOML tables of a section and its subsections, without empty ones."""
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
    if not isinstance(value, str):
        return repr(value)
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    is_control = (ord(c) < 32 or ord(c) == 127 for c in quoted)
    escaped = (f"\\u{ord(c):04X}" if bad else c for c, bad in zip(quoted, is_control, strict=True))
    return f'"{"".join(escaped)}"'
