"""Numbers and origin of a kernel profile in words, as its page and figures write them."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from wlb.cost import AttentionTable, KernelProfile
from wlb.plan import FloatArray


def rate_unit(tflops: Sequence[float]) -> tuple[float, str]:
    """Factor and unit in which these TFLOP/s are legible."""
    return (1.0, "TFLOP/s") if max(tflops, default=1.0) >= 1 else (1e3, "GFLOP/s")


def table_title(table: AttentionTable) -> str:
    heads = f"{table.num_heads} head{'s' * (table.num_heads > 1)}"
    if table.num_kv_heads != table.num_heads:
        heads += f" over {table.num_kv_heads}"
    return f"{table.backends[0]}, {heads} of {table.head_dim}"


def time_text(ns: float) -> str:
    """Three digits and a unit: 12.3 µs, 4.56 ms."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.3g} ns"


def rate_text(tflops: float) -> str:
    scale, unit = rate_unit([tflops])
    return f"{tflops * scale:.3g} {unit}"


def rates_text(tflops: FloatArray) -> str:
    """The lowest and the highest of them."""
    scale, unit = rate_unit([float(tflops.max())])
    return f"{tflops.min() * scale:.3g} to {tflops.max() * scale:.3g} {unit}"


def spoken(name: str) -> str:
    return name.replace("_", "-")


def made_with(profile: KernelProfile) -> list[tuple[str, str]]:
    """Device, command and environment of the sweep, by name."""
    origin = profile.provenance
    plain = [
        ("device", profile.device),
        ("data type", profile.dtype),
        ("attention kernels", ", ".join(profile.backends)),
        ("date", origin.date),
        ("commit", origin.commit),
        ("command", origin.command),
    ]
    starts: list[dict[str, Any]] = origin.environment.get("starts") or [{}]
    conditions: dict[str, Any] = starts[-1].get("conditions", {})
    facts = [(name, _value_text(name, v)) for name, v in origin.environment.items()]
    facts += [(name, _condition_text(v)) for name, v in conditions.items() if v not in ("", {}, 0)]
    own = [fact for fact in facts if fact[0] not in ("starts", "name", "dtype", "device")]
    return [(name, text) for name, text in [*plain, *own] if text]


def _value_text(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**30:.3g} GiB" if value >= 2**30 else f"{value / 2**20:.3g} MiB"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items())  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(str(v) for v in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return str(value)


def _condition_text(value: Any) -> str:
    """Format three numbers as least, median, most, and shares by reason as percentages."""
    match value:
        case [float() | int() as low, float() | int() as middle, float() | int() as high]:
            return f"{low:g} at least, {middle:g} at the median, {high:g} at most"
        case Mapping():
            shares = cast(Mapping[str, Any], value)
            return ", ".join(
                f"{spoken(k)} {v:.0%}" if isinstance(v, float) else f"{spoken(k)} ({v})"
                for k, v in shares.items()
            )
        case _:
            return str(value)
