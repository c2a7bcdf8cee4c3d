"""Write a RunSpec as TOML that `wlb.spec.load` reads back as the same spec."""

import textwrap
from collections.abc import Sequence
from typing import Any, cast

from wlb.spec.keys import KeyHelp, list_keys, to_dict
from wlb.spec.run import RunSpec

WHOLE = ("parallel", "pp", "packing", "sharding")
"""Sections that `to_toml` writes with all keys, because together they describe a layout."""


def to_toml(spec: RunSpec, *, comments: Sequence[str] = (), whole: Sequence[str] = WHOLE) -> str:
    """Return `spec` as the text of a TOML file.

    Args:
        spec: Configuration to write.
        comments: Lines that the file begins with, as comments.
        whole: Sections to write with all keys. Other sections have only keys that differ from
            their defaults.
    """
    blocks = ["".join(f"# {' '.join(line.split())}\n" for line in comments)]
    blocks += _tables("", to_dict(spec), to_dict(RunSpec()), whole)
    return "\n".join(block for block in blocks if block)


def to_commented_toml(spec: RunSpec, *, comments: Sequence[str] = ()) -> str:
    """Return the text of a TOML file with every key and a comment that explains it.

    Keys at their default are commented out.

    Args:
        spec: Configuration to write.
        comments: Lines that the file begins with, as comments.
    """
    values, defaults = to_dict(spec), to_dict(RunSpec())
    lines = [f"# {line}" for line in comments]
    lines.append("# A key with # before it is at its default; remove the # to set it.")
    section = ""
    for key in list_keys(RunSpec):
        prefix, _, name = key.name.rpartition(".")
        if prefix != section:
            section = prefix
            lines += ["", f"[{section}]"]
        value, default = (_at(tree, key.name) for tree in (values, defaults))
        lines += _meaning(key)
        lines.append(f"{'#' if value == default else ''}{name} = {_value(value)}")
    return "\n".join([*lines, ""])


def _at(tree: dict[str, Any], dotted: str) -> Any:
    value: Any = tree
    for part in dotted.split("."):
        value = value[part]
    return value


def _meaning(key: KeyHelp) -> list[str]:
    """Return the comment on a key as lines: its help text, unit, type or choices, and default."""
    about = ", ".join(filter(None, (key.unit, key.type.replace("|", ", "))))
    text = f"{key.doc} ({about}; default: {key.default})"
    return textwrap.wrap(
        text, 98, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def _tables(
    prefix: str, values: dict[str, Any], defaults: dict[str, Any], whole: Sequence[str]
) -> list[str]:
    """Return the TOML text of a section and of its subsections, one string for each table.

    Keys whose value is the default are left out, except in the sections of `whole`. Tables without
    keys are left out.

    Args:
        prefix: Dotted name of the section; "" for the whole configuration.
        values: Nested values of the section.
        defaults: Nested default values of the section.
        whole: Dotted names of the sections to write with all keys.
    """
    lines: list[str] = []
    nested: list[str] = []
    for name, value in values.items():
        if isinstance(value, dict):
            inner = cast("dict[str, Any]", value)
            dotted = f"{prefix}.{name}" if prefix else name
            nested += _tables(dotted, inner, defaults[name], whole)
        elif prefix in whole or value != defaults[name]:
            lines.append(f"{name} = {_value(value)}\n")
    return [f"[{prefix}]\n{''.join(lines)}", *nested] if lines else nested


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
