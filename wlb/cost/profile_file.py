"""Read and write kernel profiles as versioned JSON, and find the profiles that come with wlb.

`profile_from_json` restores what `profile_to_json` wrote, except that throughput is rounded to four
digits. The profiles that come with wlb are in kernels_profile/ of a checkout, and in
wlb/_kernels_profile of an installed wheel.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any, cast

from wlb.cost.machine import is_same
from wlb.cost.profile import (
    BACKWARD_TILES,
    AttentionTable,
    BlockCost,
    CollectiveCost,
    ElementwiseCost,
    GemmCost,
    HeadCost,
    KernelProfile,
    LayerCost,
    Provenance,
    ProvenanceKind,
)
from wlb.cost.surface import Curve, Surface
from wlb.plan import FloatArray, UserError
from wlb.plan.read_file import malformed, read_json, read_object

SCHEMA_VERSION = 2
POWER_TOLERANCE = 0.05
"""Power limits that differ by at most this fraction count as equal.

The throughput of matrix products grows with the cube root of the power limit, so a difference of 5%
changes it by less than 2%.
"""


def matching_profile(
    device: str, machine: str, backend: str | None = None, *, power_limit_w: float = 0.0
) -> KernelProfile:
    """Return the profile that fits a machine best, among the profiles that come with wlb.

    Profiles of the machine's device are compared by these properties, the most important one first:
    the power limit does not differ from the machine's, the numbers were measured, the power limit
    is known, the profile has a table of the attention kernel, and the profile is not the default
    one. If there is no profile of this device, the default profile of the device type is returned.

    Args:
        device: "cpu" or "cuda".
        machine: Name of the CPU or GPU (`machine_name`); "" if unknown.
        backend: Name of the attention kernel; None means any kernel.
        power_limit_w: Power limit of the GPU in W; 0 if unknown.
    """
    default = default_profile_name(device)
    names = [name for name in profile_names() if machine and is_same(_device_of(name), machine)]
    return min(
        map(load_profile, names or [default]),
        # False sorts before True, so the first profile without a disadvantage is chosen.
        key=lambda p: (
            not has_power(p, power_limit_w),
            p.provenance.kind != ProvenanceKind.MEASURED,
            not p.power_limit_w,
            backend not in p.backends,
            p.name == default,
        ),
    )


def has_power(profile: KernelProfile, power_limit_w: float) -> bool:
    """Return whether a profile was measured at this power limit, or either limit is unknown (0)."""
    known = profile.power_limit_w and power_limit_w
    return not known or abs(power_limit_w / profile.power_limit_w - 1) <= POWER_TOLERANCE


def _device_of(name: str) -> str:
    """Return the device of a profile that comes with wlb; "" if the file cannot be read.

    This works for profiles of all schema versions, because only the key "device" is read.
    """
    try:
        return str(read_object(_path_of(name))["device"])
    except (UserError, KeyError):
        return ""


def default_profile_name(device: str) -> str:
    """Return the name of the profile to use on devices that have no profile of their own.

    Args:
        device: "cpu" or "cuda".
    """
    names = {"cpu": "cpu", "cuda": "h100_runs"}
    if device not in names:
        raise UserError(
            f"there is no default kernel profile for the device {device!r}; use one of "
            f"{', '.join(names)}, or give the path of a profile"
        )
    return names[device]


def profile_names() -> tuple[str, ...]:
    """Return the names of the profiles that come with wlb."""
    found = {path.stem for folder in _folders() for path in folder.glob("*.json")}
    return tuple(sorted(found))


def load_profile(name_or_path: str) -> KernelProfile:
    """Load a kernel profile.

    Args:
        name_or_path: Name of a profile that comes with wlb, or the path of any .json file.

    Raises:
        UserError: There is no such profile, or its content is invalid.
    """
    path = Path(name_or_path)
    path = path if path.suffix == ".json" else _path_of(name_or_path)
    if not path.is_file():
        raise UserError(
            f"there is no kernel profile {name_or_path!r}; choose one of "
            f"{', '.join(profile_names()) or 'none'}, or give the path of a .json file"
        )
    where = f"kernel profile {name_or_path!r}"
    with malformed(where, "measure it with `wlb profile`, or choose another"):
        return profile_from_json(read_json(path))


def _path_of(name: str) -> Path:
    """Return the file of a profile that comes with wlb; an empty path if there is none."""
    return next((p for f in _folders() if (p := f / f"{name}.json").is_file()), Path())


def _folders() -> list[Path]:
    """Return the existing folders of profiles: those of an installed wheel and of a checkout."""
    installed = Path(str(resources.files("wlb") / "_kernels_profile"))
    checkout = Path(__file__).resolve().parents[2] / "kernels_profile"
    return [folder for folder in (installed, checkout) if folder.is_dir()]


def save_profile(path: Path, profile: KernelProfile) -> None:
    """Write a profile as JSON, with each list of numbers on one line.

    Raises:
        UserError: `load_profile` would refuse a value, so no file is written. This may happen if
            other work disturbed the measurement, so that for example the time of a layer does not
            grow with its tokens.
    """
    data = profile_to_json(profile)
    try:
        _check_magnitudes(data, "")
    except UserError as error:
        raise UserError(
            f"{path} was not written, because a value of the profile is implausible: {error}"
        ) from error
    text = json.dumps(data, indent=1)
    # Join the lines of each list of numbers.
    text = re.sub(r"\[\s+([-+.eE\d,\s]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    path.write_text(text + "\n", "utf-8")


def profile_from_json(data: Mapping[str, Any]) -> KernelProfile:
    """Build a profile from the content of its JSON file.

    Raises:
        UserError: The schema version differs, a value is invalid, or a key is unknown.
    """
    if not isinstance(data, dict):
        raise UserError(
            f"a kernel profile must be a JSON object, not a {type(data).__name__}; write one with "
            "`wlb profile`"
        )
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(
            f"schema_version = {version!r} must be {SCHEMA_VERSION} for this release of wlb; "
            "measure the profile again, or use the release that wrote it"
        )
    _check_magnitudes(data, "")
    for name in ("name", "device", "dtype"):
        if name in data and not isinstance(data[name], str):
            raise UserError(f"{name} = {data[name]!r} must be a string; measure the profile again")
    values: dict[str, Any] = {name: data[name] for name in _PROFILE_FIELDS}
    if "power_limit_w" in data:
        limit = data["power_limit_w"]
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
            raise UserError(
                f"power_limit_w = {limit!r} must be a number of watts above 0; remove the key if "
                "the limit is unknown"
            )
        values["power_limit_w"] = float(limit)
    gemm = data["gemm"]
    made = KernelProfile(
        **values,
        provenance=_provenance(data),
        attention=tuple(_attention(t) for t in data["attention"]),
        gemm=GemmCost(
            **_surfaces(gemm, gemm["tokens"], gemm["weights"]), provenance=_provenance(gemm)
        ),
        elementwise=tuple(ElementwiseCost(**_with_provenance(c)) for c in data["elementwise"]),
        layer=LayerCost(**_with_provenance(data["layer"])),
        head=HeadCost(**_with_provenance(data["head"])),
        collectives=tuple(CollectiveCost(**_with_provenance(c)) for c in data["collectives"]),
    )
    # A key that was not read, perhaps because it is misspelled, is missing if the profile is
    # converted back to JSON.
    if unread := _unread_key(data, profile_to_json(made)):
        raise UserError(
            f"the profile has the unknown key {unread!r}; remove the key or correct its spelling"
        )
    return made


def _unread_key(data: Any, written: Any, at: str = "") -> str:
    """Return the path of the first key of `data` that is missing in `written`; "" if there is none.

    Args:
        data: JSON values from which a profile was made.
        written: JSON values to which this profile is converted.
        at: Path of both values in their file, for example "attention[0].blocks".
    """
    if isinstance(data, dict) and isinstance(written, dict):
        for key, inner in cast("dict[str, Any]", data).items():
            name = f"{at}.{key}" if at else key
            if key not in written:
                return name
            if found := _unread_key(inner, written[key], name):
                return found
    if isinstance(data, list) and isinstance(written, list):
        pairs = zip(cast("list[Any]", data), cast("list[Any]", written), strict=False)
        found = (_unread_key(one, other, f"{at}[{i}]") for i, (one, other) in enumerate(pairs))
        return next(filter(None, found), "")
    return ""


def profile_to_json(profile: KernelProfile) -> dict[str, Any]:
    """Return the content of a profile's JSON file."""
    gemm = profile.gemm
    return {
        "schema_version": SCHEMA_VERSION,
        **{name: getattr(profile, name) for name in _PROFILE_FIELDS},
        **({"power_limit_w": profile.power_limit_w} if profile.power_limit_w else {}),
        **_provenance_json(profile),
        "attention": [_attention_json(t) for t in profile.attention],
        "gemm": {
            "tokens": gemm.forward.axis0.tolist(),
            "weights": gemm.forward.axis1.tolist(),
            **_tflops(gemm.forward, gemm.backward),
            **_provenance_json(gemm),
        },
        "elementwise": [_cost_json(c) for c in profile.elementwise],
        "layer": _cost_json(profile.layer),
        "head": _cost_json(profile.head),
        "collectives": [_cost_json(c) for c in profile.collectives],
    }


_MAGNITUDES = {
    "tflops": (1e-9, 1e9),
    "bytes_per_s": (1.0, 1e18),
    "_ns": (1e-3, 1e12),
    "_factor": (1e-6, 1e6),
    "_efficiency": (1e-6, 1e6),
    "": (1e-18, 1e18),
}
"""Smallest and largest plausible value of keys with a given ending; 0 is always allowed."""


def _check_magnitudes(value: Any, name: str) -> None:
    """Raise UserError if a number is so large or small that predicted times may exceed 64 bits.

    Args:
        value: JSON values.
        name: Path of the values in their file, for the error message.
    """
    if isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            # Numbers in the provenance are not used as prices.
            if key != "provenance":
                _check_magnitudes(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for inner in cast("list[Any]", value):
            _check_magnitudes(inner, name)
    elif isinstance(value, int | float):
        low, high = next(m for end, m in _MAGNITUDES.items() if name.endswith(end))
        if value > high or 0 < value < low:
            raise UserError(
                f"{name} = {value} must be from {low:g} to {high:g}; measure the profile again "
                "while nothing else runs on the device"
            )


_PROFILE_FIELDS = ("name", "device", "dtype", "ranks_per_node")
"""Fields of a profile that JSON stores unchanged."""
_TABLE_FIELDS = (
    "backends",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "tile_rows",
    "launch_forward_ns",
    "launch_backward_ns",
    "group_forward_ns",
    "group_backward_ns",
)
"""Fields of an attention table that JSON stores unchanged."""
_PASSES = ("forward", "backward")


def _provenance(block: Mapping[str, Any]) -> Provenance:
    data = block["provenance"]
    values: dict[str, Any] = {**data, "residuals": tuple(data.get("residuals", {}).items())}
    return Provenance(**values)


def _with_provenance(block: Mapping[str, Any]) -> dict[str, Any]:
    return {**block, "provenance": _provenance(block)}


def _provenance_json(block: Any) -> dict[str, Any]:
    provenance: Provenance = block.provenance
    data = asdict(provenance) | {"residuals": dict(provenance.residuals)}
    return {"provenance": {key: value for key, value in data.items() if value}}


def _cost_json(cost: ElementwiseCost | LayerCost | HeadCost | CollectiveCost) -> dict[str, Any]:
    return asdict(cost) | _provenance_json(cost)


def _surfaces(data: Mapping[str, Any], axis0: Any, axis1: Any) -> dict[str, Any]:
    return {
        name: Surface(axis0=axis0, axis1=axis1, values=data[f"{name}_tflops"]) for name in _PASSES
    }


def _tflops(forward: Surface | Curve, backward: Surface | Curve) -> dict[str, list[Any]]:
    return {
        "forward_tflops": _rounded(forward.values),
        "backward_tflops": _rounded(backward.values),
    }


def _rounded(values: FloatArray) -> list[Any]:
    if values.ndim > 1:
        return [_rounded(row) for row in values]
    return [float(f"{v:.4g}") for v in values]


def _attention(data: Mapping[str, Any]) -> AttentionTable:
    values: dict[str, Any] = {name: data[name] for name in _TABLE_FIELDS}
    values |= {name: data[name] for name in BACKWARD_TILES if name in data}
    if (square := data.get("square")) is not None:
        for name in _PASSES:
            curve = Curve(axis=square["lengths"], values=square[f"{name}_tflops"])
            values[f"square_{name}"] = curve
    return AttentionTable(
        **values,
        **_surfaces(data, data["q"], data["kv"]),
        padded_lengths=tuple(data["padded_lengths"]),
        reach=data.get("reach"),
        blocks=BlockCost(**data["blocks"]) if "blocks" in data else None,
        heads=data["heads"],
        heads_efficiency=data["heads_efficiency"],
        provenance=_provenance(data),
    )


def _attention_json(table: AttentionTable) -> dict[str, Any]:
    data: dict[str, Any] = {name: getattr(table, name) for name in _TABLE_FIELDS}
    if any(getattr(table, name) != table.tile_rows for name in BACKWARD_TILES):
        data |= {name: getattr(table, name) for name in BACKWARD_TILES}
    if table.square_forward is not None and table.square_backward is not None:
        lengths = table.square_forward.axis.tolist()
        data["square"] = {"lengths": lengths} | _tflops(table.square_forward, table.square_backward)
    if table.reach is not None:
        data["reach"] = table.reach.tolist()
    if table.blocks is not None:
        data["blocks"] = asdict(table.blocks)
    return data | {
        "backends": list(table.backends),
        "padded_lengths": list(table.padded_lengths),
        "q": table.forward.axis0.tolist(),
        "kv": table.forward.axis1.tolist(),
        **_tflops(table.forward, table.backward),
        "heads": table.heads.tolist(),
        "heads_efficiency": _rounded(table.heads_efficiency),
        **_provenance_json(table),
    }
