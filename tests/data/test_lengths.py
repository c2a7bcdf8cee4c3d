"""Tests length-only sources: files, and the family that reproduces the paper."""

import json

import numpy as np
import pytest

from wlb.data import FAMILIES, LengthFamily, LengthSource, lengths_of_family, lengths_of_file


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "3\n1\n\n  20 \n"),
        ("a.txt", "3\n1.0\n2e1"),
        ("a.json", "[3, 1, 20.0]"),
        ("noending", "3\n1\n20"),
    ],
)
def test_reads_text_and_json(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    source = lengths_of_file(tmp_path / name, source_id=7)
    assert source.lengths.tolist() == [3, 1, 20]
    assert (source.num_documents, source.num_tokens, source.source_id) == (3, 24, 7)
    assert source.lengths.dtype == np.int64
    assert not source.lengths.flags.writeable


@pytest.mark.parametrize("dtype", ["u1", "i4", ">i8", "f4"])
def test_reads_npy(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.array([3, 1, 20], dtype))
    assert lengths_of_file(tmp_path / "a.npy").lengths.tolist() == [3, 1, 20]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([3, 0], "length 1 is 0; a length is at least 1 token"),
        ([3, -2, 0], "length 1 is -2; "),
        ([3, 1.5], "length 1 is 1.5, not a whole number"),
        ([3, float("nan")], "length 1 is nan, not a whole number"),
        ([3, float("inf")], "length 1 is inf, not a whole number"),
        ([3, 10**400], "length 1 is 1000.*, not a whole number"),
        ([3, 2**63 - 1], "length 1 is 9223372036854775807"),
        ([True], "length 0 is True, not a whole number"),
        (["3"], "length 0 is '3', not a whole number"),
        ([[3]], r"length 0 is \[3\], not a whole number"),
        ([None], "length 0 is None, not a whole number"),
        ([], "has no lengths; the corpus has no document"),
        ({"lengths": [3]}, "holds a dict; it must hold a list"),
    ],
)
def test_json_that_holds_no_lengths_is_refused(tmp_path, values, message):
    (tmp_path / "a.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message) as error:
        lengths_of_file(tmp_path / "a.json")
    assert "a.json" in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([3.0, np.nan]), "length 1 is nan, not a whole number"),
        (np.array([[3]]), r"one axis of integers, not int64 of shape \(1, 1\)"),
        (np.array(["3"]), "one axis of integers, not <U1"),
        (np.array([True]), "one axis of integers, not bool"),
        (np.array([2**64 - 1], np.uint64), "length 0 is 18446744073709551615"),
        (np.zeros(0, np.int64), "has no lengths"),
    ],
)
def test_npy_that_holds_no_lengths_is_refused(tmp_path, values, message):
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(ValueError, match=message):
        lengths_of_file(tmp_path / "a.npy")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.npy", b"no numpy", "is not a .npy array of integers"),
        ("a.npy", b"", "is not a .npy array of integers"),
        ("a.json", b"{", "is not JSON"),
        ("a.txt", b"3\nx4\n", "length 1 is 'x4', not a whole number"),
        ("a.txt", b"\n \n", "has no lengths"),
        ("a.txt", b"\xff\xfe", "length 0 is '.*', not a whole number"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        lengths_of_file(tmp_path / name)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no file of lengths at .*a\.npy"):
        lengths_of_file(tmp_path / "a.npy")


def test_source_checks_its_lengths():
    with pytest.raises(ValueError, match="mine: length 1 is 0"):
        LengthSource(name="mine", lengths=np.array([1, 0]))


@pytest.mark.parametrize("window", [4096, 131072])
def test_paper_family_has_its_shares_of_tokens(window):
    source = lengths_of_family("wlb_paper", window=window, num_documents=400_000, seed=1)
    lengths, total = source.lengths, source.num_tokens
    assert 1 <= lengths.min() <= lengths.max() == window
    assert np.median(lengths) == pytest.approx(750 / 131072 * window, rel=0.04)
    assert lengths[lengths < window / 2].sum() / total == pytest.approx(0.78, abs=0.02)
    assert lengths[lengths == window].sum() / total == pytest.approx(0.146, abs=0.01)
    body, tail, atom = FAMILIES["wlb_paper"].document_shares
    assert body + tail + atom == pytest.approx(1)
    assert (lengths == window).mean() == pytest.approx(atom, rel=0.05)


@pytest.mark.parametrize("tail_exponent", [0.5, 1.0, 1.0001, 2.5])
def test_family_shares_hold_for_any_tail(tail_exponent):
    family = LengthFamily(
        body_median=0.01,
        body_sigma=0.5,
        tail_start=0.2,
        tail_exponent=tail_exponent,
        tail_token_share=0.5,
        atom_token_share=0.2,
    )
    lengths = family.sample(300_000, window=1_000_000, seed=0)
    total = lengths.sum()
    assert lengths[lengths < 1e5].sum() / total == pytest.approx(0.3, abs=0.015)
    assert lengths[lengths == 1e6].sum() / total == pytest.approx(0.2, abs=0.015)


def test_family_is_seeded():
    def draw(seed):
        return lengths_of_family(window=1000, num_documents=50, seed=seed).lengths.tolist()

    assert draw(1) == draw(1) != draw(2)
    assert LengthFamily(tail_token_share=0, atom_token_share=1).sample(3, window=9, seed=0).tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"body_median": 1.5}, r"body_median = 1.5 must be in \(0, 1\) windows"),
        ({"tail_start": float("nan")}, "tail_start = nan"),
        ({"body_sigma": 0}, "body_sigma = 0 must be above 0"),
        ({"tail_exponent": -1}, "tail_exponent = -1 must be above 0"),
        ({"tail_token_share": 0.9, "atom_token_share": 0.2}, "at most 1 together"),
        ({"atom_token_share": float("nan")}, "at most 1 together"),
    ],
)
def test_family_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        LengthFamily(**options)


def test_sampling_refuses():
    with pytest.raises(ValueError, match=r"no length family 'x'; known are \['wlb_paper'\]"):
        lengths_of_family("x", window=9, num_documents=1, seed=0)
    with pytest.raises(ValueError, match="num_documents = 0"):
        lengths_of_family(window=9, num_documents=0, seed=0)
    with pytest.raises(ValueError, match="window = 1 must"):
        lengths_of_family(window=1, num_documents=1, seed=0)
