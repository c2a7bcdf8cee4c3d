"""Tests blends: order of tags against a plain loop, shares, epochs, resuming, refusals."""

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.data import (
    BlendedBatches,
    GlobalBatches,
    LengthSource,
    TokenStoreWriter,
    open_batches,
    open_store,
)
from wlb.data.blend import _SEED_STEP
from wlb.data.reader import StoreReader
from wlb.data.shuffle import permute
from wlb.parallel.rows import rank_labels, rank_tokens
from wlb.plan import IGNORE
from wlb.planner import Planner, open_planner
from wlb.spec import RunSpec, apply, check
from wlb.spec.blend import parse_blend


def source(lengths):
    return LengthSource(name="test", lengths=np.array(lengths, np.int64))


def blend(lengths, weights, **options):
    given = {"tokens_per_batch": 50, "seed": 0, **options}
    return BlendedBatches([source(x) for x in lengths], weights, **given)


def stream(batches, limit):
    """Returns (source, id, length) of the first `limit` batches, one after the other."""
    found = []
    for batch, _ in islice(batches.iterate(), limit):
        d = batch.documents
        found += zip(d.source.tolist(), d.id.tolist(), d.length.tolist(), strict=True)
    return found


def test_equal_weights_alternate_by_tokens():
    batches = blend([[10] * 4, [5] * 4], [0.5, 0.5], tokens_per_batch=20)
    batch, state = batches.next(batches.start())
    # Tags 0, 20, ... and 0, 10, 20, ...: two documents of 5 to one of 10.
    assert batch.documents.source.tolist() == [0, 1, 1]
    batch, state = batches.next(state)
    assert batch.documents.source.tolist() == [0, 1, 1]
    assert state["tokens_read"] == [20, 20]
    assert state["documents_read"] == [2, 4]
    batch, state = batches.next(state)
    assert batch.documents.source.tolist() == [0, 1, 1]
    assert state["documents_read"] == [3, 6]  # of 4 each: the second store comes again


def reference(lengths, weights, *, seed, num_tokens, end=np.inf):
    """Returns the same order by a loop over documents: the source with the smallest tokens /
    weight.
    """
    tokens, read, out = [0] * len(lengths), [0] * len(lengths), []
    rows = sum(len(x) for x in lengths)
    first = np.cumsum([0, *(len(x) for x in lengths)]).tolist()
    while sum(tokens) < num_tokens:
        tags = [t / w for t, w in zip(tokens, weights, strict=True)]
        if min(tags) >= end:
            break
        s = tags.index(min(tags))
        n = len(lengths[s])
        epoch, position = divmod(read[s], n)
        row = int(permute([position], n, seed + s * _SEED_STEP, epoch)[0])
        out.append((s, epoch * rows + first[s] + row, lengths[s][row]))
        tokens[s] += lengths[s][row]
        read[s] += 1
    return out


LENGTHS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=4)


@pytest.mark.full
@given(data=st.data(), lengths=LENGTHS, tokens=st.integers(1, 300), epochs=st.integers(0, 3))
def test_the_order_is_that_of_the_plain_loop(data, lengths, tokens, epochs):
    weights = [data.draw(st.sampled_from([0.1, 0.25, 1.0, 1 / 3, 7])) for _ in lengths]
    batches = blend(lengths, weights, tokens_per_batch=tokens, epochs=epochs, seed=5)
    limit = 6 if not epochs else 1 << 20
    totals = [sum(x) for x in lengths]
    end = max(epochs * t / w for t, w in zip(totals, weights, strict=True)) if epochs else np.inf
    num_tokens = 6 * tokens if not epochs else np.inf
    found = stream(batches, limit)
    assert found == reference(lengths, weights, seed=5, num_tokens=num_tokens, end=end)
    assert len({i for _, i, _ in found}) == len(found)  # ids are unique in the run
    if epochs:
        read = [sum(n for s, _, n in found if s == number) for number in range(len(lengths))]
        assert all(r >= epochs * t for r, t in zip(read, totals, strict=True))
        assert any(r == epochs * t for r, t in zip(read, totals, strict=True))


@given(data=st.data(), lengths=LENGTHS, epochs=st.integers(0, 2))
def test_resumes_from_any_state_with_any_size_of_batches(data, lengths, epochs):
    weights = [1.0 + i for i in range(len(lengths))]
    size = data.draw(st.integers(1, 120))
    batches = blend(lengths, weights, tokens_per_batch=size, epochs=epochs)
    items = list(islice(batches.iterate(), 8))
    at = data.draw(st.integers(0, len(items) - 1))
    state = json.loads(json.dumps(items[at][1]))
    again = blend(lengths, weights, tokens_per_batch=size, epochs=epochs).iterate(state)
    if epochs:
        flags = [batch.is_last for batch, _ in batches.iterate()]
        assert flags == [False] * (len(flags) - 1) + [True]
    else:
        assert not any(batch.is_last for batch, _ in items)
    for batch, after in items[at + 1 :]:
        found, found_after = next(again)
        assert found.documents == batch.documents
        assert (found.index, found_after) == (batch.index, after)
    # The stream of documents does not depend on the size of batches.
    other = data.draw(st.integers(1, 500))
    rest = stream_from(blend(lengths, weights, tokens_per_batch=other, epochs=epochs), state)
    expected = [d for batch, _ in items[at + 1 :] for d in batch.documents.id.tolist()]
    assert rest[: len(expected)] == expected[: len(rest)]


def stream_from(batches, state):
    return [
        d for batch, _ in islice(batches.iterate(state), 30) for d in batch.documents.id.tolist()
    ]


def test_one_source_is_its_global_batches():
    lengths = np.random.default_rng(0).integers(1, 90, 500)
    options = {"tokens_per_batch": 700, "seed": 9, "epochs": 3}
    alone = GlobalBatches(source(lengths), **options)
    mixed = BlendedBatches([source(lengths)], [0.3], **options)
    pairs = list(zip(alone.iterate(), mixed.iterate(), strict=True))
    assert len(pairs) > 80
    for (batch, _), (ours, _) in pairs:
        assert batch.documents == ours.documents
        assert batch.index == ours.index


@pytest.mark.parametrize("weights", [[0.7, 0.3], [1, 9], [5, 3, 2]])
def test_shares_of_tokens_converge_to_the_weights(weights):
    rng = np.random.default_rng(1)
    lengths = [np.minimum(rng.lognormal(4 + i, 1.2, 400).astype(int) + 1, 9000) for i in range(3)]
    batches = blend(lengths[: len(weights)], weights, tokens_per_batch=8000)
    tokens, state = np.zeros(len(weights)), batches.start()
    for batch, after in islice(batches.iterate(), 400):
        np.add.at(tokens, batch.documents.source, batch.documents.length)
        state = after
    shares = np.array(weights) / sum(weights)
    assert np.abs(tokens / tokens.sum() - shares).max() < 0.01
    assert state["tokens_read"] == tokens.astype(int).tolist()
    assert max(state["documents_read"]) > 3 * 400
    # At any time two sources differ by at most their longest documents over their weights.
    longest = [x.max() for x in lengths[: len(weights)]]
    assert np.ptp(tokens / weights) <= max(n / w for n, w in zip(longest, weights, strict=True))


def test_every_document_of_an_epoch_before_the_next():
    batches = blend([range(1, 30), range(1, 9)], [1, 1], tokens_per_batch=100)
    found = stream(batches, 40)
    for number, (n, first) in enumerate([(29, 0), (8, 29)]):
        ids = [i for s, i, _ in found if s == number]
        for start in range(0, len(ids) - n, n):
            rows = [i % 37 - first for i in ids[start : start + n]]
            assert sorted(rows) == list(range(n))
            assert {i // 37 for i in ids[start : start + n]} == {start // n}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": [1.0, 3.0]}, r"weights = \[1.0, 2.0\], but this run has \[1.0, 3.0\]"),
        ({"seed": 1}, "made with seed = 0, but this run has 1; resume with the data.blend"),
        ({"lengths": [[4, 5, 6], [7, 9]]}, "made with num_tokens"),
        ({"lengths": [[4, 5, 6], [7, 8], [1]], "weights": [1, 2, 3]}, "made with num_documents"),
    ],
)
def test_refuses_states_of_other_blends(change, message):
    asked = {"lengths": [[4, 5, 6], [7, 8]], "weights": [1.0, 2.0]}
    state = blend(**asked).start()
    with pytest.raises(ValueError, match=message):
        blend(**{**asked, **change}).next(state)


def test_refuses_states_of_a_single_store_and_damaged_ones():
    batches = blend([[4], [5]], [1, 1])
    alone = GlobalBatches(source([4]), tokens_per_batch=5, seed=0)
    with pytest.raises(ValueError, match=r"the state of a blend must have .*data\.blend"):
        batches.next(alone.start())
    with pytest.raises(ValueError, match="one for each of the 2 stores in each of the lists"):
        batches.next({**batches.start(), "tokens_read": [0]})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["a"], r"data\.blend: 'a' is not PREFIX:WEIGHT"),
        (["a:x"], "'a:x' is not PREFIX:WEIGHT"),
        (["a:0"], "'a:0'"),
        (["a:-1"], "'a:-1'"),
        (["a:nan"], "'a:nan'"),
        (["a:inf"], "'a:inf'"),
        ([":1"], "':1'"),
        (["a:1", "b:2", "a:3"], "names a twice"),
    ],
)
def test_refuses_entries(entries, message):
    with pytest.raises(ValueError, match=message):
        parse_blend(entries)
    with pytest.raises(ValueError, match=message):
        check(apply(RunSpec(), {"data": {"blend": entries}}, source="x"))


def test_a_blend_and_a_store_are_not_both_taken():
    assert parse_blend(["c:/a.b:0.5", "d:2"]) == (("c:/a.b", 0.5), ("d", 2.0))
    data = {"blend": ["a:1"], "store": "b"}
    with pytest.raises(ValueError, match=r"data\.store = b and data\.blend = \['a:1'\] are both"):
        check(apply(RunSpec(), {"data": data}, source="x"))


def write(path, documents, trained=None, **about):
    with TokenStoreWriter(path, **{"vocab_size": 300, "eos_id": 0, **about}) as writer:
        for i, tokens in enumerate(documents):
            writer.add(tokens, None if trained is None else trained[i])
    return str(path)


@pytest.fixture
def stores(tmp_path):
    rng = np.random.default_rng(2)
    plain = [rng.integers(1, 300, n) for n in rng.integers(2, 60, 40)]
    masked = [rng.integers(1, 300, n) for n in rng.integers(6, 40, 15)]
    spans = [[[2, 4], [5, len(tokens)]] for tokens in masked]
    write(tmp_path / "plain", plain)
    write(tmp_path / "masked", masked, spans)
    names = (f"{tmp_path}/plain:0.6", f"{tmp_path}/masked:0.4")
    return names, [plain, masked]


def test_a_blend_reads_as_one_store(stores):
    names, documents = stores
    store = open_store(names)
    rows = documents[0] + documents[1]
    assert store.num_documents == len(rows) == 55
    assert store.num_tokens == sum(len(row) for row in rows)
    assert store.lengths.tolist() == [len(row) for row in rows]
    assert store.vocab_size == 300
    for i, row in enumerate(rows):
        assert store.read(i).tolist() == row.tolist()
        assert store.read(i, 1, 2).tolist() == row[1:2].tolist()
        assert store.trained(i).sum() == store.num_targets[i]
    with pytest.raises(ValueError, match="document 55 is not in"):
        store.read(55)


def test_a_plan_of_a_blend_reads_the_documents_it_names(stores):
    names, documents = stores
    rows = documents[0] + documents[1]
    values = {
        "data": {"blend": list(names), "context_window": 64, "num_windows": 4},
        "model": {"vocab_size": 300},
    }
    spec = check(apply(RunSpec(), values, source="test"))
    planner = open_planner(spec, spec.data.blend, "cpu")
    assert isinstance(planner, Planner)
    reader = StoreReader(spec.data.blend, 300)
    seen = {0: 0, 1: 0}
    for plan in islice(planner.steps(), 12):
        num_labels = 0
        for batch, sharding in zip(
            *(lambda p: (p.micro_batches, p.shardings))(planner.shard(plan, 0)), strict=True
        ):
            size = batch.pieces.num_tokens
            tokens = rank_tokens(batch, sharding, 0, size, reader)
            labels = rank_labels(batch, sharding, 0, size, reader)
            num_labels += int((labels != IGNORE).sum())
            expected = []
            for i in range(len(batch.pieces)):
                piece = batch.pieces[i]
                row = piece.document % len(rows)
                assert (row >= 40) == bool(piece.source)
                expected += rows[row][piece.start : piece.stop].tolist()
                seen[piece.source] += piece.stop - piece.start
            assert tokens.tolist() == expected
        assert num_labels == plan.num_targets
    assert abs(seen[0] / sum(seen.values()) - 0.6) < 0.08


def test_stores_of_different_tokenizers_are_refused(tmp_path):
    one = write(tmp_path / "a", [[1, 2]], tokenizer="a-tokenizer.json")
    for name, about, message in (
        ("b", {"vocab_size": 400}, r"vocab_size 300 and 400.*--tokenizer .*a-tokenizer\.json"),
        ("c", {"eos_id": 5}, "eos_id 0 and 5"),
    ):
        other = write(tmp_path / name, [[1, 2]], **about)
        with pytest.raises(ValueError, match=message):
            open_store((f"{one}:1", f"{other}:1"))
    marks = [
        write(tmp_path / n, [[1]], preparation={"tokenizer_checksum": n * 40}) for n in ("d", "e")
    ]
    with pytest.raises(ValueError, match=r"tokenizer dddddddddddddddd\.\.\. and eeee"):
        open_store((f"{marks[0]}:1", f"{marks[1]}:1"))
    assert open_store((f"{one}:1", f"{marks[0]}:1")).num_documents == 2  # one does not say
    with pytest.raises(ValueError, match=r"/d\S* and \S*/e\S* of data.blend .*tokenizer dddd"):
        open_store((f"{one}:1", f"{marks[0]}:1", f"{marks[1]}:1"))  # nor hides the other two


def test_a_store_without_separators_mixes_with_one_that_has_them(tmp_path):
    """This is the case of conversations and text of one tokenizer."""
    mark = {"tokenizer_checksum": "a" * 40}
    text = write(tmp_path / "text", [[1, 0]], preparation=mark)
    chat = write(tmp_path / "chat", [[1, 2]], preparation=mark, eos_id=None)
    for order in ((text, chat), (chat, text)):
        assert open_store(tuple(f"{name}:1" for name in order)).num_documents == 2


def test_open_batches_of_a_blend_has_an_order_only_shuffled(stores):
    names, _ = stores
    assert isinstance(open_batches(names, tokens_per_batch=9, seed=0), BlendedBatches)
    assert isinstance(
        open_batches(names[0].rpartition(":")[0], tokens_per_batch=9, seed=0), GlobalBatches
    )
    with pytest.raises(ValueError, match="cannot be read with shuffle = false"):
        open_batches(names, tokens_per_batch=9, seed=0, shuffle=False)


@pytest.mark.parametrize(
    ("lengths", "weights", "options", "message"),
    [
        ([], [], {}, "has 0 sources and 0 weights"),
        ([[1]], [1, 2], {}, "has 1 sources and 2 weights"),
        ([[1]], [0], {}, "must be finite and above 0"),
        ([[1], []], [1, 1], {}, "has no lengths; give the length of"),
        ([[1]], [1], {"tokens_per_batch": 0}, "tokens_per_batch = 0"),
        ([[1]], [1], {"epochs": -1}, "epochs = -1"),
    ],
)
def test_refuses(lengths, weights, options, message):
    with pytest.raises(ValueError, match=message):
        blend(lengths, weights, **options)
