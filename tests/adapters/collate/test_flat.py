"""Tests flat batches against literal values: tokens, labels, padding, packed rows, bad input."""

import re
from dataclasses import replace

import numpy as np
import pytest

from wlb.adapters.collate import (
    FlatBatch,
    FlatOptions,
    flatten,
    flatten_buffer,
    flatten_micro_batch,
)
from wlb.cost import FlopsWorkload
from wlb.packing import FixedPacker, PackerOptions
from wlb.plan import (
    IGNORE,
    Documents,
    GlobalBatch,
    IntArray,
    Layout,
    MicroBatch,
    Pieces,
    split_long,
)

X = IGNORE


class Reader:
    """Reads documents whose token t of document d is 100 * d + t."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def read(self, document: int, start: int, stop: int) -> IntArray:
        return 100 * document + np.arange(start, stop)

    def length(self, document: int) -> int:
        return self.lengths[document]


def same(a: FlatBatch, b: FlatBatch) -> bool:
    arrays = ("input_ids", "labels", "position_ids", "cu_seqlens", "seq_idx")
    return (
        all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)
        and (a.max_seqlen, a.num_padding) == (b.max_seqlen, b.num_padding)
        and a.input_ids.dtype == b.input_ids.dtype
    )


def test_two_documents() -> None:
    made = flatten([[5, 6, 7], [8, 9]])
    assert made.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert made.labels.tolist() == [X, 6, 7, X, 9]
    assert made.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert made.cu_seqlens.tolist() == [0, 3, 5]
    assert made.seq_idx.tolist() == [0, 0, 0, 1, 1]
    assert (made.max_seqlen, made.num_documents, made.num_tokens, made.num_padding) == (3, 2, 5, 0)
    assert made.num_targets == 3
    assert made.next_labels is None
    assert [made.cu_seqlens.dtype, made.seq_idx.dtype] == [np.int32, np.int32]
    assert [made.input_ids.dtype, made.labels.dtype, made.position_ids.dtype] == [np.int64] * 3


@pytest.mark.parametrize("kind", ["tuple", "uint16", "int32", "mixed", "buffer", "list buffer"])
def test_every_form_of_input_gives_the_same_batch(kind: str) -> None:
    lists = [[5, 6, 7], [8, 9]]
    expected = flatten(lists)
    if kind == "tuple":
        made = flatten([tuple(row) for row in lists])
    elif kind == "mixed":
        made = flatten([lists[0], np.array(lists[1], np.uint8)])
    elif kind == "buffer":
        made = flatten_buffer(np.array([5, 6, 7, 8, 9], np.uint16), [3, 2])
    elif kind == "list buffer":
        made = flatten_buffer([5, 6, 7, 8, 9], np.array([3, 2]))
    else:
        made = flatten([np.array(row, kind) for row in lists])
    assert same(made, expected)


def test_a_batch_shares_no_memory_with_its_input() -> None:
    buffer = np.arange(5)
    labels = np.arange(5)
    made = flatten_buffer(buffer, [5], labels=labels)
    made.input_ids[:] = 0
    made.labels[:] = 0
    assert buffer.tolist() == labels.tolist() == [0, 1, 2, 3, 4]
    assert not np.shares_memory(made.input_ids, made.labels)


def test_given_labels_keep_what_is_not_trained() -> None:
    made = flatten([[5, 6, 7], [8, 9]], labels=[[X, X, 7], np.array([8, 9])])
    assert made.labels.tolist() == [X, X, 7, X, 9]
    assert made.num_targets == 2


def test_filler_is_one_segment_and_no_document() -> None:
    """TRL's pad_to_multiple_of gives each pad token position 0, so each is a segment."""
    options = FlatOptions(pad_to_multiple_of=8, pad_token_id=1)
    made = flatten([[5, 6, 7], [8, 9]], options=options)
    assert made.input_ids.tolist() == [5, 6, 7, 8, 9, 1, 1, 1]
    assert made.labels.tolist() == [X, 6, 7, X, 9, X, X, X]
    assert made.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert made.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert made.seq_idx.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert (made.num_documents, made.num_tokens, made.num_padding) == (2, 5, 3)
    assert made.lengths.tolist() == [3, 2]
    assert made.num_targets == 3
    assert flatten([[5] * 8], options=options).num_padding == 0


def test_filler_may_be_the_longest_segment() -> None:
    made = flatten([[5, 6]], options=FlatOptions(pad_to_multiple_of=8))
    assert made.max_seqlen == 6


def test_the_longest_document_not_the_row_is_max_seqlen() -> None:
    assert flatten([[1] * 4, [1] * 9, [1] * 2]).max_seqlen == 9


def test_a_packed_row_keeps_its_documents_by_length() -> None:
    """DataCollatorWithFlattening makes one document of the first row."""
    made = flatten([[1, 2, 3, 4, 5], [6, 7]], lengths=[[2, 3], [2]])
    assert made.cu_seqlens.tolist() == [0, 2, 5, 7]
    assert made.labels.tolist() == [X, 2, X, 4, 5, X, 7]
    assert made.position_ids.tolist() == [0, 1, 0, 1, 2, 0, 1]


def test_a_packed_row_keeps_its_documents_by_position() -> None:
    made = flatten([[1, 2, 3, 4, 5], [6, 7]], position_ids=[[0, 1, 0, 1, 2], [0, 1]])
    assert same(made, flatten([[1, 2, 3, 4, 5], [6, 7]], lengths=[[2, 3], [2]]))


def test_lengths_and_positions_have_to_agree() -> None:
    rows = {"position_ids": [[0, 1, 0, 1, 2]], "lengths": [[2, 3]]}
    assert flatten([[1, 2, 3, 4, 5]], **rows).lengths.tolist() == [2, 3]
    rows["lengths"] = [[3, 2]]
    with pytest.raises(ValueError, match=re.escape("lengths [3, 2], but its position_ids begin")):
        flatten([[1, 2, 3, 4, 5]], **rows)


def test_tokens_never_say_where_a_document_ends() -> None:
    eos = 0
    made = flatten([[5, eos, 6, eos], [7, eos]])
    assert made.cu_seqlens.tolist() == [0, 4, 6]
    assert made.labels.tolist() == [X, eos, 6, eos, X, eos]


def test_no_label_crosses_a_boundary() -> None:
    """Position t predicts label t + 1, which has to be of the same document or IGNORE."""
    made = flatten([[1, 2, 3, 4], [5, 6]], lengths=[[1, 3], [2]])
    predicted = np.append(made.labels[1:], X)
    following = np.append(made.input_ids[1:], X)
    crosses = np.append(made.seq_idx[1:] != made.seq_idx[:-1], True)
    assert (predicted == X).tolist() == crosses.tolist()
    assert (predicted == following)[~crosses].all()


def test_next_labels_are_labels_moved_to_the_token_that_predicts_them() -> None:
    made = flatten([[1, 2, 3], [5, 6]], options=FlatOptions(next_labels=True))
    assert made.next_labels is not None
    assert made.next_labels.tolist() == [2, 3, X, 6, X]
    assert made.num_targets == 3


def test_a_separator_of_ones_own() -> None:
    made = flatten([[1, 2], [3]], options=FlatOptions(separator_id=-1))
    assert made.labels.tolist() == [-1, 2, -1]


@pytest.mark.parametrize("options", [{}, {"next_labels": True}, {"pad_to_multiple_of": 4}])
@pytest.mark.parametrize("separator", [IGNORE, -1, 7])
def test_a_separator_is_no_target_whatever_its_id(separator: int, options: dict) -> None:
    made = flatten(
        [[1, 2, 7], [3], [4, 5]],
        labels=[[1, X, 7], [3], [4, 5]],
        options=FlatOptions(separator_id=separator, **options),
    )
    assert made.num_targets == 2


def test_int32() -> None:
    made = flatten([[1, 2], [3]], options=FlatOptions(dtype=np.int32, pad_to_multiple_of=2))
    assert {a.dtype for a in (made.input_ids, made.labels, made.position_ids)} == {
        np.dtype(np.int32)
    }
    assert made.input_ids.tolist() == [1, 2, 3, 0]
    assert flatten([np.array([7])], options=FlatOptions(dtype=np.int32)).input_ids.tolist() == [7]


def micro_batch(lengths: list[int], *, window: int) -> MicroBatch:
    documents = Documents.from_lengths(lengths)
    pieces = split_long(documents, window=window, long_documents="split")
    return MicroBatch(index=0, pieces=pieces, workload_ns=0)


def test_a_plans_micro_batch() -> None:
    lengths = [3, 7]
    batch = micro_batch(lengths, window=5)
    assert batch.lengths.tolist() == [3, 5, 2]
    options = FlatOptions(next_labels=True, pad_to_multiple_of=4)
    made = flatten_micro_batch(batch, Reader(lengths), options=options)
    assert made.input_ids.tolist() == [0, 1, 2, 100, 101, 102, 103, 104, 105, 106, 0, 0]
    assert made.cu_seqlens.tolist() == [0, *batch.cu_seqlens[1:].tolist(), 12]
    assert made.next_labels is not None
    # 105 is the target of the piece that was cut behind 104.
    assert made.next_labels.tolist() == [1, 2, X, 101, 102, 103, 104, 105, 106, X, X, X]
    assert made.num_targets == batch.num_targets == 8
    unshifted = flatten_micro_batch(batch, Reader(lengths))
    assert unshifted.num_targets == batch.num_targets - 1


@pytest.mark.parametrize("separator", [IGNORE, -1, 4])
def test_the_targets_of_a_cut_document_are_counted_beside_separators(separator: int) -> None:
    """4 is also the label of the piece that ends before it."""
    options = FlatOptions(next_labels=True, separator_id=separator)
    made = flatten_micro_batch(micro_batch([6, 2], window=4), Reader([6, 2]), options=options)
    assert made.num_targets == 5 + 1


def test_all_micro_batches_of_a_plan_hold_the_plans_targets() -> None:
    lengths = [9, 30, 4, 1, 17, 25, 6, 8]
    options = PackerOptions(num_micro_batches=5, context_window=20, cost=FlopsWorkload())
    packer = FixedPacker(options=options)
    batch = GlobalBatch(index=0, documents=Documents.from_lengths(lengths))
    plans, _ = packer.push(batch, packer.start())
    made = [
        flatten_micro_batch(mb, Reader(lengths), options=FlatOptions(next_labels=True))
        for plan in plans
        for mb in plan.micro_batches
    ]
    assert sum(flat.num_targets for flat in made) == sum(plan.num_targets for plan in plans)
    assert sum(flat.num_tokens for flat in made) == sum(plan.num_tokens for plan in plans)


def test_filler_may_be_cut_so_that_no_position_leaves_a_models_table() -> None:
    options = FlatOptions(pad_to_multiple_of=12, longest_padding=3, next_labels=True)
    made = flatten([[5, 6, 7], [8, 9]], options=options)
    assert made.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2, 0]
    assert made.cu_seqlens.tolist() == [0, 3, 5, 8, 11, 12]
    assert made.seq_idx.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 4]
    assert (made.num_documents, made.num_tokens, made.num_padding) == (2, 5, 7)
    assert (made.max_seqlen, made.num_targets, made.lengths.tolist()) == (3, 3, [3, 2])
    assert made.next_labels is not None
    assert made.next_labels.tolist() == [6, 7, X, 9, *[X] * 8]
    empty = MicroBatch(index=0, pieces=Pieces.empty(), workload_ns=0)
    made = flatten_micro_batch(empty, Reader([]), options=options)
    assert made.cu_seqlens.tolist() == [0, 3, 6, 9, 12]
    assert (made.num_documents, made.num_tokens, made.num_targets) == (0, 0, 0)


def test_a_micro_batch_without_pieces_is_filler() -> None:
    empty = MicroBatch(index=0, pieces=Pieces.empty(), workload_ns=0)
    made = flatten_micro_batch(empty, Reader([]), options=FlatOptions(pad_to_multiple_of=4))
    assert made.cu_seqlens.tolist() == [0, 4]
    assert (made.num_documents, made.num_tokens, made.num_targets) == (0, 0, 0)
    assert flatten_micro_batch(empty, Reader([])).input_ids.tolist() == [0]


@pytest.mark.parametrize("layout", [Layout.PADDED, Layout.JOINED])
def test_other_layouts_are_refused(layout: Layout) -> None:
    other = replace(micro_batch([3, 5], window=8), layout=layout)
    with pytest.raises(
        ValueError, match=rf"packing\.layout = {layout}, .* plan with packing.layout = separate"
    ):
        flatten_micro_batch(other, Reader([3, 5]))


def test_a_reader_that_gives_too_few_tokens_is_named() -> None:
    class Short(Reader):
        def read(self, document: int, start: int, stop: int) -> IntArray:
            return super().read(document, start, min(stop, 4))

    with pytest.raises(ValueError, match="example 1 has 5 tokens but 4 tokens that were read"):
        flatten_micro_batch(micro_batch([3, 5], window=8), Short([3, 5]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flatten([]), "at least one example"),
        (lambda: flatten([[1], []]), "example 1 has no tokens"),
        (lambda: flatten([[1], [2, 2.5]]), "tokens of example 1: entry 1 is 2.5"),
        (lambda: flatten([[1, None]]), "entry 1 is None"),
        (lambda: flatten([[1, 2**63]]), "entry 1 is 9223372036854775808"),
        (lambda: flatten([[[1, 2]]]), "entry 0 is [1, 2]"),
        (lambda: flatten([np.ones((1, 3), int)]), "have shape (1, 3), but must have one axis"),
        (lambda: flatten([np.ones(3)]), "tokens of example 0 have dtype float64"),
        (lambda: flatten([np.array([2**63], np.uint64)]), "which int64 cannot represent"),
        (
            lambda: flatten([np.array([2**31])], options=FlatOptions(dtype=np.int32)),
            "which int32 cannot represent",
        ),
        (lambda: flatten([[1, 2]], labels=[[1]]), "example 0 has 2 tokens but 1 labels"),
        (
            lambda: flatten([[1, 2]], labels=[]),
            "labels are given for 0 examples, but tokens for 1 example",
        ),
        (lambda: flatten([[1, 2]], labels=[[1, 0.5]]), "labels of example 0: entry 1 is 0.5"),
        (
            lambda: flatten([[1, 2]], lengths=[]),
            "lengths are given for 0 examples, but tokens for 1 example",
        ),
        (lambda: flatten([[1, 2]], lengths=[[1, 2]]), "lengths [1, 2] add up to 3"),
        (lambda: flatten([[1, 2]], lengths=[[2, 0]]), "lengths of example 0: lengths[1] = 0"),
        (lambda: flatten([[1], [2]], position_ids=[[0], [1]]), "position_ids of example 1 begin"),
        (lambda: flatten([[1, 2]], position_ids=[[0]]), "2 tokens but 1 position_ids"),
        (lambda: flatten_buffer([1, 2], [3]), "the buffer has 2 tokens"),
        (lambda: flatten_buffer([], []), "at least one document"),
        (lambda: FlatOptions(pad_to_multiple_of=0), "pad_to_multiple_of = 0"),
        (lambda: FlatOptions(longest_padding=0), "longest_padding = 0"),
        (lambda: FlatOptions(pad_token_id=-1), "pad_token_id = -1"),
        (lambda: FlatOptions(position_ids_start=-1), "position_ids_start = -1"),
        (lambda: FlatOptions(dtype=np.int16), "must be numpy.int64 or numpy.int32"),  # pyright: ignore
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
