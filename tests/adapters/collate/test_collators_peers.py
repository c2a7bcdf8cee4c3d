"""Tests our collators beside transformers' and TRL's: equal if those are right, and their errors.

The second half shows each error on the peer's own batch, so that it is seen when a version fixes
it.
"""

from typing import Any

import numpy as np
import pytest
import torch

from wlb.adapters.collate import PaddingFreeCollator
from wlb.plan import IGNORE

transformers = pytest.importorskip("transformers", reason="needs the extra [hf]")

X = IGNORE
ROWS = [[5, 6, 7], [8], [9, 10, 11, 12], [3, 4]]


def features(*, kind: str = "list", labels: bool = False) -> list[dict[str, Any]]:
    make = {"list": list, "numpy": np.array, "torch": torch.tensor}[kind]
    out: list[dict[str, Any]] = [{"input_ids": make(row)} for row in ROWS]
    if labels:
        for feature, row in zip(out, ROWS, strict=True):
            feature["labels"] = make([X, *row[1:]])
    return out


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) != []
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        assert type(ours[key]) is type(value), key
        if isinstance(value, int):
            assert ours[key] == value, key
        else:
            assert ours[key].dtype == value.dtype, key
            assert ours[key].shape == value.shape, key
            assert (ours[key] == value).all(), key


@pytest.mark.parametrize("tensors", ["pt", "np"])
@pytest.mark.parametrize("kind", ["list", "numpy", "torch"])
@pytest.mark.parametrize("labels", [False, True])
def test_equal_to_transformers_with_every_option(tensors: str, kind: str, labels: bool) -> None:
    options: dict[str, Any] = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
    ours = PaddingFreeCollator(**options, position_ids_start=2)
    theirs = transformers.DataCollatorWithFlattening(**options, position_ids_start=2)
    rows = features(kind=kind, labels=labels)
    assert_same(ours(rows, return_tensors=tensors), theirs(rows, return_tensors=tensors))  # pyright: ignore


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"separator_id": -1},
        {"return_flash_attn_kwargs": True, "return_position_ids": False},
        {"return_seq_idx": True},
    ],
)
def test_equal_to_transformers_with_single_options(options: dict[str, Any]) -> None:
    theirs = transformers.DataCollatorWithFlattening(**options)
    assert_same(PaddingFreeCollator(**options)(features()), theirs(features()))


def test_transformers_makes_one_document_of_a_packed_row() -> None:
    rows = [{"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [2, 3]}]
    theirs = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)
    assert theirs["cu_seq_lens_q"].tolist() == [0, 5]
    assert theirs["labels"].tolist() == [[X, 2, 3, 4, 5]]  # 3 is trained from another document
    ours = PaddingFreeCollator(return_flash_attn_kwargs=True)(rows)
    assert ours["cu_seq_lens_q"].tolist() == [0, 2, 5]
    assert ours["labels"].tolist() == [[X, 2, X, 4, 5]]


def trl_collator(**options: Any) -> Any:
    trainer = pytest.importorskip("trl.trainer.sft_trainer", reason="needs the extra [hf]")
    return trainer.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, **options)


def test_equal_to_trl_on_packed_rows() -> None:
    rows = [
        {"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [2, 3]},
        {"input_ids": [6, 7], "seq_lengths": [2]},
    ]
    ours = PaddingFreeCollator(return_flash_attn_kwargs=True, return_seq_idx=True)
    assert_same(ours(rows), trl_collator()(rows))


def test_trl_makes_a_segment_of_each_pad_token() -> None:
    theirs = trl_collator(pad_to_multiple_of=8)(features()[:1])
    assert theirs["cu_seq_lens_q"].tolist() == [0, 3, 4, 5, 6, 7, 8]
    ours = PaddingFreeCollator(return_flash_attn_kwargs=True, pad_to_multiple_of=8)
    assert ours(features()[:1])["cu_seq_lens_q"].tolist() == [0, 3, 8]
