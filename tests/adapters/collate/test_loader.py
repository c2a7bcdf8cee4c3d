"""Tests the loader for other loops: disjoint ranks, exact resumption, workers, no file sent."""

import json
import pickle
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sets import full
from tests.train.case import write_store
from wlb.adapters.collate import FlatBatch, FlatOptions, flatten_micro_batch
from wlb.adapters.collate.loader import LoadedStep, PlannedLoader, PlannedSteps
from wlb.cost import FlopsWorkload
from wlb.data import GlobalBatches, TokenStore, TokenStoreWriter
from wlb.data.reader import StoreReader
from wlb.packing import BoundedPacker, PackerOptions
from wlb.plan import IGNORE, MicroBatch, UserError
from wlb.planner import Planner

LENGTHS = np.clip(np.random.default_rng(4).lognormal(3.6, 0.9, 300).astype(int) + 1, 1, 400)
COST = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=50)


class Reader:
    """Reads the documents of all epochs from a store that it opened itself."""

    def __init__(self, prefix: str) -> None:
        self.store = TokenStore(prefix)

    def length(self, document: int) -> int:
        return int(self.store.lengths[document % self.store.num_documents])

    def read(self, document: int, start: int, stop: int) -> Any:
        return self.store.read(document % self.store.num_documents, start, stop)


def planner_of(prefix: str, dp: int, n: int = 4, epochs: int = 2, s_max: int = 512) -> Planner:
    options = PackerOptions(num_micro_batches=n, context_window=256, cost=COST)
    source = GlobalBatches(TokenStore(prefix), tokens_per_batch=n * 256, seed=3, epochs=epochs)
    packer = BoundedPacker(options=options, s_max=s_max)
    return Planner(source=source, packer=packer, baseline=None, cost=COST, dp=dp)


def flat(batch: MicroBatch, reader: Any) -> dict[str, np.ndarray]:
    pieces = [batch.pieces[i] for i in range(len(batch.pieces))]
    tokens = [reader.read(p.document, p.start, p.stop) for p in pieces]
    return {
        "tokens": np.concatenate([np.zeros(0, np.int64), *tokens]),
        "cu_seqlens": batch.cu_seqlens,
        "documents": batch.pieces.document,
    }


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_store(tmp_path_factory.mktemp("loader") / "store", LENGTHS.tolist())


def loader(
    prefix: str, *, dp: int = 2, rank: int = 0, workers: int = 0, **options: int
) -> PlannedLoader:
    return PlannedLoader(
        partial(planner_of, prefix, dp, **options),
        partial(Reader, prefix),
        dp_rank=rank,
        collate=flat,
        num_workers=workers,
    )


def content(step: LoadedStep) -> tuple[int, int, list[list[int]]]:
    batches = [[*b["documents"].tolist(), *b["tokens"].tolist()] for b in step.micro_batches]
    return step.step, step.num_targets, batches


def test_ranks_share_every_document_out(prefix: str) -> None:
    steps = [list(loader(prefix, rank=rank)) for rank in range(2)]
    assert [s.step for s in steps[0]] == [s.step for s in steps[1]] == list(range(len(steps[0])))
    assert [s.num_targets for s in steps[0]] == [s.num_targets for s in steps[1]]
    found = [b["documents"] for rank in steps for s in rank for b in s.micro_batches]
    tokens = sum(b["tokens"].size for rank in steps for s in rank for b in s.micro_batches)
    assert set(np.concatenate(found).tolist()) == set(range(2 * LENGTHS.size))
    assert tokens == 2 * LENGTHS.sum()


@pytest.mark.process
@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_give_the_same_steps(prefix: str, workers: int) -> None:
    alone = [content(step) for step in loader(prefix)]
    assert [content(step) for step in loader(prefix, workers=workers)] == alone


@pytest.mark.parametrize("done", [1, *full(4, 9)])
def test_it_resumes_exactly_and_on_another_number_of_ranks(prefix: str, done: int) -> None:
    whole = [content(step) for step in loader(prefix)]
    first = loader(prefix)
    steps = iter(first)
    for _ in range(done):
        next(steps)
    state = json.loads(json.dumps(first.state_dict()))
    again = loader(prefix)
    again.load_state_dict(state)
    assert [content(step) for step in again] == whole[done:]
    # The documents that one pipeline of two would have, and the other, go to one or to four ranks.
    expected = sum(step.num_targets for step in loader(prefix)) - sum(w[1] for w in whole[:done])
    for dp in (1, 4):
        ranks = [loader(prefix, dp=dp, rank=rank) for rank in range(dp)]
        for rank in ranks:
            rank.load_state_dict(state)
        found = [list(rank) for rank in ranks]
        assert sum(step.num_targets for step in found[0]) == expected


def test_a_run_that_had_ended_goes_on_with_more_epochs(prefix: str) -> None:
    ended = loader(prefix, epochs=1, s_max=260)
    before = list(ended)
    assert ended.state_dict()["exhausted"]  # its last steps were a flush
    ranks = [loader(prefix, rank=rank, epochs=2, s_max=260) for rank in range(2)]
    after = list[list[LoadedStep]]()
    for rank in ranks:
        rank.load_state_dict(ended.state_dict())
        after.append(list(rank))
    steps = [step.step for step in before + after[0]]
    assert steps == list(range(len(steps)))
    found = [b["documents"] for made in after for step in made for b in step.micro_batches]
    second = set(range(LENGTHS.size, 2 * LENGTHS.size))
    assert set(np.concatenate(found).tolist()) == second
    again = loader(prefix, epochs=1, s_max=260)
    again.load_state_dict(ended.state_dict())
    assert list(again) == []


def test_an_iteration_goes_on_where_the_last_one_was_left(prefix: str) -> None:
    made = loader(prefix)
    first = [content(step) for step in islice(made, 3)]
    rest = [content(step) for step in made]
    assert first + rest == [content(step) for step in loader(prefix)]


def test_a_state_that_contradicts_the_data_is_refused(prefix: str) -> None:
    made = loader(prefix)
    next(iter(made))
    before = made.state_dict()
    damaged = json.loads(json.dumps(before))
    damaged["num_tokens"] -= 5
    with pytest.raises(ValueError, match=r"contradicts itself: .* tokens"):
        made.load_state_dict(damaged)
    assert made.state_dict() == before


def test_only_names_are_sent_to_workers(prefix: str) -> None:
    steps = PlannedSteps(
        partial(planner_of, prefix, 1), partial(Reader, prefix), dp_rank=0, collate=flat, state=None
    )
    assert len(pickle.dumps(steps)) < 2000
    assert Path(f"{prefix}.bin").stat().st_size > 20_000


def test_a_rank_that_is_not_there_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="dp_rank = 2 must be between 0 and 1"):
        loader(prefix, rank=2)


def test_the_divisor_counts_the_labels_that_are_trained(tmp_path: Path, prefix: str) -> None:
    masked = str(tmp_path / "masked")
    with TokenStoreWriter(masked, vocab_size=64) as writer:
        for _ in range(20):
            writer.add([3] * 40, trained=[[30, 40]])
    options: dict[str, int] = {"context_window": 128, "num_micro_batches": 2}

    def steps(of: Any, reader: Any) -> PlannedLoader:
        return PlannedLoader(
            lambda: Planner.for_lengths(of, **options),
            lambda: reader,
            dp_rank=0,
            collate=partial(flatten_micro_batch, options=FlatOptions(next_labels=True)),
        )

    for name, num in ((masked, 20 * 10), (prefix, int(LENGTHS.sum()) - LENGTHS.size)):
        loaded = list(steps(TokenStore(name), StoreReader(name, 1 << 16)))
        assert sum(step.num_targets for step in loaded) == num
        batches: list[FlatBatch] = [b for step in loaded for b in step.micro_batches]
        assert all(isinstance(b, FlatBatch) for b in batches)
        assert sum(b.num_targets for b in batches) == num
    steps(TokenStore(prefix).lengths, StoreReader(prefix, 1 << 16))
    with pytest.raises(UserError, match=r"StoreReader masks .*for_lengths\(TokenStore\(prefix\)"):
        steps(TokenStore(masked).lengths, StoreReader(masked, 64))
    with pytest.raises(UserError, match="Reader trains all tokens; use StoreReader"):
        steps(TokenStore(masked), Reader(masked))


class OwnLabels(Reader):
    """A reader of somebody's own that masks labels; it does not say `has_targets`."""

    def labels(self, document: int, start: int, stop: int) -> Any:
        return np.full(stop - start, IGNORE)


def test_a_reader_with_labels_of_its_own_needs_a_planner_that_counts_them(prefix: str) -> None:
    with pytest.raises(UserError, match="OwnLabels masks some labels"):
        PlannedLoader(
            partial(planner_of, prefix, 1), partial(OwnLabels, prefix), dp_rank=0, collate=flat
        )
