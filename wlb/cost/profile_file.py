"""Read and write kernel profiles as versioned JSON, and find the profiles that come with wlb.

`profile_to_json` and `profile_from_json` are inverse up to four digits of throughput. The profiles
are in kernels_profile/ of a checkout; a wheel has them in wlb/_kernels_profile.
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
"""Power limits that differ by at most this fraction count as the same.

The throughput of matrix products goes with the cube root of the limit.
"""


def matching_profile(
    device: str, machine: str, backend: str | None = None, *, power_limit_w: float = 0.0
) -> KernelProfile:
    """Return the profile to use for "cpu" or "cuda" on a machine.

    Prefers, in this order: the same device, the same power limit, measured numbers, a known power
    limit, the attention kernel `backend`, and a profile that is not the device type's default.
    Returns the default if there is no profile of the device.

    Args:
        device: "cpu" or "cuda".
        machine: Name of the device (`machine_name`).
        backend: Attention kernel.
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
    """Return whether the profile's GPU has this power limit, or either limit is unknown (0)."""
    known = profile.power_limit_w and power_limit_w
    return not known or abs(power_limit_w / profile.power_limit_w - 1) <= POWER_TOLERANCE


def _device_of(name: str) -> str:
    """Return the device of a profile that comes with wlb, whatever its schema version."""
    try:
        return str(read_object(_path_of(name))["device"])
    except (UserError, KeyError):
        return ""


def default_profile_name(device: str) -> str:
    """Return the profile for machines without a profile of their device."""
    names = {"cpu": "cpu", "cuda": "h100_runs"}
    if device not in names:
        raise UserError(f"no kernel profile for device {device!r}; known: {', '.join(names)}")
    return names[device]


def profile_names() -> tuple[str, ...]:
    """Return the names of the profiles that come with wlb."""
    found = {path.stem for folder in _folders() for path in folder.glob("*.json")}
    return tuple(sorted(found))


def load_profile(name_or_path: str) -> KernelProfile:
    """Load a profile that comes with wlb by name, or any profile by the path of its JSON file."""
    path = Path(name_or_path)
    path = path if path.suffix == ".json" else _path_of(name_or_path)
    if not path.is_file():
        raise UserError(
            f"no kernel profile {name_or_path!r}; shipped: {', '.join(profile_names()) or 'none'}; "
            f"or give the path of a .json file"
        )
    where = f"kernel profile {name_or_path!r}"
    with malformed(where, "measure it with `wlb profile`, or choose another"):
        return profile_from_json(read_json(path))


def _path_of(name: str) -> Path:
    """Return the file of a named profile; an empty path if there is none."""
    return next((p for f in _folders() if (p := f / f"{name}.json").is_file()), Path())


def _folders() -> list[Path]:
    """Return the folders of profiles: in an installed wheel and in a checkout."""
    installed = Path(str(resources.files("wlb") / "_kernels_profile"))
    checkout = Path(__file__).resolve().parents[2] / "kernels_profile"
    return [folder for folder in (installed, checkout) if folder.is_dir()]


def save_profile(path: Path, profile: KernelProfile) -> None:
    """Write a profile as JSON, with each list of numbers on one line.

    Raises:
        UserError: A price is one that `load_profile` would refuse; no file is written. This may
            happen if other work on the device disturbed the measurement, so that e.g. a layer's
            time does not grow with its tokens.
    """
    data = profile_to_json(profile)
    try:
        _check_magnitudes(data, "")
    except UserError as error:
        raise UserError(f"{path} is not written: {error}") from error
    text = json.dumps(data, indent=1)
    # Join the lines of each list of numbers.
    text = re.sub(r"\[\s+([-+.eE\d,\s]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    path.write_text(text + "\n", "utf-8")


def profile_from_json(data: Mapping[str, Any]) -> KernelProfile:
    """Build the profile that `data` describes.

    Raises:
        UserError: The schema version differs, a value is invalid, or a key is unknown.
    """
    if not isinstance(data, dict):
        raise UserError(f"a profile is a JSON object, this is a {type(data).__name__}")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(
            f"schema_version is {version!r}, this program reads {SCHEMA_VERSION}; measure the "
            f"profile again or use a matching release"
        )
    _check_magnitudes(data, "")
    for name in ("name", "device", "dtype"):
        if name in data and not isinstance(data[name], str):
            raise UserError(f"{name} = {data[name]!r} must be text; measure the profile again")
    values: dict[str, Any] = {name: data[name] for name in _PROFILE_FIELDS}
    if "power_limit_w" in data:
        limit = data["power_limit_w"]
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
            raise UserError(
                f"power_limit_w = {limit!r} must be a number of W above 0; leave it out if it is "
                f"unknown"
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
    # A key that is not written back was not read, for example because it is misspelled.
    if unread := _unread_key(data, profile_to_json(made)):
        raise UserError(f"has the key {unread!r}, which no profile has; remove it")
    return made


def _unread_key(data: Any, written: Any, at: str = "") -> str:
    """Return the first key of `data` that the profile made of it does not have; else "".

    `written` is that profile's JSON, and `at` is the position of `data` in it.
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
    """Return a profile as JSON values."""
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
"""Smallest and largest plausible value above 0, by the end of a key."""


def _check_magnitudes(value: Any, name: str) -> None:
    """Raise UserError for a number with which predicted times would overflow 64 bits."""
    if isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            # No price follows from the provenance.
            if key != "provenance":
                _check_magnitudes(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for inner in cast("list[Any]", value):
            _check_magnitudes(inner, name)
    elif isinstance(value, int | float):
        low, high = next(m for end, m in _MAGNITUDES.items() if name.endswith(end))
        if value > high or 0 < value < low:
            raise UserError(
                f"{name} = {value} must be in [{low:g}, {high:g}]; measure it again with "
                f"nothing else on the device"
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
