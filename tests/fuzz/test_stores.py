"""Fuzzes token stores and packs: what is read is what was written, or it is refused."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.harness import Refused, damaged, fuzzed, misshapen, outcome
from wlb.data import LengthSource, TokenStore, TokenStoreWriter
from wlb.data.verify import verify_store
from wlb.packing import Packs
from wlb.plan import Layout, digest, offsets_of
from wlb.plan.arrays import int_array

DOCUMENTS = [[5, 6, 7, 8], [1], [9, 9, 9, 2, 3], [4, 4]]
TRAINED = [[[1, 3]], [], [[1, 2], [3, 5]], [[1, 2]]]
LENGTHS = [len(d) for d in DOCUMENTS]
SUFFIXES = [".bin", ".idx", ".json", ".targets"]
ROWS, OFFSETS = [2, 0, 3, 1], [0, 1, 2, 3, 4]


def write(
    prefix: Path, documents: list[list[int]], trained: Any = None, *, vocab_size: int = 300
) -> TokenStore:
    about: dict[str, Any] = {"tokenizer": "t.json", "source": "mine", "eos_id": 2}
    about |= {"preparation": {"arguments": {"seed": 3}}}
    about["eos_id"] = min(2, vocab_size - 1)
    with TokenStoreWriter(prefix, vocab_size=vocab_size, **about) as writer:
        for i, document in enumerate(documents):
            writer.add(document, None if trained is None else trained[i])
    return TokenStore(prefix)


def content(prefix: Path) -> tuple[Any, ...]:
    """All that training reads of a store whose checksums hold."""
    verify_store(str(prefix))
    store = TokenStore(prefix)
    rows = range(store.num_documents)
    return (
        [store.read(row).tolist() for row in rows],
        [store.trained(row).tolist() for row in rows],
        store.num_targets.tolist(),
        store.count_targets(list(rows), [0] * len(rows), store.lengths).tolist(),
    )


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores") / "s"


class Good(NamedTuple):
    """Files of a store by their suffixes, and its content."""

    files: dict[str, bytes]
    content: tuple[Any, ...]


@pytest.fixture(scope="module")
def good(prefix: Path) -> Good:
    write(prefix, DOCUMENTS, TRAINED)
    files = {suffix: Path(f"{prefix}{suffix}").read_bytes() for suffix in SUFFIXES}
    return Good(files, content(prefix))


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".targets"])
@fuzzed(0.5, nightly=5000)
@given(st.data())
def test_a_damaged_store_holds_the_same_or_is_refused(
    prefix: Path, good: Good, suffix: str, data: st.DataObject
) -> None:
    for name, value in good.files.items():
        Path(f"{prefix}{name}").write_bytes(value)
    Path(f"{prefix}{suffix}").write_bytes(data.draw(damaged(good.files[suffix])))
    made = outcome(lambda: content(prefix))
    assert isinstance(made, Refused) or made == good.content


@pytest.mark.parametrize("is_shape", [True, False])
@fuzzed(0.5, nightly=5000)
@given(st.data())
def test_a_damaged_description_describes_the_same_or_is_refused(
    prefix: Path, good: Good, is_shape: bool, data: st.DataObject
) -> None:
    for name, value in good.files.items():
        Path(f"{prefix}{name}").write_bytes(value)
    text = good.files[".json"]
    value = misshapen(json.loads(text)).map(lambda t: t.encode("utf-8", "surrogatepass"))
    Path(f"{prefix}.json").write_bytes(data.draw(value if is_shape else damaged(text)))
    made = outcome(lambda: content(prefix))
    assert isinstance(made, Refused) or made == good.content


@pytest.mark.parametrize("value", [{}, [], 0, False, 1.5])
def test_a_checksum_that_is_no_text_is_refused_by_name(
    prefix: Path, good: Good, value: object
) -> None:
    for name, data in good.files.items():
        Path(f"{prefix}{name}").write_bytes(data)
    changed = {**json.loads(good.files[".json"]), "targets": value}
    Path(f"{prefix}.json").write_text(json.dumps(changed))
    made = outcome(lambda: content(prefix))
    assert isinstance(made, Refused)
    assert f"targets = {value!r} must be text" in made.message


@st.composite
def corpora(draw: st.DrawFn) -> tuple[int, list[list[int]], list[Any] | None]:
    size = draw(st.sampled_from([1, 2, 255, 256, 65_535, 65_536, 65_537, 2**24, 2**31]))
    token = st.one_of(st.integers(0, size - 1), st.sampled_from([0, size - 1]))
    documents = draw(st.lists(st.lists(token, min_size=1, max_size=8), min_size=1, max_size=6))
    if draw(st.booleans()):
        return size, documents, None
    trained: list[Any] = []
    for document in documents:
        edges = sorted(draw(st.lists(st.integers(0, len(document)), max_size=4)))
        trained.append([[a, b] for a, b in zip(edges[::2], edges[1::2], strict=False)])
    return size, documents, trained


@fuzzed()
@given(corpora())
def test_any_store_reads_back_as_it_was_written(
    prefix: Path, corpus: tuple[int, list[list[int]], list[Any] | None]
) -> None:
    size, documents, trained = corpus
    path = prefix.with_name("written")
    write(path, documents, trained, vocab_size=size)
    tokens, masks, *_ = content(path)
    assert tokens == documents
    assert TokenStore(path).vocab_size == size
    for i, document in enumerate(documents):
        spans = [[1, len(document)]] if trained is None else trained[i]
        wanted = [any(a <= t < b for a, b in spans) and t > 0 for t in range(len(document))]
        assert masks[i] == wanted


def packs_of(rows: list[int], offsets: list[int]) -> Packs:
    return Packs(
        rows=int_array("rows", rows),
        offsets=int_array("offsets", offsets),
        num_micro_batches=2,
        context_window=8,
        layout=Layout.SEPARATE,
        made_by="capacity",
        lengths=digest(int_array("lengths", LENGTHS)),
    )


def steps_of(packs: Packs) -> list[list[int]]:
    source = LengthSource(name="s", lengths=int_array("lengths", LENGTHS))
    options: Any = SimpleNamespace(num_micro_batches=2, context_window=8, layout=Layout.SEPARATE)
    packs.check(source, options)
    return [packs.rows[a:b].tolist() for a, b in pairwise(packs.offsets.tolist())]


@fuzzed()
@given(st.data())
def test_damaged_packs_are_the_same_or_refused(prefix: Path, data: st.DataObject) -> None:
    path = prefix.with_name("packs.npz")
    packs_of(ROWS, OFFSETS).save(path)
    expected = steps_of(Packs.load(path))
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    made = outcome(lambda: steps_of(Packs.load(path)))
    assert isinstance(made, Refused) or made == expected


@fuzzed()
@given(st.data())
def test_packs_of_other_arrays_train_every_document_once_or_are_refused(
    prefix: Path, data: st.DataObject
) -> None:
    path = prefix.with_name("arrays.npz")
    packs_of(ROWS, OFFSETS).save(path)
    with np.load(path) as file:
        arrays: dict[str, Any] = {name: file[name] for name in file.files}
    number = st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 2**31, 2**62])
    other = st.one_of(
        st.lists(number, max_size=6).map(lambda v: np.array(v, np.int64)),
        number.map(np.int64),
        st.sampled_from([np.array("x"), np.array(1e300), np.array([[0, 1]]), np.array([0.5])]),
    )
    for name in data.draw(st.lists(st.sampled_from(sorted(arrays)), min_size=1, max_size=2)):
        if data.draw(st.booleans()):
            arrays[name] = data.draw(other)
        else:
            arrays.pop(name, None)
    np.savez(path, **arrays)
    made = outcome(lambda: steps_of(Packs.load(path)))
    if not isinstance(made, Refused):
        assert sorted(row for rows in made for row in rows) == sorted(ROWS)


@pytest.mark.parametrize(
    ("rows", "offsets"),
    [
        ([2, 0, 3, 3], OFFSETS),
        ([2, 0, 3, -1], OFFSETS),
        (ROWS, [0, 1, 2, 3]),
        (ROWS, [4, 3, 2, 1, 0]),
        (ROWS, [0, 3, 2, 3, 4]),
        (ROWS, [0, 1, 2, 3, 3]),
        (ROWS, [1, 1, 2, 3, 4]),
        ([2, 0, 3], [0, 1, 2, 3, 3]),
        ([], [0, 0, 0]),
        (ROWS, [0]),
    ],
)
def test_packs_that_repeat_or_lose_a_document_are_refused(
    prefix: Path, rows: list[int], offsets: list[int]
) -> None:
    path = prefix.with_name("wrong.npz")
    packs_of(ROWS, OFFSETS).save(path)
    with np.load(path) as file:
        arrays: dict[str, Any] = {name: file[name] for name in file.files}
    arrays |= {"rows": np.array(rows, np.int64), "offsets": np.array(offsets, np.int64)}
    np.savez(path, **arrays)
    assert isinstance(outcome(lambda: steps_of(Packs.load(path))), Refused)


@fuzzed(0.3)
@given(st.permutations(range(6)), st.lists(st.integers(0, 3), min_size=2, max_size=2))
def test_packs_read_back_as_they_were_saved(
    prefix: Path, rows: list[int], counts: list[int]
) -> None:
    path = prefix.with_name("again.npz")
    offsets = offsets_of([*counts, 6 - sum(counts), 0]).tolist()
    packs_of(rows, offsets).save(path)
    read = Packs.load(path)
    assert (read.rows.tolist(), read.offsets.tolist()) == (rows, offsets)
