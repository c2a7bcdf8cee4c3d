"""Tests documents and pieces: how long documents are split and cut, and what is refused."""

import pytest

from wlb.plan import DocumentIds, Documents, Pieces, cut_at, int_array, split_long


def spans(pieces: Pieces) -> list[tuple[int, int, int]]:
    columns = (pieces.document.tolist(), pieces.start.tolist(), pieces.stop.tolist())
    return list(zip(*columns, strict=True))


def test_long_documents_become_pieces_of_a_window() -> None:
    pieces = split_long(Documents.from_lengths([5, 12, 10]), window=5, long_documents="split")
    assert spans(pieces) == [(0, 0, 5), (1, 0, 5), (1, 5, 10), (1, 10, 12), (2, 0, 5), (2, 5, 10)]
    # A part that ends before its document is labelled to its end; a document's last token is not.
    assert pieces.num_targets.tolist() == [4, 5, 5, 1, 5, 4]


def test_long_documents_can_be_refused() -> None:
    with pytest.raises(ValueError, match="document 1 has 12 tokens, more than the context window"):
        split_long(Documents.from_lengths([5, 12]), window=5, long_documents="refuse")
    with pytest.raises(ValueError, match="'truncate'"):
        split_long(Documents.from_lengths([5, 12]), window=5, long_documents="truncate")


def test_a_document_with_labels_on_some_tokens_is_not_cut() -> None:
    zero = [0]
    documents = Documents(id=[7], length=[12], num_targets=[3], source=zero)
    with pytest.raises(ValueError, match="document 7 must be cut, but only 3 of its 12 tokens"):
        split_long(documents, window=5, long_documents="split")


def test_cut_keeps_every_token_and_label() -> None:
    pieces = split_long(Documents.from_lengths([4, 6]), window=9, long_documents="split")
    cut = cut_at(pieces, [2, 4, 9, 100])
    assert spans(cut) == [(0, 0, 2), (0, 2, 4), (1, 0, 5), (1, 5, 6)]
    assert cut.num_targets.tolist() == [2, 1, 5, 0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([3, 0], r"lengths\[1\] = 0 must be at least 1"),
        ([3, -2], r"= -2 must be at least 1"),
        ([3.0, float("nan")], r"\[1\] = nan is not a whole number"),
        ([2.5], r"\[0\] = 2.5 is not a whole number"),
        ([[1, 2]], "one axis"),
        (["a"], "has dtype"),
    ],
)
def test_bad_lengths_are_named(bad: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Documents.from_lengths(bad)


def test_columns_are_read_only_and_of_one_length() -> None:
    documents = Documents.from_lengths([3, 4])
    with pytest.raises(ValueError, match="read-only"):
        documents.length[0] = 9
    with pytest.raises(ValueError, match="must have the same length"):
        Documents(id=[1], length=[1, 2], num_targets=[0], source=[0])


def test_ids_count_on_from_epoch_to_epoch() -> None:
    ids = DocumentIds(num_documents=10)
    assert ids.of(2, int_array("row", [0, 7])).tolist() == [20, 27]
    assert ids.row(27) == 7


def test_a_stop_whose_distance_is_beyond_64_bits_is_refused() -> None:
    one = int_array("one", [0])
    with pytest.raises(ValueError, match=r"Pieces.stop\[0\] = -9223372036854775808 must be"):
        Pieces(
            document=one,
            start=int_array("start", [512]),
            stop=int_array("stop", [-(2**63)]),
            num_targets=one,
            source=one,
            arrival_step=one,
        )
