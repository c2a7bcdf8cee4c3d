"""Find where a run differs from the conditions under which its kernel profile was measured."""

from wlb.cost.flops import layer_matrices
from wlb.cost.machine import is_same
from wlb.cost.profile_file import has_power
from wlb.cost.protocol import token_counts
from wlb.cost.workload import LinearCost, ProfiledWorkload
from wlb.plan import BoolArray, IntLike


def mismatches(cost: ProfiledWorkload) -> tuple[str, ...]:
    """Return where a run differs from the conditions under which its kernel profile was measured.

    Each entry is one sentence for the log about one difference: in the machine, the data type, the
    attention kernel, or a size outside the measured range.
    """
    table, model, profile = cost.table, cost.model, cost.profile
    notes: list[str] = []
    # The machine: device, clock and data type.
    if cost.machine and not is_same(cost.machine, profile.device):
        notes.append(
            f"the profile was measured on {profile.device}, but this machine has {cost.machine}; "
            "measure this machine with `wlb profile`"
        )
    if not has_power(profile, cost.power_limit_w):
        notes.append(
            f"the profile was measured at a power limit of {profile.power_limit_w:g} W, but this "
            f"GPU has a limit of {cost.power_limit_w:g} W, so matrix products run at another clock"
        )
    if cost.dtype and cost.dtype != profile.dtype:
        notes.append(
            f"the run computes in {cost.dtype}, but is priced with times measured in "
            f"{profile.dtype}"
        )
    # The attention kernel and the lengths of its segments.
    if cost.backend is not None and cost.backend not in table.backends:
        notes.append(
            f"the attention kernel {cost.backend} was not measured, so it is priced as "
            f"{table.backends[0]}"
        )
    if cost.longest and extrapolated(cost, [cost.longest])[0]:
        measured = table.forward
        notes.append(
            f"attention in pieces of up to {cost.longest} tokens is extrapolated, because only "
            f"{measured.axis0[0]:.0f} to {measured.axis0[-1]:.0f} query rows with "
            f"{measured.axis1[0]:.0f} to {measured.axis1[-1]:.0f} keys were measured"
            + (
                ""
                if table.reach is None
                else f" (with some numbers of rows only up to {table.reach.min():.0f} keys)"
            )
        )
    notes += _products_outside(cost.linear)
    # The head layout.
    if table.head_dim != model.head_size:
        notes.append(
            f"attention heads of size {model.head_size} are priced as measured with size "
            f"{table.head_dim}"
        )
    group = model.num_heads // model.with_kv_copies(cost.parallel.tp).num_kv_heads
    table_group = table.num_heads // table.num_kv_heads
    if group != table_group:
        notes.append(
            f"{group} query heads per KV head are priced as measured with {table_group} per KV head"
        )
    if not table.heads[0] <= cost.heads_per_rank <= table.heads[-1]:
        notes.append(
            f"the run has {cost.heads_per_rank} query heads per rank, but only "
            f"{table.heads[0]:.0f} to {table.heads[-1]:.0f} were measured"
        )
    return tuple(notes)


def extrapolated(cost: ProfiledWorkload, lengths: IntLike) -> BoolArray:
    """Return a mask of the pieces that have segments outside the measured sizes, shape [n].

    The attention of these pieces is priced with the throughput of the nearest measured size.
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
        f"matrix products with {' and '.join(f'{v:,.0f}' for v in outside)} {what} are "
        f"extrapolated, because only {axis[0]:,.0f} to {axis[-1]:,.0f} {what} were measured"
        for what, values, axis in (
            ("tokens", [tokens], surface.axis0),
            ("weights", sorted({min(weights), max(weights)}), surface.axis1),
        )
        if (outside := [v for v in values if not axis[0] <= v <= axis[-1]])
    )
