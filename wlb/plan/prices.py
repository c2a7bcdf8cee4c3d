"""Prices that change while a run trains: factors on a kernel profile, and the steps they hold from.

All numbers are integers, so that every rank and node plans with the same ones, and so that a
planner state read from JSON plans as the one that was written.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from wlb.plan.errors import UserError
from wlb.plan.plain import PlainRecord, parsing
from wlb.plan.schema import COUNT, Schema, schema_of
from wlb.plan.telemetry import TERMS

UNIT = 1_000_000
"""A factor of 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceFactors(PlainRecord):
    """Factors on the times of a kernel profile by term (`TERMS`), in millionths, at least 1.

    *_extra_ns: what a micro-batch costs on top in a decoder layer, whatever its tokens.
    expert_load: rows of the EP rank that a layer waits for over the mean rank's, in millionths; 0:
    as configured (`cost.expert_load`).
    """

    attention_forward: int = UNIT
    attention_backward: int = UNIT
    linear_forward: int = UNIT
    linear_backward: int = UNIT
    linear_forward_extra_ns: int = 0
    linear_backward_extra_ns: int = 0
    expert_load: int = 0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            least = 0 if f.name.endswith(("_ns", "_load")) else 1
            if not isinstance(value, int) or value < least:
                raise UserError(
                    f"prices: {f.name} = {value!r} must be a whole number of at least {least}"
                )

    @property
    def integers(self) -> tuple[int, ...]:
        """All fields in their order, for digests."""
        return tuple(getattr(self, f.name) for f in fields(self))

    @property
    def by_term(self) -> dict[str, float]:
        """Factors as fractions."""
        return {name: getattr(self, name) / UNIT for name in TERMS}

    @property
    def relative(self) -> dict[str, float]:
        """Each term's factor over that of linear layers forward: what plans depend on."""
        return {name: getattr(self, name) / self.linear_forward for name in TERMS}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "PriceFactors":
        """Read what `to_json` wrote; UserError if it is not a record of prices."""
        with parsing("record of prices"):
            return cls(**data)


AS_PROFILED = PriceFactors()
"""The profile's own prices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceChange(PlainRecord):
    """Prices that hold for the plans of step `step` and later ones."""

    step: int
    prices: PriceFactors

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "PriceChange":
        """Read what `to_json` wrote; UserError if it is not a change of prices."""
        with parsing("change of prices"):
            return cls(step=data["step"], prices=PriceFactors.from_json(data["prices"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceSchedule(PlainRecord):
    """Changes of prices in the order of their steps. base: the profile and kernel whose times they
    are factors of, "" where nothing changed yet."""

    base: str = ""
    changes: tuple[PriceChange, ...] = field(default=())

    def __post_init__(self) -> None:
        steps = [change.step for change in self.changes]
        if steps != sorted(set(steps)):
            raise UserError(f"price changes must be in the order of their steps, got {steps}")
        if steps and not self.base:
            raise UserError(f"prices change at steps {steps}, but are factors of no profile")

    def at(self, step: int) -> PriceFactors:
        """The prices that hold for the plan of `step`."""
        held = [change.prices for change in self.changes if change.step <= step]
        return held[-1] if held else AS_PROFILED

    @property
    def latest(self) -> PriceFactors:
        """The last change's prices, in force or to come."""
        return self.changes[-1].prices if self.changes else AS_PROFILED

    @property
    def last_step(self) -> int:
        """The step that the last change holds from; 0 without one."""
        return self.changes[-1].step if self.changes else 0

    def changed(self, change: PriceChange, *, base: str) -> "PriceSchedule":
        """The schedule with one more change, after all others. base: as of this schedule."""
        if self.changes and base != self.base:
            raise ValueError(f"prices of {base!r} cannot follow prices of {self.base!r}")
        return PriceSchedule(base=base, changes=(*self.changes, change))

    def from_step(self, step: int) -> "PriceSchedule":
        """Without changes that no plan from `step` on depends on."""
        later = [i for i, change in enumerate(self.changes) if change.step > step]
        first = later[0] if later else len(self.changes)
        return replace(self, changes=self.changes[max(0, first - 1) :])

    def of_base(self, base: str) -> "PriceSchedule":
        """This schedule if it is one of `base`, else one without changes."""
        return self if self.base == base else PriceSchedule()

    @classmethod
    def of(cls, changes: Iterable[PriceChange], *, base: str) -> "PriceSchedule":
        """A schedule of recorded changes; later ones replace earlier ones of the same step."""
        by_step = {change.step: change for change in changes}
        return cls(base=base, changes=tuple(by_step[step] for step in sorted(by_step)))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "PriceSchedule":
        """Read what `to_json` wrote; UserError if it is not a price schedule."""
        with parsing("price schedule"):
            changes = tuple(PriceChange.from_json(change) for change in data["changes"])
            return cls(base=data["base"], changes=changes)


NO_CHANGES = PriceSchedule()

FACTORS: Schema = schema_of(PriceFactors)
CHANGE: Schema = {"step": COUNT, "prices": FACTORS}
SCHEDULE: Schema = {"base": str, "changes": [CHANGE]}
