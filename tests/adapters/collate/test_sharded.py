"""Tests a CP rank's rows of a padding-free batch: none is lost, what cannot be cut is told."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wlb.adapters.collate import PaddingFreeCollator
from wlb.adapters.collate.sharded import ROWS_KEY, ContextCollator, ContextSharder, next_labels
from wlb.cost import ProfiledWorkload, load_profile
from wlb.plan import IGNORE
from wlb.sharding import NAMES
from wlb.spec import ModelSpec, ParallelSpec


def rows_of(lengths: list[int]) -> list[dict[str, Any]]:
    """Returns documents whose tokens are all different, numbered from 1."""
    ends = np.cumsum(lengths)
    return [
        {"input_ids": list(range(e - n + 1, e + 1))} for n, e in zip(lengths, ends, strict=True)
    ]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    cp=st.integers(1, 5),
    strategy=st.sampled_from(NAMES),
    exchange=st.sampled_from(["gather", "needed", "auto"]),
    row_multiple=st.integers(1, 4),
)
def test_ranks_hold_each_token_once_with_its_position_and_next_label(
    lengths: list[int], cp: int, strategy: str, exchange: str, row_multiple: int
) -> None:
    packed = PaddingFreeCollator()(rows_of(lengths))
    expected = next_labels(packed["labels"][0].numpy(), np.array(lengths))
    assert int((expected != IGNORE).sum()) == sum(lengths) - len(lengths)
    seen: dict[int, tuple[int, int, int]] = {}
    sizes = set()
    for rank in range(cp):
        sharder = ContextSharder(
            cp=cp, rank=rank, strategy=strategy, exchange=exchange, row_multiple=row_multiple
        )
        batch = sharder(packed)
        names = ("input_ids", "position_ids", "labels", "shift_labels")
        assert all(batch[name].dtype == torch.int64 for name in names)
        sizes |= {tuple(batch[name].shape) for name in names}
        for token, *values in zip(*(batch[name][0].tolist() for name in names), strict=True):
            if token:
                assert token not in seen
                seen[token] = tuple(values)
            else:  # padding
                assert values[1:] == [IGNORE, IGNORE]
        assert batch[ROWS_KEY].longest == max(lengths)
    assert len(sizes) == 1
    assert next(iter(sizes))[1] % row_multiple == 0
    columns = (packed["position_ids"][0], packed["labels"][0], expected)
    assert seen == {i + 1: tuple(int(column[i]) for column in columns) for i in range(sum(lengths))}


def test_ranks_of_one_batch_agree_and_other_documents_are_told_apart() -> None:
    def documents(rows: list[dict[str, Any]], rank: int) -> int:
        sharder = ContextSharder(cp=2, rank=rank)
        return sharder(PaddingFreeCollator()(rows))[ROWS_KEY].documents

    rows, others = rows_of([5, 3]), rows_of([3, 5])
    assert documents(rows, 0) == documents(rows, 1) != documents(others, 0)
    rows[0]["input_ids"][0] += 1
    assert documents(rows, 0) != documents(rows_of([5, 3]), 0)


def test_a_batch_comes_out_of_a_worker_process() -> None:
    """DataLoader's workers pickle it."""
    batch = ContextSharder(cp=2, rank=1)(PaddingFreeCollator()(rows_of([5, 3])))
    again: Any = pickle.loads(pickle.dumps(batch))
    assert again["input_ids"].tolist() == batch["input_ids"].tolist()
    ours, theirs = batch[ROWS_KEY], again[ROWS_KEY]
    assert (ours.plan.digest(), ours.rank) == (theirs.plan.digest(), theirs.rank)
    assert ours.rows.positions.tolist() == theirs.rows.positions.tolist()


def test_boundaries_come_from_offsets_where_there_are_no_positions() -> None:
    options = {"return_position_ids": False, "return_flash_attn_kwargs": True}
    flat = PaddingFreeCollator(**options)(rows_of([3, 2]))
    batch = ContextSharder(cp=1, rank=0)(flat)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["shift_labels"].tolist() == [[2, 3, IGNORE, 5, IGNORE]]
    assert set(batch) == {"input_ids", "labels", "shift_labels", "position_ids", ROWS_KEY}


def test_labels_that_were_shifted_already_are_kept_and_may_be_missing() -> None:
    ids = torch.tensor([[4, 5, 6]])
    batch = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 0]])}
    shifted = torch.tensor([[7, 8, 9]])
    got = ContextSharder(cp=1, rank=0)(batch | {"labels": ids, "shift_labels": shifted})
    assert got["shift_labels"].tolist() == [[7, 8, 9]]
    assert set(ContextSharder(cp=1, rank=0)(batch)) == {"input_ids", "position_ids", ROWS_KEY}


def test_positions_that_do_not_begin_at_0_are_kept() -> None:
    collator = PaddingFreeCollator(position_ids_start=2)
    batch = ContextSharder(cp=1, rank=0)(collator(rows_of([3, 2])))
    assert batch["position_ids"].tolist() == [[2, 3, 4, 2, 3]]


IDS = [[4, 5, 6]]
POSITIONS = [[0, 1, 0]]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"input_ids": IDS, "position_ids": POSITIONS, "attention_mask": [[1, 1, 1]]},
            "has an attention_mask, which context parallelism does not read.*PaddingFreeCollator",
        ),
        (
            {"input_ids": IDS},
            "neither position_ids nor cu_seq_lens_q, so documents cannot be found; let",
        ),
        (
            {"labels": IDS},
            r"the batch has the keys \['labels'\], but no input_ids; tokenize the data first",
        ),
        (
            {"input_ids": IDS, "position_ids": POSITIONS, "pixel_values": [[0.0]]},
            "has the key pixel_values, which cannot be divided over CP ranks; remove pixel_values",
        ),
        (
            {"input_ids": IDS * 2},
            r"input_ids have shape \(2, 3\), but must have shape \[1, T\]; .* one row of doc",
        ),
        (
            {"input_ids": IDS, "position_ids": [[0]]},
            r"have shape \(1, 1\), but must have shape \[1, 3\], as inpu",
        ),
        ({"input_ids": IDS, "position_ids": [[0, 2, 0]]}, r"position_ids\[1\] = 2 follows 0"),
        (
            {"input_ids": IDS, "cu_seq_lens_q": [0, 2]},
            "cu_seq_lens_q ends with 2, but input_ids has 3 tokens",
        ),
    ],
)
def test_batches_that_cannot_be_cut(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContextSharder(cp=2, rank=0)({name: torch.tensor(x) for name, x in batch.items()})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cp": 0, "rank": 0}, "cp = 0 must be at least 1"),
        ({"cp": 2, "rank": 2}, "rank = 2 must be a rank of the CP group, 0 to 1"),
        (
            {"cp": 2, "rank": 0, "strategy": "ring"},
            "strategy = 'ring', but must be one of per_sequence",
        ),
        (
            {"cp": 2, "rank": 0, "exchange": "ring"},
            "exchange = 'ring', but must be one of auto, gather",
        ),
        ({"cp": 2, "rank": 0, "row_multiple": 0}, "row_multiple = 0 must be at least 1"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContextSharder(**options)


def test_a_collator_is_cut_for_any_rank() -> None:
    collator = ContextCollator(
        collator=PaddingFreeCollator(),
        sharder=ContextSharder(cp=2, rank=0, strategy="per_document"),
    )
    tokens = [collator.of_rank(rank)(rows_of([4]))["input_ids"][0].tolist() for rank in range(2)]
    assert tokens == [[1, 4], [2, 3]]


def test_no_exchange_is_priced_as_hidden_behind_attention() -> None:
    """Attention is one call here, so it begins when all keys are there."""
    layout = ParallelSpec(tp=1, cp=16, pp=1)
    cost = ProfiledWorkload(
        model=ModelSpec(), parallel=layout, profile=load_profile("h100"), overlaps=True, stages=2
    )
    sharder = ContextSharder(cp=16, rank=3, exchange="auto", cost=cost)
    assert isinstance(sharder.cost, ProfiledWorkload)
    assert (sharder.cost.overlaps, sharder.cost.stages) == (False, 1)
