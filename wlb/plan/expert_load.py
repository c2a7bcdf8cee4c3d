"""How unevenly a step's rows were distributed over experts and over EP ranks, as measured."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from wlb.plan.errors import UserError
from wlb.plan.plain import parsing
from wlb.plan.schema import Schema, schema_of

_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """Load ratios of one step; 1 is even."""

    layers: tuple[int, ...]  # indices of the layers with experts
    # for each layer: rows of the most loaded expert over the mean expert's, over the whole step
    expert: tuple[float, ...]
    # for each layer: rows of the most loaded EP rank over the mean rank's. The most loaded rank is
    # taken in each micro-batch and EP group, because the ranks of a layer wait for it.
    rank: tuple[float, ...]
    ranks: tuple[float, ...]  # for each EP rank: its rows in all layers over the mean rank's

    @property
    def mean_expert(self) -> float:
        """Mean of `expert` over layers."""
        return sum(self.expert) / len(self.expert)

    @property
    def mean_rank(self) -> float:
        """Mean of `rank` over layers, which weigh the same because all have equally many rows."""
        return sum(self.rank) / len(self.rank)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, rounded to four digits."""
        data = {name: [round(x, _DIGITS) for x in own] for name, own in asdict(self).items()}
        return data | {"layers": list(self.layers)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ExpertLoad":
        """Read what `to_json` wrote; UserError if it is not a load of experts."""
        with parsing("load of experts"):
            of = {f.name: tuple(float(x) for x in data[f.name]) for f in fields(cls)}
        of_layers = {len(of[name]) for name in ("layers", "expert", "rank")}
        if len(of_layers) > 1 or 0 in of_layers or not of["ranks"]:
            raise UserError(
                f"a load of experts has {len(of['layers'])} layers, {len(of['expert'])} and "
                f"{len(of['rank'])} values of layers and {len(of['ranks'])} of ranks"
            )
        layers = tuple(round(layer) for layer in data["layers"])
        return cls(layers=layers, expert=of["expert"], rank=of["rank"], ranks=of["ranks"])


LOAD: Schema = schema_of(ExpertLoad)


@dataclass(slots=True)
class ExpertLoads:
    """Sums of `ExpertLoad` over steps.

    Sums by EP rank restart when the EP degree changes, because a rank then holds other experts.
    """

    steps: int = 0  # number of added steps
    rank_steps: int = 0  # steps that are summed in `ranks`
    # sum of predicted attention time of the slowest CP rank over the mean one's
    attention: float = 0.0
    # sums of `ExpertLoad.expert` for each layer
    expert: dict[int, float] = field(default_factory=dict[int, float])
    # sums of `ExpertLoad.rank` for each layer
    rank: dict[int, float] = field(default_factory=dict[int, float])
    # sums of `ExpertLoad.ranks` for each EP rank, over the last `rank_steps` steps
    ranks: dict[int, float] = field(default_factory=dict[int, float])

    def add(self, load: ExpertLoad, *, attention: float) -> None:
        """Add a step.

        Args:
            load: The step's load of experts.
            attention: Predicted attention time of its slowest CP rank over the mean one's.
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
        """Mean over steps of the slowest over the mean CP rank's predicted attention time."""
        return self.attention / self.steps

    @property
    def mean_rank(self) -> float:
        """Mean of `rank` over steps and layers."""
        return sum(self.rank.values()) / len(self.rank) / self.steps

    def worst(self, name: str) -> tuple[int, float]:
        """Return the layer or EP rank with the highest mean load, and that mean.

        Args:
            name: Field to look in: "expert" and "rank" are by layer, "ranks" is by EP rank.
        """
        sums: dict[int, float] = getattr(self, name)
        most = max(sums, key=lambda i: sums[i])
        return most, sums[most] / (self.rank_steps if name == "ranks" else self.steps)
