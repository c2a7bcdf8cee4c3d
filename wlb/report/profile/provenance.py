"""Where the numbers of a kernel profile come from, as rows of its page."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from wlb.cost import KernelProfile, Provenance
from wlb.report.profile.words import rate_text, rate_unit, spoken, table_title, time_text

FACTS = {
    "cpu": "CPU",
    "torch": "PyTorch",
    "num_threads": "threads",
    "packages": "attention packages",
    "memory_bytes": "memory",
    "capability": "compute capability",
    "cuda": "CUDA",
    "num_sms": "multiprocessors",
    "l2_bytes": "L2 cache",
    "lengths": "grid (tokens)",
    "batch_tokens": "rows of a batch",
    "model": "hidden, feed-forward and vocabulary size",
    "budgets_s": "seconds for a point of attention, of the linear part, of collectives",
    "sm_clock_mhz": "SM clock (MHz)",
    "memory_clock_mhz": "memory clock (MHz)",
    "power_w": "power (W)",
    "temperature_c": "temperature (degrees Celsius)",
    "num_samples": "samples of clocks and power",
    "throttled": "throttled, share of samples",
    "unavailable": "not told by the device",
    "why_empty": "clocks and power",
}
"""Names of a profile's environment, in words; others are shown as they are."""
NO_COST_BYTES_PER_S = 1e15
"""A rate above it says that the time of calls did not grow with their bytes."""


def source_rows(profile: KernelProfile) -> list[list[str]]:
    """Rows: block, forward, backward, kind of provenance, source."""

    def row(what: str, forward: str, backward: str, origin: Provenance) -> list[str]:
        return [what, forward, backward, str(origin.kind), origin.source]

    def tops(values: Any) -> str:
        scale, unit = rate_unit([float(values.max())])
        return f"{values.min() * scale:.3g} to {values.max() * scale:.3g} {unit}"

    def rate(bytes_per_s: float, call_ns: float) -> str:
        is_told = bytes_per_s < NO_COST_BYTES_PER_S
        told = f"{bytes_per_s / 1e9:.3g} GB/s" if is_told else "no measurable cost a byte"
        return f"{told}, {time_text(call_ns)} a call"

    rows = [
        row(table_title(t), tops(t.forward.values), tops(t.backward.values), t.provenance)
        for t in profile.attention
    ]
    gemm, head = profile.gemm, profile.head
    rows.append(
        row(
            "matrix products",
            tops(gemm.forward.values),
            tops(gemm.backward.values),
            gemm.provenance,
        )
    )
    rows += [
        row(
            str(c.op),
            rate(c.forward_bytes_per_s, c.forward_call_ns),
            rate(c.backward_bytes_per_s, c.backward_call_ns),
            c.provenance,
        )
        for c in profile.elementwise
    ]
    layer = profile.layer
    rows.append(
        row(
            "a layer's own",
            f"{layer.forward_factor:.3g} times its operators, {time_text(layer.forward_call_ns)}",
            f"{layer.backward_factor:.3g} times its operators, {time_text(layer.backward_call_ns)}",
            layer.provenance,
        )
    )
    scaling = f"{head.backward_bytes_per_s / 1e9:.3g} GB/s"
    rows.append(row("head and loss", rate_text(head.tflops), scaling, head.provenance))
    rows += [
        row(
            f"{spoken(c.op)}, {spoken(c.scope)}",
            f"{time_text(c.alpha_ns)} + wire bytes / {c.bytes_per_s / 1e9:.3g} GB/s",
            "",
            c.provenance,
        )
        for c in profile.collectives
    ]
    return rows


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
    facts = [
        (FACTS.get(name, name), text)
        for texts in (
            [(k, _value_text(k, v)) for k, v in origin.environment.items()],
            [(k, _condition_text(v)) for k, v in conditions.items() if v not in ("", {}, 0)],
        )
        for name, text in texts
        if name not in ("starts", "name", "dtype", "device")
    ]
    return [(name, text) for name, text in [*plain, *facts] if text]


def _value_text(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**30:.3g} GiB" if value >= 2**30 else f"{value / 2**20:.3g} MiB"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items())  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(str(v) for v in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return str(value)


def _condition_text(value: Any) -> str:
    """Of three numbers: least, median, most; of shares by reason: percent of samples."""
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
