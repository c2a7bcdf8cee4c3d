"""Load a preset or a TOML file with `--set` overrides, as a checked RunSpec."""

from importlib import resources
from pathlib import Path
from typing import Any, cast

from wlb.plan import UserError
from wlb.plan.errors import shortened
from wlb.plan.read_file import parse_toml
from wlb.spec.checks import check
from wlb.spec.keys import apply, did_you_mean, list_keys, nest
from wlb.spec.methods import keys_of
from wlb.spec.run import RunSpec

_MOST_DOTS = 8


def presets() -> list[str]:
    """Return the names of the presets that ship with wlb."""
    folder = resources.files("wlb.spec") / "presets"
    return sorted(
        f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")
    )


def load(name: str, overrides: list[str] | None = None) -> RunSpec:
    """Return the checked configuration of a preset or a TOML file.

    Args:
        name: Name of a preset, or path of a TOML file.
        overrides: Values of `--set` options, such as "parallel.tp=4". Later ones win. None = no
            overrides.

    Raises:
        UserError: For an unknown preset, invalid TOML, an unknown key or a wrong value.
    """
    given = _read(name)
    if not given and not overrides:
        raise UserError(
            f"{name} sets no key, so it does not describe a run; set keys in this file, or run "
            f"`wlb init demo > {name}` to write a file with all keys"
        )
    spec = apply(RunSpec(), _expanded(given), source=name)
    # Apply the options one by one, so that a message names the option at fault.
    types = {key.name: key.type for key in list_keys(RunSpec)}
    for item in overrides or []:
        dotted, sign, text = item.partition("=")
        if not sign:
            raise UserError(f"--set {item!r}: write section.key=value, as in training.steps=100")
        source = f"--set {shortened(item, 200)}"
        if dotted.count(".") > _MOST_DOTS:
            raise UserError(
                f"{source}: the name before = has {dotted.count('.')} dots, which no key has; "
                f"write section.key=value, as in training.steps=100"
            )
        value = _value(text.strip(), source, is_text=types.get(dotted.strip()) == "str")
        spec = apply(spec, _expanded(nest(dotted.strip(), value)), source=source)
    return check(spec)


def _expanded(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with the keys that packing.method sets, except those that `values` has.

    `values` has the keys of each section under the section's name.
    """
    given = values.get("packing")
    if not isinstance(given, dict):
        return values
    packing = cast("dict[str, Any]", given)
    method = packing.get("method", "")
    if not isinstance(method, str) or not method:
        return values
    return {**values, "packing": dict(keys_of(method)) | packing}


def _read(name: str) -> dict[str, Any]:
    if name in presets():
        data = (resources.files("wlb.spec") / "presets" / f"{name}.toml").read_bytes()
    else:
        path = Path(name)
        if not path.is_file():
            beside = [str(other) for other in path.parent.glob("*.toml")]
            raise UserError(
                f"{name!r} is neither a preset ({', '.join(presets())}) nor a TOML file"
                f"{did_you_mean(name, [*presets(), *beside])}"
            )
        data = path.read_bytes()
    return parse_toml(data, name)


def _value(text: str, source: str, *, is_text: bool) -> Any:
    """Return the value of a `--set` option.

    Args:
        text: Text after the equals sign.
        source: The option, for messages.
        is_text: Whether the key takes text. Then `run.name=7` gives "7" without quotes.

    Returns:
        `text` parsed as a TOML value. It is `text` itself if it is not a TOML value, or if the key
        takes text and `text` is not a quoted string.
    """
    try:
        values = parse_toml(f"v = {text}", source)
    except UserError:
        return text
    if values.keys() != {"v"}:
        raise UserError(
            f"{source}: the text after = sets more than one key; give a separate --set option for "
            f"each key"
        )
    value = values["v"]
    return value if isinstance(value, str) or not is_text else text
