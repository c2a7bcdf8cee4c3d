"""Tests padded batches against literal values."""

import re

import numpy as np
import pytest

from wlb.adapters.collate import PadOptions, PadTo, Side, pad
from wlb.plan import IGNORE

X = IGNORE
ROWS = [[5, 6, 7], [8, 9], [3]]


def test_right() -> None:
    made = pad(ROWS, options=PadOptions(pad_token_id=1))
    assert made.input_ids.tolist() == [[5, 6, 7], [8, 9, 1], [3, 1, 1]]
    assert made.labels.tolist() == [[X, 6, 7], [X, 9, X], [X, X, X]]
    assert made.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert made.position_ids.tolist() == [[0, 1, 2], [0, 1, 0], [0, 0, 0]]
    assert made.lengths.tolist() == [3, 2, 1]


def test_left() -> None:
    made = pad(ROWS, options=PadOptions(pad_token_id=1, side=Side.LEFT))
    assert made.input_ids.tolist() == [[5, 6, 7], [1, 8, 9], [1, 1, 3]]
    # 8 and 3 are no targets: they would be predicted from padding.
    assert made.labels.tolist() == [[X, 6, 7], [X, X, 9], [X, X, X]]
    assert made.attention_mask.tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
    assert made.position_ids.tolist() == [[0, 1, 2], [0, 0, 1], [0, 0, 0]]


def test_given_labels() -> None:
    made = pad([[5, 6, 7], [8, 9]], labels=[[X, X, 7], [8, 9]], options=PadOptions(pad_token_id=0))
    assert made.labels.tolist() == [[X, X, 7], [X, 9, X]]


@pytest.mark.parametrize(
    ("options", "width"),
    [
        (PadOptions(pad_token_id=0), 3),
        (PadOptions(pad_token_id=0, pad_to_multiple_of=4), 4),
        (PadOptions(pad_token_id=0, pad_to_multiple_of=3), 3),
        (PadOptions(pad_token_id=0, max_length=8, pad_to_multiple_of=4), 4),
        (PadOptions(pad_token_id=0, max_length=3), 3),
        (PadOptions(pad_token_id=0, max_length=8, pad_to=PadTo.MAX_LENGTH), 8),
        (PadOptions(pad_token_id=0, max_length=8, pad_to="max_length", side="left"), 8),  # pyright: ignore
    ],
)
def test_widths(options: PadOptions, width: int) -> None:
    made = pad([np.array(row, np.uint16) for row in ROWS], options=options)
    assert made.input_ids.shape == made.attention_mask.shape == (3, width)
    assert made.attention_mask.sum() == 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: pad(ROWS, options=PadOptions(pad_token_id=0, max_length=2)),
            "example 0 has 3 tokens, more than max_length = 2",
        ),
        (lambda: pad([], options=PadOptions(pad_token_id=0)), "at least one example"),
        (lambda: pad([[1], []], options=PadOptions(pad_token_id=0)), "example 1 has no tokens"),
        (lambda: PadOptions(pad_token_id=-1), "pad_token_id = -1"),
        (lambda: PadOptions(pad_token_id=0, pad_to=PadTo.MAX_LENGTH), "needs a width"),
        (lambda: PadOptions(pad_token_id=0, max_length=0), "max_length = 0"),
        (lambda: PadOptions(pad_token_id=0, pad_to_multiple_of=0), "pad_to_multiple_of = 0"),
        (
            lambda: PadOptions(pad_token_id=0, max_length=10, pad_to_multiple_of=4),
            "max_length = 10 must be a multiple of pad_to_multiple_of = 4",
        ),
        (lambda: PadOptions(pad_token_id=0, side="top"), "'top' is not a valid Side"),  # pyright: ignore
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
