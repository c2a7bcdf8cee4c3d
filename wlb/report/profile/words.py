"""Numbers of a kernel profile with their units, as its page and figures write them."""

from collections.abc import Sequence

from wlb.cost import AttentionTable


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


def spoken(name: str) -> str:
    return name.replace("_", "-")
