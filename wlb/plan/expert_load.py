"""Measured load of experts: how unevenly rows are distributed over experts and EP ranks."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from wlb.plan.errors import UserError
from wlb.plan.plain import parsing
from wlb.plan.schema import Schema, schema_of

_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """Loads of experts and EP ranks in one step, divided by the mean load. 1 is a perfect balance.

    The load of an expert or EP rank is the number of rows that it computes.
    """

    layers: tuple[int, ...]  # numbers of the layers with experts
    # for each of `layers`: rows of the most loaded expert in the step, divided by the mean over
    # experts
    expert: tuple[float, ...]
    # For each of `layers`: the rows of the most loaded EP rank, for which its EP group waits. They
    # are summed over micro-batches and EP groups, and divided by what equal loads would give.
    rank: tuple[float, ...]
    # for each EP rank: its rows, summed over all layers, divided by the mean over EP ranks
    ranks: tuple[float, ...]

    @property
    def mean_expert(self) -> float:
        """Rows of the most loaded expert divided by the mean over experts; mean over layers."""
        return sum(self.expert) / len(self.expert)

    @property
    def mean_rank(self) -> float:
        """Rows of the most loaded EP rank divided by the mean over EP ranks; mean over layers.

        Every layer has the same weight, because all layers have equally many rows.
        """
        return sum(self.rank) / len(self.rank)

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for `json.dumps`, with ratios rounded to four digits."""
        data = {name: [round(x, _DIGITS) for x in own] for name, own in asdict(self).items()}
        return data | {"layers": list(self.layers)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ExpertLoad":
        """Make the record from what `to_json` returned; UserError if it is anything else."""
        with parsing("load of experts"):
            of = {f.name: tuple(float(x) for x in data[f.name]) for f in fields(cls)}
        of_layers = {len(of[name]) for name in ("layers", "expert", "rank")}
        if len(of_layers) > 1 or 0 in of_layers or not of["ranks"]:
            raise UserError(
                f"a record of the load of experts has {len(of['layers'])} entries in `layers`, "
                f"{len(of['expert'])} in `expert`, {len(of['rank'])} in `rank` and "
                f"{len(of['ranks'])} in `ranks`; the first three numbers must be equal, and none "
                f"may be 0; restore the original record"
            )
        layers = tuple(round(layer) for layer in data["layers"])
        return cls(layers=layers, expert=of["expert"], rank=of["rank"], ranks=of["ranks"])


LOAD: Schema = schema_of(ExpertLoad)


@dataclass(slots=True)
class ExpertLoads:
    """The values of `ExpertLoad` summed over steps.

    The sums in `ranks` restart when the EP size changes, because EP ranks then have other experts.
    """

    steps: int = 0  # number of steps that were added
    rank_steps: int = 0  # number of steps that `ranks` sums, counted since the last change of EP
    # predicted attention time of the slowest CP rank divided by the mean over CP ranks, summed over
    # steps
    attention: float = 0.0
    # for each layer number: rows of the most loaded expert divided by the mean over experts
    # (`ExpertLoad.expert`), summed over steps
    expert: dict[int, float] = field(default_factory=dict[int, float])
    # for each layer number: rows of the most loaded EP rank divided by the mean over EP ranks
    # (`ExpertLoad.rank`), summed over steps
    rank: dict[int, float] = field(default_factory=dict[int, float])
    # for each EP rank: its rows divided by the mean over EP ranks (`ExpertLoad.ranks`), summed over
    # the last `rank_steps` steps
    ranks: dict[int, float] = field(default_factory=dict[int, float])

    def add(self, load: ExpertLoad, *, attention: float) -> None:
        """Add a step.

        Args:
            load: The step's load of experts.
            attention: Predicted attention time of the step's slowest CP rank, divided by the mean
                over CP ranks.
        """
        self.steps += 1
        self.attention += attention
        for i, layer in enumerate(load.layers):
            self.expert[layer] = self.expert.get(layer, 0.0) + load.expert[i]
            self.rank[layer] = self.rank.get(layer, 0.0) + load.rank[i]
        if len(load.ranks) != len(self.ranks):
            self.rank_steps, self.ranks = 0, {}
        self.rank_steps += 1
        for i, ratio in enumerate(load.ranks):
            self.ranks[i] = self.ranks.get(i, 0.0) + ratio

    @property
    def mean_attention(self) -> float:
        """Mean over steps of the CP imbalance of attention.

        The imbalance is the predicted time of the slowest CP rank divided by the mean over CP
        ranks.
        """
        return self.attention / self.steps

    @property
    def mean_rank(self) -> float:
        """Rows of the most loaded EP rank / mean over EP ranks; mean over steps and layers."""
        return sum(self.rank.values()) / len(self.rank) / self.steps

    def worst(self, name: str) -> tuple[int, float]:
        """Return the layer or EP rank whose load, averaged over steps, is highest.

        Args:
            name: Name of the field with the loads: "expert" or "rank", which have one load for each
                layer, or "ranks", which has one for each EP rank.

        Returns:
            The number of the layer or EP rank, and its mean load.
        """
        sums: dict[int, float] = getattr(self, name)
        most = max(sums, key=lambda i: sums[i])
        return most, sums[most] / (self.rank_steps if name == "ranks" else self.steps)
