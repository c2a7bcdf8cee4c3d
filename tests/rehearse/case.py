"""Provides a small job with TP, CP and PP, and rehearsals of it."""

from collections.abc import Sequence

from wlb.plan import UserError
from wlb.rehearse.run import Rehearsed, rehearse, rehearse_each
from wlb.spec import RunSpec, load

SMALL = (
    *("model.num_layers=4", "model.hidden_size=256", "model.num_heads=4", "model.num_kv_heads=2"),
    *("model.ffn_hidden_size=512", "model.vocab_size=512", "data.context_window=4096"),
    *("data.num_windows=0", "eval.steps=0"),
)
ON_ALL_AXES = (
    *("parallel.tp=2", "parallel.cp=2", "parallel.pp=2", "parallel.dp=1"),
    "pp.virtual_stages=2",
)


def small_job(*overrides: str) -> RunSpec:
    return load("550m_64k", [*SMALL, *ON_ALL_AXES, *overrides])


def rehearsed(*overrides: str, ranks: str = "all", steps: int = 2) -> Rehearsed:
    return rehearse(small_job(*overrides), ranks=ranks, steps=steps, jobs=2)


def rehearsed_each(
    specs: Sequence[RunSpec], *, ranks: str | Sequence[str], steps: int = 2
) -> list[Rehearsed]:
    """Rehearses several runs with one import of torch, and expects that none is refused."""
    out: list[Rehearsed] = []
    for spec, found in zip(
        specs, rehearse_each(specs, ranks=ranks, steps=steps, jobs=2), strict=True
    ):
        assert not isinstance(found, UserError), (spec.run.name, found)
        out.append(found)
    return out
