"""Reads and writes kernel profiles as versioned JSON, and finds the shipped ones.

`profile_to_json` and `profile_from_json` are inverse up to four digits of throughput. Shipped
profiles are in kernels_profile/ of a checkout, which a wheel carries as wlb/_kernels_profile.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from wlb.cost.flops import FloatArray
from wlb.cost.machine import is_same
from wlb.cost.profile import (
    AttentionTable,
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
from wlb.plan import UserError

SCHEMA_VERSION = 2


def matching_profile(device: str, machine: str, backend: str | None = None) -> KernelProfile:
    """The shipped profile for "cpu" or "cuda" on a machine of this name (`machine_name`).

    Prefers, in this order: the same device, measured, with the attention kernel `backend`, not the
    device type's default. Without a profile of the device the default is returned.
    """
    default = default_profile_name(device)
    if machine:
        same = [
            load_profile(name) for name in profile_names() if is_same(_device_of(name), machine)
        ]
        same.sort(
            key=lambda p: (
                p.provenance.kind != ProvenanceKind.MEASURED,
                backend not in p.backends,
                p.name == default,
            )
        )
        if same:
            return same[0]
    return load_profile(default)


def _device_of(name: str) -> str:
    """The device of a shipped profile of any schema version."""
    path = next(p for folder in _folders() if (p := folder / f"{name}.json").is_file())
    try:
        return str(json.loads(path.read_text("utf-8"))["device"])
    except (ValueError, KeyError, TypeError):
        return ""


def default_profile_name(device: str) -> str:
    """The shipped profile of a device type, "cpu" or "cuda", for machines without their own."""
    names = {"cpu": "cpu", "cuda": "h100"}
    if device not in names:
        raise UserError(f"no kernel profile for device {device!r}; known: {', '.join(names)}")
    return names[device]


def profile_names() -> tuple[str, ...]:
    """Names of shipped profiles."""
    found = {path.stem for folder in _folders() for path in folder.glob("*.json")}
    return tuple(sorted(found))


def load_profile(name_or_path: str) -> KernelProfile:
    """A shipped profile by name, or any profile by the path of its JSON file."""
    path = Path(name_or_path)
    if path.suffix != ".json":
        path = next((p for f in _folders() if (p := f / f"{name_or_path}.json").is_file()), Path())
    if not path.is_file():
        raise UserError(
            f"no kernel profile {name_or_path!r}; shipped: {', '.join(profile_names()) or 'none'}; "
            f"or give the path of a .json file"
        )
    try:
        return profile_from_json(json.loads(path.read_text("utf-8")))
    except KeyError as error:
        raise UserError(f"kernel profile {name_or_path!r} lacks the key {error}") from None
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"kernel profile {name_or_path!r}: {error}") from None


def _folders() -> list[Path]:
    """`wlb/_kernels_profile` of an installed wheel, `kernels_profile/` of a checkout."""
    installed = Path(str(resources.files("wlb") / "_kernels_profile"))
    checkout = Path(__file__).resolve().parents[2] / "kernels_profile"
    return [folder for folder in (installed, checkout) if folder.is_dir()]


def save_profile(path: Path, profile: KernelProfile) -> None:
    """Writes `profile` as JSON with each list of numbers on one line."""
    text = json.dumps(profile_to_json(profile), indent=1)
    text = re.sub(r"\[\s+([-+.eE\d,\s]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    path.write_text(text + "\n", "utf-8")


def profile_from_json(data: Mapping[str, Any]) -> KernelProfile:
    """The profile in `data`; raises UserError for another schema version."""
    if not isinstance(data, dict):
        raise UserError(f"a profile is a JSON object, this is a {type(data).__name__}")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(
            f"schema_version is {version!r}, this program reads {SCHEMA_VERSION}; measure the "
            f"profile again or use a matching release"
        )
    gemm = data["gemm"]
    return KernelProfile(
        name=data["name"],
        device=data["device"],
        dtype=data["dtype"],
        ranks_per_node=data["ranks_per_node"],
        provenance=_provenance(data["provenance"]),
        attention=tuple(_attention(t) for t in data["attention"]),
        gemm=GemmCost(
            **{
                name: Surface(
                    axis0=gemm["tokens"], axis1=gemm["weights"], values=gemm[f"{name}_tflops"]
                )
                for name in _PASSES
            },
            provenance=_provenance(gemm["provenance"]),
        ),
        elementwise=tuple(ElementwiseCost(**_with_provenance(c)) for c in data["elementwise"]),
        layer=LayerCost(**_with_provenance(data["layer"])),
        head=HeadCost(**_with_provenance(data["head"])),
        collectives=tuple(CollectiveCost(**_with_provenance(c)) for c in data["collectives"]),
    )


def profile_to_json(profile: KernelProfile) -> dict[str, Any]:
    gemm = profile.gemm.forward
    return {
        "schema_version": SCHEMA_VERSION,
        "name": profile.name,
        "device": profile.device,
        "dtype": profile.dtype,
        "ranks_per_node": profile.ranks_per_node,
        "provenance": _provenance_json(profile.provenance),
        "attention": [_attention_json(t) for t in profile.attention],
        "gemm": {
            "tokens": gemm.axis0.tolist(),
            "weights": gemm.axis1.tolist(),
            "forward_tflops": _rounded(gemm.values),
            "backward_tflops": _rounded(profile.gemm.backward.values),
            "provenance": _provenance_json(profile.gemm.provenance),
        },
        "elementwise": [_cost_json(c) for c in profile.elementwise],
        "layer": _cost_json(profile.layer),
        "head": _cost_json(profile.head),
        "collectives": [_cost_json(c) for c in profile.collectives],
    }


def _provenance(data: Mapping[str, Any]) -> Provenance:
    values: dict[str, Any] = {**data, "residuals": tuple(data.get("residuals", {}).items())}
    return Provenance(**values)


def _with_provenance(data: Mapping[str, Any]) -> dict[str, Any]:
    return {**data, "provenance": _provenance(data["provenance"])}


def _provenance_json(provenance: Provenance) -> dict[str, Any]:
    data = asdict(provenance) | {"residuals": dict(provenance.residuals)}
    return {key: value for key, value in data.items() if value}


def _cost_json(cost: ElementwiseCost | LayerCost | HeadCost | CollectiveCost) -> dict[str, Any]:
    return asdict(cost) | {"provenance": _provenance_json(cost.provenance)}


def _rounded(values: FloatArray) -> list[Any]:
    if values.ndim > 1:
        return [_rounded(row) for row in values]
    return [float(f"{v:.4g}") for v in values]


_PLAIN_FIELDS = (
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
_PASSES = ("forward", "backward")


def _attention(data: Mapping[str, Any]) -> AttentionTable:
    q, kv, square = data["q"], data["kv"], data.get("square")
    values: dict[str, Any] = {name: data[name] for name in _PLAIN_FIELDS}
    if square is not None:
        for name in _PASSES:
            curve = Curve(axis=square["lengths"], values=square[f"{name}_tflops"])
            values[f"square_{name}"] = curve
    return AttentionTable(
        **values,
        padded_lengths=tuple(data["padded_lengths"]),
        reach=data.get("reach"),
        forward=Surface(axis0=q, axis1=kv, values=data["forward_tflops"]),
        backward=Surface(axis0=q, axis1=kv, values=data["backward_tflops"]),
        heads=data["heads"],
        heads_efficiency=data["heads_efficiency"],
        provenance=_provenance(data["provenance"]),
    )


def _attention_json(table: AttentionTable) -> dict[str, Any]:
    data: dict[str, Any] = {name: getattr(table, name) for name in _PLAIN_FIELDS}
    if table.square_forward is not None and table.square_backward is not None:
        data["square"] = {
            "lengths": table.square_forward.axis.tolist(),
            "forward_tflops": _rounded(table.square_forward.values),
            "backward_tflops": _rounded(table.square_backward.values),
        }
    if table.reach is not None:
        data["reach"] = table.reach.tolist()
    return data | {
        "backends": list(table.backends),
        "padded_lengths": list(table.padded_lengths),
        "q": table.forward.axis0.tolist(),
        "kv": table.forward.axis1.tolist(),
        "forward_tflops": _rounded(table.forward.values),
        "backward_tflops": _rounded(table.backward.values),
        "heads": table.heads.tolist(),
        "heads_efficiency": _rounded(table.heads_efficiency),
        "provenance": _provenance_json(table.provenance),
    }
