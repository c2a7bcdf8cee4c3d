"""Tests torchtitan's dataloader protocol over a planner, with torchtitan's own classes."""

import json
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

pytest.importorskip("torchtitan", reason="needs the extra [torchtitan]")

from tests.train.case import write_store
from wlb.adapters.torchtitan import BalancedDataLoader, as_batch, open_reader
from wlb.data import TokenStore
from wlb.plan import IGNORE

LENGTHS = np.clip(np.random.default_rng(4).lognormal(3.6, 0.9, 200).astype(int) + 1, 1, 400)
WINDOW = 256
STEP = 3
"""A rank has this many micro-batches per step."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_store(tmp_path_factory.mktemp("titan") / "store", LENGTHS.tolist())


def loader(store: str, *, dp: int = 2, rank: int = 0, **options: Any) -> Any:
    """Returns a loader as torchtitan's trainer builds it."""
    per_rank = 2 * STEP // dp  # the same number in a step, on any number of ranks
    keys = {"dataset_path": store, "micro_batches_per_step": per_rank, "seed": 3, **options}
    return BalancedDataLoader.Config(**keys).build(
        dp_world_size=dp,
        dp_rank=rank,
        tokenizer=None,
        seq_len=WINDOW,
        local_batch_size=1,
        snapshot_every_n_steps=None,
    )


def documents(inputs: dict[str, Tensor], labels: Tensor) -> list[tuple[list[int], list[int]]]:
    """Returns tokens and labels between restarts of the positions."""
    positions = inputs["positions"][0]
    starts = [*torch.nonzero(positions == 0).flatten().tolist(), positions.numel()]
    return [
        (inputs["input"][0, a:b].tolist(), labels[0, a:b].tolist()) for a, b in pairwise(starts)
    ]


def test_ranks_train_every_label_of_every_document(store: str) -> None:
    found: list[tuple[int, ...]] = []
    for rank in range(2):
        for inputs, labels in loader(store, rank=rank):
            assert inputs["input"].shape == inputs["positions"].shape == labels.shape
            assert labels.shape[0] == 1
            assert labels.shape[1] <= WINDOW * 3 // 2
            assert inputs["input"].dtype == labels.dtype == torch.int64
            found += [
                tuple(zip(tokens, targets, strict=True))
                for tokens, targets in documents(inputs, labels)
            ]
    expected = Counter[tuple[int, int]]()
    whole = TokenStore(store)
    for row in range(whole.num_documents):
        tokens = whole.read(row, 0, int(whole.lengths[row])).tolist()
        expected.update(zip(tokens, [*tokens[1:], IGNORE], strict=True))
    assert Counter(pair for document in found for pair in document) == expected


def test_filler_is_a_document_of_its_own_that_trains_nothing(store: str) -> None:
    for inputs, labels in loader(store, pad_to_multiple=64):
        assert labels.shape[1] % 64 == 0
        for tokens, targets in documents(inputs, labels)[-1:]:
            if set(targets) == {IGNORE} and len(tokens) > 1:
                assert not any(tokens)
    widths = {
        labels.shape[1] for _, labels in loader(store, pad_to_multiple=64, equal_lengths=True)
    }
    assert widths == {WINDOW * 3 // 2}


def test_positions_of_filler_stay_within_torchtitans_rope(tmp_path: Path) -> None:
    """RoPE has seq_len positions, and the padding of short micro-batches is longer than that."""
    short = write_store(tmp_path / "s", [40] * 9)
    made = list(loader(short, equal_lengths=True))
    assert {labels.shape[1] for _, labels in made} == {WINDOW * 3 // 2}
    assert min(int((labels != IGNORE).sum()) for _, labels in made) < WINDOW // 2
    assert max(int(inputs["positions"].max()) for inputs, _ in made) < WINDOW
    rope = pytest.importorskip("torchtitan.models.common.rope")
    table = rope.CosSinRoPE.Config(dim=4, max_seq_len=WINDOW, theta=1e4).build()
    for inputs, _ in made:
        rows = torch.randn(1, inputs["positions"].shape[1], 1, 4)
        table(rows, rows, inputs["positions"])


def test_masks_that_torchtitan_makes_of_positions_are_the_documents(store: str) -> None:
    pytest.importorskip("triton", reason="torchtitan's models need triton")
    attention = pytest.importorskip("torchtitan.models.common.attention")
    for inputs, labels in [*loader(store, pad_to_multiple=16), *loader(store, equal_lengths=True)]:
        made = attention.create_varlen_metadata_for_document(inputs["positions"])
        sizes = [len(tokens) for tokens, _ in documents(inputs, labels)]
        assert np.diff(made.cu_seq_q.numpy()).tolist() == sizes
        assert made.max_q >= max(sizes)


def contents(batches: Any) -> list[tuple[list[int], list[int]]]:
    return [(i["input"][0].tolist(), labels[0].tolist()) for i, labels in batches]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("given", [0, 1, STEP, 2 * STEP + 2])
def test_it_resumes_exactly_from_torchs_checkpoint(store: str, given: int, tmp_path: Path) -> None:
    whole = contents(loader(store))
    first = loader(store)
    batches = iter(first)
    for _ in range(given):
        next(batches)
    dcp.save({"dataloader": first}, checkpoint_id=str(tmp_path), no_dist=True)
    second = loader(store)
    dcp.load({"dataloader": second}, checkpoint_id=str(tmp_path), no_dist=True)
    assert contents(second) == whole[given:]


@pytest.mark.parametrize("given", [1, STEP, 2 * STEP + 2])
def test_an_iteration_goes_on_where_the_last_one_was_left(store: str, given: int) -> None:
    made = loader(store)
    first = contents(islice(made, given))
    assert first + contents(made) == contents(loader(store))


def test_a_run_that_had_ended_goes_on_with_more_epochs(store: str) -> None:
    ended, more = (loader(store, dp=1, s_max=257, seed=2, epochs=n) for n in (1, 2))
    first = Counter(label for _, labels in contents(ended) for label in labels)
    assert json.loads(ended.state_dict()["wlb"])["before"]["exhausted"]  # its end was a flush
    more.load_state_dict(ended.state_dict())
    trained = Counter(label for _, labels in contents(more) for label in labels)
    del first[IGNORE], trained[IGNORE]
    assert trained == first


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"epochs": 2}, "epochs = 1, which cannot be resumed with epochs = 2"),
        ({"s_max": 300}, "s_max = 384, which cannot be resumed with s_max = 300"),
        ({"max_delay": 3}, "max_delay = 10, which cannot be resumed with max_delay = 3"),
    ],
)
def test_a_part_of_a_step_goes_on_as_it_was_planned(
    options: dict[str, Any], what: str, store: str
) -> None:
    """Its rest would otherwise be of another step, and lose or repeat what lies between the two."""
    first, other = loader(store, dp=1), loader(store, dp=1, **options)
    whole = contents(first)
    first = loader(store, dp=1)
    begun = contents(islice(first, 2 * STEP + 1))
    with pytest.raises(ValueError, match=what):
        other.load_state_dict(first.state_dict())
    again = loader(store, dp=1)
    again.load_state_dict(first.state_dict())
    assert begun + contents(again) == whole
    list(islice(first, 2 * STEP - 1))
    other.load_state_dict(first.state_dict())  # after a step all of it may change


def test_it_goes_on_with_another_number_of_ranks(store: str) -> None:
    first = loader(store)
    before = contents(islice(first, 2 * STEP))
    other = contents(islice(loader(store, rank=1), 2 * STEP))
    one = loader(store, dp=1)
    one.load_state_dict(first.state_dict())
    after = contents(one)
    every = contents(loader(store)) + contents(loader(store, rank=1))
    tokens = Counter(t for batch in before + other + after for t in batch[0])
    assert tokens == Counter(t for batch in every for t in batch[0])
    list(islice(first, 1))
    with pytest.raises(ValueError, match="in the middle of a step of 2 data-parallel ranks"):
        one.load_state_dict(first.state_dict())
    fewer = loader(store, micro_batches_per_step=STEP - 1)
    with pytest.raises(ValueError, match=r"step of 3 micro-batches a rank, .*per_step = 2"):
        fewer.load_state_dict(first.state_dict())


def test_refusals(store: str) -> None:
    with pytest.raises(ValueError, match="dataset_path is empty"):
        loader("")
    with pytest.raises(ValueError, match="micro_batches_per_step = 0"):
        loader(store, micro_batches_per_step=0)
    with pytest.raises(ValueError, match="pad_to_multiple = 0"):
        loader(store, pad_to_multiple=0)
    with pytest.raises(
        ValueError, match=r"local_batch_size = 2 .*pipeline_parallel_microbatch_size = 1"
    ):
        BalancedDataLoader.Config(dataset_path=store, micro_batches_per_step=1).build(
            dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=8, local_batch_size=2
        )
    theirs = {"dp_rank_0": b"", "world_size": 1}
    with pytest.raises(ValueError, match="not saved by wlb's dataloader"):
        loader(store).load_state_dict(theirs)


@pytest.mark.process
def test_workers_give_the_same(store: str) -> None:
    assert contents(loader(store, num_workers=1)) == contents(loader(store))


def test_labels_that_a_store_masks_are_not_trained(tmp_path: Path) -> None:
    from wlb.data import TokenStoreWriter
    from wlb.planner import Planner

    with TokenStoreWriter(tmp_path / "s", vocab_size=32) as writer:
        writer.add(np.arange(1, 7), trained=np.array([[2, 4], [5, 6]]))
    planner = Planner.for_lengths([6], context_window=4, num_micro_batches=1, s_max=8)
    found = []
    for step in planner.steps():
        inputs, labels = as_batch(step.packing.micro_batch(0), open_reader(str(tmp_path / "s")))
        found += documents(inputs, labels)
    assert sorted(found) == [([1, 2, 3, 4], [IGNORE, 3, 4, IGNORE]), ([5, 6], [6, IGNORE])]
