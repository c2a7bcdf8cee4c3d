"""Tests global batches: the crossing rule, conservation, and resuming from any state."""

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.data import GlobalBatches, LengthSource, ListedBatches, TokenStore, TokenStoreWriter
from wlb.data.shuffle import permute
from wlb.plan import UserError


def source(*lengths, source_id=0):
    return LengthSource(name="test", lengths=np.array(lengths, np.int64), source_id=source_id)


def run(batches, state=None):
    return [batch for batch, _ in batches.iterate(state)]


def columns(batch, *names):
    return [getattr(batch.documents, name).tolist() for name in names]


def test_the_document_that_crosses_the_limit_belongs_to_the_batch():
    corpus = source(4, 3, 5, 1, 10, 2)
    batches = GlobalBatches(corpus, tokens_per_batch=8, seed=0, epochs=1, shuffle=False)
    assert [columns(b, "length", "id") for b in run(batches)] == [
        [[4, 3, 5], [0, 1, 2]],  # 7 < 8, so 5 comes too
        [[1, 10], [3, 4]],
        [[2], [5]],  # the last batch is short
    ]


def test_a_batch_that_is_exactly_full_ends():
    batches = GlobalBatches(source(4, 4, 4, 4), tokens_per_batch=8, seed=0, epochs=1, shuffle=False)
    assert [columns(b, "length") for b in run(batches)] == [[[4, 4]], [[4, 4]]]


def test_a_batch_goes_on_into_the_next_epoch():
    batches = GlobalBatches(source(2, 3), tokens_per_batch=4, seed=0, epochs=3, shuffle=False)
    assert [(*columns(b, "length", "id"), b.index) for b in run(batches)] == [
        ([2, 3], [0, 1], 0),  # 5 tokens: one too many, so the next batch needs only 3
        ([2, 3], [2, 3], 1),
        ([2], [4], 2),
        ([3], [5], 3),  # 15 tokens in all: the short end
    ]
    batches = GlobalBatches(source(2, 3), tokens_per_batch=6, seed=0, epochs=3, shuffle=False)
    assert [columns(b, "length", "id") for b in run(batches)] == [
        [[2, 3, 2], [0, 1, 2]],
        [[3, 2], [3, 4]],
        [[3], [5]],
    ]


def test_what_a_long_document_brings_too_much_counts_for_later_batches():
    batches = GlobalBatches(source(11, 2, 4), tokens_per_batch=4, seed=0, epochs=2, shuffle=False)
    lengths = [columns(b, "length")[0] for b in run(batches)]
    # 4, 8, 12, ... tokens of the stream: the first batch has 11, the second none, the third 2.
    assert lengths == [[11], [], [2], [4], [11], [], [], [2, 4]]


def test_columns():
    batches = GlobalBatches(source(1, 7, source_id=4), tokens_per_batch=8, seed=0, shuffle=False)
    batch, state = batches.next(batches.start())
    assert batch.index == 0
    assert columns(batch, "num_targets", "source") == [[0, 6], [4, 4]]
    assert (state["epoch"], state["position"], state["batch"]) == (1, 0, 1)


def test_shuffled_order_is_that_of_permute():
    corpus = source(*range(1, 21))
    batches = GlobalBatches(corpus, tokens_per_batch=30, seed=5, epochs=2)
    ids = np.concatenate([batch.documents.id for batch in run(batches)])
    assert ids[:20].tolist() == permute(range(20), 20, 5, 0).tolist()
    assert (ids[20:] - 20).tolist() == permute(range(20), 20, 5, 1).tolist()


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    tokens_per_batch=st.integers(1, 400),
    epochs=st.integers(1, 5),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_every_document_once_an_epoch(lengths, tokens_per_batch, epochs, seed, shuffle):
    batches = GlobalBatches(
        source(*lengths),
        tokens_per_batch=tokens_per_batch,
        seed=seed,
        epochs=epochs,
        shuffle=shuffle,
    )
    found = run(batches)
    ids = np.concatenate([batch.documents.id for batch in found])
    length = np.concatenate([batch.documents.length for batch in found])
    assert np.array_equal(np.sort(ids), np.arange(epochs * len(lengths)))
    assert np.array_equal(length, np.array(lengths)[ids % len(lengths)])
    assert np.all(np.diff(ids // len(lengths)) >= 0)  # epochs follow each other
    assert [batch.is_last for batch in found] == [False] * (len(found) - 1) + [True]
    total = 0
    for i, batch in enumerate(found):
        assert batch.index == i
        total += batch.documents.num_tokens
        last = batch.documents.length[-1:].sum()
        if i < len(found) - 1:
            # No batch falls behind, and none takes a document it does not need.
            assert total >= (i + 1) * tokens_per_batch
            assert not last or total - last < (i + 1) * tokens_per_batch


@given(data=st.data(), epochs=st.integers(0, 3))
def test_resumes_from_any_state(data, epochs):
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    options = {"tokens_per_batch": data.draw(st.integers(1, 60)), "seed": 3, "epochs": epochs}
    batches = GlobalBatches(source(*lengths), **options)
    stream = [item for item, _ in zip(batches.iterate(), range(8), strict=False)]
    at = data.draw(st.integers(0, len(stream) - 1))
    state = json.loads(json.dumps(stream[at][1]))  # what a checkpoint holds
    again = GlobalBatches(source(*lengths), **options).iterate(state)
    for batch, after in stream[at + 1 :]:
        found, found_after = next(again)
        assert found.index == batch.index
        assert found.documents == batch.documents
        assert found_after == after
    if epochs and len(stream) < 8:
        assert next(again, None) is None


def test_a_list_of_batches_knows_its_last_one():
    stream = GlobalBatches(source(3, 4, 5), tokens_per_batch=6, seed=0)
    found = [batch for batch, _ in islice(stream.iterate(), 3)]
    listed = ListedBatches(found)
    assert [batch.is_last for batch in found] == [False] * 3  # this stream never ends
    (first, state), (_, after) = listed.next({"batch": 0}), listed.next({"batch": 1})
    assert (first.is_last, state) == (False, {"batch": 1})
    last, end = listed.next(after)
    assert last.is_last
    assert last.documents == found[2].documents
    assert listed.next(end) is None


def test_next_changes_nothing():
    batches = GlobalBatches(source(3, 4, 5), tokens_per_batch=6, seed=0)
    state = batches.start()
    before = dict(state)
    first, second = batches.next(state), batches.next(state)
    assert state == before
    assert first[0].documents == second[0].documents
    assert first[1] == second[1]


def test_ends_after_the_last_epoch_and_stays_ended():
    batches = GlobalBatches(source(3, 4), tokens_per_batch=100, seed=0, epochs=2)
    batch, state = batches.next(batches.start())
    assert batch.documents.num_tokens == 14
    assert batches.next(state) is None
    assert batches.next(state) is None
    longer = GlobalBatches(source(3, 4), tokens_per_batch=100, seed=0, epochs=3)
    assert longer.next(state)[0].documents.num_tokens == 7


def test_tokens_per_batch_may_change_at_a_resume():
    corpus = source(*range(1, 30))
    batches = GlobalBatches(corpus, tokens_per_batch=50, seed=1, epochs=1)
    batch, state = batches.next(batches.start())
    rest = run(GlobalBatches(corpus, tokens_per_batch=77, seed=1, epochs=1), state)
    ids = np.concatenate([b.documents.id for b in (batch, *rest)])
    assert sorted(ids) == list(range(29))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (GlobalBatches(source(1, 2), tokens_per_batch=2, seed=8), "seed = 7, but this run has 8"),
        (
            GlobalBatches(source(1, 2, 1), tokens_per_batch=2, seed=7),
            "num_documents = 2, but this run has 3",
        ),
        (
            GlobalBatches(source(1, 3), tokens_per_batch=2, seed=7),
            "num_tokens = 3, but this run has 4",
        ),
        (
            GlobalBatches(source(2, 1), tokens_per_batch=2, seed=7),
            "lengths = [0-9]+, but this run has",
        ),
        (
            GlobalBatches(source(1, 2), tokens_per_batch=2, seed=7, shuffle=False),
            "shuffle = True, but this run has False",
        ),
    ],
)
def test_state_of_another_stream_is_refused(other, message):
    state = GlobalBatches(source(1, 2), tokens_per_batch=2, seed=7).start()
    with pytest.raises(ValueError, match=message):
        other.next(state)


def test_state_of_another_kind_is_refused():
    batches = GlobalBatches(source(1, 2), tokens_per_batch=2, seed=7)
    with pytest.raises(ValueError, match=r"the state of a corpus must have .*but has"):
        batches.next({"step": 1})
    with pytest.raises(ValueError, match="position = -1, which must be a whole number"):
        batches.next({**batches.start(), "position": -1})


class Identified(LengthSource):
    """Is a source that says which tokens it has."""

    tokens = "abc"

    @property
    def identity(self):
        return {"tokens": self.tokens, "eos_id": 0}


def test_a_state_of_other_tokens_of_the_same_lengths_is_refused():
    first, other = (Identified(name="given", lengths=[1, 2, 3]) for _ in range(2))
    object.__setattr__(other, "tokens", "xyz")
    batches = GlobalBatches(first, tokens_per_batch=2, seed=7)
    _, state = batches.next(batches.start())
    assert state["store"] == {"tokens": "abc", "eos_id": 0}
    assert batches.next(state) is not None
    with pytest.raises(
        UserError, match=r"not the one of the checkpoint \(tokens was abc, is xyz\)"
    ):
        GlobalBatches(other, tokens_per_batch=2, seed=7).next(state)
    # A checkpoint of a version that did not know identities goes on, and has one from then on.
    old = {name: value for name, value in state.items() if name != "store"}
    _, after = batches.next(old)
    assert after["store"] == state["store"]


class Raw:
    """Is a source that somebody else wrote, unchecked."""

    source_id = 0

    def __init__(self, lengths, num_documents=None):
        self.lengths = lengths
        self.num_documents = len(lengths) if num_documents is None else num_documents


@pytest.mark.parametrize(
    ("corpus", "options", "message"),
    [
        (Raw([]), {}, "the corpus has no documents; set data.store"),
        (Raw([3, 0]), {}, "document 1 of the corpus has 0 tokens"),
        (Raw([3, 1.5]), {}, "lengths.1. = 1.5 is not a whole number"),
        (Raw([3, 1], 5), {}, "num_documents of the corpus is 5, but lengths has 2"),
        (Raw([3]), {"tokens_per_batch": 0}, "tokens_per_batch = 0 must be at least 1"),
        (Raw([3]), {"epochs": -1}, "epochs = -1 must be at least 0"),
    ],
)
def test_refuses(corpus, options, message):
    with pytest.raises(ValueError, match=message):
        GlobalBatches(corpus, **{"tokens_per_batch": 8, "seed": 0, **options})


def test_tiny_corpus_and_huge_batch_need_no_loop_over_epochs():
    batches = GlobalBatches(source(1, 2, 3), tokens_per_batch=3_000_000, seed=0)
    batch, state = batches.next(batches.start())
    assert len(batch.documents) == 1_500_000
    assert (state["epoch"], state["position"]) == (500_000, 0)


def test_a_block_of_short_documents_is_followed_by_more():
    """The first estimate, by mean length, is far too low where short documents come first."""
    corpus = source(*[1] * 5000, 100_000)
    batches = GlobalBatches(corpus, tokens_per_batch=4000, seed=0, epochs=1, shuffle=False)
    assert [len(batch.documents) for batch in run(batches)] == [4000, 1001]


def test_a_token_store_is_a_source(tmp_path):
    with TokenStoreWriter(tmp_path / "s", vocab_size=300) as writer:
        for document in ([1, 2], [3], [4, 5, 6]):
            writer.add(document)
    store = TokenStore(tmp_path / "s", source_id=2)
    batches = GlobalBatches(store, tokens_per_batch=6, seed=0, epochs=2)
    texts = [
        store.read(batches.ids.row(int(i))).tolist()
        for batch in run(batches)
        for i in batch.documents.id
    ]
    assert sorted(texts) == [[1, 2], [1, 2], [3], [3], [4, 5, 6], [4, 5, 6]]
    assert columns(batches.next(batches.start())[0], "source") == [[2, 2, 2]]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("position", 99, "position = 99, which must be below 2, the number of documents"),
        ("epoch", "a", "epoch = 'a'"),
    ],
)
def test_impossible_counters_are_refused(name, value, message):
    batches = GlobalBatches(source(2, 3), tokens_per_batch=4, seed=0)
    with pytest.raises(ValueError, match=message):
        batches.next({**batches.start(), name: value})
