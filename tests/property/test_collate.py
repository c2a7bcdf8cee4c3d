"""Tests that collation keeps boundaries in every form, loses no token, and adds targets up."""

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wlb.adapters.collate import (
    FlatOptions,
    PadOptions,
    Side,
    block_mask,
    cu_seqlens_from_lengths,
    cu_seqlens_from_position_ids,
    flatten,
    flatten_buffer,
    lengths_from_cu_seqlens,
    lengths_from_position_ids,
    pad,
    position_ids_from_lengths,
)
from wlb.plan import IGNORE

lengths_of = st.lists(st.integers(1, 40) | st.integers(500, 900), min_size=1, max_size=12)
documents_of = st.lists(
    st.lists(st.integers(0, 70_000), min_size=1, max_size=9), min_size=1, max_size=8
)


@given(lengths_of, st.integers(0, 3))
def test_lengths_offsets_and_positions_say_the_same(lengths: list[int], start: int) -> None:
    offsets = cu_seqlens_from_lengths(lengths)
    assert lengths_from_cu_seqlens(offsets).tolist() == lengths
    ids = position_ids_from_lengths(lengths, start=start)
    assert ids.tolist() == [start + i for n in lengths for i in range(n)]
    assert lengths_from_position_ids(ids, start=start).tolist() == lengths
    assert np.array_equal(cu_seqlens_from_position_ids(ids, start=start), offsets)


@given(
    documents_of,
    st.none() | st.integers(1, 20),
    st.none() | st.integers(1, 20),
    st.sampled_from(["list", "int32", "buffer"]),
)
def test_tokens_are_conserved_and_targets_add_up(
    documents: list[list[int]], multiple: int | None, longest: int | None, kind: str
) -> None:
    options = FlatOptions(pad_to_multiple_of=multiple, longest_padding=longest, next_labels=True)
    if kind == "buffer":
        made = flatten_buffer(list(chain(*documents)), [len(d) for d in documents], options=options)
    elif kind == "int32":
        made = flatten([np.array(d, np.int32) for d in documents], options=options)
    else:
        made = flatten(documents, options=options)
    offsets = made.cu_seqlens.tolist()
    ids = made.input_ids.tolist()
    found = [ids[offsets[i] : offsets[i + 1]] for i in range(made.num_documents)]
    assert found == documents
    assert offsets[-1] == len(ids)
    assert len(ids) % (multiple or 1) == 0
    assert made.num_padding < (multiple or 1)
    assert made.max_seqlen == max(np.diff(offsets))
    assert max(np.diff(offsets)[made.num_documents :], default=0) <= (longest or len(ids))
    targets = [token for d in documents for token in d[1:]]
    assert made.num_targets == len(targets)
    assert [label for label in made.labels.tolist() if label != IGNORE] == targets
    assert made.next_labels is not None
    assert [label for label in made.next_labels.tolist() if label != IGNORE] == targets
    # Nobody who reads position ids instead of cu_seqlens sees other segments.
    assert np.array_equal(cu_seqlens_from_position_ids(made.position_ids), made.cu_seqlens)


@given(documents_of, st.data())
def test_rows_that_are_packed_already_give_the_batch_of_their_documents(
    documents: list[list[int]], data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents)))
    rows: list[list[list[int]]] = []
    for document, is_new in zip(documents, cuts, strict=True):
        if is_new or not rows:
            rows.append([])
        rows[-1].append(document)
    lengths = [[len(d) for d in row] for row in rows]
    packed = [list(chain(*row)) for row in rows]
    expected = flatten(documents)
    positions = [position_ids_from_lengths(row) for row in lengths]
    for made in (flatten(packed, lengths=lengths), flatten(packed, position_ids=positions)):
        assert np.array_equal(made.cu_seqlens, expected.cu_seqlens)
        assert np.array_equal(made.labels, expected.labels)
        assert np.array_equal(made.input_ids, expected.input_ids)


@given(documents_of, st.sampled_from(list(Side)), st.integers(1, 5))
def test_padded_rows_hold_their_documents(
    documents: list[list[int]], side: Side, multiple: int
) -> None:
    options = PadOptions(pad_token_id=7, side=side, pad_to_multiple_of=multiple)
    made = pad(documents, options=options)
    is_token = made.attention_mask == 1
    assert [row[seen].tolist() for row, seen in zip(made.input_ids, is_token, strict=True)] == (
        documents
    )
    assert (made.input_ids[~is_token] == 7).all()
    assert (made.labels[~is_token] == IGNORE).all()
    targets = made.labels[made.labels != IGNORE].tolist()
    assert targets == flatten(documents).labels[flatten(documents).labels != IGNORE].tolist()


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.none() | st.integers(1, 6))
def test_a_mask_is_what_its_definition_says(lengths: list[int], window: int | None) -> None:
    offsets = cu_seqlens_from_lengths(lengths)
    mask = block_mask(offsets, window=window)
    segment = [i for i, n in enumerate(lengths) for _ in range(n)]
    for t in range(len(segment)):
        for s in range(len(segment)):
            near = window is None or t - s < window
            assert mask[t, s] == (segment[t] == segment[s] and s <= t and near)
