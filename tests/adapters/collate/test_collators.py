"""Tests the collators: the paper's example, keys and dtypes, DataLoader workers, refusals."""

import pickle
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.sets import nightly
from wlb.adapters.collate import FlatOptions, PaddedCollator, PaddingFreeCollator, flatten
from wlb.plan import IGNORE

X = IGNORE
PAPER = [
    [10, 11, 12, 13],
    [20, 21, 22, 23, 24, 25, 26, 27],
    [30, 31, 32, 33, 34],
    [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 410],
]


def features(rows: list[list[int]] = PAPER) -> list[dict[str, Any]]:
    return [{"input_ids": row} for row in rows]


def test_the_papers_example() -> None:
    """The example is in Section 3.5 of "Enhancing Training Efficiency Using Packing with Flash
    Attention".
    """
    batch = PaddingFreeCollator()(features())
    # fmt: off
    expected = {
        "input_ids": [[
            10, 11, 12, 13, 20, 21, 22, 23, 24, 25, 26, 27, 30, 31, 32, 33, 34,
            40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 410,
        ]],
        "labels": [[
            -100, 11, 12, 13, -100, 21, 22, 23, 24, 25, 26, 27, -100, 31, 32, 33, 34,
            -100, 41, 42, 43, 44, 45, 46, 47, 48, 49, 410,
        ]],
        "position_ids": [[
            0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4,
            0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10,
        ]],
    }
    # fmt: on
    assert {key: value.tolist() for key, value in batch.items()} == expected
    assert list(batch) == list(expected)
    assert {value.dtype for value in batch.values()} == {torch.int64}
    assert batch["input_ids"].shape == (1, 28)


def test_everything_that_can_be_returned() -> None:
    collator = PaddingFreeCollator(
        return_flash_attn_kwargs=True, return_seq_idx=True, return_shift_labels=True
    )
    batch = collator(features([[5, 6, 7], [8, 9]]))
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 5]
    assert (batch["max_length_q"], batch["max_length_k"]) == (3, 3)
    assert type(batch["max_length_q"]) is int
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1]]
    assert batch["shift_labels"].tolist() == [[6, 7, X, 9, X]]
    assert batch["seq_idx"].dtype == batch["cu_seq_lens_q"].dtype == torch.int32


def test_numpy_instead_of_tensors() -> None:
    collator = PaddingFreeCollator(return_flash_attn_kwargs=True, return_tensors="np")
    batch = collator(features())
    assert isinstance(batch["input_ids"], np.ndarray)
    again = collator(features(), return_tensors="pt")
    for key in ("input_ids", "labels", "position_ids", "cu_seq_lens_q"):
        assert np.array_equal(batch[key], again[key].numpy())


def test_tensors_as_input() -> None:
    rows = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in PAPER]
    batch = PaddingFreeCollator()(rows)
    assert torch.equal(batch["labels"], PaddingFreeCollator()(features())["labels"])
    batch["input_ids"].zero_()
    assert rows[0]["input_ids"].tolist() == PAPER[0]


@pytest.mark.parametrize("key", ["seq_lengths", "lengths"])
def test_a_packed_row_with_lengths(key: str) -> None:
    rows = [{"input_ids": [1, 2, 3, 4, 5], key: [2, 3]}, {"input_ids": [6, 7], key: [2]}]
    batch = PaddingFreeCollator(return_flash_attn_kwargs=True)(rows)
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 5, 7]
    assert batch["labels"].tolist() == [[X, 2, X, 4, 5, X, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 1]]


def test_a_packed_row_with_positions() -> None:
    rows = [{"input_ids": [1, 2, 3, 4, 5], "position_ids": [0, 1, 0, 1, 2]}]
    batch = PaddingFreeCollator(return_flash_attn_kwargs=True)(rows)
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 5]


def test_filler_and_positions_that_begin_elsewhere() -> None:
    collator = PaddingFreeCollator(
        pad_to_multiple_of=4,
        pad_token_id=9,
        position_ids_start=2,
        return_flash_attn_kwargs=True,
        return_seq_idx=True,
    )
    batch = collator(features([[5, 6, 7], [8, 9]]), separator_id=-1)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 9, 9, 9]]
    assert batch["labels"].tolist() == [[-1, 6, 7, -1, 9, X, X, X]]
    assert batch["position_ids"].tolist() == [[2, 3, 4, 2, 3, 2, 3, 4]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 8]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]


def test_a_batch_that_was_flattened_elsewhere() -> None:
    collator = PaddingFreeCollator(return_position_ids=False, return_flash_attn_kwargs=True)
    batch = collator.batch(flatten(PAPER))
    assert set(batch) == {
        "input_ids",
        "labels",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    }
    shifted = PaddingFreeCollator(return_shift_labels=True)
    with pytest.raises(
        ValueError, match="return_shift_labels = True needs a FlatBatch with next_labels"
    ):
        shifted.batch(flatten(PAPER))
    made = shifted.batch(flatten(PAPER, options=FlatOptions(next_labels=True)))
    assert made["shift_labels"][0, :4].tolist() == [11, 12, 13, X]


def test_padded() -> None:
    batch = PaddedCollator(pad_token_id=0, side="left", pad_to_multiple_of=4)(  # pyright: ignore
        features([[5, 6, 7], [8, 9]])
    )
    assert {key: value.tolist() for key, value in batch.items()} == {
        "input_ids": [[0, 5, 6, 7], [0, 0, 8, 9]],
        "labels": [[X, X, 6, 7], [X, X, X, 9]],
        "attention_mask": [[0, 1, 1, 1], [0, 0, 1, 1]],
        "position_ids": [[0, 0, 1, 2], [0, 0, 0, 1]],
    }
    assert {value.dtype for value in batch.values()} == {torch.int64}
    plain = PaddedCollator(pad_token_id=0, return_position_ids=False, return_tensors="np")
    assert set(plain(features())) == {"input_ids", "labels", "attention_mask"}


@pytest.mark.process
@pytest.mark.full
@pytest.mark.parametrize(
    "collator",
    [PaddingFreeCollator(return_flash_attn_kwargs=True), PaddedCollator(pad_token_id=0)],
    ids=["padding-free", "padded"],
)
@pytest.mark.parametrize("start", ["fork", *nightly("spawn")])
def test_workers_of_a_data_loader(collator: Any, start: str) -> None:
    loader = DataLoader(
        features(), batch_size=2, collate_fn=collator, num_workers=1, multiprocessing_context=start
    )
    batches = list(loader)
    assert len(batches) == 2
    for batch, rows in zip(batches, (PAPER[:2], PAPER[2:]), strict=True):
        expected = collator(features(rows))
        assert set(batch) == set(expected)
        for key, value in expected.items():
            assert np.array_equal(batch[key], value)
            assert not isinstance(value, torch.Tensor) or not batch[key].is_cuda


def test_a_collator_is_a_plain_value() -> None:
    collator = PaddingFreeCollator(pad_to_multiple_of=64)
    assert pickle.loads(pickle.dumps(collator)) == collator


@pytest.mark.process
def test_importing_the_room_leaves_torch_out() -> None:
    code = (
        "import sys; from wlb.adapters.collate import PaddingFreeCollator;"
        "PaddingFreeCollator(return_tensors='np')([{'input_ids': [1, 2]}]);"
        "print(sorted(m for m in sys.modules if 'torch' in m))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"wlb-llm\[train\]"):
        PaddingFreeCollator()(features())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one example"),
        ([{"text": "a"}], "example 0 has the keys ['text'], but no input_ids"),
        ([{"input_ids": [1, 2], "attention_mask": [1, 0]}], "and 1 ones; tokenize without"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], "its attention_mask has shape (1,)"),
        ([{"input_ids": [1], "labels": [1]}, {"input_ids": [2]}], "['input_ids'], but no labels"),
        ([{"input_ids": [1]}, {"input_ids": [2], "seq_lengths": [1]}], "but no seq_lengths"),
        ([{"input_ids": [1], "seq_lengths": [1], "lengths": [1]}], "give only one of the two"),
        (
            [{"input_ids": [1, 2], "completion_mask": [0, 1]}],
            "examples have the key completion_mask",
        ),
        ([{"input_ids": [[1, 2]]}], "entry 0 is [1, 2]"),
    ],
)
def test_features_that_would_be_guessed_at(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        PaddingFreeCollator()(rows)


def test_an_attention_mask_of_ones_says_nothing() -> None:
    rows = [{"input_ids": row, "attention_mask": [1] * len(row), "text": "x"} for row in PAPER]
    assert torch.equal(
        PaddingFreeCollator()(rows)["input_ids"], PaddingFreeCollator()(features())["input_ids"]
    )


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [1, 2, 3], "seq_lengths": [1, 2]},
        {"input_ids": [1, 2, 3], "position_ids": [0, 0, 1]},
    ],
)
def test_a_padded_batch_refuses_packed_rows(row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="example 0 is a packed row of 2 documents"):
        PaddedCollator(pad_token_id=0)([row])


@pytest.mark.parametrize("collator", [PaddedCollator(pad_token_id=0), PaddingFreeCollator()])
def test_lengths_of_other_tokens_are_refused(collator: Any) -> None:
    with pytest.raises(ValueError, match=r"example 0 has 5 tokens, .* \[3\] add up to 3"):
        collator([{"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [3]}])


@pytest.mark.parametrize("lengths", [3, np.int64(3), np.array(3)])
@pytest.mark.parametrize("collator", [PaddedCollator(pad_token_id=0), PaddingFreeCollator()])
def test_lengths_that_are_no_list_are_refused(collator: Any, lengths: Any) -> None:
    with pytest.raises(ValueError, match=r"lengths of example 0: lengths has shape .* one axis"):
        collator([{"input_ids": [1, 2, 3], "lengths": lengths}])


def test_options_that_cannot_be_meant() -> None:
    with pytest.raises(ValueError, match="would not say where documents begin"):
        PaddingFreeCollator(return_position_ids=False)
    with pytest.raises(ValueError, match="return_tensors = 'tf' must be 'pt' or 'np'"):
        PaddingFreeCollator(return_tensors="tf")  # pyright: ignore
    with pytest.raises(ValueError, match="pad_to_multiple_of = 0"):
        PaddingFreeCollator(pad_to_multiple_of=0)
    with pytest.raises(ValueError, match="pad_to = max_length needs a width"):
        PaddedCollator(pad_token_id=0, pad_to="max_length")  # pyright: ignore


@pytest.mark.parametrize("option", [{"dtype": np.int32}, {"next_labels": True}])
def test_options_that_follow_from_others_are_no_arguments(option: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(option))):
        PaddingFreeCollator(**option)
    assert PaddingFreeCollator(return_shift_labels=True).next_labels
