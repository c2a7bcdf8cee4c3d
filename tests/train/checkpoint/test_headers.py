"""Tests that a header which does not give each byte to one tensor is refused, and each element."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from wlb.plan import UserError
from wlb.train.checkpoint.headers import HeaderEntry, checked_headers, read_header

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}


def written(path: Path, header: bytes | dict[str, Any], num_bytes: int = 16) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))
    return path


def part(path: Path, shape: list[int], start: list[int], *, dtype: str = "F32") -> None:
    """Writes a file of a checkpoint with one part of the tensor w."""
    num_bytes = 4 * torch.Size(shape).numel()
    sharding = json.dumps({"w": {"saved_offsets": start}})
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, num_bytes]}
    about = {"format": "pt", "DCP_SHARDING_INFO": sharding}
    written(path, {"__metadata__": about, "w": entry}, num_bytes)


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(3, 5, dtype=torch.bfloat16),
        "b": torch.zeros(0, 4),
        "c": torch.tensor(1.0),
        "d": torch.zeros(7, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    assert read_header(tmp_path / "x.safetensors", remedy="") == {
        "a": HeaderEntry("BF16", (3, 5)),
        "b": HeaderEntry("F32", (0, 4)),
        "c": HeaderEntry("F32", ()),
        "d": HeaderEntry("U8", (7,)),
    }


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"a": A, "b": A}, r"b of dtype F32 .* has bytes \[0, 8\), but must begin at byte 8"),
        ({"a": A, "b": B | {"data_offsets": [4, 12]}}, r"b .* has bytes \[4, 12\)"),
        (
            {"a": A | {"data_offsets": [4, 12]}},
            r"a .* has bytes \[4, 12\), but must begin at byte 0",
        ),
        ({"a": A}, r"its header lists 8 bytes of tensors, but the file has 16"),
        ({"a": A, "b": B | {"dtype": "F64"}}, "b of dtype F64 and shape"),
        ({"a": A, "b": B | {"shape": [-2]}}, r"shape\[0\] = -2 must be a whole"),
        ({"a": A, "b": B | {"more": 1}}, "has the unknown key 'more'"),
        ({"a": A, "b": B | {"data_offsets": [8]}}, r"b has data_offsets = \[8\]"),
        ({"a": A, "b": [1]}, r"= \[1\] must be an object"),
        (json.dumps({"a": A, "b": B}).encode().replace(b'"b"', b'"a"'), "has the key 'a' twice"),
        (
            json.dumps({"a": A, "b": B}).encode().replace(b'"b"', b'"\\u0061"'),
            "has the key 'a' twice",
        ),
        (b"[]", "must be an object"),
        (b"no JSON", "is not JSON"),
    ],
)
def test_a_header_that_does_not_give_each_byte_to_one_tensor_is_refused(
    tmp_path: Path, header: Any, said: str
) -> None:
    path = written(tmp_path / "x.safetensors", header)
    with pytest.raises(UserError, match=said):
        read_header(path, remedy="get it again")


def test_parts_that_are_each_element_once_are_a_tensor(tmp_path: Path) -> None:
    for i, (shape, start) in enumerate([([2, 3], [0, 0]), ([2, 1], [0, 3]), ([1, 4], [2, 0])]):
        part(tmp_path / f"{i}.safetensors", shape, start)
    part(tmp_path / "9.safetensors", [0, 4], [3, 0])  # of a rank without rows
    assert checked_headers(tmp_path, remedy="")["w"] == HeaderEntry("F32", (3, 4), (0, 0))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([([2, 4], [0, 0]), ([2, 4], [0, 0])], "more than once"),
        ([([2, 4], [0, 0]), ([2, 4], [1, 0])], "more than once"),
        ([([2, 4], [0, 0]), ([2, 4], [3, 0])], "only in part"),
        ([([2, 4], [1, 0])], "only in part"),
        ([([2, 4], [0, 0]), ([2], [2])], r"numbers of dimensions \[1, 2\]"),
        ([([2, 4], [0])], r"w has saved_offsets = \[0\]"),
    ],
)
def test_parts_that_are_not_each_element_once_are_refused(
    tmp_path: Path, parts: list[tuple[list[int], list[int]]], said: str
) -> None:
    for i, (shape, start) in enumerate(parts):
        part(tmp_path / f"{i}.safetensors", shape, start)
    with pytest.raises(UserError, match=said):
        checked_headers(tmp_path, remedy="")


def test_parts_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    part(tmp_path / "0.safetensors", [2, 4], [0, 0])
    part(tmp_path / "1.safetensors", [2, 4], [2, 0], dtype="I32")
    with pytest.raises(
        UserError, match=r"is saved in parts of different kinds \(dtypes \['F32', 'I32'\]"
    ):
        checked_headers(tmp_path, remedy="")


def test_a_file_that_does_not_say_where_its_tensors_belong_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "x.safetensors", {"a": A, "b": B})
    with pytest.raises(UserError, match="lacks the metadata"):
        checked_headers(tmp_path, remedy="")
    about = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [0]}})}
    written(tmp_path / "x.safetensors", {"__metadata__": about, "a": A, "b": B})
    with pytest.raises(UserError, match="lacks the key 'b'"):
        checked_headers(tmp_path, remedy="")
