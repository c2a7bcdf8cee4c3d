"""How unevenly a step's rows were over experts and over the ranks that hold them, as measured."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from wlb.plan.errors import UserError
from wlb.plan.plain import parsing
from wlb.plan.schema import Schema, schema_of

_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """Of one step, by layer with experts; 1 = even.

    layers: indices of these layers. expert: rows of the most loaded expert over the mean one's, of
    the whole step. rank: rows of the most loaded EP rank of each micro-batch and EP group over the
    mean rank's, which a layer's ranks wait for. ranks: by EP rank, its rows of all layers over the
    mean one's.
    """

    layers: tuple[int, ...]
    expert: tuple[float, ...]
    rank: tuple[float, ...]
    ranks: tuple[float, ...]

    @property
    def mean_expert(self) -> float:
        """Mean over layers."""
        return sum(self.expert) / len(self.expert)

    @property
    def mean_rank(self) -> float:
        """Mean over layers, which have equally many rows: rows that are waited for over those of
        even ranks.
        """
        return sum(self.rank) / len(self.rank)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, to four digits."""
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
    """Sums of `ExpertLoad` over steps. attention: of these steps' predicted attention times of the
    slowest over the mean CP rank. expert, rank: by layer. ranks: by EP rank, of the last
    `rank_steps` steps, in which EP ranks were equally many: others held other experts.
    """

    steps: int = 0
    rank_steps: int = 0
    attention: float = 0.0
    expert: dict[int, float] = field(default_factory=dict[int, float])
    rank: dict[int, float] = field(default_factory=dict[int, float])
    ranks: dict[int, float] = field(default_factory=dict[int, float])

    def add(self, load: ExpertLoad, *, attention: float) -> None:
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
        return self.attention / self.steps

    @property
    def mean_rank(self) -> float:
        """Mean of steps and layers."""
        return sum(self.rank.values()) / len(self.rank) / self.steps

    def worst(self, name: str) -> tuple[int, float]:
        """The layer (of `expert`, `rank`) or EP rank (of `ranks`) of the highest mean, and it."""
        sums: dict[int, float] = getattr(self, name)
        most = max(sums, key=lambda i: sums[i])
        return most, sums[most] / (self.rank_steps if name == "ranks" else self.steps)
