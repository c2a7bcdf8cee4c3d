"""Print the index arrays of one small micro-batch: three documents on two CP ranks.

`python -m wlb.parallel.context.example` prints the block in this folder's README.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from wlb.parallel.context.rows import RankExchange, RankStage, Transfer, rank_exchange
from wlb.plan import ContextExchange, KeyExchange, ShardingPlan, exchange_of

ROWS = 6
"""Rows of each rank. Rank 0 has six tokens; rank 1 has five and one row of padding."""


def example() -> ShardingPlan:
    """Return a sharding of documents a, b and c, of 5, 3 and 3 tokens, over two ranks.

    Rank 0 has both ends of a, and all of b. Rank 1 has the middle of a, and all of c.
    """
    return ShardingPlan(
        strategy="by hand",
        lengths=np.array([5, 3, 3]),
        piece=np.array([0, 0, 1, 0, 2]),
        start=np.array([0, 4, 0, 2, 0]),
        stop=np.array([2, 5, 3, 4, 3]),
        rank_offsets=np.array([0, 3, 5]),
    )


def text() -> str:
    """Return the text that the module prints: index arrays by kind of exchange and rank."""
    plan = example()
    local = names(plan)
    lines = ["row     " + " ".join(f"{row:2}" for row in range(ROWS))]
    lines += [f"rank {r}  {' '.join(of_rank)}" for r, of_rank in enumerate(local)]
    for exchange, own_first in (
        (KeyExchange.GATHER, False),
        (KeyExchange.NEEDED, False),
        (KeyExchange.NEEDED, True),
    ):
        made = exchange_of(replace(plan, exchange=exchange), local_tokens=ROWS, own_first=own_first)
        for rank in range(plan.cp):
            lines += ["", f"{exchange}{', own keys first' * own_first}: rank {rank}"]
            mine = rank_exchange(made, rank)
            lines += [*str(mine).splitlines(), *_read(mine, made, rank, local)]
    return "\n".join(lines) + "\n"


def names(plan: ShardingPlan) -> list[list[str]]:
    """Return the name of the token in each row, by rank.

    For example "a0" is the first token of document a, and "--" is padding.
    """
    out: list[list[str]] = []
    for rank in range(plan.cp):
        spans = plan.for_rank(rank).spans
        found = [f"{'abc'[s.piece]}{token}" for s in spans for token in range(s.start, s.stop)]
        out.append(found + ["--"] * (ROWS - len(found)))
    return out


def _read(
    mine: RankExchange, exchange: ContextExchange, rank: int, local: list[list[str]]
) -> Iterator[str]:
    """Yield lines that say which keys the queries of each segment attend to, stage by stage.

    Args:
        mine: The rank's part of the exchange.
        exchange: The exchange for all ranks.
        rank: The CP rank.
        local: Names of the tokens in each row, by rank (see `names`).
    """
    for s, stage in enumerate(mine.stages):
        rows = local[rank]
        if stage.transfer != Transfer.OWN:
            rows = _arrived(exchange, rank, s - exchange.own_first, local)
            yield f"stage {s} brings {' '.join(rows) or 'nothing'}"
        for queries, keys in _segments(stage, local[rank], rows):
            yield f"  {' '.join(queries):8} see {' '.join(keys)}"


def _arrived(exchange: ContextExchange, rank: int, stage: int, local: list[list[str]]) -> list[str]:
    moved = exchange.travels
    here = moved.of((moved.reader == rank) & (moved.stage == stage))
    columns = zip(here.holder.tolist(), here.first.tolist(), here.last.tolist(), strict=True)
    return [name for holder, first, last in columns for name in local[holder][first:last]]


def _segments(
    stage: RankStage, local: list[str], rows: list[str]
) -> Iterator[tuple[list[str], list[str]]]:
    assert stage.kv_index is not None
    mine = range(ROWS) if stage.query_rows is None else stage.query_rows.tolist()
    q, k = stage.cu_seqlens_q.tolist(), stage.cu_seqlens_k.tolist()
    for i in range(len(q) - 1):
        queries = [local[row] for row in mine[q[i] : q[i + 1]]]
        yield queries, [rows[key] for key in stage.kv_index[k[i] : k[i + 1]]]


if __name__ == "__main__":
    sys.stdout.write(text())
