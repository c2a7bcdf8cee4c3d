"""Build a KernelProfile from the records of a sweep, with the error of each fit."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from wlb.cost import (
    Collective,
    CollectiveCost,
    KernelProfile,
    Provenance,
    ProvenanceKind,
    Scope,
    load_profile,
)
from wlb.cost.profile import DTYPE_BYTES
from wlb.plan import UserError
from wlb.profile.attention import AttentionGrid, HeadLayout, equal_call, random_call
from wlb.profile.collectives import fit_alpha_beta
from wlb.profile.fit_attention import AttentionRecords, Call, FittedAttention, fit_attention
from wlb.profile.fit_linear import (
    fit_elementwise,
    fit_gemm,
    fit_head,
    fit_layer,
    layer_errors,
    sum_of_operators,
)
from wlb.profile.tasks import Record, measured
from wlb.spec import ModelSpec

STAND_INS = {"cpu": "cpu", "cuda": "h100"}
"""Device -> name of the shipped profile whose costs stand in for unmeasured collectives."""
RANKS_PER_NODE = {"cpu": 1024, "cuda": 8}
"""Device -> number of ranks per node that is assumed if the machine does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltProfile:
    """A kernel profile that was built from a sweep, with errors and notes for reports."""

    profile: KernelProfile
    attention: tuple[FittedAttention, ...]  # fits of the profile's attention tables, in order
    # relative errors of the first attention table and of whole layers, by name of the error
    residuals: dict[str, float]
    notes: tuple[str, ...]  # sentences on what is missing, assumed or doubtful
    records: Sequence[Record] = field(repr=False)  # all records of the sweep

    @property
    def failed(self) -> list[Record]:
        """Records of tasks that failed."""
        return [r for r in self.records if r.failed]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOrigin:
    """Where and how a sweep ran. The provenance of each part of a profile is made from this."""

    name: str  # name of the profile
    environment: Mapping[str, Any]  # description of machine and sweep, as `run_sweep` returns it
    ranks_per_node: int | None = None  # None = 8 on GPUs, and all processes on a CPU

    @property
    def dtype(self) -> str:
        """Data type in which kernels were measured."""
        return self.environment["dtype"]

    def provenance(self, source: str, **more: Any) -> Provenance:
        """Return a provenance with the date, commit and command of the sweep's latest start.

        Args:
            source: Text that says how the values were measured.
            **more: Further fields of `Provenance`, by name.
        """
        start = self.environment["starts"][-1]
        return Provenance(
            kind=ProvenanceKind.MEASURED,
            source=source,
            device=self.environment["name"],
            dtype=self.dtype,
            date=start["date"],
            commit=start["commit"],
            command=start["command"],
            **more,
        )


def build(
    records: Sequence[Record],
    *,
    model: ModelSpec,
    layouts: Sequence[HeadLayout],
    grid: AttentionGrid,
    origin: SweepOrigin,
) -> BuiltProfile:
    """Fit a profile to the records of a sweep.

    Args:
        records: Records of the sweep.
        model: Model of the sweep.
        layouts: Head layouts, each of which gets an attention table if enough was measured of it.
        grid: Settings of the attention sweep.
        origin: Where the sweep ran.

    Raises:
        UserError: If too little was measured.
    """
    try:
        return _built(records, model, layouts, grid, origin)
    except KeyError as error:
        raise UserError(
            f"a record of the sweep has no entry {error}; to measure again, remove the lines "
            "without this entry from the sweep's file, or remove the file"
        ) from error


def _built(
    records: Sequence[Record],
    model: ModelSpec,
    layouts: Sequence[HeadLayout],
    grid: AttentionGrid,
    origin: SweepOrigin,
) -> BuiltProfile:
    provenance = origin.provenance("wlb profile")

    def call_of(record: Record) -> Call:
        if "index" in record.point:
            return random_call(grid, record.point["index"])
        return equal_call(record.point)

    attention, notes = _attention(records, layouts, call_of, origin)
    moved, more = collectives(records, origin)
    gemm, value_bytes = fit_gemm(records, provenance), DTYPE_BYTES[origin.dtype]
    elementwise = fit_elementwise(records, provenance, value_bytes=value_bytes)
    operators = partial(
        sum_of_operators, model, gemm=gemm, elementwise=elementwise, value_bytes=value_bytes
    )
    layer = fit_layer(records, operators, provenance)
    residuals = {**attention[0].residuals, **layer_errors(records, operators, layer)}
    source = "wlb profile; residuals of the first attention table and of whole layers"
    profile = KernelProfile(
        name=origin.name,
        device=origin.environment["name"],
        dtype=origin.dtype,
        ranks_per_node=origin.ranks_per_node or RANKS_PER_NODE[origin.environment["device"]],
        power_limit_w=origin.environment.get("power_limit_w", 0.0),
        provenance=origin.provenance(
            source,
            backend=", ".join(dict.fromkeys(a.table.backends[0] for a in attention)),
            residuals=tuple(residuals.items()),
            environment=origin.environment,
        ),
        attention=tuple(fitted.table for fitted in attention),
        gemm=gemm,
        elementwise=elementwise,
        layer=layer,
        head=fit_head(records, provenance),
        collectives=moved,
    )
    return BuiltProfile(
        profile=profile,
        attention=attention,
        residuals=residuals,
        notes=(*notes, *more),
        records=records,
    )


def _attention(
    records: Sequence[Record],
    layouts: Sequence[HeadLayout],
    call_of: Callable[[Record], Call],
    origin: SweepOrigin,
) -> tuple[tuple[FittedAttention, ...], list[str]]:
    """Fit an attention table for each layout that has enough records.

    Args:
        records: Records of the sweep.
        layouts: Head layouts.
        call_of: Function that returns the segments of a record's call.
        origin: Where the sweep ran.

    Returns:
        The fitted tables, and notes on what is missing or doubtful.

    Raises:
        UserError: If no layout has enough records.
    """
    found: list[FittedAttention] = []
    notes: list[str] = []
    for layout in layouts:
        try:
            fitted = fit_attention(
                AttentionRecords(layout=layout, records=records, call_of=call_of),
                backends=(layout.backend,),
                provenance=origin.provenance("wlb profile", backend=layout.backend),
            )
        except UserError as error:
            notes.append(f"no table: {error}")
            continue
        found.append(fitted)
        notes += fitted.notes
    if not found:
        raise UserError("; ".join(notes))
    return tuple(found), notes


def collectives(
    records: Sequence[Record], origin: SweepOrigin
) -> tuple[tuple[CollectiveCost, ...], list[str]]:
    """Return the costs of all collectives, and notes on costs that could not be fitted.

    A cost cannot be fitted if the collective was not measured, or if its times do not grow with
    size because of noise. The collective then gets a substitute, which its provenance names. On a
    CPU this is the cost of the same collective within a node, if that was fitted. In all other
    cases it is the cost in a profile that comes with wlb.

    Args:
        records: Records of the sweep.
        origin: Where the sweep ran.
    """
    found: dict[tuple[str, str], CollectiveCost] = {}
    why: dict[tuple[str, str], str] = {}
    notes: list[str] = []
    pairs = list(itertools.product(Collective, Scope))
    # Fit what was measured.
    for op, scope in pairs:
        wanted = {"op": op, "scope": scope}.items()
        matching = [r for r in measured(records, "collective") if wanted <= r.point.items()]
        if len(matching) < 3:
            continue
        ranks = matching[0].point["ranks"]
        sizes = [r.point["bytes"] for r in matching]
        try:
            fit = fit_alpha_beta(sizes, [r.numbers["ns"] for r in matching], op, ranks)
        except UserError as error:
            notes.append(f"{scope} {error}; until then the profile has an assumed cost for {op}")
            why[op, scope] = "measured, but the times could not be fitted"
            continue
        found[op, scope] = CollectiveCost(
            op=op,
            scope=scope,
            alpha_ns=round(fit.alpha_ns),
            bytes_per_s=float(f"{fit.bytes_per_s:.4g}"),
            provenance=origin.provenance(f"wlb profile, {ranks} ranks", residuals=fit.residuals),
        )
    # Fill the gaps with costs from elsewhere, and say in their provenance where they come from.
    for op, scope in pairs:
        if (op, scope) in found:
            continue
        stand_in = found.get((op, Scope.INTRA_NODE))
        if stand_in is not None and origin.environment["device"] == "cpu":
            source = "this is the cost between processes of one machine"
        else:
            other = load_profile(STAND_INS[origin.environment["device"]])
            stand_in = next(c for c in other.collectives if (c.op, c.scope) == (op, scope))
            source = f"profile {other.name}, which has {stand_in.provenance.source}"
        source = f"{why.get((op, scope), 'not measured')}: {source}"
        assumed = Provenance(kind=ProvenanceKind.ASSUMED, source=source)
        found[op, scope] = replace(stand_in, scope=scope, provenance=assumed)
    return tuple(found[pair] for pair in pairs), notes
