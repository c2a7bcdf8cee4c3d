"""Say in what respects a run differs from what its kernel profile was measured for."""

from wlb.cost.flops import layer_matrices
from wlb.cost.machine import is_same
from wlb.cost.profile_file import has_power
from wlb.cost.protocol import token_counts
from wlb.cost.workload import LinearCost, ProfiledWorkload
from wlb.plan import BoolArray, IntLike


def mismatches(cost: ProfiledWorkload) -> tuple[str, ...]:
    """Return how a run differs from what its kernel profile was measured for.

    Each entry is a sentence for the log, about the machine, the data type, the attention kernel, or
    sizes outside the measured range.
    """
    table, model, profile = cost.table, cost.model, cost.profile
    notes: list[str] = []
    # The machine: device, clock and data type.
    if cost.machine and not is_same(cost.machine, profile.device):
        notes.append(
            f"it was measured on {profile.device}, this machine has {cost.machine}: "
            f"`wlb profile` measures this one"
        )
    if not has_power(profile, cost.power_limit_w):
        notes.append(
            f"it was measured at a power limit of {profile.power_limit_w:g} W, this GPU has "
            f"{cost.power_limit_w:g} W: matrix products run at a different clock"
        )
    if cost.dtype and cost.dtype != profile.dtype:
        notes.append(f"{cost.dtype} is priced with times measured in {profile.dtype}")
    # The attention kernel and the lengths of its segments.
    if cost.backend is not None and cost.backend not in table.backends:
        notes.append(f"attention by {cost.backend} is priced as {table.backends[0]}")
    if cost.longest and extrapolated(cost, [cost.longest])[0]:
        measured = table.forward
        notes.append(
            f"pieces of up to {cost.longest} tokens are extrapolated: measured were "
            f"{measured.axis0[0]:.0f}..{measured.axis0[-1]:.0f} rows over "
            f"{measured.axis1[0]:.0f}..{measured.axis1[-1]:.0f} keys"
            + ("" if table.reach is None else f", {table.reach.min():.0f} with some rows")
        )
    notes += _products_outside(cost.linear)
    # The head layout.
    if table.head_dim != model.head_size:
        notes.append(f"head size {model.head_size} is priced with a table of {table.head_dim}")
    group = model.num_heads // model.with_kv_copies(cost.parallel.tp).num_kv_heads
    table_group = table.num_heads // table.num_kv_heads
    if group != table_group:
        notes.append(
            f"{group} query heads a KV head are priced with a table of {table_group} a KV head"
        )
    if not table.heads[0] <= cost.heads_per_rank <= table.heads[-1]:
        notes.append(
            f"{cost.heads_per_rank} heads a rank are outside the table's "
            f"{table.heads[0]:.0f}..{table.heads[-1]:.0f}"
        )
    return tuple(notes)


def extrapolated(cost: ProfiledWorkload, lengths: IntLike) -> BoolArray:
    """Return which pieces have segments outside the measured sizes, shape [n].

    Their attention is priced with the throughput of the nearest measured size.
    """
    d = token_counts("lengths", lengths)
    return cost.table.extrapolated(*cost.mean_chunk(d)) | cost.table.extrapolated(d, d)


def _products_outside(linear: LinearCost) -> tuple[str, ...]:
    """Return a sentence for each size of matrix products that is outside the measured range."""
    surface = linear.profile.gemm.forward
    tokens = max(1.0, linear.micro_batch_tokens / linear.parallel.cp)
    models = [kind.model for kind in linear.model.layer_kinds]
    tp = linear.parallel.tp
    weights = [a * b / tp for m in models for a, b in layer_matrices(m.with_kv_copies(tp))]
    return tuple(
        f"matrix products of {' and '.join(f'{v:,.0f}' for v in outside)} {what} are "
        f"extrapolated: measured were {axis[0]:,.0f}..{axis[-1]:,.0f}"
        for what, values, axis in (
            ("tokens", [tokens], surface.axis0),
            ("weights", sorted({min(weights), max(weights)}), surface.axis1),
        )
        if (outside := [v for v in values if not axis[0] <= v <= axis[-1]])
    )
